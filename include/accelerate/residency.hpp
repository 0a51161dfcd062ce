#pragma once

/// Parameters whose bytes may be elsewhere: sharded over ranks, in host memory, in a file. Operators fetch them by
/// themselves; this header is for code that goes around operators, and for those who want to know what moves.

#include <cstdint>
#include <memory>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::residency {

/// Of all models of this process, since its start or the last reset_stats(). A unit is what moves as one, a transformer
/// block for example.
struct Stats {
  int64_t faults = 0;         ///< touches of a unit that nobody had begun to fetch
  int64_t prefetch_hits = 0;  ///< touches of a unit that was on its way
  int64_t evictions = 0;
  int64_t bytes_fetched = 0;        ///< into flat storages, however they came
  int64_t bytes_stored = 0;         ///< written back because an operator changed them
  int64_t resident_bytes = 0;       ///< of units present or on their way, now
  int64_t peak_resident_bytes = 0;  ///< the most so far
  int64_t products_on_codes = 0;    ///< operators on weights in few bits that needed no fetch
  int64_t decodes = 0;              ///< times that such a weight was decoded whole
};
ACCELERATE_API Stats stats();
/// Sets all to zero but resident_bytes; the peak starts there.
ACCELERATE_API void reset_stats();

/// Evict each unit as soon as the operator that touched it ends: slow, and every result must stay the same bit for bit.
/// For tests. Models that are prepared later obey it; also set by ACCELERATE_RESIDENCY_PARANOID=1.
ACCELERATE_API void set_paranoid(bool paranoid);

struct SummonOptions {
  /// Changes within the scope become the parameters' values. false: they are lost.
  bool writeback = true;
  /// Only rank 0 keeps the bytes; the others take part in fetching them and stay as they are. Excludes writeback.
  bool rank0_only = false;
};

/// While it lives, all parameters of the module are present: data_ptr(), torch::save and the like work. With sharded
/// parameters making one is collective; destroying one never communicates.
class ACCELERATE_API Summon {
 public:
  Summon(const ModelRef& model, const SummonOptions& options);
  Summon(Summon&&) noexcept;
  Summon& operator=(Summon&&) noexcept;
  ~Summon();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

[[nodiscard]] ACCELERATE_API Summon summon(const ModelRef& model, const SummonOptions& options = {});

}  // namespace accelerate::residency
