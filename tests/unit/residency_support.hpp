#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "accelerate/residency.hpp"
#include "residency/homes/host.hpp"
#include "residency/residency.hpp"

namespace residency_test {

namespace residency = accelerate::residency;
using accelerate::ModelRef;
using accelerate::NamedTensors;

/// A home that counts, can be told to fail, and fetches at once.
struct CountingHome final : residency::Home {
  explicit CountingHome(at::Tensor bytes) : master(std::move(bytes)) {}
  std::unique_ptr<residency::Transfer> fetch(const at::Tensor& flat) override {
    ++fetches;
    if (std::exchange(fail_next, false)) throw std::runtime_error("the disk is gone");
    at::Tensor(flat).copy_(master);
    return nullptr;
  }
  void store(const at::Tensor& flat) override {
    ++stores;
    master.copy_(flat);
  }
  at::Tensor master;
  int fetches = 0, stores = 0;
  bool fail_next = false;
};

/// Values of the tensors as their unit's flat storage holds them.
inline at::Tensor flatten(const NamedTensors& tensors, const residency::Layout& layout) {
  torch::NoGradGuard no_grad;
  at::Tensor flat = torch::zeros({layout.numel}, tensors.front().second.options().requires_grad(false));
  for (size_t i = 0; i < tensors.size(); ++i)
    flat.narrow(0, layout.offsets[i], tensors[i].second.numel())
        .copy_(tensors[i].second.detach().contiguous().view({-1}));
  return flat;
}

inline std::vector<at::Tensor> values(const NamedTensors& named) {
  std::vector<at::Tensor> result;
  for (const auto& [name, tensor] : named) result.push_back(tensor);
  return result;
}

/// One unit of the tensors. `make_home` gets their bytes.
template <class MakeHome>
residency::Unit& add_unit(residency::Residency& units, const std::string& name, const NamedTensors& tensors,
                          const MakeHome& make_home, bool keep = false) {
  residency::PartSpec part;
  part.layout = residency::lay_out(values(tensors));
  part.home = make_home(flatten(tensors, part.layout));
  part.members = tensors;
  part.dtype = tensors.front().second.scalar_type();
  std::vector<residency::PartSpec> parts;
  parts.push_back(std::move(part));
  return units.add(name, std::move(parts), keep);
}

/// Every direct child with parameters becomes a unit whose bytes are in host memory, the module's own parameters a kept
/// one.
inline std::shared_ptr<residency::Residency> shard_children(const std::shared_ptr<torch::nn::Module>& module,
                                                            const residency::Policy& policy) {
  auto units = std::make_shared<residency::Residency>(policy);
  auto worker = std::make_shared<residency::Worker>();
  const auto home = [&](at::Tensor bytes) { return residency::host_home(std::move(bytes), worker); };
  std::set<at::TensorImpl*> taken;
  const auto fresh = [&](const NamedTensors& all) {
    NamedTensors mine;
    for (const auto& item : all)
      if (taken.insert(item.second.unsafeGetTensorImpl()).second) mine.push_back(item);
    return mine;
  };
  for (const auto& child : module->named_children())
    if (const auto mine = fresh(ModelRef(child.value()).parameters()); !mine.empty())
      add_unit(*units, child.key(), mine, home);
  if (const auto mine = fresh(ModelRef(module).parameters()); !mine.empty())
    add_unit(*units, "root", mine, home, /*keep=*/true);
  return units;
}

}  // namespace residency_test
