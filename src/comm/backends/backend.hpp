#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace accelerate::comm {

struct BackendOptions {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::string master_addr;
  std::chrono::milliseconds timeout{0};
  std::vector<int> ranks;  ///< of a group within the job: their numbers in the job. Empty: all
};

/// A back end of c10d: one way to move bytes. A back end that this build lacks is the file no_<name>.cpp, with
/// is_available() false.
struct BackendFactory {
  const char* name;
  bool available;
  /// Blocks until all ranks have called it.
  c10::intrusive_ptr<c10d::Backend> (*create)(const c10::intrusive_ptr<c10d::Store>& store,
                                              const BackendOptions& options);
  /// Whether it has thrown this because bytes did not arrive. Null when there is none.
  bool (*has_thrown)(const std::exception& error);
  /// The steps to get it.
  const char* how_to_build;
  /// Whether nothing is under way any more, waiting for that `limit` at most: its destructor would wait on for what is.
  /// Null: that does not wait.
  bool (*settles)(c10d::Backend& backend, std::chrono::milliseconds limit) = nullptr;
};

/// Within its scope collectives that this thread starts move the thing of this number, beside having their sizes: gloo
/// takes no message for another's then.
class AboutToMove {
 public:
  explicit AboutToMove(uint64_t what) : before_(std::exchange(what_, what)) {}
  ~AboutToMove() { what_ = before_; }
  AboutToMove(const AboutToMove&) = delete;
  AboutToMove& operator=(const AboutToMove&) = delete;
  static uint64_t now() { return what_; }

 private:
  static inline thread_local uint64_t what_ = 0;
  uint64_t before_;
};

extern const BackendFactory kGloo;
extern const BackendFactory kNccl;
extern const BackendFactory kMpi;

/// By name. @throws ConfigError for an unknown name, NotBuiltError for one that this build lacks.
const BackendFactory& find_backend(const std::string& name);

/// Whether one of the back ends has thrown this.
bool is_transport_error(const std::exception& error);

}  // namespace accelerate::comm
