#include "input/read_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace accelerate {
namespace {

namespace fs = std::filesystem;

OpenedFile refused(const std::string& problem) { return {.file = -1, .size = 0, .problem = problem}; }

/// Whether a resolved path is below a resolved folder.
bool is_below(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

/// The folder with the contents of a Hugging Face cache of which this one is a snapshot, else nothing:
/// models--NAME/snapshots/REVISION links to models--NAME/blobs.
fs::path blobs_of(const fs::path& folder) {
  for (fs::path at = folder; at.has_relative_path(); at = at.parent_path())
    if (at.parent_path().filename() == "snapshots") return at.parent_path().parent_path() / "blobs";
  return {};
}

}  // namespace

OpenedFile open_regular(const fs::path& path) {
  if (path.native().find('\0') != std::string::npos) return refused("its name holds a NUL byte");
  struct stat status {};
  // Before it is opened, since opening alone does something to some devices.
  if (::stat(path.c_str(), &status) != 0) return refused(std::string("can't open it: ") + std::strerror(errno));
  const int file = S_ISREG(status.st_mode) ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
  if (S_ISREG(status.st_mode) && file < 0) return refused(std::string("can't open it: ") + std::strerror(errno));
  if (file < 0 || ::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    if (file >= 0) ::close(file);
    return refused(S_ISDIR(status.st_mode) ? "it is a folder, not a regular file" : "it is not a regular file");
  }
  return {.file = file, .size = status.st_size, .problem = {}};
}

std::string git_lfs_problem(std::string_view begin) {
  return begin.starts_with("version https://git-lfs.github.com/spec/")
             ? "it is a pointer of Git LFS, some lines in the place of a file that was not fetched: run git lfs pull "
               "in "
               "its folder, or download the file itself"
             : "";
}

std::string read_file(const fs::path& path, int64_t most_bytes, std::string& text) {
  const auto opened = open_regular(path);
  if (opened.file < 0) return opened.problem;
  const auto done = [&](const std::string& problem) {
    ::close(opened.file);
    return problem;
  };
  const auto too_large = [&](int64_t bytes) {
    return fmt::format("it has {} bytes or more, expected at most {} in a file of this kind", bytes, most_bytes);
  };
  if (opened.size > most_bytes) return done(too_large(opened.size));
  text.resize(static_cast<size_t>(opened.size) + 1);  // one more, to see that it ends there: some grow, and those of
                                                      // /proc say that they have 0 bytes
  size_t filled = 0;
  for (;;) {
    if (filled == text.size()) text.resize(text.size() * 2 + 4096);
    const auto got = ::read(opened.file, text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return done(std::string("can't read it: ") + std::strerror(errno));
    if (got == 0) break;
    filled += static_cast<size_t>(got);
    if (static_cast<int64_t>(filled) > most_bytes) return done(too_large(static_cast<int64_t>(filled)));
  }
  text.resize(filled);
  return done(git_lfs_problem(text));
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error) || error == std::errc::too_many_symbolic_link_levels;
}

bool is_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

void check_inside(std::string_view what, const fs::path& folder, const fs::path& path) {
  std::error_code error;
  const auto real_folder = fs::canonical(folder.empty() ? "." : folder, error);
  const auto real = error ? fs::path() : fs::weakly_canonical(fs::absolute(path), error);
  const auto blobs = blobs_of(real_folder);
  if (error || is_below(real, real_folder) || (!blobs.empty() && is_below(real, blobs))) return;  // opening says more
  raise<CheckpointError>(
      "{}: '{}' leads to '{}', which is neither in the folder '{}' nor among the files of the same model in a Hugging "
      "Face cache. Put the file itself there.",
      what, path.string(), real.string(), folder.string());
}

fs::path file_inside(std::string_view what, const fs::path& folder, const fs::path& name) {
  const auto& text = name.native();
  constexpr size_t kLongest = 255;  // that any file system takes
  if (text.empty() || text == "." || text == ".." || text.size() > kLongest || text.find('/') != std::string::npos ||
      text.find('\0') != std::string::npos)
    raise<CheckpointError>("{}: '{}' is not the plain name of a file in the folder '{}'.", what,
                           text.substr(0, std::min<size_t>(text.find('\0'), 100)), folder.string());
  return folder / name;
}

}  // namespace accelerate
