#include "sagemaker/source.hpp"
#include "utils/raise.hpp"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace sagemaker {
namespace {

namespace fs = std::filesystem;
using accelerate::ConfigError;

struct stat status_of(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    accelerate::raise<ConfigError>("the source file {} can't be read: {}", path.string(), std::strerror(errno));
  return status;
}

void collect(const fs::path& path, const std::string& name, std::vector<std::pair<dev_t, ino_t>>& above,
             std::vector<SourceFile>& files) {
  const struct stat status = status_of(path);
  SourceFile file{.name = name,
                  .path = path,
                  .mode = static_cast<mode_t>(status.st_mode & 07777),
                  .bytes = 0,
                  .modified = status.st_mtime};
  if (S_ISREG(status.st_mode)) {
    file.bytes = status.st_size;
    files.push_back(std::move(file));
    return;
  }
  if (!S_ISDIR(status.st_mode)) return;
  const std::pair identity{status.st_dev, status.st_ino};
  if (std::find(above.begin(), above.end(), identity) != above.end())
    accelerate::raise<ConfigError>(
        "the source folder {} is a link to a folder above it, so that the archive would never end. Remove the link",
        path.string());
  file.name += "/";
  files.push_back(std::move(file));
  above.push_back(identity);
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error))
    entries.push_back(entry->path());
  if (error) accelerate::raise<ConfigError>("the source folder {} can't be read: {}", path.string(), error.message());
  std::sort(entries.begin(), entries.end());
  for (const auto& entry : entries) collect(entry, name + "/" + entry.filename().string(), above, files);
  above.pop_back();
}

/// Collects compressed bytes.
class Gzip {
 public:
  Gzip() {
    if (deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
      accelerate::raise<accelerate::ResourceError>("no memory is left to compress the source archive");
  }
  ~Gzip() { deflateEnd(&stream_); }
  Gzip(const Gzip&) = delete;
  Gzip& operator=(const Gzip&) = delete;
  void add(const void* data, size_t bytes, int flush = Z_NO_FLUSH) {
    stream_.next_in = static_cast<Bytef*>(const_cast<void*>(data));
    stream_.avail_in = static_cast<uInt>(bytes);
    char room[65536];
    do {
      stream_.next_out = reinterpret_cast<Bytef*>(room);
      stream_.avail_out = sizeof(room);
      deflate(&stream_, flush);
      result_.append(room, sizeof(room) - stream_.avail_out);
    } while (stream_.avail_out == 0);
  }
  std::string finish() {
    add("", 0, Z_FINISH);
    return std::move(result_);
  }

 private:
  z_stream stream_{};
  std::string result_;
};

/// POSIX.1-1988's header ("ustar"), which every tar reads.
struct Header {
  char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100], magic[6], version[2],
      user[32], group[32], major[8], minor[8], prefix[155], padding[12];
};
static_assert(sizeof(Header) == 512);

void add_entry(Gzip& out, const std::string& name, char type, mode_t mode, int64_t bytes, int64_t modified) {
  Header header{};
  std::memcpy(header.name, name.data(), std::min(name.size(), sizeof(header.name)));
  std::snprintf(header.mode, sizeof(header.mode), "%07o", static_cast<unsigned>(mode));
  std::snprintf(header.uid, sizeof(header.uid), "%07o", 0U);  // who packed it is nobody's business
  std::snprintf(header.gid, sizeof(header.gid), "%07o", 0U);
  const unsigned long long most = (1ULL << 33) - 1;  // in eleven octal digits
  std::snprintf(header.size, sizeof(header.size), "%011llo", static_cast<unsigned long long>(bytes) & most);
  std::snprintf(header.mtime, sizeof(header.mtime), "%011llo",
                static_cast<unsigned long long>(std::max<int64_t>(0, modified)) & most);
  header.type = type;
  std::memcpy(header.magic, "ustar", 6);
  std::memcpy(header.version, "00", 2);
  std::memset(header.checksum, ' ', sizeof(header.checksum));
  unsigned sum = 0;
  for (const unsigned char byte : std::string(reinterpret_cast<const char*>(&header), sizeof(header))) sum += byte;
  std::snprintf(header.checksum, sizeof(header.checksum), "%06o", sum);
  out.add(&header, sizeof(header));
}

void pad(Gzip& out, int64_t bytes) {
  const char nothing[512] = {};
  if (bytes % 512) out.add(nothing, static_cast<size_t>(512 - bytes % 512));
}

/// A name that doesn't fit, as an extended header of POSIX.1-2001 before the file's own: "LENGTH path=NAME\n", the
/// length counting itself.
void add_long_name(Gzip& out, const std::string& name) {
  const std::string rest = " path=" + name + "\n";
  size_t length = rest.size() + 1;
  while (std::to_string(length).size() + rest.size() != length) ++length;
  const std::string record = std::to_string(length) + rest;
  add_entry(out, "PaxHeader", 'x', 0644, static_cast<int64_t>(record.size()), 0);
  out.add(record.data(), record.size());
  pad(out, static_cast<int64_t>(record.size()));
}

}  // namespace

std::vector<SourceFile> files_of(const fs::path& path) {
  std::vector<SourceFile> files;
  std::vector<std::pair<dev_t, ino_t>> above;
  std::error_code ignored;
  const fs::path name = path.filename().empty() || path.filename() == "." || path.filename() == ".."
                            ? fs::canonical(path, ignored).filename()
                            : path.filename();
  collect(path, name.string(), above, files);
  return files;
}

std::vector<SourceFile> files_below(const fs::path& folder) {
  std::vector<SourceFile> files;
  std::vector<std::pair<dev_t, ino_t>> above;
  collect(folder, "", above, files);
  files.erase(files.begin());  // the folder itself
  for (auto& file : files) file.name.erase(0, 1);
  return files;
}

std::string tar_gz(const std::vector<SourceFile>& files) {
  Gzip out;
  for (const auto& file : files) {
    if (file.name.size() > sizeof(Header::name)) add_long_name(out, file.name);
    if (file.bytes >= int64_t(1) << 33)
      accelerate::raise<ConfigError>(
          "the source file {} has 8 GB or more. Data belongs into input channels (sagemaker_inputs_file)",
          file.path.string());
    add_entry(out, file.name, file.name.back() == '/' ? '5' : '0', file.mode, file.bytes, file.modified);
    if (file.name.back() == '/') continue;
    if (file.path.empty()) {
      out.add(file.content.data(), file.content.size());
    } else {
      std::ifstream in(file.path, std::ios::binary);
      if (!in)
        accelerate::raise<ConfigError>("the source file {} can't be read: {}", file.path.string(),
                                       std::strerror(errno));
      char bytes[65536];
      int64_t left = file.bytes;
      while (left > 0 &&
             in.read(bytes, static_cast<std::streamsize>(std::min<int64_t>(left, sizeof(bytes)))).gcount() > 0) {
        out.add(bytes, static_cast<size_t>(in.gcount()));
        left -= in.gcount();
      }
      if (left > 0 || in.peek() != std::ifstream::traits_type::eof())
        accelerate::raise<ConfigError>(
            "the source file {} changed its size while it was read. Does something still write to it?",
            file.path.string());
    }
    pad(out, file.bytes);
  }
  const char end[1024] = {};
  out.add(end, sizeof(end));
  return out.finish();
}

}  // namespace sagemaker
