#include "run_state/filling.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "formats/expected_files.hpp"
#include "observe/trace.hpp"
#include "residency/disk/by_turns.hpp"
#include "snapshot/ledger.hpp"

namespace accelerate::run_state {

void Filling::add(std::string what, const checkpointing::StoredTensor& stored, const parallel::Held& holding,
                  at::Tensor to) {
  if (to.numel() == 0) return;
  std::vector<formats::FoundPart> parts;
  for (const auto& part : boxes_of(holding, at::empty(to.sizes(), to.options().device(at::kMeta))))
    parts.push_back(formats::naming_damage(what, [&] { return checkpointing::find_part(stored, part.box); }));
  items_.push_back({std::move(what), holding, std::move(to), std::move(parts)});
}

void Filling::fill(const Item& item, const at::Tensor& read) {
  formats::naming_damage(item.what, [&] {
    auto part = item.parts.begin();
    for (const auto& box : boxes_of(item.holding, read)) (part++)->read(box.values);
  });
  at::Tensor(item.to).copy_(read);  // of itself nothing, but who hears of writes, or compares versions, learns of it
}

void Filling::run() const {
  trace::Span span(trace::SpanKind::checkpoint_read, name_);
  at::NoGradGuard no_grad;
  snapshot::keep_all();
  std::vector<const Item*> order;
  int64_t bytes = 0;
  for (const auto& item : items_) {
    order.push_back(&item);
    bytes += static_cast<int64_t>(item.to.nbytes());
  }
  std::stable_sort(order.begin(), order.end(), [](const Item* a, const Item* b) {
    const auto &x = a->parts.front(), &y = b->parts.front();
    return std::tie(x.file, x.begin) < std::tie(y.file, y.begin);
  });
  std::vector<at::Tensor> here;
  std::vector<const Item*> of_here;
  for (const Item* item : order) {
    if (comes_and_goes(item->to)) fill(*item, at::empty(item->to.sizes(), item->to.options()));
    else here.push_back(item->to), of_here.push_back(item);
  }
  residency::by_turns(here, /*changes=*/true, [&](const auto&, const std::vector<size_t>& numbers) {
    for (const size_t number : numbers) fill(*of_here[number], here[number]);
  });
  span.set_bytes(bytes);
}

}  // namespace accelerate::run_state
