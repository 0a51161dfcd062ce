// Instead of libFuzzer, with any compiler: gives a fuzz target the inputs of a file, one a line in base64. The
// program ends where a target does what it may not.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "base64.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  std::ifstream in(argc == 2 ? argv[1] : "");
  int inputs = 0;
  for (std::string line; std::getline(in, line); ++inputs) {
    const auto bytes = from_base64(line);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%d inputs\n", inputs);
  return inputs > 0 ? 0 : 1;
}
