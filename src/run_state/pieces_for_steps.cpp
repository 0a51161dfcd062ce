#include "run_state/pieces_for_steps.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

/// The group of the ranks that hold the other elements; null: there are none.
std::shared_ptr<comm::Group> group_of(const parallel::Held& held) {
  return (held.mesh ? *held.mesh : comm::mesh()).along(held.cut);
}

/// A slice in numbers, as many for all ranks' slices of a tensor, and whether it is held in its box's sizes.
void append(std::vector<int64_t>& numbers, const parallel::Held& held) {
  auto corner = held.slice.corner, sizes = held.slice.sizes;
  corner.resize(static_cast<size_t>(held.whole.dim())), sizes.resize(corner.size());  // which no elements may lack
  numbers.insert(numbers.end(), corner.begin(), corner.end());
  numbers.insert(numbers.end(), sizes.begin(), sizes.end());
  numbers.insert(numbers.end(), {held.slice.begin, held.slice.numel, held.value.sizes() == held.slice.sizes ? 1 : 0});
}

/// Another rank's part of the same tensor. @param numbers  that rank's; moves on to those of the next tensor
parallel::Held read_held(const parallel::Held& mine, const int64_t*& numbers) {
  const auto dims = static_cast<ptrdiff_t>(mine.whole.dim());
  parallel::Held theirs = mine;
  theirs.slice.corner.assign(numbers, numbers + dims);
  theirs.slice.sizes.assign(numbers + dims, numbers + 2 * dims);
  numbers += 2 * dims;
  theirs.slice.begin = *numbers++, theirs.slice.numel = *numbers++;
  const bool is_box = *numbers++ != 0;
  const auto options = mine.whole.options().device(at::kMeta);
  theirs.value = is_box ? at::empty(theirs.slice.sizes, options) : at::empty({theirs.slice.numel}, options);
  return theirs;
}

/// Between each two ranks a tensor each way, none where it has no elements. The lower of two ranks sends first:
/// on a device's streams what is sent waits to be received.
class ShardExchange {
 public:
  explicit ShardExchange(comm::Group& group) : group_(group) {}
  /// With one of the ranks after the other, in their order.
  void with(int64_t other, const at::Tensor& sent, at::Tensor& received) {
    const auto send = [&] {
      if (sent.numel() > 0) under_way_.push_back(group_.send(sent, other));
    };
    if (group_.rank() < other) send();
    if (received.numel() > 0) group_.receive_(received, other);
    if (group_.rank() > other) send();
  }
  void finish() {
    for (const auto& transfer : under_way_) group_.wait(*transfer);
  }

 private:
  comm::Group& group_;
  std::vector<std::shared_ptr<comm::Group::Transfer>> under_way_;
};

}  // namespace

ShardsForSteps::ShardsForSteps(const parallel::Engines& engines) {
  for (const auto& engine : engines) {
    if (!engine->holds_pieces()) continue;
    for (auto& held : engine->pieces()) {
      if (!held.in_pieces()) continue;
      const auto* key = held.value.unsafeGetTensorImpl();
      // The whole tensor leaves its sizes and the order of its elements. A dry run counts what is made on meta.
      if (!held.whole.is_meta())
        held.whole =
            at::empty_strided(held.whole.sizes(), held.whole.strides(), held.whole.options().device(at::kMeta));
      held.tensor = at::Tensor();
      pieces_.emplace(key, Shard{std::move(held), engine});
    }
  }
}

bool ShardsForSteps::has(const at::Tensor& parameter) const {
  return pieces_.contains(parameter.unsafeGetTensorImpl());
}

const parallel::Held& ShardsForSteps::held(const at::Tensor& piece) const {
  const auto& found = pieces_.at(piece.unsafeGetTensorImpl());
  if (found.engine.expired())
    raise<ConfigError>(
        "step: the prepared model of a parameter {} is gone, but the optimizer needs all of the parameter, of which "
        "this rank has a piece, expected the model to live as long as its optimizer steps",
        found.held.whole.sizes());
  return found.held;
}

at::IntArrayRef ShardsForSteps::whole_sizes(const at::Tensor& piece) const { return held(piece).whole.sizes(); }

at::Tensor ShardsForSteps::summed(const at::Tensor& piece, const at::Tensor& sums) const {
  const auto group = group_of(held(piece));
  if (!group) return sums;
  at::Tensor sum = sums.to(group->device());
  group->all_reduce_(sum, Reduction::sum);
  return sum.to(sums.device());
}

void ShardsForSteps::share_out(const std::vector<at::Tensor>& pieces, const Job& job) const {
  for (const auto& share : shares_of(pieces)) take_part(share, pieces, job);
}

const std::vector<ShardsForSteps::Share>& ShardsForSteps::shares_of(const std::vector<at::Tensor>& pieces) const {
  std::vector<const at::TensorImpl*> list;
  for (const auto& piece : pieces) list.push_back(piece.unsafeGetTensorImpl());
  if (const auto known = shares_.find(list); known != shares_.end()) return known->second;
  constexpr size_t kLists = 64;  // the parts of a model; more come where other parameters have gradients in each step
  if (shares_.size() >= kLists) shares_.clear();
  std::vector<Share> shares;
  for (size_t number = 0; number < pieces.size(); ++number) {
    const auto group = group_of(held(pieces[number]));
    const auto same =
        std::find_if(shares.begin(), shares.end(), [&](const Share& share) { return share.group == group; });
    auto& share =
        same != shares.end() ? *same : shares.emplace_back(Share{.group = group, .numbers = {}, .of_ranks = {}});
    share.numbers.push_back(number);
  }
  for (auto& share : shares) {
    std::stable_sort(share.numbers.begin(), share.numbers.end(),
                     [&](size_t a, size_t b) { return held(pieces[a]).whole.numel() > held(pieces[b]).whole.numel(); });
    if (!share.group || share.group->dry()) continue;
    std::vector<int64_t> mine;
    for (const size_t number : share.numbers) append(mine, held(pieces[number]));
    const auto ranks = share.group->world_size();
    const at::Tensor all =
        share.group->all_gather(at::tensor(mine, at::kLong).to(share.group->device())).cpu().contiguous();
    std::vector<const int64_t*> next;
    for (int64_t rank = 0; rank < ranks; ++rank)
      next.push_back(all.const_data_ptr<int64_t>() + rank * static_cast<int64_t>(mine.size()));
    for (size_t i = 0; i < share.numbers.size(); ++i) {
      std::vector<parallel::Held> of_ranks;
      for (auto& numbers : next) of_ranks.push_back(read_held(held(pieces[share.numbers[i]]), numbers));
      const bool is_mine = static_cast<int64_t>(i) % ranks == share.group->rank();
      share.of_ranks.push_back(is_mine ? std::move(of_ranks) : std::vector<parallel::Held>());
    }
  }
  return shares_.emplace(std::move(list), std::move(shares)).first->second;
}

void ShardsForSteps::take_part(const Share& share, const std::vector<at::Tensor>& pieces, const Job& job) const {
  const auto ranks = share.group ? static_cast<size_t>(share.group->world_size()) : 1;
  const auto me = share.group ? static_cast<size_t>(share.group->rank()) : 0;
  const bool alone = ranks == 1 || share.group->dry();
  // In each round every rank has one of them.
  for (size_t first = 0; first < share.numbers.size(); first += ranks) {
    const size_t count = std::min(ranks, share.numbers.size() - first);
    const auto number = [&](size_t rank) { return share.numbers[first + rank]; };
    std::vector<at::Tensor> values;  // by the rank that makes something of them
    for (size_t rank = 0; rank < count; ++rank) values.push_back(job.values(number(rank)));
    const auto to_send = [&](const at::Tensor& tensor) { return tensor.to(share.group->device()).contiguous(); };
    const auto others = [&](const auto& f) {
      for (size_t rank = 0; rank < ranks; ++rank)
        if (rank != me) f(rank);
    };
    at::Tensor made;
    const auto* of_ranks = me < count && !alone ? &share.of_ranks[first + me] : nullptr;
    const auto received_like = [&](const at::Tensor& like, at::IntArrayRef sizes) {
      return at::empty(sizes, like.options().device(share.group->device()));
    };
    if (me < count) {
      const auto& known = held(pieces[number(me)]);
      made = at::empty(known.whole.sizes(), values[me].options());
      parallel::put_into(known, values[me], made);
    }
    if (!alone) {
      ShardExchange exchange(*share.group);
      others([&](size_t rank) {
        at::Tensor theirs =
            of_ranks ? received_like(values[me], (*of_ranks)[rank].value.sizes()) : received_like(values.front(), {0});
        exchange.with(static_cast<int64_t>(rank), rank < count ? to_send(values[rank]) : received_like(theirs, {0}),
                      theirs);
        if (of_ranks) parallel::put_into((*of_ranks)[rank], theirs.to(made.device()), made);
      });
      exchange.finish();
    } else if (share.group && made.defined()) {
      // A dry run: what is sent, of the shards here and then of what is made of them, is as much as of this.
      share.group->all_reduce_(made, Reduction::sum);
    }
    if (me < count) made = job.make(number(me), made);
    std::vector<at::Tensor> results;
    for (size_t rank = 0; rank < count; ++rank)
      results.push_back(rank == me ? parallel::slice_of(held(pieces[number(me)]), made) : values[rank]);
    if (!alone) {
      ShardExchange exchange(*share.group);
      others([&](size_t rank) {
        at::Tensor mine =
            rank < count ? received_like(values[rank], values[rank].sizes()) : received_like(values.front(), {0});
        exchange.with(static_cast<int64_t>(rank),
                      of_ranks ? to_send(parallel::slice_of((*of_ranks)[rank], made)) : received_like(mine, {0}), mine);
        if (rank < count) results[rank] = mine.to(values[rank].device());
      });
      exchange.finish();
    }
    for (size_t rank = 0; rank < count; ++rank) job.take(number(rank), results[rank]);
  }
}

}  // namespace accelerate::run_state
