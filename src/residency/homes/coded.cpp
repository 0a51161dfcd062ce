#include "residency/homes/coded.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

namespace accelerate::residency {
namespace {

class CodedHome final : public Home {
 public:
  explicit CodedHome(std::shared_ptr<CodedValues> values) : values_(std::move(values)) {}

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    values_->decode(flat);
    return nullptr;
  }
  void store(const at::Tensor& flat) override { values_->put(flat); }
  std::optional<at::ScalarType> keeps() const override { return values_->dtype(); }
  void refine(int64_t begin, const at::Tensor& values) const override {
    values.copy_(decoded().narrow(0, begin, values.numel()));
  }
  void take(int64_t begin, const at::Tensor& values) override {
    const at::Tensor all = decoded();
    all.narrow(0, begin, values.numel()).copy_(values);
    values_->put(all);
  }
  int64_t version() const override { return values_->version(); }
  bool rounds() const override { return true; }

 private:
  at::Tensor decoded() const {
    const at::Tensor all = at::empty({values_->numel()}, values_->codes().options().dtype(values_->dtype()));
    values_->decode(all);
    return all;
  }

  std::shared_ptr<CodedValues> values_;
};

}  // namespace

CodedValues::CodedValues(int64_t numel, at::ScalarType dtype, const at::Device& device)
    : numel_(numel),
      dtype_(dtype),
      wire_(int8_wire()),
      codes_(at::zeros({wire_->bytes(numel)}, at::TensorOptions().dtype(at::kByte).device(device))) {}

void CodedValues::decode(const at::Tensor& to) const { wire_->decode(codes_.to(to.device()), 0, to); }

void CodedValues::put(const at::Tensor& values) {
  ++changes_;
  if (values.is_meta() || codes_.is_meta()) return;  // a dry run
  const at::NoGradGuard no_grad;
  const at::Tensor given = values.to(codes_.device()), seen = at::empty_like(given);
  const at::Tensor exact = at::empty({numel_}, codes_.options().dtype(at::kFloat));
  decode(seen), decode(exact);
  // Exact values of a block are encoded as they were: its largest one is 127 times its scale.
  codes_.copy_(wire_->encode(at::where(at::ne(given, seen), given.to(at::kFloat), exact), 0));
}

std::unique_ptr<Home> coded_home(std::shared_ptr<CodedValues> values) {
  return std::make_unique<CodedHome>(std::move(values));
}

}  // namespace accelerate::residency
