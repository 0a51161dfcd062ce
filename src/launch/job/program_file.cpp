#include "launch/job/program_file.hpp"

#include <unistd.h>

#include <optional>
#include <string_view>

#include "input/read_file.hpp"
#include "launch/job/host.hpp"
#include "launch/job/settings.hpp"
#include "utils/fd.hpp"

namespace accelerate::launcher {
namespace {

/// Nothing of what is no text, or can't be read.
std::optional<std::string> first_line_of_text(const std::filesystem::path& file) {
  const Fd opened(open_regular(file).file);
  char bytes[4096];
  const ssize_t got = opened ? ::read(opened.get(), bytes, sizeof(bytes)) : -1;
  if (got < 0) return std::nullopt;
  const std::string_view begin(bytes, static_cast<size_t>(got));
  if (begin.find('\0') != std::string_view::npos) return std::nullopt;
  return std::string(begin.substr(0, begin.find('\n')));
}

}  // namespace

bool may_be_python(const std::filesystem::path& file) {
  const auto first = first_line_of_text(file);
  return first && (!first->starts_with("#!") || first->find("python") != std::string::npos);
}

bool is_python_program(const std::vector<std::string>& command, const Settings& settings, const Host& host) {
  std::filesystem::path program = command.front();
  if (settings.on("module") || program.extension() == ".py" || program.filename().string().starts_with("python"))
    return true;
  if (!program.has_parent_path() && !is_there(program)) program = host.find_in_path(program);
  const auto first = first_line_of_text(program);
  return first && (first->starts_with("#!") ? first->find("python") != std::string::npos : !is_executable(program));
}

}  // namespace accelerate::launcher
