#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "utils/raise.hpp"

/// The one way in which files that others may have made are opened and read whole. Needs no LibTorch.
namespace accelerate {

/// The largest sizes of files, by their kind; a larger one is refused before any of it is read.
inline constexpr int64_t kMostSettingsBytes = int64_t{16} << 20;  ///< configs, hostfiles, tables, secrets: some KB
inline constexpr int64_t kMostListBytes = int64_t{256} << 20;     ///< indexes, vocabularies: up to 40 MB are known

struct OpenedFile {
  int file = -1;  ///< for the caller to close
  int64_t size = 0;
  std::string problem;  ///< why there is none: "can't open it: No such file or directory"
};

/// Opens for reading, without blocking, what is a regular file: FIFOs would wait for a writer, devices never end. A
/// name with a NUL is refused, since the system would open what the part before it names.
ACCELERATE_API OpenedFile open_regular(const std::filesystem::path& path);

/// The problem of a file that begins so, if Git LFS has left it for a file that was not fetched: some lines of text
/// that name it.
ACCELERATE_API std::string git_lfs_problem(std::string_view begin);

/// All of such a file. @return what is wrong, or nothing
ACCELERATE_API std::string read_file(const std::filesystem::path& path, int64_t most_bytes, std::string& text);

/// The entries of a folder, in no order. @throws E that says why it can't be read
template <class E>
std::vector<std::filesystem::directory_entry> read_folder(std::string_view what, const std::filesystem::path& path) {
  std::vector<std::filesystem::directory_entry> found;
  std::error_code error;
  for (std::filesystem::directory_iterator next(path, error), end; !error && next != end; next.increment(error))
    found.push_back(*next);
  if (error)
    raise<E>("{} '{}': can't read the folder: {}. Check the path and the rights.", what, path.string(),
             error.message());
  return found;
}

/// A file with an error: "<what> '<path>': can't open it: No such file or directory. <hint>".
template <class E>
std::string read_text(std::string_view what, const std::filesystem::path& path, int64_t most_bytes,
                      std::string_view hint = "Check the path and the rights.") {
  std::string text;
  if (const auto problem = read_file(path, most_bytes, text); !problem.empty())
    raise<E>("{}{}'{}': {}. {}", what, what.empty() ? "" : " ", path.string(), problem, hint);
  return text;
}

/// As std::filesystem, but without exceptions: a name that no system takes is not there, and of a link in a circle
/// opening says what is wrong.
ACCELERATE_API bool is_there(const std::filesystem::path& path);
ACCELERATE_API bool is_folder(const std::filesystem::path& path);

/// Refuses a path that leads out of `folder`, by itself or because it is a link. Links into the `blobs` of a Hugging
/// Face cache are meant, where `folder` is in one of its snapshots: so files lie there.
/// @throws CheckpointError, which begins with `what`. The file need not be there.
ACCELERATE_API void check_inside(std::string_view what, const std::filesystem::path& folder,
                                 const std::filesystem::path& path);

/// A file beside others, as an index in its folder names it: by that name alone, so that an index leads nowhere else. A
/// link that lies there under this name is followed: people have their large files on other disks.
/// @throws CheckpointError, which begins with `what`, for another name. The file need not be there.
ACCELERATE_API std::filesystem::path file_inside(std::string_view what, const std::filesystem::path& folder,
                                                 const std::filesystem::path& name);

}  // namespace accelerate
