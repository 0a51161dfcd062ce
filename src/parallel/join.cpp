#include "parallel/join.hpp"

#include <ATen/ops/full.h>

#include "comm/group.hpp"
#include "comm/mesh.hpp"

namespace accelerate::parallel {
namespace {

/// Joins that have begun end, also when the loop throws.
class Joining {
 public:
  void begin(Engine& engine) {
    engine.begin_join();
    begun_.push_back(&engine);
  }
  ~Joining() {
    for (Engine* engine : begun_) engine->end_join();
  }

 private:
  std::vector<Engine*> begun_;
};

}  // namespace

int64_t last_candidate(comm::Group& group, bool candidate) {
  at::Tensor rank =
      at::full({1}, candidate ? group.rank() : -1, at::TensorOptions().dtype(at::kLong).device(group.device()));
  group.all_reduce_(rank, Reduction::max);
  return rank.item<int64_t>();
}

std::optional<int64_t> join(const Engines& models, const std::function<void()>& loop,
                            const std::function<void(bool averages)>& shadowed) {
  Joining joining;
  Engines joined;
  for (const auto& model : models) {
    if (!model) continue;
    joining.begin(*model);
    joined.push_back(model);
  }
  loop();
  const auto group = comm::mesh().along(comm::kTokens);
  if (joined.empty() || !group) return std::nullopt;  // nobody has other batches
  std::optional<int64_t> longest;
  group->guard("join_uneven_inputs", [&] {
    // One round per step that some rank still takes. A rank that finds nobody left in the first round stopped last.
    bool last = true;
    for (bool active = true; active;) {
      active = false;
      for (const auto& model : joined) {
        const auto averages = model->shadow_step();
        if (!averages) break;
        shadowed(*averages);
        active = true;
        last = false;
      }
    }
    const int64_t source = last_candidate(*group, last);
    for (const auto& model : joined) model->finish_join(source);
    if (last_candidate(*group, !last) >= 0) longest = source;
  });
  return longest;
}

}  // namespace accelerate::parallel
