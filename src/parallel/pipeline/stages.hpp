#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "residency/chain.hpp"

namespace accelerate::parallel::pipeline {

/// How tensors get from stage to stage. `label`: the operator that needs it, for errors.
class Carrier {
 public:
  virtual ~Carrier() = default;
  virtual void send(const at::Tensor& tensor, int64_t to, const std::string& label) = 0;
  /// Its values as the sender has them, its strides too. @param like  what this rank thinks of its sizes and dtype
  virtual at::Tensor receive(const at::Tensor& like, int64_t from, const std::string& label) = 0;
  /// Another rank sends something to a third one.
  virtual void skip() = 0;
  /// Somebody is about to write to this storage.
  virtual void before_write(const c10::StorageImpl& storage) = 0;
};

/// Thrown on all ranks at the same operator, so that none waits for another.
struct AgreedError : ConfigError {
  using ConfigError::ConfigError;
};

struct StagedParameter {
  std::string name;
  at::Tensor tensor;
  int64_t stage = 0;
  std::vector<int64_t> holders;  ///< stages whose ranks have the values, `stage` among them
};

/// Runs this rank's operators and lets those of other stages give sizes only.
///
/// All ranks run the same program, so all of them know of each operator to which stage it belongs: that of the latest
/// of its arguments. A parameter's stage is given, a result has its operator's, and what depends on neither (inputs,
/// constants, buffers) is everywhere and has none. An argument that another stage made is sent when an operator first
/// uses it: the ranks agree on that as well without a word. The pipeline's word for a storage is *value*; views share
/// it.
class Stages final : public residency::Handler {
 public:
  struct Options {
    int64_t own = -1;            ///< -1: no operator runs, to see what would happen
    Carrier* carrier = nullptr;  ///< null: nothing moves
    at::Device device = at::kCPU;
    std::function<void(size_t parameter)> on_touch;             ///< an operator reads the parameter
    std::function<void(size_t parameter, int64_t to)> on_lack;  ///< stage `to` needs a parameter that it doesn't hold
  };
  Stages(const std::vector<StagedParameter>& parameters, Options options);
  ~Stages();
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;

  /// For the chain's link *place*.
  bool handle(residency::OperatorCall& call, residency::Next next) override;

  /// The stage whose values a result has; -1: the same on all ranks.
  int64_t stage_of(const at::Tensor& tensor) const;
  /// The values of a result, on the rank of stage `to`; undefined on others.
  at::Tensor bring(const at::Tensor& tensor, int64_t to, const std::string& label);
  /// Lets go of copies of values that have ended.
  void prune();

  int64_t operators() const { return operators_; }    ///< that ran here
  int64_t skipped() const { return skipped_; }        ///< that gave sizes only
  int64_t everywhere() const { return everywhere_; }  ///< that ran on all ranks

 private:
  struct Value;

  void run_in(int64_t stage, std::vector<int64_t> holders, residency::OperatorCall& call, residency::Next next);
  Value* find(const at::Tensor& tensor) const;
  void begin_value(const at::Tensor& tensor, int64_t stage, const std::vector<int64_t>& holders);
  at::Tensor here(const at::Tensor& tensor, const Value& value) const;
  at::Tensor cross(const at::Tensor& tensor, Value& value, int64_t to, const std::string& label);
  void move(const at::Tensor& tensor, Value& value, int64_t to, const std::string& label);
  void run_on_sizes(residency::OperatorCall& call, int64_t stage, residency::Next next);

  Options options_;
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Value>> values_;
  size_t prune_at_ = 4096;
  int64_t operators_ = 0, skipped_ = 0, everywhere_ = 0;
};

}  // namespace accelerate::parallel::pipeline
