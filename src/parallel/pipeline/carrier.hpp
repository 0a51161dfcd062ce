#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "comm/group.hpp"
#include "parallel/pipeline/stages.hpp"

namespace accelerate::parallel::pipeline {

/// Sends tensors of a call from rank to rank. A few numbers and the operator's name go before each: by these ranks
/// notice that they don't run the same program.
class GroupCarrier final : public Carrier {
 public:
  explicit GroupCarrier(std::shared_ptr<comm::Group> group);
  ~GroupCarrier() override;

  void send(const at::Tensor& tensor, int64_t to, const std::string& label) override;
  at::Tensor receive(const at::Tensor& like, int64_t from, const std::string& label) override;
  void skip() override { ++number_; }
  void before_write(const c10::StorageImpl& storage) override;

  void begin_call();
  /// Waits for what was sent so long ago that the receiver must have come to it, so that only a few parts are in
  /// memory.
  void end_part();
  /// Waits for all that was sent, and compares with lower ranks how much has been sent altogether: tensors go to higher
  /// ranks only.
  void end_call();
  /// Waits for all that was sent. Without it, what the receiver hasn't asked for yet would be lost.
  void wait();

  int64_t sent = 0, received = 0, bytes_sent = 0, bytes_received = 0;  ///< of this call

 private:
  struct Sent {
    const c10::StorageImpl* storage;  ///< null for the announcement
    int64_t part;
    std::shared_ptr<comm::Group::Transfer> transfer;
  };
  struct Announcement;
  void announce(const Announcement& announcement, int64_t to);
  Announcement expect(int64_t from);
  [[noreturn]] void differ(const Announcement& mine, const Announcement& theirs, int64_t from);
  void wait_for(Sent& sent);

  std::shared_ptr<comm::Group> group_;
  std::deque<Sent> under_way_;
  int64_t call_ = 0, number_ = 0, part_ = 0;
};

}  // namespace accelerate::parallel::pipeline
