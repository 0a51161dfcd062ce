#include "parallel/sharding/shards_on_disk.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "memory/meta_memory.hpp"
#include "parallel/sharding/counts.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

std::shared_ptr<residency::DiskMemory> disk_at(const DiskPlace& place, const residency::SpillFile::Wording& wording) {
  return std::make_shared<residency::DiskMemory>(place.folder, place.requests, wording);
}

/// Larger groups would take memory, and make no disk faster.
constexpr int64_t kEnoughElements = 8 << 20;
/// One comes, one is stepped on, one goes.
constexpr int64_t kPipelined = 3;

}  // namespace

ShardsOnDisk::ShardsOnDisk(const ShardingSettings& settings, std::vector<ShardedPart>& parts, const at::Device& device)
    : parts_(parts),
      is_dry_(device.is_meta()),
      has_states_(settings.states_on_disk.has_value()),
      has_parameters_(settings.parameters_on_disk.has_value()),
      how_(settings.states_on_disk.value_or(StatesOnDisk{
          .group_elements = kEnoughElements, .groups_in_memory = settings.step_in_backward ? kPipelined : 1})) {
  if (has_parameters_) elements_left_in_memory_ = settings.parameters_on_disk->elements_in_memory;
  if (is_dry_) return;
  if (has_states_)
    states_ = disk_at(how_.place, {.user = "optimizer states on disk",
                                   .contents = "the optimizer's states",
                                   .advice = "or name a folder on another disk"});
  if (has_parameters_)
    parameters_ = disk_at(
        settings.parameters_on_disk->place,
        {.user = "parameters on disk", .contents = "the parameters", .advice = "or name a folder on another disk"});
}

at::Tensor ShardsOnDisk::zeros(const std::shared_ptr<residency::DiskMemory>& disk, bool on_disk, int64_t numel,
                               const at::TensorOptions& options) {
  if (!on_disk) return at::zeros({numel}, options);
  if (disk) return disk->zeros({numel}, c10::typeMetaToScalarType(options.dtype()));
  const meta_memory::Uncounted in_a_file;
  const at::Tensor dry = at::zeros({numel}, options);
  dry_.insert(dry.storage().unsafeGetStorageImpl());
  return dry;
}

std::optional<residency::KeptSlice> ShardsOnDisk::allocate(ShardedPart& part, int64_t numel,
                                                           const at::TensorOptions& options) {
  // The first units stay in memory, not those that happen to fit.
  const bool in_memory = !has_parameters_ || elements_left_in_memory_ >= numel;
  elements_left_in_memory_ = in_memory ? elements_left_in_memory_ - (has_parameters_ ? numel : 0) : 0;
  const auto kept = [&](const at::Tensor& values) {
    if (in_memory) return residency::in_memory(values);
    counts::add(ShardingCount::parts_on_disk);
    return residency::on_disk(parameters_, values);
  };
  if (part.compute_dtype == part.master_dtype) {
    if (in_memory) return std::nullopt;
    part.master = zeros(parameters_, /*on_disk=*/true, numel, options.dtype(part.master_dtype));
    return kept(part.master);
  }
  if (in_memory && !has_states_) return std::nullopt;
  part.master = zeros(states_, has_states_, numel, options.dtype(part.master_dtype));
  return residency::image_of(part.master,
                             kept(zeros(parameters_, !in_memory, numel, options.dtype(part.compute_dtype))));
}

at::Tensor ShardsOnDisk::allocate_master(const ShardedPart& part, int64_t numel) {
  return has_states_ ? zeros(states_, /*on_disk=*/true, numel, at::TensorOptions().dtype(part.master_dtype))
                     : at::Tensor();
}

bool ShardsOnDisk::may_have_changed(const ShardedPart& part) const {
  for (const auto* disk : {states_.get(), parameters_.get()})
    if (disk && disk->has(part.master)) return disk->may_have_been_touched(part.master);
  return true;
}

const std::vector<std::vector<size_t>>& ShardsOnDisk::groups() {
  if (!groups_.empty() || !steps_in_groups()) return groups_;
  group_of_.assign(parts_.size(), 0);
  given_.assign(parts_.size(), 0);
  int64_t elements = 0;
  for (const auto& part : parts_) {
    if (!part.trainable) continue;
    const int64_t more = part.master.numel();
    if (groups_.empty() || elements + more > std::min(how_.group_elements, kEnoughElements))
      groups_.emplace_back(), elements = 0;
    groups_.back().push_back(part.index);
    group_of_[part.index] = groups_.size() - 1;
    elements += more;
  }
  return groups_;
}

std::vector<at::Tensor> ShardsOnDisk::masters_of(size_t group) const {
  std::vector<at::Tensor> masters;
  for (const size_t index : groups_[group]) masters.push_back(parts_[index].master);
  return masters;
}

ShardsOnDisk::UnderWay ShardsOnDisk::under_way(
    size_t group, std::vector<at::Tensor> tensors,
    std::unique_ptr<residency::Transfer> (residency::DiskMemory::*move)(const std::vector<at::Tensor>&)) const {
  UnderWay moves{.group = group, .tensors = std::move(tensors), .states = nullptr, .parameters = nullptr};
  if (states_) moves.states = (states_.get()->*move)(moves.tensors);
  if (parameters_) moves.parameters = (parameters_.get()->*move)(moves.tensors);
  return moves;
}
ShardsOnDisk::UnderWay ShardsOnDisk::bring(size_t group, std::vector<at::Tensor> tensors) const {
  return under_way(group, std::move(tensors), &residency::DiskMemory::bring);
}
ShardsOnDisk::UnderWay ShardsOnDisk::send(size_t group, std::vector<at::Tensor> tensors) const {
  return under_way(group, std::move(tensors), &residency::DiskMemory::send);
}

bool ShardsOnDisk::postpone(const std::function<void()>& f) {
  try {
    f();
    return true;
  } catch (const ResourceError&) {
    if (!failed_) failed_ = std::current_exception();
    return false;
  }
}

void ShardsOnDisk::before_group(size_t group, const std::vector<at::Tensor>& states) {
  counts::add(ShardingCount::groups_from_disk);
  if (is_dry_) return before_dry_group(group, states, 1 + (how_.reads_ahead ? 1 : 0) + (how_.writes_behind ? 1 : 0));
  // Another group, which this step passes over, does not come: it would stay in memory, where writes of the program
  // are nobody's to send.
  if (coming_ && coming_->group != group) coming_.reset();
  if (auto coming = std::exchange(coming_, std::nullopt)) {
    coming->wait();
    counts::add(ShardingCount::groups_read_ahead);
  }
  // With one group, tensors that are still on their way to the disk may be wanted again.
  settle(going_, group);
  auto needed = masters_of(group);
  needed.insert(needed.end(), states.begin(), states.end());
  const auto gradients = gradients_of(groups_[group]);
  note_gradients(gradients);
  needed.insert(needed.end(), gradients.begin(), gradients.end());
  bring(group, std::move(needed)).wait();
  kept_.resize(groups_.size());
  // Two optimizers of one model step on other parameters of the group: tensors read ahead for the other one go.
  if (const auto& before = kept_[group]; !before.empty()) {
    std::vector<at::Tensor> others;
    for (const auto& tensor : before)
      if (std::none_of(states.begin(), states.end(), [&](const auto& state) { return state.is_same(tensor); }))
        others.push_back(tensor);
    if (states_) states_->drop(others);
  }
  // One is stepped on, one comes, and the others go.
  const size_t next = group + 1;
  const auto in_memory = static_cast<int64_t>(going_.size()) + 1;
  if (!how_.reads_ahead || next >= groups_.size() || in_memory >= how_.groups_in_memory) return;
  if (next < ahead_.size() && ahead_[next].is_there) return;
  auto wanted = masters_of(next);
  wanted.insert(wanted.end(), kept_[next].begin(), kept_[next].end());
  const auto gradients_to_come = gradients_of(groups_[next]);
  wanted.insert(wanted.end(), gradients_to_come.begin(), gradients_to_come.end());
  coming_ = bring(next, std::move(wanted));
}

void ShardsOnDisk::before_dry_group(size_t group, const std::vector<at::Tensor>& states, int64_t at_a_time) {
  int64_t bytes = 0;
  for (const auto& master : masters_of(group))
    if (master.scalar_type() != parts_[groups_[group].front()].compute_dtype || has_parameters_)
      bytes += static_cast<int64_t>(master.nbytes());
  for (const auto& state : states) bytes += static_cast<int64_t>(state.nbytes());
  for (const auto& gradient : gradients_of(groups_[group])) bytes += static_cast<int64_t>(gradient.nbytes());
  const meta_memory::Purpose buffers(MemoryUse::optimizer);
  dry_buffers_ = at::empty({bytes * std::min(how_.groups_in_memory, at_a_time)},
                           at::TensorOptions().dtype(at::kByte).device(at::kMeta));
}

std::vector<at::Tensor> ShardsOnDisk::gradients_of(const std::vector<size_t>& parts) const {
  std::vector<at::Tensor> gradients;
  if (!has_states_) return gradients;
  for (const size_t index : parts)
    for (const auto& member : parts_[index].members)
      if (const at::Tensor& gradient = member.shard.grad(); gradient.defined() && gradient.numel() > 0)
        gradients.push_back(gradient);
  return gradients;
}

void ShardsOnDisk::place(const at::Tensor& parameter, const at::Tensor& state) {
  if (!states_ || state.dim() == 0) return;
  const auto is_parameter = [&](const ShardedMember& member) {
    return member.shard.is_same(parameter) || member.tensor.is_same(parameter);
  };
  if (std::any_of(parts_.begin(), parts_.end(), [&](const ShardedPart& part) {
        return std::any_of(part.members.begin(), part.members.end(), is_parameter);
      }))
    states_->place(state);
}

void ShardsOnDisk::take(const std::vector<at::Tensor>& tensors, bool whole) {
  postpone([&] {
    for (const auto& tensor : tensors) states_->take(tensor, whole);
  });
}

void ShardsOnDisk::after_group(size_t group, const std::vector<at::Tensor>& states) {
  std::vector<at::Tensor> moments;
  for (const auto& state : states)
    if (state.dim() > 0) moments.push_back(state);  // not counts of steps
  if (is_dry_) {
    dry_buffers_.reset();
    for (const auto& moment : moments) dry_.insert(moment.storage().unsafeGetStorageImpl());
    return lie_in_a_file(moments);
  }
  const auto gradients = gradients_of(groups_[group]);  // a step may have put others in their place
  if (states_) {
    take(moments, /*whole=*/true);
    take(gradients, /*whole=*/false);
    drop_unchanged_gradients();
  }
  kept_[group] = states;
  auto all = masters_of(group);
  all.insert(all.end(), states.begin(), states.end());
  all.insert(all.end(), gradients.begin(), gradients.end());
  going_.push_back(send(group, std::move(all)));
  const int64_t may_go = how_.writes_behind ? how_.groups_in_memory - 1 - (coming_ ? 1 : 0) : 0;
  while (static_cast<int64_t>(going_.size()) > may_go) {
    postpone([&] { going_.front().wait(); });
    going_.erase(going_.begin());
  }
  if (!going_.empty()) counts::add(ShardingCount::groups_written_behind);
}

void ShardsOnDisk::lie_in_a_file(const std::vector<at::Tensor>& dry) {
  for (const auto& tensor : dry) tensor.storage().set_data_ptr_noswap(at::DataPtr(nullptr, at::Device(at::kMeta)));
}

void ShardsOnDisk::settle(std::vector<UnderWay>& moves, size_t group) {
  std::erase_if(moves, [&](UnderWay& one) {
    if (one.group == group) postpone([&] { one.wait(); });
    return one.group == group;
  });
}

void ShardsOnDisk::note_gradients(const std::vector<at::Tensor>& gradients) {
  for (const auto& gradient : gradients)
    if (states_->has(gradient)) gradients_here_.emplace_back(gradient, gradient._version());
}

void ShardsOnDisk::drop_unchanged_gradients() {
  std::vector<at::Tensor> as_they_were;
  for (const auto& [gradient, version] : std::exchange(gradients_here_, {}))
    if (gradient._version() == version) as_they_were.push_back(gradient);
  states_->drop(as_they_were);
}

void ShardsOnDisk::before_gradients(const ShardedPart& part) {
  if (!states_) return;
  settle(gradients_going_, group_of_[part.index]);
  const auto gradients = gradients_of({part.index});
  if (std::any_of(gradients.begin(), gradients.end(), [&](const auto& gradient) { return states_->has(gradient); }))
    states_->bring(gradients)->wait();
}

void ShardsOnDisk::after_gradients(const std::vector<size_t>& parts) {
  auto gradients = gradients_of(parts);
  if (gradients.empty()) return;
  if (is_dry_) return lie_in_a_file(gradients);
  take(gradients, /*whole=*/false);
  counts::add(ShardingCount::gradients_to_disk, static_cast<int64_t>(parts.size()));
  // While one goes, backward makes the next.
  for (; gradients_going_.size() > 1; gradients_going_.erase(gradients_going_.begin()))
    postpone([&] { gradients_going_.front().wait(); });
  gradients_going_.push_back(send(group_of_[parts.front()], std::move(gradients)));
}

void ShardsOnDisk::settle_gradients() {
  for (; !gradients_going_.empty(); gradients_going_.erase(gradients_going_.begin()))
    postpone([&] { gradients_going_.front().wait(); });
  coming_.reset();
  std::fill(given_.begin(), given_.end(), 0);
  for (auto& ahead : ahead_) ahead.begun = false;
  if (!order_now_.empty()) order_ = std::exchange(order_now_, {});
}

std::optional<size_t> ShardsOnDisk::completed_by(const ShardedPart& part) {
  given_[part.index] = 1;
  const size_t group = group_of_[part.index];
  const auto& all = groups_[group];
  if (std::any_of(all.begin(), all.end(), [&](size_t index) { return parts_[index].trained && !given_[index]; }))
    return std::nullopt;
  order_now_.push_back(group);
  return group;
}

std::vector<size_t> ShardsOnDisk::left_open() const {
  std::vector<size_t> open;
  for (size_t group = 0; group < groups_.size(); ++group) {
    const auto& all = groups_[group];
    const bool begun = std::any_of(all.begin(), all.end(), [&](size_t index) { return given_[index] != 0; });
    if (begun && std::find(order_now_.begin(), order_now_.end(), group) == order_now_.end()) open.push_back(group);
  }
  return open;
}

std::optional<size_t> ShardsOnDisk::after_in_backward(size_t group) const {
  if (order_.empty()) return group > 0 ? std::optional(group - 1) : std::nullopt;
  const auto found = std::find(order_.begin(), order_.end(), group);
  return found == order_.end() || found + 1 == order_.end() ? std::nullopt : std::optional(*(found + 1));
}

bool ShardsOnDisk::has(const at::Tensor& tensor) const {
  if (is_dry_) return tensor.has_storage() && dry_.contains(tensor.storage().unsafeGetStorageImpl());
  return (states_ && states_->has(tensor)) || (parameters_ && parameters_->has(tensor));
}

bool ShardsOnDisk::settle_ahead(Ahead& ahead) {
  const bool is_there = postpone([&] { ahead.going.wait(); });
  ahead.going = {};
  return is_there;
}

bool ShardsOnDisk::before_ahead(size_t group, const std::vector<at::Tensor>& states) {
  ahead_.resize(groups_.size());
  kept_.resize(groups_.size());
  Ahead& ahead = ahead_[group];
  ahead.is_there = false;
  ahead.shared |= std::exchange(ahead.begun, true);
  if (ahead.shared) return false;
  if (is_dry_) return before_dry_group(group, states, kPipelined), true;
  for (const auto* disk : {states_.get(), parameters_.get()})
    if (disk && !disk->tells_touches()) {
      if (!std::exchange(spoke_, true))
        logs::warn("accelerate.parallel",
                   "step_in_backward has no effect: the file system of the folder for states and parameters has no "
                   "transfers past its cache (O_DIRECT), by which changes between backward and step would show");
      return false;
    }
  settle_ahead(ahead);
  ahead.tensors = masters_of(group);
  ahead.tensors.insert(ahead.tensors.end(), states.begin(), states.end());
  auto needed = ahead.tensors;
  const auto gradients = gradients_of(groups_[group]);
  settle(gradients_going_, group);
  needed.insert(needed.end(), gradients.begin(), gradients.end());
  try {
    if (coming_ && coming_->group != group) coming_.reset();
    if (auto coming = std::exchange(coming_, std::nullopt)) {
      coming->wait();
      counts::add(ShardingCount::groups_read_ahead);
    }
    bring(group, std::move(needed)).wait();
  } catch (const ResourceError&) {
    return false;  // the step reads it anew, and tells
  }
  // What has found no place yet has nothing on the disk to go back to.
  const bool can = std::all_of(ahead.tensors.begin(), ahead.tensors.end(), [&](const at::Tensor& tensor) {
    return (!states_ || states_->are_copies({tensor})) && (!parameters_ || parameters_->are_copies({tensor}));
  });
  const auto find_room = [&] {
    if (states_) states_->make_room_beside(ahead.tensors);
    if (parameters_) parameters_->make_room_beside(ahead.tensors);
  };
  if (can && postpone(find_room)) return true;
  if (states_) states_->drop(ahead.tensors);
  if (parameters_) parameters_->drop(ahead.tensors);
  return false;
}

void ShardsOnDisk::after_ahead(size_t group, const std::vector<at::Tensor>& states) {
  if (is_dry_) return dry_buffers_.reset();
  Ahead& ahead = ahead_[group];
  kept_[group] = states;
  ahead.versions.clear();
  for (const auto& master : masters_of(group)) ahead.versions.push_back(master._version());
  ahead.going = under_way(group, ahead.tensors, &residency::DiskMemory::send_beside);
  ahead.is_there = true;
  counts::add(ShardingCount::groups_ahead);
  // One is computed, one comes, and the others go.
  ahead_going_.push_back(group);
  const auto in_memory = static_cast<int64_t>(ahead_going_.size());
  if (const auto next = after_in_backward(group); next && !ahead_[*next].shared && in_memory < how_.groups_in_memory) {
    auto wanted = masters_of(*next);
    wanted.insert(wanted.end(), kept_[*next].begin(), kept_[*next].end());
    coming_ = bring(*next, std::move(wanted));
  }
  const int64_t may_go = std::max<int64_t>(how_.groups_in_memory - 1 - (coming_ ? 1 : 0), 0);
  for (; static_cast<int64_t>(ahead_going_.size()) > may_go; ahead_going_.erase(ahead_going_.begin())) {
    Ahead& oldest = ahead_[ahead_going_.front()];
    oldest.is_there &= settle_ahead(oldest);
  }
}

bool ShardsOnDisk::take_ahead(size_t group, bool divides) {
  if (group >= ahead_.size() || !std::exchange(ahead_[group].is_there, false)) return false;
  Ahead& ahead = ahead_[group];
  std::erase(ahead_going_, group);
  if (!settle_ahead(ahead)) return false;
  const auto masters = masters_of(group);
  for (size_t i = 0; i < masters.size(); ++i)
    if (has(masters[i]) && masters[i]._version() != ahead.versions[i]) return false;
  const auto gradients = gradients_of(groups_[group]);
  auto made_of = ahead.tensors;
  made_of.insert(made_of.end(), gradients.begin(), gradients.end());
  for (const auto& tensor : made_of)
    for (const auto* disk : {states_.get(), parameters_.get()})
      if (disk && disk->has(tensor) && disk->may_have_been_touched(tensor)) return false;
  if (divides) {
    note_gradients(gradients);
    bring(group, gradients).wait();
  }
  if (states_) states_->exchange(ahead.tensors);
  if (parameters_) parameters_->exchange(ahead.tensors);
  counts::add(ShardingCount::groups_taken_over);
  return true;
}

void ShardsOnDisk::after_take(size_t group) {
  if (gradients_here_.empty()) return;
  drop_unchanged_gradients();
  going_.push_back(send(group, gradients_of(groups_[group])));
}

void ShardsOnDisk::settle() {
  coming_.reset();
  for (const size_t group : std::exchange(ahead_going_, {})) ahead_[group].is_there &= settle_ahead(ahead_[group]);
  for (; !going_.empty(); going_.erase(going_.begin())) postpone([&] { going_.front().wait(); });
  if (auto failed = std::exchange(failed_, nullptr)) std::rethrow_exception(failed);
}

}  // namespace accelerate::parallel
