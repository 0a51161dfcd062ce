#include "formats/input_file.hpp"
#include "utils/read_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace accelerate::formats {

InputFile::InputFile(const std::filesystem::path& path) : path_(path) {
  const auto opened = open_regular(path);
  if (opened.file < 0)
    raise<CheckpointError>(
        "can't read '{}': {}. Check the path and the rights; a checkpoint must be copied with all of its files.",
        path.string(), opened.problem);
  file_ = opened.file;
  size_ = opened.size;
  char begin[64];
  const auto got = ::pread(file_, begin, sizeof begin, 0);
  if (const auto problem = git_lfs_problem({begin, static_cast<size_t>(std::max<ssize_t>(got, 0))}); !problem.empty()) {
    ::close(file_);
    raise<CheckpointError>("can't read '{}': {}.", path.string(), problem);
  }
}

InputFile::InputFile(std::string name, std::string bytes)
    : path_(std::move(name)), bytes_(std::move(bytes)), size_(static_cast<int64_t>(bytes_.size())) {}

InputFile::~InputFile() {
  if (file_ >= 0) ::close(file_);
}

int InputFile::duplicate() const { return ::fcntl(file_, F_DUPFD_CLOEXEC, 0); }

void InputFile::read(int64_t offset, void* data, int64_t count) const {
  auto* to = static_cast<char*>(data);
  while (count > 0) {
    const auto got = file_ < 0 ? static_cast<int64_t>(bytes_.copy(to, static_cast<size_t>(count),
                                                                  static_cast<size_t>(std::min(offset, size_))))
                               : ::pread(file_, to, static_cast<size_t>(count), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) raise<CheckpointError>("reading '{}' at byte {}: {}.", path_.string(), offset, std::strerror(errno));
    if (got == 0)
      raise<CheckpointError>(
          "reading '{}': it ends at byte {}, where {} more were expected. It is truncated: copy it again, or save "
          "again.",
          path_.string(), offset, count);
    to += got, offset += got, count -= got;
  }
}

}  // namespace accelerate::formats
