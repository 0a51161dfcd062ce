#include "utils/network/relay.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <utility>
#include <vector>

namespace accelerate {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Now = Stream::Now;

class PlainStream : public Stream {
 public:
  explicit PlainStream(Fd fd) : fd_(std::move(fd)) {
    const int on = 1;
    ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
    ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // small questions, small answers
  }
  Now open() override {
    pollfd ready{fd_.get(), POLLOUT, 0};
    if (::poll(&ready, 1, 0) == 0) return waits_for(POLLOUT);
    int error = 0;
    socklen_t length = sizeof(error);
    const bool good = ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
    return good ? Now::moved : Now::over;
  }
  Now read(std::string& into) override {
    char bytes[16 << 10];
    const ssize_t got = ::recv(fd_.get(), bytes, sizeof(bytes), 0);
    if (got < 0) return may_come(POLLIN);
    into.append(bytes, static_cast<size_t>(got));
    return got > 0 ? Now::moved : Now::over;
  }
  Now write(std::string& from) override {
    const ssize_t written = ::send(fd_.get(), from.data(), from.size(), MSG_NOSIGNAL);
    if (written < 0) return may_come(POLLOUT);
    from.erase(0, static_cast<size_t>(written));
    return Now::moved;
  }
  void finish() override { ::shutdown(fd_.get(), SHUT_WR); }
  int fd() const override { return fd_.get(); }

 private:
  Now waits_for(short events) {
    wanted = static_cast<short>(wanted | events);
    return Now::waits;
  }
  Now may_come(short events) { return errno == EAGAIN || errno == EINTR ? waits_for(events) : Now::over; }
  Fd fd_;
};

/// An address in bytes, to tell strangers apart.
std::string address_of(const sockaddr_storage& peer) {
  const auto bytes = [](const auto& address) {
    return std::string(reinterpret_cast<const char*>(&address), sizeof(address));
  };
  return peer.ss_family == AF_INET6 ? bytes(reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr)
                                    : bytes(reinterpret_cast<const sockaddr_in&>(peer).sin_addr);
}

class Connection {
 public:
  Connection(std::unique_ptr<Stream> near, std::string from)
      : since(Clock::now()), from(std::move(from)), near_(std::move(near)) {}

  /// Does what can be done without waiting. @return false: it has ended
  bool advance(const Relay::Ends& ends) {
    near_->wanted = 0;
    if (far_) far_->wanted = 0;
    unfinished_ = false;
    if (!opened) {
      if (!far_) {
        if (const Now now = near_->open(); now != Now::moved) return now == Now::waits;
        far_ = ends.far();
        if (!far_) return false;
      }
      if (const Now now = far_->open(); now != Now::moved) return now == Now::waits;
      opened = true;
    }
    constexpr int kTurns = 16;  // then the others have theirs
    bool moved = true;
    for (int turn = 0; moved; ++turn) {
      if (turn == kTurns) return unfinished_ = true;
      moved = false;
      if (!carry(*near_, there_, *far_, moved) || !carry(*far_, back_, *near_, moved)) return false;
    }
    return !there_.finished || !back_.finished;
  }
  void watch(std::vector<pollfd>& watched) const {
    for (const Stream* stream : {near_.get(), far_.get()}) {
      const bool watches = stream && stream->wanted;  // an end that has closed would wake poll() for nothing
      watched.push_back({watches ? stream->fd() : -1, watches ? stream->wanted : short{0}, 0});
    }
  }
  bool goes_on_at_once() const { return unfinished_; }

  const Clock::time_point since;
  const std::string from;
  bool opened = false;

 private:
  struct Way {
    std::string bytes;
    bool over = false;      // nothing more comes in
    bool finished = false;  // and what came has gone, and its end been passed on
  };
  /// @return false: there is nobody any more to whom to carry
  static bool carry(Stream& from, Way& way, Stream& to, bool& moved) {
    if (way.bytes.empty() && !way.over) {
      const Now now = from.read(way.bytes);
      moved |= now == Now::moved;
      way.over = now == Now::over;
    }
    if (!way.bytes.empty()) {
      const Now now = to.write(way.bytes);
      if (now == Now::over) return false;
      moved |= now == Now::moved;
    }
    if (way.over && way.bytes.empty() && !std::exchange(way.finished, true)) to.finish();
    return true;
  }

  const std::unique_ptr<Stream> near_;
  std::unique_ptr<Stream> far_;
  Way there_, back_;
  bool unfinished_ = false;
};

/// What the thread does.
class Loop {
 public:
  Loop(int listening, Relay::Ends ends) : listening_(listening), ends_(std::move(ends)) {
    ::fcntl(listening, F_SETFL, ::fcntl(listening, F_GETFL) | O_NONBLOCK);
  }

  void run() {
    std::vector<pollfd> watched;
    for (;;) {
      watched.assign(1, {Clock::now() < pause_until_ ? -1 : listening_, POLLIN, 0});
      for (const auto& connection : connections_) connection->watch(watched);
      ::poll(watched.data(), watched.size(), static_cast<int>(time_to_wait().count()));
      const auto now = Clock::now();
      size_t kept = 0;
      for (size_t i = 0; i < connections_.size(); ++i) {
        auto& connection = connections_[i];
        const bool ready = watched[1 + 2 * i].revents || watched[2 + 2 * i].revents || connection->goes_on_at_once();
        if ((ready && !advance(*connection)) || is_late(*connection, now)) continue;
        if (kept != i) connections_[kept] = std::move(connection);
        ++kept;
      }
      connections_.resize(kept);
      if (watched[0].revents && !accept_all()) return;
    }
  }

 private:
  static bool is_late(const Connection& connection, Clock::time_point now) {
    return !connection.opened && now - connection.since > Relay::kTimeToOpen;
  }

  bool advance(Connection& connection) {
    try {
      return connection.advance(ends_);
    } catch (const std::exception&) {
      return false;  // memory or descriptors are exhausted; who comes back finds more
    }
  }

  size_t unopened() const {
    return static_cast<size_t>(
        std::count_if(connections_.begin(), connections_.end(), [](const auto& one) { return !one->opened; }));
  }
  bool someone_waits() const {
    pollfd ready{listening_, POLLIN, 0};
    return ::poll(&ready, 1, 0) > 0;
  }
  /// Makes room: of the address that has most unopened connections the oldest goes, unless every address has one only,
  /// which may become something.
  bool drop_one() {
    std::map<std::string, size_t> counts;
    for (const auto& one : connections_)
      if (!one->opened) ++counts[one->from];
    const auto most = std::max_element(counts.begin(), counts.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    if (most == counts.end()) return false;
    const auto oldest = std::find_if(connections_.begin(), connections_.end(),
                                     [&](const auto& one) { return !one->opened && one->from == most->first; });
    if (most->second == 1 && Clock::now() - (*oldest)->since < Relay::kTimeWhenMany) return false;
    connections_.erase(oldest);
    return true;
  }
  milliseconds time_to_wait() const {
    milliseconds wait{-1};
    if (Clock::now() < pause_until_) wait = kPause;
    for (const auto& one : connections_) {
      if (one->goes_on_at_once()) return milliseconds(0);
      if (!one->opened) wait = kPause;
    }
    return wait;
  }

  /// A client that nobody accepts would wait for ever: it gets the descriptor that is kept for this, and is closed.
  void refuse_one() {
    if (!drop_one()) {
      if (ends_.exhausted && !std::exchange(said_, true)) ends_.exhausted();
      reserve_.reset();
      Fd(::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC)).reset();
      reserve_ = spare();
    }
    pause();
  }
  static Fd spare() { return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }
  void pause() { pause_until_ = Clock::now() + kPause; }
  /// @return false: the socket was shut down
  bool accept_all() {
    constexpr int kAtOnce = 64;
    for (int i = 0; i < kAtOnce && someone_waits(); ++i) {
      if (unopened() >= Relay::kMostUnopened && !drop_one()) {
        pause();
        break;
      }
      sockaddr_storage peer{};
      socklen_t length = sizeof(peer);
      Fd fd(::accept4(listening_, reinterpret_cast<sockaddr*>(&peer), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) {
        if (errno == EINVAL || errno == EBADF) return false;
        if (errno == EAGAIN) return true;
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) refuse_one();
        continue;  // or the peer has gone again
      }
      if (ends_.admit && !ends_.admit(fd.get())) continue;
      try {
        auto connection = std::make_unique<Connection>(ends_.near(std::move(fd)), address_of(peer));
        if (advance(*connection)) connections_.push_back(std::move(connection));
      } catch (const std::exception&) {
        pause();
      }
    }
    return true;
  }

  static constexpr milliseconds kPause{20};
  const int listening_;
  const Relay::Ends ends_;
  std::vector<std::unique_ptr<Connection>> connections_;  // in the order in which they came
  Clock::time_point pause_until_{};
  Fd reserve_ = spare();
  bool said_ = false;
};

}  // namespace

std::unique_ptr<Stream> plain_stream(Fd fd) { return std::make_unique<PlainStream>(std::move(fd)); }

Relay::Relay(int listening, Ends ends) : listening_(listening) {
  thread_ = std::thread([listening, ends = std::move(ends)] { Loop(listening, ends).run(); });
}

Relay::~Relay() {
  ::shutdown(listening_.get(), SHUT_RDWR);
  thread_.join();
}

}  // namespace accelerate
