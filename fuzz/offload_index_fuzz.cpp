#include <cstdlib>
#include <string>

#include <ATen/core/Tensor.h>

#include "accelerate/bigmodel/offload.hpp"
#include "accelerate/utils/error.hpp"
#include "scratch_folder.hpp"

// Any bytes are the index of an offload folder whose weights lie within their files, or a CheckpointError. In the
// folder are two files of 64 bytes, and a safetensors file with one tensor.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  static const ScratchFolder folder;
  static const bool prepared = [] {
    const std::string header = R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    for (const char* name : {"a.dat", "b.dat"}) folder.write(name, std::string(64, '\1'));
    folder.write("t.safetensors", std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header +
                                      std::string(8, '\1'));
    return true;
  }();
  std::string index;  // in which @ stands for the folder
  for (const char c : std::string_view(reinterpret_cast<const char*>(data), prepared ? size : 0))
    index += c == '@' ? folder.path().string() : std::string(1, c);
  folder.write("index.json", index);
  try {
    const OffloadedWeightsLoader weights({.state_dict = {}, .save_folder = folder.path(), .index = {}});
    for (const auto& name : weights.names()) try {
        const auto weight = weights[name];
        if (weight.nbytes() > 64 || weight.numel() < 0) std::abort();
      } catch (const CheckpointError&) {
      }
  } catch (const CheckpointError&) {
  }
  return 0;
}
