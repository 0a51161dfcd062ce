// Instead of libFuzzer, with any compiler: gives a fuzz target the inputs of a file, one a line in base64. The
// program ends where a target does what it may not.
#include "replay.hpp"

#include <cstdio>
#include <fstream>
#include <string>

#include "base64.hpp"

int main(int argc, char** argv) {
  const FuzzTarget target = fuzz_target(argc == 3 ? argv[1] : "");
  std::ifstream in(argc == 3 ? argv[2] : "");
  int inputs = 0;
  for (std::string line; target && std::getline(in, line); ++inputs) {
    const auto bytes = from_base64(line);
    target(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%d inputs\n", inputs);
  return inputs > 0 ? 0 : 1;
}
