#pragma once

#include <memory>
#include <optional>
#include <string>

namespace accelerate::comm {

class Group;

/// Texts that ranks leave for each other beside collectives, which are the training thread's: through the job's store,
/// by a connection of their own, which the first of them makes. Each is written once, under a key that nobody uses
/// again. One thread at a time.
class Notes {
 public:
  explicit Notes(const Group& group);
  ~Notes();

  /// @throws CommError when a rank has failed, or the store is gone
  void leave(const std::string& key, const std::string& text);
  /// Nothing: it is not there yet. @throws CommError as above
  std::optional<std::string> find(const std::string& key);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::comm
