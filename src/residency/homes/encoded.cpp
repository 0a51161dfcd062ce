#include "residency/homes/encoded.hpp"

#include <utility>

#include "accelerate/utils/error.hpp"
#include "residency/counters.hpp"

namespace accelerate::residency {
namespace {

class EncodedHome final : public Home {
 public:
  explicit EncodedHome(std::shared_ptr<const EncodedWeight> weight) : weight_(std::move(weight)) {}

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (flat.is_meta()) return nullptr;  // a dry run
    const at::Tensor values = flat.narrow(0, 0, weight_->codes.numel());
    codes::decode_into(codes::to(weight_->codes, values.device()), values);
    counters().decodes.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }

  void store(const at::Tensor&) override {
    throw ConfigError(
        "a weight in few bits was written to outside of operators; it is frozen, because its values can't all be had "
        "in so few bits. Train adapters beside it, or load the model without quantization");
  }

  const EncodedWeight* encoded() const override { return weight_.get(); }

 private:
  const std::shared_ptr<const EncodedWeight> weight_;
};

}  // namespace

std::unique_ptr<Home> encoded_home(std::shared_ptr<const EncodedWeight> weight) {
  return std::make_unique<EncodedHome>(std::move(weight));
}

}  // namespace accelerate::residency
