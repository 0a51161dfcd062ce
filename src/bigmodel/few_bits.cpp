#include <ATen/ops/abs.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "accelerate/formats/safetensors.hpp"
#include "bigmodel/quantizer.hpp"
#include "bigmodel/walk.hpp"
#include "bigmodel/weight_sources.hpp"
#include "codes/bitsandbytes.hpp"
#include "formats/torch_dtypes.hpp"
#include "memory/file_mappings.hpp"
#include "memory/huge_pages.hpp"
#include "residency/homes/encoded.hpp"
#include "utils/raise.hpp"

namespace accelerate::bigmodel {
namespace {

namespace fs = std::filesystem;

/// The bytes that codes take at most: in the order of products there are groups of 16 rows and of 32 columns, and
/// scales in fp32.
/// @param like  its data need not be there, but of GGUF's blocks
void count_codes(PlacedWeight& weight, const codes::Codes& like) {
  const auto up = [](int64_t count, int64_t group) { return (count + group - 1) / group * group; };
  const int64_t rows = up(like.rows(), 16), numel = rows * up(like.columns(), 32);
  int64_t data = 0;
  if (codes::is_gguf(like.encoding)) data = rows * like.data.size(1);
  else if (codes::is_four_bit(like.encoding)) data = numel / 2, weight.scale_bytes = numel / like.block_size * 4;
  else data = numel, weight.scale_bytes = rows * 4;
  weight.code_bytes = data + weight.scale_bytes;
}
codes::Codes form_of(const LoadTarget& target, const codes::EncodeOptions& how) {
  codes::Codes form{.encoding = how.encoding, .shape = target.tensor.sizes().vec(), .block_size = how.block_size};
  if (target.transposed) std::swap(form.shape[0], form.shape[1]);
  return form;
}

/// Values in fp32 that have been rounded as the weight's dtype asks, and to fp16 before int8, as bitsandbytes does it.
/// A part after the other, and in memory that goes back at once: beside the codes a model has room for little more.
/// @param mapped  the value is in a mapped file, whose pages are given back as soon as they have been read
at::Tensor rounded(const at::Tensor& value, at::ScalarType dtype, bool to_half, bool mapped) {
  constexpr int64_t kPart = 1 << 20;
  const at::Tensor from = value.reshape({-1}), floats = empty_in_huge_pages(value.sizes(), at::kFloat);
  const at::Tensor kept = empty_in_huge_pages({std::min(kPart, from.numel())}, dtype),
                   half = to_half ? empty_in_huge_pages(kept.sizes(), at::kHalf) : kept;
  for (int64_t first = 0; first < from.numel(); first += kPart) {
    const int64_t count = std::min(kPart, from.numel() - first);
    const at::Tensor part = from.narrow(0, first, count);
    kept.narrow(0, 0, count).copy_(part);
    if (to_half) half.narrow(0, 0, count).copy_(kept.narrow(0, 0, count));
    floats.view({-1}).narrow(0, first, count).copy_(half.narrow(0, 0, count));
    if (mapped) give_pages_back(part.mutable_data_ptr(), static_cast<int64_t>(part.nbytes()));
  }
  return floats;
}

/// @throws ConfigError for values without codes: with what encoding said about them, unless rounding has made them so
void refuse_values(const std::string& name, const at::Tensor& value, at::ScalarType dtype, bool to_half,
                   const std::string& problem) {
  const auto most = at::abs(value).max().item<double>();
  if (!std::isfinite(most)) raise<ConfigError>("load_and_quantize_model: '{}': {}", name, problem);
  raise<ConfigError>(
      "load_and_quantize_model: '{}': found a value of magnitude {}, expected what {} holds, to which weights are "
      "rounded before they are encoded{}. {}, or leave the module out (skip_modules)",
      name, most, formats::python_name(to_half ? at::kHalf : dtype),
      to_half ? " (LLM.int8() begins with fp16, whatever torch_dtype is)" : "",
      to_half ? "Use load_in_4bit with another torch_dtype than float16" : "Set torch_dtype to bfloat16 or float32");
}

bool rounds_to_half(const codes::EncodeOptions& how) { return how.encoding == codes::Encoding::int8_rowwise; }

codes::Codes encode_value(const std::string& name, const at::Tensor& value, at::ScalarType dtype,
                          const codes::EncodeOptions& how, bool mapped) {
  const c10::NoGradGuard no_grad;
  try {
    codes::Codes codes = codes::encode(rounded(value, dtype, rounds_to_half(how), mapped), how);
    codes.dtype = dtype;
    return codes;
  } catch (const ConfigError& error) {
    refuse_values(name, value, dtype, rounds_to_half(how), error.what());
    throw;
  }
}

/// Refuses values that encoding would refuse, before it takes a model's own values away. It looks at one part after the
/// other.
void check_values(const std::string& name, const at::Tensor& value, at::ScalarType dtype,
                  const codes::EncodeOptions& how) {
  if (value.is_meta()) return;  // said later
  if (residency::encoded_weight(value))
    raise<ConfigError>(
        "load_and_quantize_model: '{}' is in few bits already, expected a weight of numbers: errors would add up. Load "
        "the model's files, or build it again",
        name);
  constexpr int64_t kPart = 1 << 20;
  const at::Tensor flat = value.detach().reshape({-1});
  for (int64_t first = 0; first < flat.numel(); first += kPart) {
    at::Tensor part = flat.narrow(0, first, std::min(kPart, flat.numel() - first)).to(dtype);
    if (rounds_to_half(how)) part = part.to(at::kHalf);
    if (!at::isfinite(part).all().item<bool>())
      refuse_values(name, value.detach(), dtype, rounds_to_half(how),
                    fmt::format("found NaN or infinity among elements {} and following, expected finite values: no "
                                "code stands for them. A weight that was trained into it, or a damaged file, is likely",
                                first));
  }
}

/// Codes that are to be on disk: written in bitsandbytes' form, and mapped.
codes::Codes on_disk(const std::string& name, const codes::Codes& codes, const fs::path& folder) {
  if (folder.empty())
    raise<ConfigError>(
        "load_and_quantize_model: the device map puts '{}' on disk, and there is no offload_folder, expected a folder "
        "with room for its codes",
        name);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) raise<CheckpointError>("can't create the folder '{}': {}.", folder.string(), error.message());
  const fs::path file = folder / (name + ".safetensors");
  save_safetensors(file, codes::bitsandbytes_tensors(name, codes));
  const SafetensorsFile mapped(file);
  const auto weights = codes::find_bitsandbytes_weights(mapped.names());
  return codes::read_bitsandbytes(
      weights.at(0), [&](const std::string& part) { return mapped.tensor(part); }, codes.dtype);
}

}  // namespace

void choose_codes(std::vector<PlacedWeight>& weights, const Quantizer& quantizer, const OpenCheckpoint* checkpoint) {
  std::optional<FileMappings> files;
  for (auto& weight : weights) {
    const LoadTarget& target = weight.target;
    if (target.is_buffer || target.tensor.numel() == 0 || !c10::isFloatingType(target.dtype)) continue;
    if (checkpoint && quantizer.keep_codes && target.stored) {
      if (const auto kept = checkpoint->codes.find(target.stored->first);
          kept != checkpoint->codes.end() && kept->second.transposed == target.transposed) {
        codes::Codes codes = kept->second.read(target.dtype);
        codes.dtype = target.dtype;
        if (codes.data.defined()) {
          if (!files) files.emplace();
          count_codes(weight, codes);
          weight.codes_in_file = files->hold(codes.data.const_data_ptr());
          // Asked for once: there may be a copy, whose memory is not to be held twice.
          weight.encode = [codes = std::move(codes)](const PlacedWeight&) mutable { return std::move(codes); };
          continue;
        }
      }
    }
    const auto how = quantizer.how ? quantizer.how(target) : std::nullopt;
    if (!how || (checkpoint && !target.stored)) continue;
    count_codes(weight, form_of(target, *how));
    weight.is_encoded_here = true;
    if (!checkpoint) check_values(weight.name(), target.tensor, target.dtype, *how);
    weight.encode = [name = weight.name(), tensor = target.tensor, mapped = checkpoint && checkpoint->mapped,
                     stored = checkpoint ? target.stored : nullptr, transposed = target.transposed,
                     dtype = target.dtype, how = *how, folder = quantizer.offload_folder](const PlacedWeight& self) {
      at::Tensor value = stored ? stored->second.read_whole() : tensor;
      if (transposed) value = value.t();
      const codes::Codes codes = encode_value(name, value, dtype, how, mapped && value.is_contiguous());
      return self.codes_in_file ? on_disk(name, codes, folder) : codes;
    };
  }
}

void send_codes_to_disk(std::vector<PlacedWeight>& weights) {
  for (auto& weight : weights)
    if (weight.is_encoded_here) weight.codes_in_file = weight.target.place && weight.target.place->is_disk();
}

std::map<std::string, int64_t> bytes_by_name(const std::vector<PlacedWeight>& weights) {
  std::map<std::string, int64_t> bytes;
  for (const auto& weight : weights)
    for (const auto& name : weight.target.names)
      if (weight.code_bytes > 0) bytes[name] = weight.code_bytes;
  return bytes;
}

std::map<std::string, int64_t> bytes_in_few_bits(const ModelRef& model, const Quantizer& quantizer) {
  auto weights = weights_of(targets_of(model));
  for (auto& weight : weights)
    if (const auto how = quantizer.how(weight.target)) count_codes(weight, form_of(weight.target, *how));
  return bytes_by_name(weights);
}

void count_bytes(ModuleTree& tree, const std::map<std::string, int64_t>& bytes) {
  const auto walk = [&](const auto& self, ModuleTree& module, const std::string& prefix) -> void {
    for (auto& tensor : module.parameters)
      if (const auto found = bytes.find(joined(prefix, tensor.name)); found != bytes.end())
        tensor.shape = {found->second}, tensor.dtype = "uint8";
    for (auto& child : module.children) self(self, child, joined(prefix, child.name));
  };
  walk(walk, tree, "");
}

std::string dtype_of_size(at::ScalarType dtype) {
  const auto size = c10::elementSize(dtype);
  return size == 2 ? "float16" : size == 1 ? "int8" : "float32";
}

}  // namespace accelerate::bigmodel
