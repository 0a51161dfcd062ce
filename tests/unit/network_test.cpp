// Guards before servers that believe whoever connects: strangers, neighbours, thousands of them.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "network/guarded_port.hpp"
#include "network/local_address.hpp"
#include "network/peer_user.hpp"
#include "network/relay.hpp"
#include "network/wait_for_server.hpp"

namespace {

using namespace accelerate;

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
constexpr milliseconds kLong{60000};  // nothing takes a second on an idle machine

sockaddr_in at(const char* address, int64_t port) {
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(static_cast<uint16_t>(port));
  ::inet_pton(AF_INET, address, &place.sin_addr);
  return place;
}

Fd listening(int64_t& port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in own = at("127.0.0.1", 0);
  socklen_t length = sizeof(own);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&own), length), 0);
  EXPECT_EQ(::listen(fd.get(), 4096), 0);
  ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length);
  port = ntohs(own.sin_port);
  return fd;
}

/// A connection, or none when it can't be had in time.
Fd connected(int64_t port, const char* from = "127.0.0.1", const char* to = "127.0.0.1",
             milliseconds patience = kLong) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_in own = at(from, 0), server = at(to, port);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)) != 0) return {};
  ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&server), sizeof(server));
  pollfd ready{fd.get(), POLLOUT, 0};
  int error = 0;
  socklen_t length = sizeof(error);
  if (::poll(&ready, 1, static_cast<int>(patience.count())) != 1 ||
      ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0)
    return {};
  ::fcntl(fd.get(), F_SETFL, 0);
  const timeval limit{60, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  return fd;
}

/// Sends and waits for as many bytes. @return what came; shorter when the connection has ended
std::string asked(const Fd& fd, const std::string& question) {
  if (::send(fd.get(), question.data(), question.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(question.size()))
    return {};
  std::string answer(question.size(), '\0');
  const ssize_t got = ::recv(fd.get(), answer.data(), answer.size(), MSG_WAITALL);
  return answer.substr(0, static_cast<size_t>(std::max<ssize_t>(got, 0)));
}

/// Sends back what comes, in capitals.
class Server {
 public:
  explicit Server(int fd) : fd_(fd), thread_([this] { run(); }) {}
  ~Server() {
    ::shutdown(fd_.get(), SHUT_RDWR);
    thread_.join();
    for (auto& one : ones_) one.join();
  }
  std::atomic<int> accepted = 0;
  std::atomic<int> from_elsewhere = 0;  ///< and not from 127.0.0.1

 private:
  void run() {
    for (;;) {
      sockaddr_in peer{};
      socklen_t length = sizeof(peer);
      const int fd = ::accept4(fd_.get(), reinterpret_cast<sockaddr*>(&peer), &length, SOCK_CLOEXEC);
      if (fd < 0) return;
      ++accepted;
      from_elsewhere += peer.sin_addr.s_addr != htonl(INADDR_LOOPBACK);
      ones_.emplace_back([connection = Fd(fd)] {
        char bytes[64 << 10];
        for (ssize_t got; (got = ::recv(connection.get(), bytes, sizeof(bytes), 0)) > 0;) {
          for (ssize_t i = 0; i < got; ++i) bytes[i] = static_cast<char>(::toupper(bytes[i]));
          for (ssize_t done = 0, sent = 0; done < got; done += sent)
            if ((sent = ::send(connection.get(), bytes + done, static_cast<size_t>(got - done), MSG_NOSIGNAL)) <= 0)
              return;
        }
      });
    }
  }
  Fd fd_;
  std::vector<std::thread> ones_;
  std::thread thread_;
};

/// Opens when the first byte is the right one: a handshake that strangers don't know. `ended` gets that byte, or a
/// blank of who says nothing, at its end.
class Knocking : public Stream {
 public:
  Knocking(Fd fd, std::string& ended) : plain_(plain_stream(std::move(fd))), ended_(ended) {}
  ~Knocking() override { ended_ += said_; }
  Now open() override {
    std::string byte;
    char first = 0;
    const ssize_t got = ::recv(plain_->fd(), &first, 1, MSG_DONTWAIT);
    if (got < 0) return Now::waits;
    if (got == 1) said_ = first;
    return got == 1 && first == '!' ? Now::moved : Now::over;
  }
  Now read(std::string& into) override { return plain_->read(into); }
  Now write(std::string& from) override { return plain_->write(from); }
  void finish() override { plain_->finish(); }
  int fd() const override { return plain_->fd(); }

 private:
  const std::unique_ptr<Stream> plain_;
  std::string& ended_;
  char said_ = ' ';
};

/// A server behind a door at which one knocks.
class Knocked : public testing::Test {
 protected:
  Knocked() {
    Fd inner = listening(inner_port);
    server = std::make_unique<Server>(inner.release());
    relay = std::make_unique<Relay>(
        listening(port).release(),
        Relay::Ends{.admit = nullptr,
                    .near = [this](Fd fd) { return std::make_unique<Knocking>(std::move(fd), ended); },
                    .far = [this] { return plain_stream(connected(inner_port)); },
                    .exhausted = [this] { exhausted = true; }});
  }
  /// A client that knows how gets an answer.
  void expect_answer() const {
    const Fd client = connected(port);
    EXPECT_TRUE(client);
    EXPECT_EQ(::send(client.get(), "!", 1, MSG_NOSIGNAL), 1);
    EXPECT_EQ(asked(client, "who is there"), "WHO IS THERE");
  }
  std::string ended;  ///< written by the relay's thread
  int64_t inner_port = 0, port = 0;
  std::unique_ptr<Server> server;
  std::unique_ptr<Relay> relay;
  std::atomic<bool> exhausted = false;
};

size_t threads() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) count += entry.exists();
  return count;
}

TEST_F(Knocked, TenThousandSilentConnectionsDoNotKeepTheOthersOut) {
  expect_answer();
  const size_t before = threads();
  std::deque<Fd> silent;
  for (int i = 0; i < 10000; ++i) {
    silent.push_back(connected(port, "127.0.0.7"));
    ASSERT_TRUE(silent.back()) << i;
    if (silent.size() > 500) silent.pop_front();
    if (i % 1000 == 999) expect_answer();
  }
  EXPECT_LE(threads(), before + 10);  // the server's, one for each that got in
}

// Each from an address of its own, so that none is more suspicious than the others: they have a second each.
TEST_F(Knocked, SilentConnectionsFromManyAddressesGiveWay) {
  std::vector<Fd> silent;
  for (int i = 0; i < 400; ++i) {
    const std::string from = "127.1." + std::to_string(i / 200) + "." + std::to_string(1 + i % 200);
    silent.push_back(connected(port, from.c_str()));
    ASSERT_TRUE(silent.back());
  }
  expect_answer();
}

TEST_F(Knocked, SilentOnesAreClosedInTimeAndGarbageAtOnce) {
  const Fd silent = connected(port), wrong = connected(port);
  char byte = 0;
  EXPECT_EQ(::send(wrong.get(), "?", 1, MSG_NOSIGNAL), 1);
  EXPECT_EQ(::recv(wrong.get(), &byte, 1, 0), 0);
  EXPECT_EQ(::recv(silent.get(), &byte, 1, 0), 0);
  EXPECT_EQ(server->accepted, 0);
  relay.reset();
  EXPECT_EQ(ended, "? ") << "in this order";
}

TEST_F(Knocked, WithoutDescriptorsClientsAreClosedAndNotLeftWaiting) {
  const Fd opened = connected(port);  // whose end would give descriptors back
  ASSERT_EQ(::send(opened.get(), "!", 1, MSG_NOSIGNAL), 1);
  ASSERT_EQ(asked(opened, "hello"), "HELLO");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{.rlim_cur = 256, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<Fd> all;
  for (int fd = 0; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) all.emplace_back(fd);
  ASSERT_EQ(errno, EMFILE);
  all.pop_back();  // for the client, which is in this process, too
  const Fd client = connected(port);
  char byte = 0;
  EXPECT_EQ(::recv(client.get(), &byte, 1, 0), 0) << "closed, before this end stopped waiting";
  EXPECT_TRUE(exhausted);
  all.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(asked(opened, "still here"), "STILL HERE");
  expect_answer();
}

TEST_F(Knocked, MuchGoesBothWaysAtOnceAndAnEndOfOneWayIsNoneOfTheOther) {
  const Fd client = connected(port);
  EXPECT_EQ(::send(client.get(), "!", 1, MSG_NOSIGNAL), 1);
  const std::string text(20 << 20, 'x');
  std::thread sender([&] {
    for (size_t done = 0; done < text.size();) {
      const ssize_t sent = ::send(client.get(), text.data() + done, text.size() - done, MSG_NOSIGNAL);
      if (sent <= 0) break;
      done += static_cast<size_t>(sent);
    }
    ::shutdown(client.get(), SHUT_WR);
  });
  std::string back(text.size(), '\0');
  size_t got = 0;
  for (ssize_t n; got < back.size() && (n = ::recv(client.get(), back.data() + got, back.size() - got, 0)) > 0;)
    got += static_cast<size_t>(n);
  sender.join();
  char byte = 0;
  EXPECT_EQ(::recv(client.get(), &byte, 1, 0), 0);  // the server has heard of the end
  back.resize(got);
  EXPECT_TRUE(back == std::string(text.size(), 'X')) << got;
}

TEST(PeerUser, IsKnownWhileTheConnectionStands) {
  int64_t port = 0;
  const Fd server = listening(port);
  Fd client = connected(port);
  const Fd accepted(::accept4(server.get(), nullptr, nullptr, SOCK_CLOEXEC));
  EXPECT_EQ(user_of_peer(accepted.get()), ::getuid());
  EXPECT_EQ(user_of_peer_by_table(accepted.get()), ::getuid());
  EXPECT_TRUE(admit_own(accepted.get()));
  client.reset();  // a socket that is going away belongs to root, says the kernel
  EXPECT_EQ(user_of_peer(accepted.get()), std::nullopt);
  EXPECT_EQ(user_of_peer_by_table(accepted.get()), std::nullopt);
  EXPECT_FALSE(admit_own(accepted.get()));
}

/// Both ends of a connection of version 6 to `address`, or of version 4 where that is one, and the client's is of 6.
std::pair<Fd, Fd> connection_of_version_6(const char* address) {
  const auto socket = [] { return Fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)); };
  const Fd server = socket();
  Fd client = socket();
  sockaddr_in6 place{};
  place.sin6_family = AF_INET6;
  ::inet_pton(AF_INET6, address, &place.sin6_addr);
  auto* where = reinterpret_cast<sockaddr*>(&place);
  socklen_t length = sizeof(place);
  if (::bind(server.get(), where, length) != 0 || ::listen(server.get(), 1) != 0 ||
      ::getsockname(server.get(), where, &length) != 0 || ::connect(client.get(), where, length) != 0)
    return {};
  return {std::move(client), Fd(::accept4(server.get(), nullptr, nullptr, SOCK_CLOEXEC))};
}

TEST(PeerUser, IsKnownWithAddressesOfVersion6) {
  for (const char* address : {"::ffff:127.0.0.3", "::1"}) {
    const auto [client, accepted] = connection_of_version_6(address);
    if (!accepted && address[2] == '1') continue;  // the machine has none of them
    ASSERT_TRUE(accepted) << address;
    EXPECT_EQ(user_of_peer(accepted.get()), ::getuid()) << address;
    EXPECT_EQ(user_of_peer_by_table(accepted.get()), ::getuid()) << address;
    EXPECT_TRUE(is_on_this_machine(accepted.get())) << address;
    EXPECT_TRUE(admit_own_or_remote(accepted.get())) << address;
  }
}

TEST(LocalAddress, IsTheOneFromWhichThisMachineSends) {
  EXPECT_EQ(local_address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(local_address_towards("localhost").value_or("").empty(), false);
  EXPECT_EQ(local_address_towards("no-such-machine.invalid"), std::nullopt);
}

TEST(WaitForServer, EndsWhenSomebodyListensAndSaysWhatStandsInTheWay) {
  int64_t port = 0;
  listening(port);  // and no longer
  const auto here = static_cast<uint16_t>(port);
  std::string why;
  EXPECT_FALSE(wait_for_server("127.0.0.1", here, Clock::now() + milliseconds(200), why));
  EXPECT_EQ(why, "Connection refused");
  EXPECT_FALSE(wait_for_server("no-such-machine.invalid", here, Clock::now() + milliseconds(20), why));
  EXPECT_THAT(why, testing::HasSubstr("Name or service not known"));

  Fd late(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  auto found =
      std::async(std::launch::async, [&] { return wait_for_server("localhost", here, Clock::now() + kLong, why); });
  EXPECT_EQ(found.wait_for(milliseconds(200)), std::future_status::timeout);
  const sockaddr_in own = at("127.0.0.1", port);
  ASSERT_EQ(::bind(late.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
  ASSERT_EQ(::listen(late.get(), 1), 0);
  EXPECT_TRUE(found.get());
}

/// Past the guard, from any source port but the guard's. @return whether anybody answered
bool reaches_server(int64_t port) {
  const Fd fd = connected(port, "127.0.0.1", "127.0.0.2", milliseconds(1500));  // a second try is in it
  if (!fd || ::send(fd.get(), "let me in", 9, MSG_NOSIGNAL) != 9) return false;
  pollfd ready{fd.get(), POLLIN, 0};
  char byte = 0;
  return ::poll(&ready, 1, 1500) == 1 && ::recv(fd.get(), &byte, 1, 0) > 0;
}

GuardedPort open_guarded() {
  std::string why;
  auto port = GuardedPort::open(0, why);
  EXPECT_TRUE(port) << why;
  return std::move(*port);
}

TEST(GuardedPort, LetsThisUserThroughAndNobodyReachesTheServerOtherwise) {
  GuardedPort guarded = open_guarded();
  Server server(guarded.listening());
  std::vector<Fd> clients;
  for (int i = 0; i < 150; ++i) {
    clients.push_back(connected(guarded.port()));
    ASSERT_EQ(asked(clients.back(), "here"), "HERE") << i;
    // Every machine knows that one's name; the name of others c10d's store would ask a name server for.
    if (i < 60) ASSERT_EQ(server.from_elsewhere, 0) << i;
  }
  EXPECT_EQ(server.accepted, 150);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(reaches_server(guarded.port())) << i;
  EXPECT_EQ(server.accepted, 150);
  Fd inside = guarded.connect();
  pollfd ready{inside.get(), POLLOUT, 0};
  ASSERT_EQ(::poll(&ready, 1, static_cast<int>(kLong.count())), 1);
  ::fcntl(inside.get(), F_SETFL, 0);
  EXPECT_EQ(asked(inside, "past it"), "PAST IT");
}

/// The guarded server's owner: root may give kernels orders that others may not.
class GuardedPortOf : public testing::TestWithParam<uid_t> {};

TEST_P(GuardedPortOf, OtherUsersGetNoWordToTheServer) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can be somebody else";
  constexpr uid_t kStranger = 65534;
  // A process that was root once must not be able to go back.
  const auto becomes = [](uid_t user) {
    return ::setresgid(user, user, user) == 0 && ::setresuid(user, user, user) == 0;
  };
  testing::internal::CaptureStderr();
  const pid_t owner = ::fork();
  if (owner == 0) {
    // The stranger first, while this process may still make one: it waits for its turn.
    int turn[2];
    if (::pipe(turn) != 0) ::_exit(2);
    const pid_t stranger = ::fork();
    if (stranger == 0) {
      int64_t port = 0;
      if (!becomes(kStranger) || ::read(turn[0], &port, sizeof(port)) != sizeof(port)) ::_exit(2);
      char byte = 0;
      const Fd fd = connected(port);
      ::send(fd.get(), "let me in", 9, MSG_NOSIGNAL);
      const bool closed = ::recv(fd.get(), &byte, 1, 0) <= 0;
      bool reached = false;
      for (int i = 0; i < 3; ++i) reached |= reaches_server(port);
      ::_exit(closed && !reached ? 0 : 1);
    }
    if (!becomes(GetParam())) ::_exit(3);
    GuardedPort guarded = open_guarded();
    Server server(guarded.listening());
    const int64_t port = guarded.port();
    int status = 0;
    if (::write(turn[1], &port, sizeof(port)) != sizeof(port) || ::waitpid(stranger, &status, 0) != stranger)
      ::_exit(4);
    if (status != 0) ::_exit(5);
    if (server.accepted != 0) ::_exit(6);
    ::_exit(asked(connected(port), "mine") == "MINE" ? 0 : 7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(owner, &status, 0), owner);
  EXPECT_EQ(WEXITSTATUS(status), 0) << status;
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "a process of user 65534 tried to connect to the store of this job, which is user " +
                std::to_string(GetParam()) + "'s, and was refused\n");
}

INSTANTIATE_TEST_SUITE_P(RootAndOthers, GuardedPortOf, testing::Values(0, 54321),
                         [](const auto& user) { return user.param == 0 ? "root" : "user"; });

TEST(GuardedPort, ABusyPortIsSaidWithTheReason) {
  int64_t port = 0;
  const Fd server = listening(port);
  std::string why;
  EXPECT_FALSE(GuardedPort::open(port, why));
  EXPECT_THAT(why, testing::HasSubstr("in use"));
}

}  // namespace
