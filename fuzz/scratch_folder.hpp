#pragma once

#include <stdlib.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

/// For readers that want a path: a folder for the files of one input, which the next one overwrites. Removed at the
/// end.
class ScratchFolder {
 public:
  ScratchFolder() : path_((std::filesystem::temp_directory_path() / "accelerate_fuzz_XXXXXX").string()) {
    if (!::mkdtemp(path_.data())) std::abort();
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::filesystem::path path() const { return path_; }
  /// @return its path
  std::filesystem::path write(const char* name, std::string_view bytes) const {
    auto file = path() / name;
    std::FILE* out = std::fopen(file.c_str(), "wb");
    if (!out || std::fwrite(bytes.data(), 1, bytes.size(), out) != bytes.size() || std::fclose(out) != 0) std::abort();
    return file;
  }
  void remove(const char* name) const { std::filesystem::remove(path() / name); }

 private:
  std::string path_;
};

/// The files of an input, in one: between them is the byte 0xFF, which UTF-8 never has.
inline std::vector<std::string_view> files_of(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::vector<std::string_view> files;
  for (size_t end = 0; (end = rest.find('\xFF')) != rest.npos; rest.remove_prefix(end + 1))
    files.push_back(rest.substr(0, end));
  files.push_back(rest);
  return files;
}
