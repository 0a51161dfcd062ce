#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "codes/bitsandbytes.hpp"

namespace {

using namespace accelerate;
using namespace accelerate::codes;

/// An input: tensors of four bytes and as many as they have dimensions, each (name, dtype, dimensions, values, sizes),
/// until a byte that names none; then the text of the state.
std::map<std::string, at::Tensor> tensors_of(const uint8_t* data, size_t size) {
  static const std::vector<std::string> kNames{"a.weight",
                                               "a.weight.absmax",
                                               "a.weight.quant_map",
                                               "a.weight.nested_absmax",
                                               "a.weight.nested_quant_map",
                                               "a.weight.quant_state.bitsandbytes__nf4",
                                               "a.weight.quant_state.bitsandbytes__fp4",
                                               "a.weight.quant_state.bitsandbytes__af4",
                                               "a.SCB",
                                               "a.weight_format",
                                               "SCB",
                                               "weight"};
  constexpr at::ScalarType kDtypes[] = {at::kFloat,  at::kByte,   at::kChar,         at::kHalf,         at::kBFloat16,
                                        at::kDouble, at::kLong,   at::kBool,         at::kComplexFloat, at::kShort,
                                        at::kUInt16, at::kUInt64, at::kFloat8_e4m3fn};
  std::map<std::string, at::Tensor> tensors;
  const uint8_t *at = data, *end = data + size;
  const auto take = [&] { return at < end ? *at++ : uint8_t{255}; };
  std::vector<std::string> texts;
  while (true) {
    const uint8_t name = take();
    if (name >= kNames.size()) break;
    const auto dtype = kDtypes[take() % std::size(kDtypes)];
    const int dimensions = take() % 4;
    const uint8_t values = take();
    std::vector<int64_t> sizes;
    for (int i = 0; i < dimensions; ++i) sizes.push_back(take());
    if (sizes.size() == 3) sizes[2] %= 4;
    auto tensor = at::zeros(sizes, at::TensorOptions().dtype(dtype));
    const auto fill = [&](c10::ArrayRef<float> from) {
      tensor = at::empty({static_cast<int64_t>(from.size())}, at::TensorOptions().dtype(at::kFloat));
      std::memcpy(tensor.mutable_data_ptr(), from.data(), from.size() * sizeof(float));
    };
    if (values == 1) fill(table(Encoding::nf4));
    else if (values == 2) fill(table(Encoding::fp4));
    else if (values == 3) fill(dynamic_map());
    else if (values == 4) texts.push_back(kNames[name]);
    else if (tensor.nbytes() > 0) std::memset(tensor.mutable_data_ptr(), values, tensor.nbytes());
    tensors[kNames[name]] = tensor;
  }
  for (const auto& name : texts) {
    auto text = at::empty({end - at}, at::TensorOptions().dtype(at::kByte));
    if (at < end) std::memcpy(text.mutable_data_ptr(), at, static_cast<size_t>(end - at));
    tensors[name] = text;
  }
  return tensors;
}

std::vector<Codes> read_all(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  std::vector<Codes> all;
  for (const auto& weight : find_bitsandbytes_weights(names))
    all.push_back(read_bitsandbytes(
        weight,
        [&](const std::string& name) {
          const auto found = tensors.find(name);
          if (found == tensors.end()) throw CheckpointError("there is no " + name);
          return found->second;
        },
        at::kHalf));
  return all;
}

}  // namespace

// Any tensors under bitsandbytes' names are codes that can be decoded to finite numbers, and written so that they read
// the same; or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    for (const auto& codes : read_all(tensors_of(data, size))) {
      const auto values = decode(codes, at::kFloat);
      if (values.sizes() != at::IntArrayRef(codes.shape)) std::abort();
      const auto* numbers = values.const_data_ptr<float>();
      if (!std::all_of(numbers, numbers + values.numel(), [](float x) { return x - x == 0; })) std::abort();
      const auto again = read_all(bitsandbytes_tensors("a.weight", codes));
      if (again.size() != 1 || again[0].dtype != codes.dtype) std::abort();
      const auto same = decode(again[0], at::kFloat);
      if (same.sizes() != values.sizes() ||
          (values.numel() > 0 && std::memcmp(same.const_data_ptr(), numbers, values.nbytes()) != 0))
        std::abort();
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
