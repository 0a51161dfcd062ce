#include "parallel/codes/codes.hpp"

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "accelerate/codes/kernels.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "parallel/engines.hpp"
#include "residency/homes/encoded.hpp"

namespace accelerate::parallel {
namespace {

using residency::EncodedWeight;

/// The parts of the codes, as text for the others.
std::string message_of(const EncodedWeight& weight) {
  const float offset = weight.codes.nested ? weight.codes.nested->offset : 0;
  const at::Tensor bytes = residency::bytes_of(weight.codes);
  std::string text(reinterpret_cast<const char*>(&offset), sizeof(offset));
  return text.append(static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
}

void take(EncodedWeight& weight, const std::string& text) {
  const at::Device device = weight.codes.device();
  const bool once = codes::kernels::is_kept_once(weight.codes);
  float offset = 0;
  const at::Tensor bytes =
      at::empty({static_cast<int64_t>(text.size() - sizeof(offset))}, at::TensorOptions().dtype(at::kByte));
  text.copy(reinterpret_cast<char*>(&offset), sizeof(offset));
  text.copy(static_cast<char*>(bytes.mutable_data_ptr()), text.size() - sizeof(offset), sizeof(offset));
  residency::lay_codes_in(weight, bytes.to(device));
  weight.codes.packed = codes::new_packed_cache();
  if (once) codes::keep_once(weight.codes);
  if (weight.codes.nested) weight.codes.nested->offset = offset;
}

}  // namespace

void agree_on_codes(const NamedTensors& parameters) {
  std::vector<EncodedWeight*> weights;
  for (const auto& [name, tensor] : parameters)
    if (auto* weight = residency::encoded_weight(tensor)) weights.push_back(weight);
  const auto group = comm::mesh().along(comm::kTokens);
  if (weights.empty() || !group) return;
  std::vector<int64_t> mine;
  for (const auto* weight : weights)
    mine.push_back(static_cast<int64_t>(std::hash<std::string_view>{}(message_of(*weight))));
  const auto first = from_bytes<std::vector<int64_t>>(comm::broadcast_bytes(*group, to_bytes(mine), 0));
  std::vector<int64_t> others;
  for (size_t i = 0; i < mine.size(); ++i)
    if (mine[i] != first[i]) others.push_back(static_cast<int64_t>(i));
  std::set<int64_t> wanted;
  for (const auto& theirs : comm::all_gather_bytes(*group, to_bytes(others)))
    for (const int64_t i : from_bytes<std::vector<int64_t>>(theirs)) wanted.insert(i);
  for (const int64_t i : wanted) {
    EncodedWeight& weight = *weights[static_cast<size_t>(i)];
    const std::string text = comm::broadcast_bytes(*group, group->rank() == 0 ? message_of(weight) : std::string(), 0);
    if (mine[static_cast<size_t>(i)] != first[static_cast<size_t>(i)]) take(weight, text);
  }
}

namespace {

/// The weights of one model.
struct AgreedWeights {
  NamedTensors parameters;
  bool agreed = false;
};

class CodesOfOne final : public StandIn {
 public:
  CodesOfOne(std::shared_ptr<AgreedWeights> all, EncodedWeight& weight) : all_(std::move(all)), weight_(weight) {}
  void agree() override {
    if (!std::exchange(all_->agreed, true)) agree_on_codes(all_->parameters);
  }
  at::Tensor bytes() override { return residency::bytes_of(weight_.codes); }
  void placed(const at::Tensor& bytes, int64_t sharers) override { residency::lay_codes_in(weight_, bytes, sharers); }

 private:
  std::shared_ptr<AgreedWeights> all_;
  EncodedWeight& weight_;
};

/// Has nothing to do while the model trains: there is no gradient, and what is computed with lies where it was placed.
class ChosenCodes final : public ChosenLayer {
 public:
  void hand_on(std::vector<Held>& given) const override {
    std::shared_ptr<AgreedWeights> all;
    for (Held& held : given)
      if (auto* const weight = residency::encoded_weight(held.tensor)) {
        if (!all) all = std::make_shared<AgreedWeights>();
        all->parameters.emplace_back(held.names.front(), held.tensor);
        held.stand_in = std::make_shared<CodesOfOne>(all, *weight);
      }
  }
  std::unique_ptr<Layer> make(const ModelRef&, const at::Device&, bool, const std::vector<Held>&) const override {
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<ChosenLayer> choose_codes(const EngineRequest&) { return std::make_unique<ChosenCodes>(); }

}  // namespace accelerate::parallel
