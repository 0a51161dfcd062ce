#include "residency/encoded.hpp"

#include <optional>
#include <utility>

#include "accelerate/codes/kernels.hpp"
#include "codes/cuda/codes_on_gpu.hpp"
#include "codes/kernels/exact.hpp"
#include "codes/kernels/frozen.hpp"
#include "codes/kernels/linear.hpp"
#include "codes/kernels/multiply.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "codes/llm_int8.hpp"
#include "residency/counters.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/products.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// Counts it, as it does where the weight is decoded as a whole.
at::Tensor exact_linear(const at::Tensor& x, const EncodedWeight& weight, const OptionalTensor& bias) {
  counters().decodes.fetch_add(1, std::memory_order_relaxed);
  return codes::kernels::exact_linear(x, codes::to(weight.codes, x.device()), bias);
}

/// x w^T + bias in x's dtype, without autograd.
/// @param trains  no kernel rounds activations then: gradients are those of the decoded weight
at::Tensor product(const at::Tensor& x, const EncodedWeight& weight, const OptionalTensor& bias, bool trains) {
  counters().products_on_codes.fetch_add(1, std::memory_order_relaxed);
  const CodesInUse in_use(weight);
  const bool int8 = weight.codes.encoding == codes::Encoding::int8_rowwise;
  if (!weight.exact && !trains && x.is_cpu())
    if (const auto kernel = codes::kernels_of(weight.codes.encoding).linear; kernel && !int8)
      if (at::Tensor y = kernel(x, weight.codes, bias); y.defined()) return y;
  // Kernels of GPUs take decoded weights and round nothing.
  if (at::Tensor y = codes::cuda::linear(x, weight.codes, bias); y.defined()) return y;
  if (int8 && !weight.exact) return codes::llm_int8_linear(x, weight.codes, bias, weight.outlier_threshold);
  return exact_linear(x, weight, bias);
}

/// The weight of a member. Not its codes: they may go before backward, which has to notice.
struct FrozenMember final : codes::kernels::FrozenWeight {
  explicit FrozenMember(at::Tensor tensor) : owner(std::move(tensor)) {}
  at::Tensor with_codes(const at::Device& device,
                        c10::function_ref<at::Tensor(const codes::Codes&)> use) const override {
    const Member* member = Member::of(owner);
    if (!member || !member->encoded())
      throw ConfigError(
          "backward: a weight in few bits has gone, because what load_and_quantize_model returned was destroyed; "
          "keep it until after backward");
    const CodesInUse in_use(*member->encoded());
    counters().decodes.fetch_add(1, std::memory_order_relaxed);
    return use(codes::to(member->encoded()->codes, device));
  }
  const at::Tensor owner;
};

at::Tensor linear(const at::Tensor& x, const Member& member, const OptionalTensor& bias) {
  const EncodedWeight& weight = *member.encoded();
  const at::ScalarType given = x.scalar_type(), computes = weight.compute_dtype.value_or(given);
  const bool int8 = weight.codes.encoding == codes::Encoding::int8_rowwise;
  const at::Device device = member.tensor().device();
  const at::Tensor input = int8 ? x.to(device) : x.to(device, computes);
  const bool has_bias = bias && bias->defined();
  // One that LibTorch broadcasts is for its own operators.
  if (has_bias && (bias->dim() != 1 || bias->size(0) != weight.codes.rows()))
    return linear(x, member, {}).add(bias->to(given));
  const OptionalTensor added = has_bias && !int8 ? OptionalTensor(bias->to(computes)) : bias;
  const bool trains = codes::kernels::wants_gradient(x, bias);
  const auto compute = [&] { return product(input, weight, added, trains); };
  const at::Tensor y =
      trains ? codes::kernels::frozen_linear(input, added, c10::make_intrusive<FrozenMember>(member.tensor()), compute)
             : compute();
  return y.to(given);
}

/// All that the codes are of, in their order of dimensions.
bool is_whole(const at::Tensor& tensor, const Member& member) {
  const EncodedWeight& weight = *member.encoded();
  if (!tensor.sizes().equals(weight.codes.shape) || tensor.storage_offset() != 0) return false;
  return weight.transposed ? tensor.t().is_contiguous() : tensor.is_contiguous();
}

/// The transpose of a matrix.
bool is_turned(const at::Tensor& tensor, const Member& member) {
  return tensor.dim() == 2 && is_whole(tensor.t(), member);
}

/// These make the call's result if they can; else nothing. @param place  which argument the member is

OptionalTensor product_of(const OperatorCall& call, const ProductPlaces& places, const Member& member, size_t place) {
  const auto values = call.arguments();
  if (place != places.weight || !values[places.x].isTensor() || has_other_factors(call)) return {};
  const at::Tensor &x = values[places.x].toTensor(), &weight = values[place].toTensor();
  if (!x.defined() || x.dim() < 1 || !x.is_floating_point() || Member::of(x)) return {};
  if (!(places.rows ? weight.dim() == 2 && is_whole(weight, member) : is_turned(weight, member))) return {};
  return linear(x, member, places.bias == kNoArgument ? std::nullopt : values[places.bias].toOptional<at::Tensor>());
}

OptionalTensor embedding_of(const OperatorCall& call, const Member& member, size_t place) {
  const auto values = call.arguments();
  if (place != 0 || values[0].toTensor().dim() != 2 || !is_whole(values[0].toTensor(), member)) return {};
  const EncodedWeight& weight = *member.encoded();
  const CodesInUse in_use(weight);
  const at::Tensor indices = values[1].toTensor().to(weight.codes.device());
  counters().products_on_codes.fetch_add(1, std::memory_order_relaxed);
  return codes::embedding(indices, weight.codes, member.tensor().scalar_type()).to(member.tensor().device());
}

struct Encoded final : Handler {
  bool handle(OperatorCall& call, Next next) override {
    const Member* member = nullptr;
    size_t place = 0;
    call.for_each_tensor([&](const at::Tensor& tensor, size_t i) {
      const Member* one = Member::of(tensor);
      if (!one || !one->encoded()) return;
      if (call.writes(i) && call.facts.needs_bytes)
        raise<ConfigError>(
            "{}: it would write to '{}', which is kept in few bits ({}) and frozen, because its values can't all be "
            "had in them. Train adapters beside it, or load the model without quantization",
            call.name(), one->name(), codes::name(one->encoded()->codes.encoding));
      if (!member) member = one, place = i;
    });
    // An operator with out= has the name of one that returns a new tensor.
    if (!member || !call.facts.needs_bytes || call.facts.writes != 0 || member->tensor().is_meta()) return false;
    OptionalTensor result =
        next.compute(TorchLayers::no_autocast, [&]() -> OptionalTensor {  // all types are chosen here
          if (const auto* const places = product_places(call.name())) return product_of(call, *places, *member, place);
          return call.name() == "aten::embedding" ? embedding_of(call, *member, place) : std::nullopt;
        });
    if (!result) return false;
    call.finish({*std::move(result)});
    return true;
  }
};

}  // namespace

std::shared_ptr<const codes::kernels::Packed> packed_for_rows(const at::Tensor& weight) {
  const Member* const member = Member::of(weight);
  const EncodedWeight* const encoded = member ? member->encoded() : nullptr;
  if (!encoded || encoded->exact || encoded->compute_dtype.value_or(at::kFloat) != at::kFloat ||
      encoded->codes.encoding == codes::Encoding::int8_rowwise || !is_whole(weight, *member) ||
      codes::kernels_of(encoded->codes.encoding).linear != &codes::kernels::try_linear || !encoded->codes.packed ||
      !codes::kernels::has_fast_instructions() || !only_homes_are_asked())
    return nullptr;
  counters().products_on_codes.fetch_add(1, std::memory_order_relaxed);
  const CodesInUse in_use(*encoded);  // of codes that come and go, what it returns is the caller's alone
  return codes::kernels::packed_of(encoded->codes);
}

Handler& encoded_handler() {
  static Encoded encoded;
  return encoded;
}

}  // namespace accelerate::residency
