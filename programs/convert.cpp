// `accelerate convert`, which starts this with IN, OUT and pairs of an option and its text, checked against the table
// of options.
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>

#include <nlohmann/json.hpp>

#include "accelerate/bigmodel/convert_files.hpp"
#include "accelerate/bigmodel/sizes.hpp"
#include "bigmodel/hub_cache.hpp"
#include "command.hpp"

namespace {

namespace fs = std::filesystem;

std::optional<at::ScalarType> dtype_of(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  return *name == "float32"   ? at::kFloat
         : *name == "float64" ? at::kDouble
         : *name == "float16" ? at::kHalf
                              : at::kBFloat16;
}

/// What an end before the end leaves.
std::string outcome(const fs::path& out) {
  const auto work = accelerate::unfinished_conversion(out);
  if (!fs::is_directory(work)) return "nothing was written";
  return fmt::format("'{}' is not there; the files that are whole are in '{}', from which the same command goes on",
                     out.string(), work.string());
}

void print(const accelerate::ConvertedFiles& made, const fs::path& out) {
  std::printf("%lld tensors, %s, in %zu files%s\n", static_cast<long long>(made.tensors),
              accelerate::convert_bytes(static_cast<double>(made.bytes)).c_str(), made.files.size(),
              made.kept > 0 ? fmt::format(", {} of which an earlier run had made", made.kept).c_str() : "");
  for (const auto& note : made.notes) std::printf("%s\n", accelerate::plain_lines(note).c_str());
  std::printf("The weights are in %s\n", out.c_str());
}

nlohmann::ordered_json json_of(const accelerate::ConvertedFiles& made, const fs::path& out) {
  auto files = nlohmann::ordered_json::array();
  for (const auto& file : made.files) files.push_back(file.string());
  return {{"out", out.string()}, {"tensors", made.tensors}, {"bytes", made.bytes},
          {"files", files},      {"kept", made.kept},       {"notes", made.notes}};
}

int run(const std::vector<std::string>& words) {
  const fs::path out = words[1];
  const command::GivenOptions given(words, 2);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) command::listen_for(signal);
  accelerate::ConvertFilesOptions options{.to = given.text("to"),
                                          .dtype = dtype_of(given.text("dtype")),
                                          .max_shard_size = given.text("max_shard_size"),
                                          .tag = given.text("tag").value_or(""),
                                          .overwrite = given.on("overwrite")};
  command::Bar bar("converting", "tensor");
  options.on_progress = [&](int64_t done, int64_t all) {
    if (command::interrupted) throw command::Interrupted();
    bar.show(done, all);
  };
  try {
    const auto made = accelerate::convert_files(accelerate::bigmodel::local_model(words[0]), out, options);
    bar.finish(made.tensors);
    if (given.on("json")) std::cout << json_of(made, out).dump(2) << std::endl;
    else print(made, out);
  } catch (const command::Interrupted&) {
    throw command::Interrupted{outcome(out)};
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return command::main_of("convert", 2, argc, argv, run); }
