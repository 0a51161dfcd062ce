#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "snapshot/ledger.hpp"

namespace accelerate::snapshot {

/// Files that are written later, as who writes them has put it off.
struct LaterFiles {
  /// What each rank does by itself, in this order.
  std::vector<std::function<void()>> writes = {};
  /// What all ranks do, in one order, each with a text for rank 0; and what rank 0 does with the texts of all ranks, by
  /// rank, when everything else is written.
  struct Together {
    std::function<std::string()> write;
    std::function<void(const std::vector<std::string>& texts)> last;
  };
  std::vector<Together> together = {};
};

/// While it lives on this thread, functions that write files of state hold what they would write and put the writing
/// off: then all that a save says and compares beforehand is the same, and so are the files.
class PutOff {
 public:
  /// @param ledger  keeps what will be written as it is now; null: nothing changes until it is
  explicit PutOff(std::shared_ptr<Ledger> ledger);
  ~PutOff();
  PutOff(const PutOff&) = delete;
  PutOff& operator=(const PutOff&) = delete;

  /// Null: files are written at once.
  static PutOff* here();

  Ledger* ledger() const { return ledger_.get(); }
  /// The tensor for who writes later.
  at::Tensor hold(const at::Tensor& tensor, Ledger::Order order) const {
    return ledger_ ? ledger_->hold(tensor, order) : tensor;
  }
  LaterFiles& files() { return files_; }

 private:
  std::shared_ptr<Ledger> ledger_;
  LaterFiles files_;
};

}  // namespace accelerate::snapshot
