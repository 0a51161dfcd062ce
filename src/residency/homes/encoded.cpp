#include "residency/homes/encoded.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "accelerate/codes/kernels.hpp"
#include "accelerate/utils/error.hpp"
#include "memory/huge_pages.hpp"
#include "residency/counters.hpp"
#include "residency/member.hpp"

namespace accelerate::residency {
namespace {

class EncodedHome final : public Home {
 public:
  explicit EncodedHome(std::shared_ptr<EncodedWeight> weight) : weight_(std::move(weight)) {}

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (flat.is_meta()) return nullptr;  // a dry run
    const at::Tensor values = flat.narrow(0, 0, weight_->codes.numel());
    const CodesInUse in_use(*weight_);
    const auto codes = codes::to(weight_->codes, values.device());
    if (weight_->transposed)
      values.view({codes.shape[1], codes.shape[0]}).copy_(codes::decode(codes, values.scalar_type()).t());
    else codes::decode_into(codes, values);
    counters().decodes.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }

  void store(const at::Tensor&) override {
    throw ConfigError(
        "a weight in few bits was written to outside of operators; it is frozen, because its values can't all be had "
        "in so few bits. Train adapters beside it, or load the model without quantization");
  }

  EncodedWeight* encoded() const override { return weight_.get(); }

 private:
  const std::shared_ptr<EncodedWeight> weight_;
};

/// Where each tensor that there is begins: a multiple of what vectors want.
int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

template <class Tensors> std::vector<at::Tensor*> parts_of(Tensors& codes) {
  std::vector<at::Tensor*> parts{&codes.data};
  if (codes.scales.defined()) parts.push_back(&codes.scales);
  if (codes.nested) parts.push_back(&codes.nested->absmax);
  return parts;
}

}  // namespace

EncodedWeight* encoded_weight(const at::Tensor& tensor) {
  const Member* member = Member::of(tensor);
  return member ? member->encoded() : nullptr;
}

at::Tensor bytes_of(const codes::Codes& codes) {
  codes::Codes plain = codes::unpacked(codes);
  int64_t size = 0;
  for (const at::Tensor* part : parts_of(plain)) size += aligned(static_cast<int64_t>(part->nbytes()));
  at::Tensor bytes = at::empty({size}, at::TensorOptions().dtype(at::kByte));
  bytes.zero_();
  int64_t at = 0;
  for (const at::Tensor* part : parts_of(plain)) {
    const auto length = static_cast<int64_t>(part->nbytes());
    if (length > 0) bytes.narrow(0, at, length).copy_(part->contiguous().view({-1}).view(at::kByte));
    at += aligned(length);
  }
  return bytes;
}

void lay_codes_in(EncodedWeight& weight, const at::Tensor& bytes, int64_t sharers) {
  weight.sharers = sharers;
  codes::Codes laid = weight.codes;
  laid.packed = nullptr;
  int64_t at = 0;
  for (at::Tensor* part : parts_of(laid)) {
    const auto length = static_cast<int64_t>(part->nbytes());
    *part = bytes.narrow(0, at, length).view(part->scalar_type()).view(part->sizes());
    at += aligned(length);
  }
  weight.codes = std::move(laid);
}

void give_up(EncodedWeight& weight) {
  if (!weight.is_here()) return;
  weight.bytes_elsewhere = weight.codes.bytes();
  weight.codes.data.reset();
  weight.codes.scales.reset();
  if (weight.codes.nested) weight.codes.nested->absmax.reset();
  weight.codes.packed = nullptr;
}

void pin_codes(const EncodedWeight& weight, Pins& pins) {
  if (!weight.is_here())
    throw ConfigError(
        "a weight in few bits is not on this rank: prepare_pippy left its codes to another stage; compute with the "
        "model by the pipeline only");
  Member* bytes = Member::of(weight.codes.data);
  if (bytes) pins.add(bytes->unit(), /*writes=*/false);
  else if (!weight.codes.packed)  // laid in a unit, see lay_codes_in()
    throw ConfigError(
        "a weight in few bits has gone, because what Accelerator::prepare made of its model was destroyed, and its "
        "codes were sharded; keep that while the module is in use");
}

void CodesInUse::let_go() const {
  const codes::Codes& codes = weight_.codes;
  const int64_t bytes = std::max(codes::packed_bytes(codes), static_cast<int64_t>(codes.data.nbytes()));
  codes::drop_packed(codes);
  give_pages_back(codes.data.mutable_data_ptr(), static_cast<int64_t>(codes.data.nbytes()));
  auto& count = counters();
  count.add_resident(bytes);  // it was there until now
  count.add_resident(-bytes);
  count.bytes_fetched.fetch_add(bytes, std::memory_order_relaxed);
  count.evictions.fetch_add(1, std::memory_order_relaxed);
}

std::unique_ptr<Home> encoded_home(std::shared_ptr<EncodedWeight> weight) {
  return std::make_unique<EncodedHome>(std::move(weight));
}

}  // namespace accelerate::residency
