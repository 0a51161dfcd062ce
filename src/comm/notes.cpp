#include "comm/notes.hpp"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <vector>

#include "comm/group_impl.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {

struct Notes::Impl {
  c10::intrusive_ptr<c10d::Store> groups, own;
  std::shared_ptr<Progress> progress;
  int64_t rank;

  /// Connects when it is first used: that takes a millisecond.
  c10d::Store& store() {
    if (!own) own = groups->clone();
    return *own;
  }

  template <class F> auto ask(const char* what, const F& f) {
    if (const auto failure = progress->failure(); !failure.empty())
      raise<CommError>("{} on rank {}: {}", what, rank, failure);
    try {
      return f();
    } catch (const std::exception& error) {
      raise<CommError>("{} on rank {}: the store, which rank 0 serves, does not answer; look at rank 0's output ({})",
                       what, rank, text_of(error));
    }
  }
};

Notes::Notes(const Group& group) : impl_(std::make_unique<Impl>()) {
  impl_->progress = group.impl_->progress;
  impl_->rank = group.impl_->own();
  impl_->groups = group.impl_->store;
}
Notes::~Notes() = default;

void Notes::leave(const std::string& key, const std::string& text) {
  impl_->ask("leaving a note",
             [&] { impl_->store().set("notes/" + key, std::vector<uint8_t>(text.begin(), text.end())); });
}

std::optional<std::string> Notes::find(const std::string& key) {
  return impl_->ask("looking for a note", [&]() -> std::optional<std::string> {
    if (!impl_->store().check({"notes/" + key})) return std::nullopt;
    const auto bytes = impl_->store().get("notes/" + key);
    return std::string(bytes.begin(), bytes.end());
  });
}

}  // namespace accelerate::comm
