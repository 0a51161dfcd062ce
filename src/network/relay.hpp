#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "utils/fd.hpp"

namespace accelerate {

/// One end of a connection that a Relay carries: bytes as they are, or through a protocol. Nothing here waits.
class Stream {
 public:
  enum class Now {
    moved,  ///< done
    waits,  ///< until more comes in or can go out
    over    ///< the other end has closed it, or does not speak the protocol
  };
  virtual ~Stream() = default;
  /// Connects and shakes hands; again and again until it is done.
  virtual Now open() = 0;
  /// Appends what has come.
  virtual Now read(std::string& into) = 0;
  /// Takes away from the front what has gone.
  virtual Now write(std::string& from) = 0;
  /// Tells the other end that no more will be written.
  virtual void finish() = 0;
  virtual int fd() const = 0;
};

/// Bytes as they are. The descriptor, which it takes over, may still be connecting.
std::unique_ptr<Stream> plain_stream(Fd fd);

/// Accepts connections on a thread of its own and carries each on to another end, for as long as the object lives. A
/// peer that says nothing, says it slowly or comes in thousands takes neither threads nor memory, nor the others' turn.
class Relay {
 public:
  struct Ends {
    std::function<bool(int)> admit;                   ///< whether an accepted descriptor may stay
    std::function<std::unique_ptr<Stream>(Fd)> near;  ///< of an accepted descriptor
    std::function<std::unique_ptr<Stream>()> far;     ///< once the near end is open; null: can't be had
    std::function<void()> exhausted;  ///< no descriptors are left, and clients are closed: said once; may be null
  };
  static constexpr size_t kMostUnopened = 256;                     ///< connections whose handshake is not done
  static constexpr std::chrono::milliseconds kTimeToOpen{3000};    ///< after which they are closed
  static constexpr std::chrono::milliseconds kTimeWhenMany{1000};  ///< the same while others wait for their turn

  /// @param listening  a listening socket, which it takes over
  /// @throws std::system_error when no descriptor is left
  Relay(int listening, Ends ends);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

 private:
  Fd listening_;
  std::thread thread_;
};

}  // namespace accelerate
