/// A handler on the residency's chain, which adds an adapter's part to what operators compute with the adapted weight.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "adapters/lora_layer.hpp"
#include "residency/member.hpp"
#include "residency/products.hpp"
#include "residency/replaced.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::detail {
namespace {

using residency::Handler;
using residency::kKey;
using residency::Link;
using residency::Member;
using residency::Next;
using residency::OperatorCall;
using residency::ProductPlaces;
using residency::TorchLayers;

/// The same tensor with or without the key, through which operators on it come by.
at::Tensor alias_with(const at::Tensor& tensor, c10::DispatchKeySet keys) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return at::Tensor(std::move(impl));
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

class LoraRegistry {
 public:
  void add(LoraLayer& layer) {
    const MutexLock lock(mutex_);
    by_weight_[layer.weight.unsafeGetTensorImpl()] = &layer;
    by_storage_[storage_of(layer.weight)] = &layer;
  }
  void remove(const LoraLayer& layer) {
    const MutexLock lock(mutex_);
    by_weight_.erase(layer.weight.unsafeGetTensorImpl());
    std::erase_if(by_storage_, [&](const auto& entry) { return entry.second == &layer; });
  }
  /// The layer whose weight the tensor is, or is a view of.
  LoraLayer* find(const at::Tensor& tensor) {
    const auto* storage = storage_of(tensor);
    if (!storage) return nullptr;
    const MutexLock lock(mutex_);
    if (const auto found = by_weight_.find(tensor.unsafeGetTensorImpl()); found != by_weight_.end()) {
      by_storage_[storage] = found->second;  // a residency may have given it another
      return found->second;
    }
    const auto found = by_storage_.find(storage);
    return found != by_storage_.end() && storage_of(found->second->weight) == storage ? found->second : nullptr;
  }
  /// The layer whose weight the tensor is, even if its storage is another now.
  LoraLayer* of(const at::Tensor& weight) {
    const MutexLock lock(mutex_);
    const auto found = by_weight_.find(weight.unsafeGetTensorImpl());
    return found == by_weight_.end() ? nullptr : found->second;
  }
  std::vector<LoraLayer*> all() {
    const MutexLock lock(mutex_);
    std::vector<LoraLayer*> layers;
    for (const auto& [weight, layer] : by_weight_) layers.push_back(layer);
    return layers;
  }

 private:
  Mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, LoraLayer*> by_weight_ ACCELERATE_GUARDED_BY(mutex_);
  std::unordered_map<const c10::StorageImpl*, LoraLayer*> by_storage_ ACCELERATE_GUARDED_BY(mutex_);
};

LoraRegistry& registry() {
  static LoraRegistry& instance = *new LoraRegistry;  // not destroyed: a program's own static models may come after
  return instance;
}

/// Layers compute with their weights by these, too, but what an adapter means there nobody has said.
bool is_other_layer(const std::string& name) {
  static const std::unordered_set<std::string_view> names{
      "aten::einsum", "aten::bmm",    "aten::baddbmm", "aten::bilinear", "aten::tensordot",   "aten::mv",
      "aten::addmv",  "aten::conv1d", "aten::conv2d",  "aten::conv3d",   "aten::convolution", "aten::inner"};
  return names.contains(name);
}

[[noreturn]] void refuse(const LoraLayer& layer, const OperatorCall& call, const char* how) {
  raise<ConfigError>(
      "adapter of '{}': {} takes the weight {} {}, expected linear, addmm, mm or matmul with the whole weight "
      "[outputs, inputs]{}; leave the module out of target_modules{}",
      layer.path, call.full_name(), layer.weight.sizes(), how, layer.transposed ? " transposed" : "",
      std::string_view(how) == "the other way round" ? ", or change fan_in_fan_out" : "");
}

void check_orientation(const LoraLayer& layer, const OperatorCall& call, const ProductPlaces& product,
                       const at::Tensor& operand) {
  const auto extent = residency::weight_view(operand, layer.weight);
  if (extent == residency::WeightView::part) refuse(layer, call, "in part");
  if ((product.rows == (extent == residency::WeightView::whole)) == layer.transposed)
    refuse(layer, call, "the other way round");
}

at::Tensor part_of_adapter(const LoraLayer& layer, const at::Tensor& x) {
  at::Tensor input = x.to(layer.a.scalar_type());
  if (layer.dropout > 0)
    if (const auto module = layer.module.lock(); module && module->is_training())
      input = at::dropout(input, layer.dropout, /*train=*/true);
  return at::linear(at::linear(input, layer.a), layer.b).mul_(layer.scaling);
}

struct AdaptedProducts final : Handler {
  bool handle(OperatorCall& call, Next next) override {
    const ProductPlaces* product = residency::product_places(call.name());
    if (!product) {
      if (is_other_layer(call.name()) && !residency::within_backward())
        call.for_each_tensor([&](const at::Tensor& tensor, size_t) {
          if (const auto* layer = registry().find(tensor); layer && layer->enabled && !layer->merged)
            refuse(*layer, call, "in a way that is not known");
        });
      return false;
    }
    const at::Tensor operand = call.arguments()[product->weight].toTensor();
    const LoraLayer* layer = registry().find(operand);
    if (!layer || !layer->enabled || layer->merged || residency::within_backward()) return false;
    check_orientation(*layer, call, *product, operand);
    const at::Tensor x = call.arguments()[product->x].toTensor();
    double factor = 1;
    if (const auto alpha = call.schema.argumentIndexWithName("alpha"))
      factor = call.arguments()[static_cast<size_t>(*alpha)].toScalar().toDouble();
    // Members have to be there again in backward. For others autograd gets an alias, on which operators don't come by.
    if (!operand.requires_grad() && !Member::of(operand))
      call.set_argument(product->weight, alias_with(operand, operand.key_set().remove(kKey)));
    next();
    // Kernels that the zoo runs below autograd have no gradient; what is added to their results may.
    const bool below_autograd = call.name().starts_with("accelerate_models::");
    next.compute(below_autograd ? TorchLayers::gradients : TorchLayers::program, [&] {
      const at::Tensor part = part_of_adapter(*layer, x);
      call.map_results([&](const at::Tensor& result) { return result.add_(part, factor); });
    });
    return true;
  }
};

AdaptedProducts& handler() {
  static AdaptedProducts instance;
  return instance;
}

}  // namespace

LoraLayer::~LoraLayer() { stop_watching(*this); }

at::Tensor LoraLayer::difference() const {
  const auto product = at::mm(b, a).mul_(scaling);
  return transposed ? product.t() : product;
}

void watch(LoraLayer& layer) {
  if (!layer.watched) layer.watched.emplace(Link::adapt, handler());
  if (!residency::has_key(layer.weight)) {
    const auto alias = alias_with(layer.weight, layer.weight.key_set().add(kKey));
    layer.weight.unsafeGetTensorImpl()->shallow_copy_from(alias.getIntrusivePtr());
  }
  registry().add(layer);
  residency::replaced_listener.store(
      [](const at::Tensor& tensor) {
        if (LoraLayer* const known = registry().of(tensor)) watch(*known);
      },
      std::memory_order_release);
}

void watch_all_again() {
  for (LoraLayer* layer : registry().all()) watch(*layer);
}

void stop_watching(LoraLayer& layer) {
  if (!layer.watched) return;
  registry().remove(layer);
  layer.watched.reset();
  // A member needs the key for itself.
  if (Member::of(layer.weight)) return;
  const auto alias = alias_with(layer.weight, layer.weight.key_set().remove(kKey));
  layer.weight.unsafeGetTensorImpl()->shallow_copy_from(alias.getIntrusivePtr());
}

}  // namespace accelerate::detail
