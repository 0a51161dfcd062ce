#include "formats/input_file.hpp"
#include "utils/raise.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace accelerate::formats {

InputFile::InputFile(const std::filesystem::path& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (file_ < 0)
    raise<CheckpointError>(
        "can't open '{}': {}. Check the path and the rights; a checkpoint must be copied with all of its files.",
        path.string(), std::strerror(errno));
  struct stat status {};
  if (::fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(file_);
    raise<CheckpointError>("can't read '{}': it is not a regular file.", path.string());
  }
  size_ = status.st_size;
}

InputFile::~InputFile() { ::close(file_); }

int InputFile::duplicate() const { return ::fcntl(file_, F_DUPFD_CLOEXEC, 0); }

void InputFile::read(int64_t offset, void* data, int64_t count) const {
  auto* to = static_cast<char*>(data);
  while (count > 0) {
    const auto got = ::pread(file_, to, static_cast<size_t>(count), offset);
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
