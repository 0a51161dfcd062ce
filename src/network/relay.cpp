#include "network/relay.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <system_error>
#include <unordered_map>
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
    if (::poll(&ready, 1, 0) == 0) return Now::waits;
    int error = 0;
    socklen_t length = sizeof(error);
    const bool good = ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
    return good ? Now::moved : Now::over;
  }
  Now read(std::string& into) override {
    char bytes[16 << 10];
    const ssize_t got = ::recv(fd_.get(), bytes, sizeof(bytes), 0);
    if (got < 0) return after_error();
    into.append(bytes, static_cast<size_t>(got));
    return got > 0 ? Now::moved : Now::over;
  }
  Now write(std::string& from) override {
    const ssize_t written = ::send(fd_.get(), from.data(), from.size(), MSG_NOSIGNAL);
    if (written < 0) return after_error();
    from.erase(0, static_cast<size_t>(written));
    return Now::moved;
  }
  void finish() override { ::shutdown(fd_.get(), SHUT_WR); }
  int fd() const override { return fd_.get(); }

 private:
  static Now after_error() { return errno == EAGAIN || errno == EINTR ? Now::waits : Now::over; }
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
  /// Has the kernel say under `id` when an end can do more than it could, from now on. @return false: it can't
  bool watch(const Fd& epoll, uint64_t id) {
    for (auto [stream, watched] : {std::pair(near_.get(), &near_watched_), std::pair(far_.get(), &far_watched_)}) {
      if (!stream || std::exchange(*watched, true)) continue;
      epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data = {.u64 = id}};
      if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, stream->fd(), &event) != 0) return false;
    }
    return true;
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
  bool near_watched_ = false, far_watched_ = false;
  bool unfinished_ = false;
};

/// The loop of the thread. The cost of an event does not depend on how many connections there are.
class Loop {
 public:
  Loop(int listening, Fd epoll, Relay::Ends ends)
      : listening_(listening), ends_(std::move(ends)), epoll_(std::move(epoll)) {}

  void run() {
    std::array<epoll_event, 256> events;
    std::vector<uint64_t> ready;
    for (;;) {
      const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), time_to_wait());
      bool knocks = false;
      ready.clear();
      ready.swap(again_);
      for (int i = 0; i < count; ++i) {
        const uint64_t id = events[static_cast<size_t>(i)].data.u64;
        if (id == kListening) knocks = true;
        else ready.push_back(id);
      }
      std::sort(ready.begin(), ready.end());  // either end may have said something
      ready.erase(std::unique(ready.begin(), ready.end()), ready.end());
      for (const uint64_t id : ready) advance(id);
      drop_late();
      if (paused_ && Clock::now() >= pause_until_) listen(true);
      if (knocks && !accept_all()) return;
    }
  }

 private:
  /// The connection may be gone: the kernel goes on speaking of descriptors that a child process has inherited.
  void advance(uint64_t id) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& connection = *found->second;
    const bool was_opened = connection.opened;
    bool lives = false;
    try {
      lives = connection.advance(ends_) && connection.watch(epoll_, id);
    } catch (const std::exception&) {  // memory or descriptors are exhausted; a second try finds more
    }
    if (!was_opened && (connection.opened || !lives)) std::erase(unopened_, id);
    if (!lives) connections_.erase(found);
    else if (connection.goes_on_at_once()) again_.push_back(id);
  }

  void drop(uint64_t id) {
    std::erase(unopened_, id);
    connections_.erase(id);
  }
  void drop_late() {
    const auto now = Clock::now();
    while (!unopened_.empty() && now - connections_.at(unopened_.front())->since > Relay::kTimeToOpen)
      drop(unopened_.front());
  }
  bool someone_waits() const {
    pollfd ready{listening_, POLLIN, 0};
    return ::poll(&ready, 1, 0) > 0;
  }
  /// Makes room: of the address that has most unopened connections the oldest goes, unless every address has one only,
  /// which may become something.
  bool drop_one() {
    std::map<std::string, size_t> counts;
    for (const uint64_t id : unopened_) ++counts[connections_.at(id)->from];
    const auto most = std::max_element(counts.begin(), counts.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    if (most == counts.end()) return false;
    const uint64_t oldest = *std::find_if(unopened_.begin(), unopened_.end(),
                                          [&](uint64_t id) { return connections_.at(id)->from == most->first; });
    if (most->second == 1 && Clock::now() - connections_.at(oldest)->since < Relay::kTimeWhenMany) return false;
    drop(oldest);
    return true;
  }
  int time_to_wait() const {
    if (!again_.empty()) return 0;
    return paused_ || !unopened_.empty() ? static_cast<int>(kPause.count()) : -1;
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
  void listen(bool on) {
    paused_ = !on;
    epoll_event event{.events = on ? EPOLLIN : 0U, .data = {.u64 = kListening}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listening_, &event);
  }
  void pause() {
    pause_until_ = Clock::now() + kPause;
    listen(false);
  }
  /// @return false: the socket was shut down
  bool accept_all() {
    constexpr int kAtOnce = 64;
    for (int i = 0; i < kAtOnce && someone_waits(); ++i) {
      if (unopened_.size() >= Relay::kMostUnopened && !drop_one()) {
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
        const uint64_t id = next_++;
        connections_.emplace(id, std::make_unique<Connection>(ends_.near(std::move(fd)), address_of(peer)));
        unopened_.push_back(id);
        advance(id);
      } catch (const std::exception&) {
        pause();
      }
    }
    return true;
  }

  static constexpr milliseconds kPause{20};
  static constexpr uint64_t kListening = 0;
  const int listening_;
  const Relay::Ends ends_;
  const Fd epoll_;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<uint64_t> unopened_;  // in the order in which they came
  std::vector<uint64_t> again_;     // had more to do when their turn was over
  uint64_t next_ = kListening + 1;
  bool paused_ = false;
  Clock::time_point pause_until_{};
  Fd reserve_ = spare();
  bool said_ = false;
};

}  // namespace

std::unique_ptr<Stream> plain_stream(Fd fd) { return std::make_unique<PlainStream>(std::move(fd)); }

Relay::Relay(int listening, Ends ends) : listening_(listening) {
  Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  if (::fcntl(listening, F_SETFL, ::fcntl(listening, F_GETFL) | O_NONBLOCK) != 0 || !epoll ||
      ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, listening, &event) != 0)
    throw std::system_error(errno, std::generic_category());
  thread_ = std::thread([listening, epoll = std::move(epoll), ends = std::move(ends)]() mutable {
    Loop(listening, std::move(epoll), std::move(ends)).run();
  });
}

Relay::~Relay() {
  ::shutdown(listening_.get(), SHUT_RDWR);
  thread_.join();
}

}  // namespace accelerate
