// Our readers' verdicts on many files: differential.py compares them with what the Python packages say to the same.
//
// usage: verdicts FORMAT, with a file a line on the standard input, in base64. Prints a line each: "yes", or "no" and
// why.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>

#include "../../fuzz/base64.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/tokenizer.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/gguf_header.hpp"
#include "formats/torch_archive.hpp"

namespace {

using namespace accelerate;

/// @param bytes  the same as are in the file
using Read = std::function<void(const std::string& path, const std::string& bytes)>;

const std::map<std::string, Read> kReaders = {
    {"safetensors", [](const std::string& path, const std::string&) { load_safetensors(path); }},
    {"torch",
     [](const std::string& path, const std::string&) {
       const auto file = std::make_shared<formats::InputFile>(path);
       formats::TorchArchive(file, 0, file->size(), "file").value();
     }},
    {"gguf",
     [](const std::string&, const std::string& bytes) {
       const auto header = formats::parse_gguf_header(bytes, "file");
       formats::check_gguf_data(header, static_cast<int64_t>(bytes.size()), "file");
     }},
    {"tokenizer",
     [](const std::string& path, const std::string&) { models::Tokenizer::from_pretrained(path).encode("ab ab 12"); }},
};

}  // namespace

int main(int argc, char** argv) {
  const auto reader = kReaders.find(argc == 2 ? argv[1] : "");
  const int memory = ::memfd_create("verdicts", MFD_CLOEXEC);
  if (reader == kReaders.end() || memory < 0) return 2;
  const std::string path = "/proc/self/fd/" + std::to_string(memory);
  for (std::string line; std::getline(std::cin, line);) {
    const auto bytes = from_base64(line);
    if (::ftruncate(memory, 0) != 0 ||
        ::pwrite(memory, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      return 2;
    std::string verdict = "yes";
    try {
      reader->second(path, bytes);
    } catch (const Error& error) {
      verdict = "no " + std::string(error.what()).substr(0, 300);
      std::replace(verdict.begin(), verdict.end(), '\n', ' ');
    }
    std::printf("%s\n", verdict.c_str());
    std::fflush(stdout);
  }
  return 0;
}
