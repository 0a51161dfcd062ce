#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "accelerate/optim/steps_on_pieces.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/held.hpp"

namespace accelerate::comm {
class Group;
}  // namespace accelerate::comm

namespace accelerate::run_state {

/// The shards that engines hold, for optimizers that ask for more of a parameter than that. Does not keep the engines.
class ShardsForSteps final : public optim::Shards {
 public:
  explicit ShardsForSteps(const parallel::Engines& engines);

  bool has(const at::Tensor& parameter) const override;
  at::IntArrayRef whole_sizes(const at::Tensor& piece) const override;
  at::Tensor summed(const at::Tensor& piece, const at::Tensor& sums) const override;
  void share_out(const std::vector<at::Tensor>& pieces, const Job& job) const override;

 private:
  struct Shard {
    parallel::Held held;
    std::weak_ptr<parallel::Engine> engine;
  };
  /// @throws ConfigError where the model is gone
  const parallel::Held& held(const at::Tensor& piece) const;

  /// Shards of a list that lie with the same ranks, the largest first. Each rank makes every so manieth.
  struct Share {
    std::shared_ptr<comm::Group> group;                 ///< null: this rank has all of them
    std::vector<size_t> numbers;                        ///< in the list
    std::vector<std::vector<parallel::Held>> of_ranks;  ///< as each rank holds it; empty for what others make
  };
  /// Collective, the first time that a list comes.
  const std::vector<Share>& shares_of(const std::vector<at::Tensor>& pieces) const;
  void take_part(const Share& share, const std::vector<at::Tensor>& pieces, const Job& job) const;

  std::unordered_map<const at::TensorImpl*, Shard> pieces_;
  mutable std::map<std::vector<const at::TensorImpl*>, std::vector<Share>> shares_;  ///< of the lists that came
};

}  // namespace accelerate::run_state
