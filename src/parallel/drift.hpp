#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"

namespace accelerate::comm {
class Group;
}

namespace accelerate::parallel {

/// Sees to it that parameters which ranks hold alike stay alike, and that what each rank writes to its shard of a
/// sharded one is of one whole (DistributedDataParallelKwargs::compare_parameters_every): only gradients are averaged,
/// and nobody else hears of what a rank writes by itself.
class DriftCheck {
 public:
  /// @param group  the ranks that hold the same; null: nobody does.  @param every  0: never. @throws ConfigError when
  /// it is negative.
  explicit DriftCheck(std::shared_ptr<comm::Group> group = nullptr, int64_t every = 0);

  /// An operator has written to a sharded parameter. @param values  the whole of it now, as this rank has it
  void note_write(const std::string& name, const at::Tensor& values);

  /// After a backward that averaged. When it is time, compares by a hash of the bits of each parameter: two passes over
  /// memory and one small message. Where hashes differ, the values do the talking: differences that unlike processors'
  /// way of rounding makes are left alone. Collective over all ranks of the job, those of other groups included.
  /// @param parameters  asked for when it is time
  /// @throws ConfigError on all ranks, naming the first parameter that differs and a rank that has other values.
  void after_average(const std::function<NamedTensors()>& parameters);

 private:
  /// For each parameter since the last look: how often it was written, and what sums over its values say of it.
  using Writes = std::map<std::string, std::vector<double>>;

  bool is_due(int64_t averages) const;
  std::string difference(const NamedTensors& parameters) const;
  std::string difference(const Writes& first, const Writes& other, size_t rank) const;

  std::shared_ptr<comm::Group> group_;
  int64_t every_;
  int64_t averages_ = 0;
  Writes writes_;
};

}  // namespace accelerate::parallel
