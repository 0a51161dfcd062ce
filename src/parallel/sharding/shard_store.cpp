#include "parallel/sharding/shard_store.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "accelerate/codes/float8.hpp"
#include "comm/group.hpp"
#include "memory/meta_memory.hpp"
#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/frozen_codes.hpp"
#include "parallel/sharding/used_units.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/shard.hpp"
#include "residency/residency.hpp"

namespace accelerate::parallel {

Digest digest_of(const at::Tensor& piece) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = piece.is_complex() ? at::view_as_real(piece.detach()) : piece.detach();
  if (values.numel() == 0) return {};
  const auto bits = values.element_size() == 8 ? at::kLong : values.element_size() == 4 ? at::kInt : at::kShort;
  return {values.view(bits).sum(at::kLong).item<int64_t>(),
          std::bit_cast<int64_t>(at::linalg_vector_norm(values, 2, {}, false, at::kDouble).item<double>())};
}

namespace {

ReducerOptions reducer_options(const ShardingSettings& settings, const ShardGroups& groups) {
  const int64_t replicas = groups.replicate ? groups.replicate->world_size() : 1;
  return {.kept = settings.kept_gradients,
          .times = settings.sums_gradients ? static_cast<double>(groups.ranks() * replicas) : 1,
          .before = settings.divides_before,
          .overlap = settings.overlap_reduction};
}

/// Which parts' masters lie on the host, though the model is on a device: a share of all elements. The first parts
/// stay on the device, as DeepSpeed's first sub-groups do.
struct OnHost {
  OnHost(const ShardingSettings& settings, const at::Device& device)
      : any(settings.offload && !device.is_cpu() && !device.is_meta()),
        pinned(settings.pin_memory),
        share(settings.offload_share) {}
  bool has(const ShardedPart& part, const std::vector<ShardedPart>& parts) const {
    if (!any || share == 1) return any;
    int64_t before = 0, all = 0;
    for (const auto& one : parts) {
      all += one.numel();
      if (one.index < part.index) before += one.numel();
    }
    return static_cast<double>(before) >= (1 - share) * static_cast<double>(all);
  }
  bool any, pinned;
  double share;
};

/// Each rank holds its shards itself.
class GatheredStore final : public ShardStore {
 public:
  GatheredStore(std::vector<ShardedPart>& parts, const ShardGroups& groups, const at::Device& device,
                const ShardingSettings& settings, std::unique_ptr<ShardsOnDisk> disk)
      : ShardStore(std::move(disk)),
        parts_(parts),
        slices_(parts.size()),
        groups_(groups),
        device_(device),
        host_(settings, device),
        keeps_(settings.keep_until_step && !device.is_meta()),
        options_(reducer_options(settings, groups)) {}

  void allocate(ShardedPart& part) override {
    const meta_memory::Purpose shards(MemoryUse::parameters);
    const bool on_host = host_.has(part, parts_);
    const int64_t numel = part.numel() / groups_.ranks();
    if (part.coded) return frozen_.allocate(part, numel, on_host ? at::Device(at::kCPU) : device_);
    const auto options = at::TensorOptions().dtype(part.master_dtype).device(on_host ? at::Device(at::kCPU) : device_);
    slices_[part.index] = disk().allocate(part, numel, options);
    if (!slices_[part.index]) part.master = at::zeros({numel}, options);
    if (part.fp8)
      part.fp8_scales =
          at::ones({static_cast<int64_t>(part.members.size())}, at::TensorOptions().dtype(at::kFloat).device(device_));
    if (!on_host) return;
    counts::add(ShardingCount::parts_offloaded);
    if (host_.pinned) {
      part.master = part.master.pin_memory();
      counts::add(ShardingCount::parts_pinned);
    }
  }
  std::unique_ptr<residency::Home> home(ShardedPart& part, const std::string& name) override {
    if (part.coded)
      return residency::shard_home({.home = frozen_.home(part),
                                    .numel = part.numel() / groups_.ranks(),
                                    .dtype = part.master_dtype,
                                    .message = part.codes},
                                   groups_.shard, groups_.near, name, residency::int8_wire());
    std::unique_ptr<residency::Wire> wire;
    if (part.fp8) {
      std::vector<residency::WireSlice> slices;
      for (const auto& member : part.members)
        slices.push_back({.begin = member.offset, .length = member.tensor.numel()});
      wire = residency::float8_wire(std::move(slices), part.fp8_scales);
      counts::add(ShardingCount::parts_as_fp8);
    } else if (part.int8) {
      wire = residency::int8_wire();
      counts::add(ShardingCount::parts_as_int8);
    }
    return residency::shard_home(slices_[part.index].value_or(residency::in_memory(part.master)), groups_.shard,
                                 groups_.near, name, std::move(wire));
  }
  std::unique_ptr<GradientReducer> make_reducer() override {
    return collective_reducer(parts_, groups_, options_, &used_);
  }
  void use(const residency::Unit& unit) override { used_.add(unit); }
  void reshard(bool kept) override {
    used_.reshard(kept);
    frozen_.release();
  }
  void refresh(residency::Residency&) override {
    if (std::any_of(parts_.begin(), parts_.end(),
                    [&](const ShardedPart& part) { return part.fp8 && part.master._version() != scaled_[part.index]; }))
      work_out_scales();
  }
  void publish(residency::Residency&) override {
    work_out_scales();
    if (keeps_) digests_ = digests();
  }
  void publish_part(ShardedPart& part) override {
    if (const auto& slice = slices_[part.index]) slice->make_current(/*anyway=*/true);
  }
  void make_ahead(ShardedPart& part) override {
    if (const auto& slice = slices_[part.index]) slice->make_ahead();
  }
  void take_ahead(ShardedPart& part) override {
    if (const auto& slice = slices_[part.index]; !slice || !slice->take_ahead()) publish_part(part);
  }
  /// Otherwise a unit that is whole from step to step would be gathered anew for each micro-step.
  std::optional<std::vector<char>> changed_parts() override {
    if (!keeps_) return std::nullopt;
    const auto before = std::exchange(digests_, digests());
    at::Tensor changed = at::zeros({static_cast<int64_t>(parts_.size())}, at::kInt);
    for (size_t i = 0; i < parts_.size(); ++i)
      if (before.size() != parts_.size() || before[i] != digests_[i]) changed[static_cast<int64_t>(i)] = 1;
    at::Tensor anywhere = changed.to(groups_.shard->device());
    groups_.shard->all_reduce_(anywhere, Reduction::max);
    anywhere = anywhere.cpu();
    const auto* flags = anywhere.data_ptr<int32_t>();
    return std::vector<char>(flags, flags + parts_.size());
  }

 private:
  std::vector<Digest> digests() const {
    std::vector<Digest> all;
    for (const auto& part : parts_) {
      if (!part.trainable) all.emplace_back();
      else if (slices_[part.index] && !disk().may_have_changed(part)) all.emplace_back(part.master._version(), 0);
      else all.push_back(digest_of(part.master));
    }
    return all;
  }
  /// The scales of weights that travel as fp8: each from the largest value that any rank holds of the weight.
  void work_out_scales() {
    const at::NoGradGuard no_grad;
    scaled_.resize(parts_.size());
    for (const auto& part : parts_) scaled_[part.index] = part.fp8 ? part.master._version() : 0;
    std::vector<at::Tensor> largest;
    for (const auto& part : parts_)
      for (const auto& member : part.members)
        if (part.fp8)
          largest.push_back(device_.is_meta() ? at::empty({}, part.fp8_scales.options())  // a dry run
                                              : codes::amax(member.shard).reshape({}).to(groups_.shard->device()));
    if (largest.empty()) return;
    at::Tensor all = at::stack(largest);
    groups_.shard->all_reduce_(all, Reduction::max);
    if (device_.is_meta()) return;
    int64_t done = 0;
    for (const auto& part : parts_) {
      if (!part.fp8) continue;
      const auto count = static_cast<int64_t>(part.members.size());
      part.fp8_scales.copy_(codes::scale_of(all.narrow(0, done, count), codes::Float8::e4m3));
      done += count;
    }
  }

  std::vector<ShardedPart>& parts_;
  std::vector<std::optional<residency::KeptSlice>> slices_;  ///< by part: what lies on a disk, in whole or in part
  ShardGroups groups_;
  at::Device device_;
  OnHost host_;
  bool keeps_;
  ReducerOptions options_;
  FrozenCodes frozen_;
  UsedUnits used_;
  std::vector<Digest> digests_;  ///< by part
  std::vector<int64_t> scaled_;  ///< per part: the version of its master whose scales these are
};

/// One process, or a whole model on each rank: the flat storage is the only shard.
class LocalStore final : public ShardStore {
 public:
  LocalStore(std::vector<ShardedPart>& parts, const ShardGroups& groups, const at::Device& device,
             const ShardingSettings& settings, std::unique_ptr<ShardsOnDisk> disk)
      : ShardStore(std::move(disk)),
        parts_(parts),
        slices_(parts.size()),
        published_(parts.size(), -1),
        groups_(groups),
        device_(device),
        host_(settings, device),
        options_(reducer_options(settings, groups)) {
    if (host_.any) worker_ = std::make_shared<residency::Worker>();
  }

  void allocate(ShardedPart& part) override {
    const meta_memory::Purpose shards(MemoryUse::parameters);
    const bool goes = host_.has(part, parts_);
    const auto options = at::TensorOptions().dtype(part.master_dtype).device(goes ? at::Device(at::kCPU) : device_);
    computed_.resize(parts_.size());
    if (part.coded) return frozen_.allocate(part, part.numel(), goes ? at::Device(at::kCPU) : device_);
    if ((slices_[part.index] = disk().allocate(part, part.numel(), options))) {
      // An image in memory is computed with where it lies.
      if (!goes) computed_[part.index] = slices_[part.index]->home->mapped().value_or(at::Tensor());
      return;
    }
    part.master = at::zeros({part.numel()}, options);
    if (goes) {
      counts::add(ShardingCount::parts_offloaded);
      if (host_.pinned) {
        part.master = part.master.pin_memory();
        counts::add(ShardingCount::parts_pinned);
      }
      return;
    }
    computed_[part.index] =
        part.compute_dtype == part.master_dtype
            ? part.master
            : at::empty({part.numel()}, at::TensorOptions().dtype(part.compute_dtype).device(device_));
  }
  std::unique_ptr<residency::Home> home(ShardedPart& part, const std::string&) override {
    if (part.coded) return frozen_.home(part);
    const at::Tensor& computed = computed_[part.index];
    if (slices_[part.index] && !computed.defined()) return residency::kept_home(*slices_[part.index]);
    if (!computed.defined()) return residency::host_home(part.master, worker_);
    return computed.is_same(part.master) ? residency::memory_home(computed)
                                         : residency::image_home(computed, part.master);
  }
  at::Tensor computed(const ShardedPart& part) const override { return computed_[part.index]; }
  void reshard(bool) override { frozen_.release(); }
  std::unique_ptr<GradientReducer> make_reducer() override {
    return groups_.replicate ? collective_reducer(parts_, groups_, options_, nullptr) : local_reducer(parts_, options_);
  }
  void refresh(residency::Residency& units) override {
    const auto is_behind = [&](const ShardedPart& part) {
      return computed_[part.index].defined() && !computed_[part.index].is_same(part.master) &&
             part.master._version() != published_[part.index];
    };
    if (std::any_of(parts_.begin(), parts_.end(), is_behind)) publish(units);
  }
  void publish(residency::Residency& units) override {
    at::NoGradGuard no_grad;
    for (const auto& part : parts_) {
      auto& computed = computed_[part.index];
      const bool done = slices_[part.index] && part.master._version() == published_[part.index];
      if (computed.defined() && !computed.is_same(part.master) && !done) computed.copy_(part.master);
      published_[part.index] = part.master._version();
    }
    units.note_up_to_date();
  }
  void publish_part(ShardedPart& part) override {
    at::NoGradGuard no_grad;
    if (!slices_[part.index]) return;
    slices_[part.index]->make_current(/*anyway=*/true);
    published_[part.index] = part.master._version();
  }
  void make_ahead(ShardedPart& part) override {
    if (const auto& slice = slices_[part.index]) slice->make_ahead();
  }
  void take_ahead(ShardedPart& part) override {
    at::NoGradGuard no_grad;
    if (const auto& slice = slices_[part.index]; !slice || !slice->take_ahead()) publish_part(part);
    else published_[part.index] = part.master._version();
  }

 private:
  std::vector<ShardedPart>& parts_;
  std::vector<std::optional<residency::KeptSlice>> slices_;  ///< as GatheredStore's
  std::vector<int64_t> published_;                           ///< per part: which version of its master the image is of
  ShardGroups groups_;
  at::Device device_;
  OnHost host_;
  ReducerOptions options_;
  FrozenCodes frozen_;
  std::shared_ptr<residency::Worker> worker_;
  /// Per part: master itself, or its image in the compute dtype; undefined where the master lies on the host.
  std::vector<at::Tensor> computed_;
};

}  // namespace

std::unique_ptr<ShardStore> make_shard_store(std::vector<ShardedPart>& parts, const ShardGroups& groups,
                                             const at::Device& device, const ShardingSettings& settings) {
  auto disk = std::make_unique<ShardsOnDisk>(settings, parts, device);
  if (groups.ranks() == 1) return std::make_unique<LocalStore>(parts, groups, device, settings, std::move(disk));
  // Parameters on a disk would be in memory that ranks share.
  if (device.is_cpu() && !disk->has_parameters() && !settings.quantized.any())
    if (auto store = shared_memory_store(parts, groups, reducer_options(settings, groups), disk)) return store;
  return std::make_unique<GatheredStore>(parts, groups, device, settings, std::move(disk));
}

}  // namespace accelerate::parallel
