// Jobs on several machines, which are several launchers on this one, and what becomes of them when parts of them die.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "program.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLong{90000};  // nothing here takes long, but the tests of other modules run beside these

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(line);
  std::sort(result.begin(), result.end());
  return result;
}

std::string content(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<pid_t> children_of(pid_t pid, const std::string& name = "") {
  std::vector<pid_t> result;
  std::ifstream children("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
  for (pid_t child; children >> child;)
    if (name.empty() || content("/proc/" + std::to_string(child) + "/comm") == name + "\n") result.push_back(child);
  return result;
}

class Machines : public testing::Test {
 protected:
  Machines()
      : folder(support::scratch_dir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name()),
        port(std::to_string(support::free_port())) {
    fs::remove_all(folder);
    fs::create_directories(folder);
  }

  /// A launcher that takes part as machine `rank` (or, with c10d, as 127.0.0.<rank + 1>). Short times, so that losses
  /// are seen soon.
  std::unique_ptr<Program> machine(int rank, const std::string& script, std::vector<std::string> more = {},
                                   const std::string& conf = "") const {
    const bool c10d = std::find(more.begin(), more.end(), "c10d") != more.end();
    std::vector<std::string> words{
        accelerate_path(),
        "launch",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        port,
        "--rdzv_conf",
        "local_addr=127.0.0." + std::to_string(rank + 1) +
            ",keep_alive_interval=0.5,keep_alive_max_attempt=8,join_timeout=60,close_timeout=8" +
            (c10d ? ",last_call_timeout=1" : "") + conf};
    if (!c10d) words.insert(words.end(), {"--machine_rank", std::to_string(rank)});
    words.insert(words.end(), more.begin(), more.end());
    words.insert(words.end(), {"/bin/sh", "-c", script});
    return std::make_unique<Program>(words);
  }
  std::string file(const std::string& name) const { return folder / name; }
  /// Writes the process numbers of the rank and of a child of it that is hard to get rid of.
  std::string with_grandchild() const {
    return "(trap '' INT TERM HUP; exec sleep 120) & echo $! >> " + file("pids") + "; echo $$ >> " + file("pids") +
           "; wait; wait; wait";
  }
  /// Waits until `count` lines are in the file.
  bool lines_in(const std::string& name, size_t count) const {
    for (const auto end = Clock::now() + kLong; Clock::now() < end; std::this_thread::sleep_for(milliseconds(20)))
      if (sorted_lines(content(file(name))).size() >= count) return true;
    return false;
  }

  const fs::path folder;
  const std::string port;
};

const std::vector<std::string> kTwo{"--num_machines", "2", "--num_processes", "4"};
const std::vector<std::string> kElastic{"--num_machines", "1:2", "--num_processes", "4", "--rdzv_backend", "c10d"};

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// ---------------------------------------------------------------- rounds

TEST_F(Machines, StaticRanksFindTorchrunsVariables) {
  const std::string script =
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_NAME $ROLE_RANK "
      "$ROLE_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT "
      "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_USE_AGENT_STORE; echo $TORCHELASTIC_RUN_ID "
      ">> " +
      file("ids");
  auto b = machine(1, script, kTwo + std::vector<std::string>{"-q", "--role", "guest"});
  auto a = machine(0, script, kTwo + std::vector<std::string>{"-q", "--role", "host", "--max_restarts", "3"});
  const auto first = a->wait(kLong), second = b->wait(kLong);
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(sorted_lines(first.out), ElementsAre("0 0 4 2 0 2 host 0 2 127.0.0.1:" + port + " 0 3 True",
                                                   "1 1 4 2 0 2 host 1 2 127.0.0.1:" + port + " 0 3 True"));
  EXPECT_THAT(sorted_lines(second.out), ElementsAre("2 0 4 2 1 2 guest 0 2 127.0.0.1:" + port + " 0 0 True",
                                                    "3 1 4 2 1 2 guest 1 2 127.0.0.1:" + port + " 0 0 True"));
  const auto ids = sorted_lines(content(file("ids")));
  EXPECT_EQ(ids.size(), 4u);
  EXPECT_EQ(ids.front(), ids.back());
}

TEST_F(Machines, ElasticJobGrowsWithALateMachine) {
  const std::string script = "echo $RANK/$WORLD_SIZE $GROUP_RANK $TORCHELASTIC_RESTART_COUNT; echo x >> " +
                             file("started") + "; [ $WORLD_SIZE = 4 ] || sleep 100";
  auto a = machine(0, script, kElastic);
  ASSERT_TRUE(lines_in("started", 2));  // alone after the last call
  auto b = machine(1, script, kElastic);
  const auto first = a->wait(kLong), second = b->wait(kLong);
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(sorted_lines(first.out),
              ElementsAre("0/2 0 0", "0/4 0 0", "1/2 0 0", "1/4 0 0"));  // growing is no failure: no restart is counted
  EXPECT_THAT(sorted_lines(second.out), ElementsAre("2/4 1 0", "3/4 1 0"));
  EXPECT_THAT(first.err, HasSubstr("(127.0.0.2) has joined"));
}

TEST_F(Machines, LogFoldersHaveAnAttemptForEachStart) {
  const std::string script =
      "echo out $RANK; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || { [ $RANK = 3 ] && exit 1; sleep 100; }";
  const auto options = kTwo + std::vector<std::string>{"-q", "--max_restarts", "1", "--tee", "1"};
  auto a = machine(0, script, options + std::vector<std::string>{"--log_dir", file("a")}),
       b = machine(1, script, options + std::vector<std::string>{"--log_dir", file("b")});
  EXPECT_EQ(a->wait(kLong).exit_code, 0);
  EXPECT_EQ(b->wait(kLong).exit_code, 0);
  const fs::path run = fs::directory_iterator(file("b"))->path();
  EXPECT_EQ(content(run / "attempt_0/1/stdout.log"), "out 3\n");
  EXPECT_EQ(content(run / "attempt_1/0/stdout.log"), "out 2\n");
}

// ---------------------------------------------------------------- ranks that die

// As soon as the others have stopped, whatever time they would have had for it.
TEST_F(Machines, KilledRankStartsAllMachinesAgain) {
  const std::string script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && { echo x >> " + file("again") +
                             "; exit 0; }; echo x >> " + file("started") + "; if [ $RANK = 3 ]; then while [ $(cat " +
                             file("started") +
                             " | wc -l) -lt 4 ]; do sleep 0.05; done; kill -9 $$; fi; exec sleep 1000";
  const auto options = kTwo + std::vector<std::string>{"--max_restarts", "1", "--grace_seconds", "1000"};
  auto a = machine(0, script, options), b = machine(1, script, options);
  const auto first = a->wait(kLong), second = b->wait(kLong);
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(first.err, HasSubstr("ranks were stopped: a rank failed on machine 1"));
  EXPECT_THAT(second.err, HasSubstr("rank 3 of 4 failed first: it was killed by signal 9"));
  EXPECT_EQ(sorted_lines(content(file("again"))).size(), 4u);
}

TEST_F(Machines, WithoutRestartsAllLaunchersReturnTheFailedRanksCode) {
  const std::string script = "[ $RANK = 2 ] && exit 9; exec sleep 100";
  auto a = machine(0, script, kTwo), b = machine(1, script, kTwo);
  const auto first = a->wait(kLong), second = b->wait(kLong);
  EXPECT_EQ(first.exit_code, 9);
  EXPECT_EQ(second.exit_code, 9);
  EXPECT_THAT(first.err, HasSubstr("the job has ended: machine 1"));
  EXPECT_THAT(first.err, HasSubstr("rank 2 of 4 ended with exit code 9"));
}

TEST_F(Machines, ConsequenceOnAnotherMachineIsNotTheCause) {
  // Rank 0 fails first, but with the code for a lost peer; the cause is rank 2.
  const std::string script = "[ $RANK = 0 ] && exit 69; [ $RANK = 2 ] && { sleep 0.3; exit 7; }; exec sleep 100";
  const auto options = kTwo + std::vector<std::string>{"--monitor_interval", "3"};
  auto a = machine(0, script, options), b = machine(1, script, options);
  EXPECT_EQ(a->wait(kLong).exit_code, 7);
  EXPECT_EQ(b->wait(kLong).exit_code, 7);
}

TEST_F(Machines, RankThatIgnoresTermIsKilledAndTheRoundGoesOn) {
  const std::string script =
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; if [ $RANK = 0 ]; then trap '' TERM; echo $$ > " +
      file("stubborn") + "; while :; do sleep 0.2; done; fi; while [ ! -s " + file("stubborn") +
      " ]; do sleep 0.05; done; [ $RANK = 3 ] && exit 1; exec sleep 100";
  const auto options = kTwo + std::vector<std::string>{"--max_restarts", "1", "--grace_seconds", "1"};
  auto a = machine(0, script, options), b = machine(1, script, options);
  EXPECT_EQ(a->wait(kLong).exit_code, 0);
  EXPECT_EQ(b->wait(kLong).exit_code, 0);
  EXPECT_TRUE(gone(pids_in(file("stubborn"), 1).front()));
}

// ---------------------------------------------------------------- machines that are lost

TEST_F(Machines, LostMachineLeavesTheOthersGoingOnAndMayComeBack) {
  const std::string wait_for_all = "echo $RANK/$WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT >> " + file("started") +
                                   "; [ $TORCHELASTIC_RESTART_COUNT = 1 -a $WORLD_SIZE = 4 ] && exit 0; " +
                                   with_grandchild();
  const auto options = kElastic + std::vector<std::string>{"--max_restarts", "1"};
  auto a = machine(0, wait_for_all, options, ",is_host=1"),
       b = machine(1, wait_for_all, options, ",is_host=0");  // the host's loss would end the job
  ASSERT_TRUE(lines_in("started", 4));
  const auto all = pids_in(file("pids"), 8);
  const auto agents = children_of(b->pid(), "accelerate-agen");
  ASSERT_EQ(agents.size(), 1u);
  b->signal(SIGKILL);  // the launcher of one machine; the kernel and the warden take care of its ranks, and the agent
                       // says goodbye
  b->wait(kLong);
  ASSERT_TRUE(lines_in("started", 6));  // the other goes on alone
  auto c = machine(2, wait_for_all, options, ",is_host=0");
  const auto first = a->wait(kLong), third = c->wait(kLong);
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(third.exit_code, 0) << third.err;
  EXPECT_THAT(sorted_lines(content(file("started"))),
              ElementsAre("0/2 restart 1", "0/4 restart 0", "0/4 restart 1", "1/2 restart 1", "1/4 restart 0",
                          "1/4 restart 1", "2/4 restart 0", "2/4 restart 1", "3/4 restart 0", "3/4 restart 1"));
  for (const pid_t pid : pids_in(file("pids"), 8)) EXPECT_TRUE(gone(pid)) << pid;
  EXPECT_TRUE(gone(agents.front()));
}

TEST_F(Machines, KilledAgentTakesItsRanksAlongAndIsMissedByTheOthers) {
  const std::string script = with_grandchild();
  auto a = machine(0, script, kTwo), b = machine(1, script, kTwo);
  const auto all = pids_in(file("pids"), 8);
  const auto agents = children_of(b->pid(), "accelerate-agen");
  ASSERT_EQ(agents.size(), 1u);
  ::kill(agents.front(), SIGKILL);
  const auto second = b->wait(kLong), first = a->wait(kLong);
  EXPECT_EQ(second.exit_code, 71) << second.err;
  EXPECT_THAT(second.err, HasSubstr("accelerate-agent, which keeps the connection to the other machines, has died"));
  EXPECT_EQ(first.exit_code, 69) << first.err;
  EXPECT_THAT(first.err, HasSubstr("was lost"));
  for (const pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid;
}

TEST_F(Machines, HostThatDiesEndsTheJobEverywhere) {
  const std::string script = with_grandchild();
  auto a = machine(0, script, kTwo), b = machine(1, script, kTwo);
  const auto all = pids_in(file("pids"), 8);
  const auto agents = children_of(a->pid(), "accelerate-agen");
  ASSERT_EQ(agents.size(), 1u);
  ::kill(agents.front(), SIGKILL);
  a->signal(SIGKILL);
  a->wait(kLong);
  const auto second = b->wait(kLong);
  EXPECT_EQ(second.exit_code, 69) << second.err;
  EXPECT_THAT(second.err, HasSubstr("can't be reached any more"));
  for (const pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid;
}

TEST_F(Machines, CtrlCOnOneMachineIsSaidOnTheOthers) {
  for (const int stopped : {0, 1}) {
    fs::remove(file("pids"));
    std::vector<std::unique_ptr<Program>> both;
    for (int rank : {0, 1}) both.push_back(machine(rank, with_grandchild(), kTwo));
    const auto all = pids_in(file("pids"), 8);
    both[static_cast<size_t>(stopped)]->signal(SIGINT);
    EXPECT_EQ(both[static_cast<size_t>(stopped)]->wait(kLong).exit_code, 130);
    const auto other = both[static_cast<size_t>(1 - stopped)]->wait(kLong);
    EXPECT_EQ(other.exit_code, 69);
    EXPECT_THAT(other.err, HasSubstr("stopped by SIGINT"));
    for (const pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid;
  }
}

TEST_F(Machines, TooFewMachines) {
  auto a = machine(0, "true", kTwo, ",join_timeout=1");
  auto b = machine(0, "true", kElastic + std::vector<std::string>{"--num_machines", "2:3", "--num_processes", "3"},
                   ",join_timeout=1,is_host=0");
  const auto first = a->wait(kLong);
  EXPECT_EQ(first.exit_code, 71);
  EXPECT_THAT(first.err, HasSubstr("only 1 of 2 machines came within 1 s; missing: machine rank 1"));
  EXPECT_NE(b->wait(kLong).exit_code, 0);  // another kind of job at the same address
}

// ---------------------------------------------------------------- ports and strangers

class Listener {
 public:
  explicit Listener(const std::string& port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(port)));
    const int on = 1;
    ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || ::listen(fd_, 8) != 0)
      ADD_FAILURE() << "can't listen at " << port;
  }
  ~Listener() { ::close(fd_); }

 private:
  int fd_;
};

TEST_F(Machines, PortOfAnotherProgram) {
  const Listener listener(port);
  auto a = machine(0, "echo started", kTwo), b = machine(1, "echo started", kTwo, ",join_timeout=2");
  const auto first = a->wait(kLong), second = b->wait(kLong);
  EXPECT_EQ(first.exit_code, 71);
  EXPECT_THAT(first.err, HasSubstr("is already in use on this machine"));
  EXPECT_EQ(second.exit_code, 71);
  EXPECT_THAT(second.err, HasSubstr("127.0.0.1:" + port));
  EXPECT_EQ(first.out + second.out, "");
}

TEST_F(Machines, OnOneMachineTheStoreListensOnLoopbackOnly) {
  auto a = machine(0, "echo $$ >> " + file("pids") + "; exec sleep 100", kTwo),
       b = machine(1, "echo $$ >> " + file("pids") + "; exec sleep 100", kTwo);
  pids_in(file("pids"), 4);
  std::set<std::string> sockets;
  for (const auto* program : {a.get(), b.get()})
    for (const pid_t agent : children_of(program->pid(), "accelerate-agen"))
      for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(agent) + "/fd")) {
        std::error_code ignored;
        const std::string target = fs::read_symlink(entry.path(), ignored);
        if (target.starts_with("socket:[")) sockets.insert(target.substr(8, target.size() - 9));
      }
  size_t listening = 0;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream in(table);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::istringstream words(line);
      std::vector<std::string> word{std::istream_iterator<std::string>(words), {}};
      if (word.size() < 10 || word[3] != "0A" || !sockets.contains(word[9])) continue;
      ++listening;
      EXPECT_THAT(word[1], testing::ContainsRegex("^0.00007F:")) << word[1];
    }
  }
  // The gate, the store's two ends, and a silent socket for strangers where the kernel has rules for ordinary users.
  EXPECT_THAT(listening, testing::AnyOf(3u, 4u));
}

TEST_F(Machines, AgentsAreSmall) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "an instrumented program takes more";
#endif
  auto a = machine(0, "echo $$ >> " + file("pids") + "; exec sleep 100", kTwo),
       b = machine(1, "echo $$ >> " + file("pids") + "; exec sleep 100", kTwo);
  pids_in(file("pids"), 4);
  for (const auto* program : {a.get(), b.get()})
    for (const pid_t agent : children_of(program->pid(), "accelerate-agen")) {
      std::ifstream status("/proc/" + std::to_string(agent) + "/status");
      int64_t resident = 0;
      for (std::string line; std::getline(status, line);)
        if (line.starts_with("VmRSS:")) resident = std::stoll(line.substr(6));
      std::cout << "an agent's resident memory: " << resident << " kB\n";
      EXPECT_GT(resident, 1000);
      EXPECT_LT(resident,
                20000);  // 13,000 to 15,000 with LibTorch 2.13; 110,000 when all of its operators are registered
    }
}

TEST_F(Machines, WrongTokenIsRefusedAndDisturbsNobody) {
  std::ofstream(file("secret")) << "the right words\n";
  fs::permissions(file("secret"), fs::perms::owner_read | fs::perms::owner_write);
  const std::string script = "echo $RANK $MASTER_ADDR";
  const auto options = kTwo + std::vector<std::string>{"-q"};
  auto host = machine(0, script, options, ",token_file=" + file("secret"));
  const auto wrong = machine(1, script, options, ",token=guessed")->wait(kLong);
  EXPECT_EQ(wrong.exit_code, 64) << wrong.err;
  EXPECT_THAT(wrong.err, HasSubstr("the token"));
  EXPECT_THAT(wrong.err, Not(HasSubstr("guessed")));
  EXPECT_EQ(wrong.out, "");
  const auto none = machine(1, script, options, ",join_timeout=2")->wait(kLong);
  EXPECT_EQ(none.exit_code, 71) << none.err;
  EXPECT_THAT(none.err, HasSubstr("Does it expect a token"));
  auto right = machine(1, script, options, ",token=the right words");
  const auto second = right->wait(kLong), first = host->wait(kLong);
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_THAT(sorted_lines(first.out + second.out),
              ElementsAre("0 127.0.0.1", "1 127.0.0.1", "2 127.0.0.1", "3 127.0.0.1"));
}

/// A connection of a stranger's.
class Stranger {
 public:
  explicit Stranger(const std::string& port, const std::string& address = "127.0.0.1")
      : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_port = htons(static_cast<uint16_t>(std::stoi(port)));
    ::inet_pton(AF_INET, address.c_str(), &place.sin_addr);
    const timeval limit{20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    connected = ::connect(fd_, reinterpret_cast<const sockaddr*>(&place), sizeof(place)) == 0;
  }
  ~Stranger() { ::close(fd_); }
  Stranger(const Stranger&) = delete;
  void say(const std::string& text) const { ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL); }
  /// All until the other end closes; nothing more when it does not within 20 s.
  std::string hear() const {
    std::string all;
    char bytes[4096];
    ssize_t got = 0;
    while ((got = ::recv(fd_, bytes, sizeof(bytes), 0)) > 0) all.append(bytes, static_cast<size_t>(got));
    return got == 0 || errno == ECONNRESET ? all : "still open after " + all;
  }
  int fd() const { return fd_; }
  bool connected = false;

 private:
  int fd_;
};

/// Carries one connection to `port` after the other, and remembers what each client said first.
class Tap {
 public:
  explicit Tap(std::string to) : to_(std::move(to)), listening_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(own);
    ::bind(listening_, reinterpret_cast<sockaddr*>(&own), length);
    ::listen(listening_, 16);
    ::getsockname(listening_, reinterpret_cast<sockaddr*>(&own), &length);
    port = std::to_string(ntohs(own.sin_port));
    thread_ = std::thread([this] {
      for (int near; (near = ::accept(listening_, nullptr, nullptr)) >= 0;)
        carriers_.emplace_back([this, near] { carry(near); });
    });
  }
  ~Tap() {
    ::shutdown(listening_, SHUT_RDWR);
    thread_.join();
    for (auto& carrier : carriers_) carrier.join();
    ::close(listening_);
  }
  std::vector<std::string> said() {
    const std::lock_guard lock(mutex_);
    return said_;
  }
  std::string port;

 private:
  void carry(int near) {
    const Stranger far(to_);
    size_t index = 0;
    {
      const std::lock_guard lock(mutex_);
      index = said_.size();
      said_.emplace_back();
    }
    std::thread back([&] { pass(far.fd(), near, nullptr); });
    pass(near, far.fd(), &index);
    back.join();
    ::close(near);
  }
  void pass(int from, int to, const size_t* index) {
    char bytes[16 << 10];
    for (;;) {
      const ssize_t got = ::recv(from, bytes, sizeof(bytes), 0);
      if (got < 0 && errno == EAGAIN) continue;
      if (got <= 0) break;
      if (index) {
        const std::lock_guard lock(mutex_);
        said_[*index].append(bytes, static_cast<size_t>(got));
      }
      ::send(to, bytes, static_cast<size_t>(got), MSG_NOSIGNAL);
    }
    ::shutdown(to, SHUT_WR);
    ::shutdown(from, SHUT_RD);
  }
  const std::string to_;
  const int listening_;
  std::mutex mutex_;
  std::vector<std::string> said_;
  std::vector<std::thread> carriers_;
  std::thread thread_;
};

TEST_F(Machines, StrangersNeitherEndNorDelayAJobWithAToken) {
  const std::string script = "touch " + file("up") + "_$RANK; while [ ! -e " + file("go") + " ]; do sleep 0.05; done";
  auto host = machine(0, script, kTwo, ",token=the right words");
  for (const auto end = Clock::now() + kLong; Clock::now() < end && !Stranger(port).connected;)
    std::this_thread::sleep_for(milliseconds(20));
  std::vector<std::unique_ptr<Stranger>> silent;
  const auto flood = [&](int count) {
    for (int i = 0; i < count; ++i) {
      silent.push_back(std::make_unique<Stranger>(port));
      if (i % 7 == 0) silent.back()->say(i % 2 ? "GET / HTTP/1.1\r\n\r\n" : std::string("\x16\x03\x01\x02", 4));
      if (silent.size() > 400) silent.erase(silent.begin(), silent.begin() + 100);
    }
  };
  flood(1000);
  // The other machine comes through a place where all that it says is written down.
  Tap tap(port);
  auto guest = std::make_unique<Program>(std::vector<std::string>{
      accelerate_path(), "launch", "--main_process_ip", "127.0.0.1", "--main_process_port", tap.port, "--rdzv_conf",
      "local_addr=127.0.0.2,keep_alive_interval=0.5,keep_alive_max_attempt=8,join_timeout=60,close_timeout=8,token=the "
      "right words",
      "--machine_rank", "1", "--num_machines", "2", "--num_processes", "4", "/bin/sh", "-c", script});
  for (const auto end = Clock::now() + kLong; Clock::now() < end && !fs::exists(file("up") + "_3");)
    std::this_thread::sleep_for(milliseconds(20));
  guest->read_for(milliseconds(0));
  ASSERT_TRUE(fs::exists(file("up") + "_3")) << guest->errors();
  flood(9000);
  const auto agents = children_of(host->pid(), "accelerate-agen");
  ASSERT_EQ(agents.size(), 1u);
  size_t threads = 0;
  for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(agents[0]) + "/task"))
    threads += entry.exists();
  EXPECT_LT(threads, 16u);
  const auto said = tap.said();
  ASSERT_FALSE(said.empty());
  for (const auto& words : said) {
    EXPECT_THAT(words, Not(HasSubstr("accelerate.agent")));  // it is not to be read on the way
    const Stranger again(port);
    again.say(words);
    // An answer to the first message, which is not secret; then an end.
    EXPECT_THAT(again.hear(), Not(HasSubstr("still open")));
  }
  std::ofstream(file("go")) << "\n";
  const auto first = host->wait(kLong), second = guest->wait(kLong);
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
}

// Anybody who may write to the agents' store or to the ranks' can end the job.
TEST_F(Machines, OtherUsersOfTheMachineGetToNoStore) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can be somebody else";
  const std::string script = "echo $MASTER_ADDR $MASTER_PORT >> " + file("stores") + "; exec sleep 100";
  const auto more = kElastic + std::vector<std::string>{"--num_machines", "2"};
  auto a = machine(0, script, more), b = machine(1, script, more);
  const auto what_was_said = [](Program& launcher) {
    launcher.signal(SIGTERM);
    return launcher.wait(kLong).err;
  };
  ASSERT_TRUE(lines_in("stores", 4)) << "first: " << what_was_said(*a) << "\nsecond: " << what_was_said(*b);
  std::string ranks_address, ranks_port;
  std::istringstream(content(file("stores"))) >> ranks_address >> ranks_port;
  ASSERT_NE(ranks_port, port);
  for (const auto& [address, store] :
       {std::pair(std::string("127.0.0.1"), port), std::pair(ranks_address, ranks_port)}) {
    // c10d's greeting, and the question how many keys there are.
    const std::string question = std::string("\0\xce\xf7\x85\x3c", 5) + "\7";
    const auto is_answered = [&] {
      const Stranger client(store, address);
      client.say(question);
      char byte = 0;
      return ::recv(client.fd(), &byte, 1, 0) == 1;
    };
    EXPECT_TRUE(is_answered()) << store;
    const pid_t stranger = ::fork();
    if (stranger == 0) ::_exit(::setuid(65534) != 0 ? 2 : is_answered() ? 1 : 0);
    int status = 0;
    ASSERT_EQ(::waitpid(stranger, &status, 0), stranger);
    EXPECT_EQ(status, 0) << store;
  }
}

TEST_F(Machines, TheTokenIsInNoTraceOfAJob) {
  const std::string secret = "sesame-4711-open";
  std::ofstream(file("secret")) << secret << "\n";
  fs::permissions(file("secret"), fs::perms::owner_read | fs::perms::owner_write);
  // The command lines and variables of all processes, as a rank of this user sees them.
  const std::string script =
      "grep -a -l 'sesame-471[1]' /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; echo seen; echo broken >&2; [ "
      "$RANK = 0 ] || sleep 60; exit 3";
  std::vector<std::unique_ptr<Program>> launchers;
  for (const int rank : {0, 1})
    launchers.push_back(
        machine(rank, script,
                kTwo + std::vector<std::string>{"--log_dir", file("logs" + std::to_string(rank)), "--tee", "3",
                                                "--receipts", "--monitor_interval", "0.2"},
                ",token_file=" + file("secret")));
  std::string traces;
  for (auto& launcher : launchers) {
    const auto result = launcher->wait(kLong);
    EXPECT_NE(result.exit_code, 0);
    traces += result.out + result.err;
  }
  EXPECT_THAT(traces, HasSubstr("seen"));
  EXPECT_THAT(traces, Not(testing::ContainsRegex("/proc/[0-9]+/")));
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().filename() != "secret") traces += content(entry.path());
  EXPECT_THAT(traces, Not(HasSubstr(secret)));
}

TEST_F(Machines, HostWithoutTokenIsNotTrustedByAClientWithOne) {
  auto host = machine(0, "echo started", kTwo, ",join_timeout=15");
  const auto client = machine(1, "echo started", kTwo, ",token=secret,join_timeout=10")->wait(kLong);
  EXPECT_NE(client.exit_code, 0);
  EXPECT_THAT(client.err, HasSubstr("token"));
  EXPECT_EQ(client.out, "");
  EXPECT_EQ(host->wait(kLong).exit_code, 71);
}

TEST_F(Machines, LauncherThatIsKilledWhileItWaitsLeavesNoAgent) {
  for (const int rank : {0, 1}) {  // one waits for others, one for the host
    auto program = machine(rank, "echo started", kTwo);
    std::vector<pid_t> agents;
    for (int i = 0; i < 1000 && agents.empty(); ++i, std::this_thread::sleep_for(milliseconds(10)))
      agents = children_of(program->pid(), "accelerate-agen");
    ASSERT_EQ(agents.size(), 1u);
    program->signal(SIGKILL);
    program->wait(kLong);
    EXPECT_TRUE(gone(agents.front())) << rank;
  }
}

TEST_F(Machines, MistakesInRendezvousSettings) {
  const auto error = [&](const std::vector<std::string>& options, const std::string& conf) {
    std::vector<std::string> words =
        options + std::vector<std::string>{
                      "--main_process_ip", "127.0.0.1", "--main_process_port", port, "--rdzv_conf", conf, "/bin/true"};
    const auto result = launch(words);
    EXPECT_EQ(result.exit_code, 64) << result.err;
    return result.err;
  };
  // A key that nobody reads is a remark: torchrun's users have more keys than we.
  const auto remarked =
      launch(kElastic + std::vector<std::string>{"--main_process_ip", "127.0.0.1", "--main_process_port", port,
                                                 "--rdzv_conf", "last_cal_timeout=3", "/bin/true"});
  EXPECT_EQ(remarked.exit_code, 0) << remarked.err;
  EXPECT_THAT(remarked.err, HasSubstr("did you mean 'last_call_timeout'?"));
  EXPECT_THAT(error(kElastic, "join_timeout=soon"), HasSubstr("expected a number"));
  EXPECT_THAT(error(kElastic, "join_timeout"), HasSubstr("expected key=value"));
  EXPECT_THAT(error(kElastic, "store_type=file"), HasSubstr("expected tcp"));
  EXPECT_THAT(error(kElastic, "token_file=/no/such/file"), HasSubstr("can't be read"));
  EXPECT_THAT(error({"--num_machines", "2:1", "--num_processes", "2"}, "timeout=1"), HasSubstr("expected MIN:MAX"));
  EXPECT_THAT(error({"--num_machines", "1:2", "--num_processes", "2", "--machine_rank", "0"}, "timeout=1"),
              HasSubstr("needs --rdzv_backend c10d"));
  std::ofstream(file("open")) << "secret\n";
  EXPECT_THAT(error(kElastic, "token_file=" + file("open")), HasSubstr("chmod 600"));
}

// ---------------------------------------------------------------- hostfiles

/// A shell that starts its command here and, like ssh, stands between it and us.
class Hostfile : public Machines {
 protected:
  Hostfile() {
    write("hosts", "# two machines\n127.0.0.1 slots=2\n\n127.0.0.2 slots=3  # the larger one\n");
    write("ssh", "#!/bin/sh\necho \"$2\" > '" + file("command.") + "'$1\n/bin/sh -c \"$2\"\n");
    fs::permissions(file("ssh"), fs::perms::owner_all);
  }
  void write(const std::string& name, const std::string& text) const { std::ofstream(file(name)) << text; }
  std::unique_ptr<Program> start(const std::string& script, const std::vector<std::string>& more = {},
                                 const std::string& flag = "--hostfile") const {
    std::vector<std::string> words{accelerate_path(), "launch", flag, file("hosts"), "--main_process_port", port};
    words.insert(words.end(), more.begin(), more.end());
    words.insert(words.end(), {"/bin/sh", "-c", script});
    const char* path = std::getenv("PATH");
    return std::make_unique<Program>(
        words, Program::Options{.env = {"PATH=" + folder.string() + ":" + (path ? path : ""), "NCCL_DEBUG=WARN",
                                        "HOME=" + folder.string()},
                                .input = "",
                                .terminal = false,
                                .read_output = true,
                                .folder = folder});
  }
};

TEST_F(Hostfile, StartsALauncherOnEachMachineWithItsSlots) {
  const auto result = start(
                          "echo $RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $WORLD_SIZE $GROUP_RANK $NCCL_DEBUG \"$0\" $(pwd) "
                          "$ACCELERATE_LAUNCH_TETHER",
                          {"-q", "--mixed_precision", "bf16"})
                          ->wait(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string rest = " WARN /bin/sh " + folder.string();
  EXPECT_THAT(sorted_lines(result.out), ElementsAre("0 0/2 5 0" + rest, "1 1/2 5 0" + rest, "2 0/3 5 1" + rest,
                                                    "3 1/3 5 1" + rest, "4 2/3 5 1" + rest));
  EXPECT_THAT(content(file("command.127.0.0.2")), HasSubstr("--mixed_precision 'bf16'"));
}

TEST_F(Hostfile, FiltersChooseMachinesAndSlots) {
  EXPECT_THAT(
      sorted_lines(
          start("echo $RANK/$WORLD_SIZE $CUDA_VISIBLE_DEVICES", {"-q", "--include", "127.0.0.2:0,2"})->wait(kLong).out),
      ElementsAre("0/2 0,2", "1/2 0,2"));
  EXPECT_FALSE(fs::exists(file("command.127.0.0.1")));
  EXPECT_THAT(
      sorted_lines(
          start("echo $RANK/$WORLD_SIZE $GROUP_RANK", {"-q", "--exclude", "127.0.0.1:1@127.0.0.2:0"})->wait(kLong).out),
      ElementsAre("0/3 0", "1/3 1", "2/3 1"));
}

TEST_F(Hostfile, TokenIsOnNoCommandLine) {
  auto program =
      start("echo $$ >> " + file("pids") + "; exec sleep 100", {"--rdzv_conf", "token=sesame,join_timeout=60"});
  pids_in(file("pids"), 5);
  EXPECT_THAT(content(file("command.127.0.0.1")) + content(file("command.127.0.0.2")), Not(HasSubstr("sesame")));
  EXPECT_THAT(content(file("command.127.0.0.1")), HasSubstr("--rdzv_conf 'join_timeout=60'"));
  // The gate that the host's agent keeps refuses a machine that does not know it.
  const auto stranger =
      machine(1, "true", {"--num_machines", "2", "--num_processes", "5"}, ",token=guessed")->wait(kLong);
  EXPECT_EQ(stranger.exit_code, 64);
  program->signal(SIGTERM);
  EXPECT_EQ(program->wait(kLong).exit_code, 143);
}

TEST_F(Hostfile, EverythingEndsWithTheStarter) {
  for (const int number : {SIGINT, SIGKILL}) {
    fs::remove(file("pids"));
    auto program = start(with_grandchild());
    const auto all = pids_in(file("pids"), 10);
    program->signal(number);
    const auto result = program->wait(kLong);
    EXPECT_EQ(number == SIGINT ? result.exit_code : 128 + result.signal, 128 + number) << result.err;
    for (const pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid << " after " << number;
  }
}

TEST_F(Hostfile, FailuresCarryTheirExitCode) {
  const auto result = start("[ $RANK = 4 ] && exit 9; exec sleep 100")->wait(kLong);
  EXPECT_EQ(result.exit_code, 9) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank 4 of 5 failed first"));
  write("ssh", "#!/bin/sh\necho 'ssh: connect to host: No route' >&2; exit 255\n");
  const auto unreachable = start("true")->wait(kLong);
  EXPECT_EQ(unreachable.exit_code, 255);
  EXPECT_THAT(unreachable.err, HasSubstr("can you log in there without a password?"));
}

/// The same, by a server of ssh that the test starts.
class Sshd : public Hostfile {
 protected:
  void SetUp() override {
    ASSERT_EQ(::access("/usr/sbin/sshd", X_OK), 0)
        << "there is no sshd here (Debian: openssh-server), which scripts/test.sh installs";
    if (::getuid() == 0) fs::create_directories("/run/sshd");
    const std::string ssh_port = std::to_string(support::free_port());
    for (const char* key : {"hostkey", "key"})
      ASSERT_EQ(run({"/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file(key)}), 0);
    write("sshd_config", "Port " + ssh_port + "\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey " +
                             file("hostkey") + "\nAuthorizedKeysFile " + file("key.pub") +
                             "\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\n");
    sshd_ = std::make_unique<Program>(
        std::vector<std::string>{"/usr/sbin/sshd", "-D", "-f", file("sshd_config"), "-E", file("sshd.log")});
    write(
        "ssh",
        "#!/bin/sh\nexec /usr/bin/ssh -p " + ssh_port + " -i " + file("key") +
            " -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \"$@\"\n");
    for (int i = 0; i < 100 && run({file("ssh"), "127.0.0.2", "true"}) != 0; ++i)
      std::this_thread::sleep_for(milliseconds(100));
  }
  static int run(const std::vector<std::string>& words) { return Program(words).wait(kLong).exit_code; }

  void everything_ends_with_the_starter(const std::vector<std::string>& options, int number,
                                        const std::string& flag = "--hostfile") const {
    fs::remove(file("pids"));
    auto program = start(with_grandchild(), options, flag);
    const auto all = pids_in(file("pids"), 10);
    program->signal(number);
    const auto result = program->wait(kLong);
    EXPECT_EQ(number == SIGKILL ? 128 + result.signal : result.exit_code, 128 + number) << result.err;
    for (const pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid << " after " << number;
  }

 private:
  std::unique_ptr<Program> sshd_;
};

TEST_F(Sshd, StartsAndEndsTheJob) {
  const auto result = start("echo $RANK/$WORLD_SIZE ${SSH_CONNECTION:+by ssh}", {"-q"})->wait(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err << content(file("sshd.log"));
  EXPECT_THAT(sorted_lines(result.out),
              ElementsAre("0/5 by ssh", "1/5 by ssh", "2/5 by ssh", "3/5 by ssh", "4/5 by ssh"));
  everything_ends_with_the_starter({}, SIGKILL);
}

TEST_F(Sshd, ByPdsh) {
  ASSERT_EQ(::access("/usr/bin/pdsh", X_OK), 0)
      << "there is no pdsh here (Debian: pdsh), which scripts/test.sh installs";
  const std::vector<std::string> pdsh{"--remote_shell", "pdsh"};
  const auto result =
      start("echo $RANK/$WORLD_SIZE ${SSH_CONNECTION:+by ssh} $NCCL_DEBUG 50%h \"it's\"", pdsh)->wait(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string rest = "/5 by ssh WARN 50%h it's";
  EXPECT_THAT(sorted_lines(result.out), ElementsAre("0" + rest, "1" + rest, "2" + rest, "3" + rest, "4" + rest));
  EXPECT_THAT(result.err, HasSubstr("meet without a token"));
  const auto failed = start("[ $RANK = 4 ] && exit 9; exec sleep 100", pdsh)->wait(kLong);
  EXPECT_EQ(failed.exit_code, 9) << failed.err;
  EXPECT_THAT(failed.err, HasSubstr("rank 4 of 5 failed first"));
  for (const int number : {SIGTERM, SIGINT, SIGKILL}) everything_ends_with_the_starter(pdsh, number);
}

TEST_F(Sshd, DeepSpeedsHostfileIsStartedByPdsh) {
  ASSERT_EQ(::access("/usr/bin/pdsh", X_OK), 0)
      << "there is no pdsh here (Debian: pdsh), which scripts/test.sh installs";
  write(".deepspeed_env", "MINE=it's 50%h\nNCCL_DEBUG=INFO\nACCELERATE_USE_DEEPSPEED=old\n");
  const std::string flag = "--deepspeed_hostfile";
  const std::vector<std::string> deepspeed{"--use_deepspeed", "--num_machines", "2"};
  const auto result =
      start(
          "echo $RANK/$WORLD_SIZE $GROUP_RANK on $CUDA_VISIBLE_DEVICES ${SSH_CONNECTION:+by ssh} $NCCL_DEBUG \"$MINE\" "
          "$ACCELERATE_USE_DEEPSPEED",
          deepspeed + std::vector<std::string>{"--deepspeed_inclusion_filter", "127.0.0.2:2,0@127.0.0.1:1"}, flag)
          ->wait(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err << content(file("sshd.log"));
  const std::string rest = " by ssh INFO it's 50%h true";
  EXPECT_THAT(sorted_lines(result.out), ElementsAre("0/3 0 on 1" + rest, "1/3 1 on 0,2" + rest, "2/3 1 on 0,2" + rest));
  everything_ends_with_the_starter(deepspeed, SIGKILL, flag);
}

TEST_F(Sshd, PdshTakesTheTokenFromAFileOnEachMachine) {
  ASSERT_EQ(::access("/usr/bin/pdsh", X_OK), 0)
      << "there is no pdsh here (Debian: pdsh), which scripts/test.sh installs";
  const auto said =
      start("true", {"--remote_shell", "pdsh", "--rdzv_conf", "join_timeout=60,token=sesame"})->wait(kLong);
  EXPECT_EQ(said.exit_code, 64);
  EXPECT_THAT(said.err, HasSubstr("name that with token_file="));
  write("secret", "sesame\n");
  fs::permissions(file("secret"), fs::perms::owner_read | fs::perms::owner_write);
  auto program = start("echo $$ >> " + file("pids") + "; exec sleep 100",
                       {"--remote_shell", "pdsh", "--rdzv_conf", "token_file=" + file("secret") + ",join_timeout=60"});
  pids_in(file("pids"), 5);
  const auto stranger =
      machine(1, "true", {"--num_machines", "2", "--num_processes", "5"}, ",token=guessed")->wait(kLong);
  EXPECT_EQ(stranger.exit_code, 64) << stranger.err;
  program->signal(SIGTERM);
  EXPECT_EQ(program->wait(kLong).exit_code, 143);
}

TEST_F(Hostfile, Mistakes) {
  const auto error = [&](const std::vector<std::string>& more) {
    const auto result = start("true", more)->wait(kLong);
    EXPECT_EQ(result.exit_code, 64) << result.err;
    return result.err;
  };
  EXPECT_THAT(error({"--include", "127.0.0.3"}), HasSubstr("Did you mean '127.0.0."));
  EXPECT_THAT(error({"--include", "127.0.0.1:2"}), HasSubstr("has slots 0 to 1"));
  EXPECT_THAT(error({"--include", "127.0.0.1", "--exclude", "127.0.0.2"}), HasSubstr("exclude each other"));
  EXPECT_THAT(error({"--exclude", "127.0.0.1@127.0.0.2"}), HasSubstr("leaves no machine"));
  EXPECT_THAT(error({"--num_processes", "4"}), HasSubstr("leave out --num_machines, --num_processes"));
  EXPECT_THAT(error({"--remote_shell", "no-such-shell"}), HasSubstr("not in PATH"));
  write("hosts", "a slots=2\nb\n");
  EXPECT_THAT(error({}), HasSubstr("line 2 is 'b', expected NAME slots=N"));
}

}  // namespace
