#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "run_state/holdings.hpp"

namespace accelerate::formats {
class TorchPickle;
}

namespace accelerate::run_state {

/// Makes tensors whole, stage by stage, as the writer asks for them; the other ranks follow. Memory: the tensors of one
/// stage. Tensors that are whole everywhere need no stream; a stream of nothing never communicates.
class WholeStream {
 public:
  /// A tensor of which each rank brings the shard that belongs to its shard of a parameter.
  struct Wanted {
    const parallel::Engine* engine;
    int64_t part;
    at::Tensor parameter;
    std::string kind;  ///< "" for the parameter itself
    at::Tensor piece;
  };
  using Stage = std::vector<Wanted>;

  struct Options {
    bool everywhere = false;  ///< false: only rank 0 gets whole tensors
    /// Tensors come as copies. Otherwise as views of their gathered part: each must be used before the next one comes.
    bool copies = false;
    bool on_host = true;  ///< where copies lie; else with their parameter
  };

  /// The same stages on all ranks, but for the shards.
  explicit WholeStream(std::vector<Stage> stages) : WholeStream(std::move(stages), Options{}) {}
  WholeStream(std::vector<Stage> stages, const Options& options);

  /// A whole tensor of this stage or, leaving this one behind, of the next that has it.
  at::Tensor get(const at::Tensor& parameter, const std::string& kind = {});
  /// Gathers what is left, so that all ranks come out in step.
  void finish();

 private:
  void advance();

  std::vector<Stage> stages_;
  Options options_;
  size_t next_ = 0;
  std::map<std::pair<const at::TensorImpl*, std::string>, at::Tensor> whole_;
};

WholeStream::Wanted wanted(const parallel::Held& holding, const std::string& kind, const at::Tensor& piece);

/// A stage for each run of neighbours that belong to one part.
std::vector<WholeStream::Stage> part_by_part(std::vector<WholeStream::Wanted> wanted);

/// Runs `write` on ranks that write; it gets whole tensors from the stream, and the others gather in step. Its errors
/// are thrown on all ranks. Collective.
void write_in_step(WholeStream& stream, bool writes, const std::function<void()>& write);

/// The file appears when it is complete. @param user  what writes it, for messages
void write_archive(const std::filesystem::path& file, formats::TorchPickle&& pickle, const char* user = "save_state");

}  // namespace accelerate::run_state
