/// Receipts of InitProcessGroupKwargs.
//
// settings: InitProcessGroupKwargs

#include "state/receipts.hpp"

namespace accelerate::receipts {
namespace {

Deed backend(const ProcessGroupFacts& f) {
  if (f.run.ranks == 1) return nothing("one process has no process group");
  return acted("{} ranks talk through {}", f.run.ranks, f.backend);
}
Deed timeout(const ProcessGroupFacts& f) {
  if (f.run.ranks == 1) return nothing("one process waits for nobody");
  if (!f.given.timeout) return off("by the back end");
  return acted("in force for all waits; none took as long");
}
Deed init_method(const ProcessGroupFacts& f) {
  if (f.run.ranks == 1) return nothing("one process meets nobody");
  if (f.given.init_method.empty()) return off("by MASTER_ADDR and MASTER_PORT");
  return acted("{} ranks met through {}", f.run.ranks, f.given.init_method);
}

constexpr ReceiptRow<ProcessGroupFacts> kProcessGroupRows[] = {
    {"InitProcessGroupKwargs.backend", nullptr, "with several processes",
     asked<&ProcessGroupFacts::given, &InitProcessGroupKwargs::backend>, backend},
    {"InitProcessGroupKwargs.timeout", nullptr, "when a peer does not answer",
     asked<&ProcessGroupFacts::given, &InitProcessGroupKwargs::timeout>, timeout},
    {"InitProcessGroupKwargs.init_method", nullptr, "with several processes",
     asked<&ProcessGroupFacts::given, &InitProcessGroupKwargs::init_method>, init_method},
};

}  // namespace

std::vector<Receipt> of_process_group(const ProcessGroupFacts& facts) { return made(kProcessGroupRows, facts); }

}  // namespace accelerate::receipts
