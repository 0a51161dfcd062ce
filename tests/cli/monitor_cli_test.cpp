// `accelerate launch --monitor` and `--monitor_port`: the real program on a terminal, through a pipe, over HTTP and in
// a real browser.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "browser.hpp"
#include "program.hpp"
#include "ranks.hpp"
#include "screen.hpp"

namespace {

using namespace cli_test;
using nlohmann::json;
using testing::AllOf;
using testing::Gt;
using testing::HasSubstr;
using testing::Lt;
using testing::Not;
using testing::StartsWith;
using Clock = std::chrono::steady_clock;

std::string bin(const std::string& name) { return std::string(ACCELERATE_BIN_DIR) + "/" + name; }

std::vector<std::string> launching(std::vector<std::string> options, const std::vector<std::string>& program) {
  options.insert(options.begin(), {accelerate_path(), "launch", "--cpu"});
  options.insert(options.end(), program.begin(), program.end());
  return options;
}

std::vector<std::string> rank_program(int steps, double per_second, const std::string& line) {
  return {bin("monitor_rank"), std::to_string(steps), std::to_string(per_second), line};
}

/// The address that the launcher has printed, up to "/" at its end.
std::string url_of(Program& program) {
  EXPECT_TRUE(program.wait_for("the monitor's page is ")) << program.errors();
  std::smatch found;
  const std::string text = program.errors() + program.output();
  return std::regex_search(text, found, std::regex("http://[^ /]+/")) ? found[0].str() : "";
}

class Connection {
 public:
  explicit Connection(const std::string& url) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(url.substr(url.rfind(':') + 1))));
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    const timeval patience{20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~Connection() { ::close(fd_); }
  Connection(const Connection&) = delete;
  bool connected() const { return connected_; }
  bool send(const std::string& text) {
    return ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }
  void end() { ::shutdown(fd_, SHUT_WR); }
  std::string rest() {
    std::string text;
    char bytes[4096];
    for (ssize_t got; (got = ::recv(fd_, bytes, sizeof(bytes), 0)) > 0;) text.append(bytes, static_cast<size_t>(got));
    return text;
  }

 private:
  int fd_;
  bool connected_ = false;
};

std::string request(const std::string& url, const std::string& text) {
  Connection connection(url);
  EXPECT_TRUE(connection.connected()) << url;
  connection.send(text);
  return connection.rest();
}

json state_of(const std::string& url, const std::string& page = "state.json") {
  const auto answer = request(url, "GET /" + page + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? json() : json::parse(answer.substr(body + 4));
}

/// Asks until `good` says so; the last answer.
template <class Good> json state_when(const std::string& url, Good good, const std::string& page = "state.json") {
  json state;
  for (const auto end = Clock::now() + std::chrono::seconds(60); Clock::now() < end;
       std::this_thread::sleep_for(milliseconds(50)))
    if (state = state_of(url, page); state.is_null() || good(state)) return state;
  ADD_FAILURE() << "not within 60 seconds: " << state.dump(1);
  return state;
}

bool all_step(const json& state) {
  for (const auto& rank : state["ranks"])
    if (rank["steps_per_second"].is_null() || rank["cpu_percent"].is_null()) return false;
  return !state["ranks"].empty();
}

// ---------------------------------------------------------------- the page's data

TEST(MonitorPage, SaysWhatRanksDo) {
  Program program(launching({"--num_processes", "2", "--monitor_port", "0", "--monitor_seconds", "0.2"},
                            rank_program(400, 20, "\033[32mloss\033[0m \xff is")));
  const auto url = url_of(program);
  // The records say that the steps came on time. Where the machine is busy a rank seems idle now and then.
  const auto on_time = [](const json& rank) {
    return rank["steps"] > 60 && std::abs(rank["steps_per_second"].get<double>() - 20) < 1e-6;
  };
  const auto state =
      state_when(url, [&](const json& s) { return all_step(s) && on_time(s["ranks"][0]) && on_time(s["ranks"][1]); });
  EXPECT_EQ(state["program"], "monitor_rank");
  EXPECT_EQ(state["world_size"], 2);
  ASSERT_EQ(state["ranks"].size(), 2u);
  for (int i = 0; i < 2; ++i) {
    const auto& rank = state["ranks"][static_cast<size_t>(i)];
    EXPECT_EQ(rank["name"], std::to_string(i));
    EXPECT_EQ(rank["state"], "running");
    EXPECT_EQ(::kill(rank["pid"].get<pid_t>(), 0), 0);
    EXPECT_GT(rank["steps"], 0);
    EXPECT_GT(rank["resident_bytes"], 500 << 10);
    EXPECT_LT(rank["resident_bytes"], 100 << 20);
    EXPECT_TRUE(rank["gpu"].is_null());
    EXPECT_THAT(rank["last_line"].get<std::string>(), StartsWith("loss � is "));
  }
  EXPECT_THAT(program.errors(), Not(HasSubstr("rank  state")));  // the table is for --monitor
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait().exit_code, 143);
  EXPECT_FALSE(Connection(url).connected());
}

TEST(MonitorPage, RefusesWhatItShould) {
  Program program(launching({"--monitor_port", "0"}, {"/bin/sleep", "60"}));
  const auto url = url_of(program);
  EXPECT_THAT(url, StartsWith("http://127.0.0.1:"));
  EXPECT_THAT(request(url, "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"), StartsWith("HTTP/1.1 403 "));
  EXPECT_THAT(request(url, "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc"),
              StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(request(url, "GET / HTTP/1.1\r\nHost: localhost\r\nX: " + std::string(20000, 'x')),
              StartsWith("HTTP/1.1 431 "));
  EXPECT_THAT(request(url, "nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  {
    // A request in pieces, of a client that closes its half.
    Connection slow(url);
    for (const char c : std::string("GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n"))
      slow.send(std::string(1, c));
    slow.end();
    EXPECT_THAT(slow.rest(), StartsWith("HTTP/1.1 200 "));
  }
  {
    // Clients that say nothing give way to those that ask.
    std::vector<std::unique_ptr<Connection>> silent;
    for (int i = 0; i < 128; ++i) silent.push_back(std::make_unique<Connection>(url));
    EXPECT_THAT(request(url, "GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
  }
  program.signal(SIGTERM);
  program.wait();
}

TEST(MonitorPage, KnowsFailuresAndRestarts) {
  // Rank 1 fails at first; the second attempt goes on.
  Program program(
      launching({"--num_processes", "2", "--max_restarts", "1", "--monitor_port", "0", "--monitor_seconds", "0.1"},
                rank_program(40, 10, "step")),
      {.env = {"FAIL=1"}});
  const auto url = url_of(program);
  EXPECT_THAT(state_when(url, all_step)["summary"].get<std::string>(), HasSubstr("restart 0 of 1"));
  const auto second = state_when(url, [](const json& state) { return state["attempt"] == 1 && all_step(state); });
  EXPECT_THAT(second["summary"].get<std::string>(), testing::EndsWith("2 running; restart 1 of 1"));
  EXPECT_LT(second["ranks"][1]["steps"], 40);  // counted from the start of this attempt
  program.signal(SIGTERM);
  program.wait();
}

TEST(MonitorPage, MachinesHaveTheirOwnRanksAndAreSeenWaiting) {
  const auto machine = [&](int rank) {
    return launching(
        {"--num_machines", "2", "--num_processes", "4", "--main_process_ip", "127.0.0.1", "--main_process_port",
         "29597", "--machine_rank", std::to_string(rank), "--monitor_port", "0", "--monitor_seconds", "0.1"},
        rank_program(300, 20, "step"));
  };
  Program first(machine(0));
  const auto url = url_of(first);
  EXPECT_THAT(state_when(url, [](const json& state) { return state["waiting"] == true; })["summary"].get<std::string>(),
              HasSubstr("waiting for the other machines"));
  Program second(machine(1));
  const auto other = url_of(second);
  const auto here = state_when(url, all_step), there = state_when(other, all_step);
  EXPECT_EQ(here["waiting"], false);
  EXPECT_EQ(here["world_size"], 4);
  EXPECT_EQ(here["ranks"][1]["name"], "1");
  EXPECT_EQ(there["ranks"][0]["name"], "2");
  EXPECT_THAT(there["summary"].get<std::string>(), HasSubstr("machine 1 of 2; 4 ranks on all machines"));
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 143);
  second.signal(SIGTERM);
  second.wait();
}

TEST(MonitorPage, HostfilesShowMachinesByName) {
  const std::string folder = support::scratch_dir() + "/";
  std::ofstream(folder + "hosts") << "alpha slots=2\nbeta slots=1\n";
  std::ofstream(folder + "ssh") << "#!/bin/sh\necho \"$2\" > '" << folder << "command.'$1\nexec /bin/sh -c \"$2\"\n";
  std::filesystem::permissions(folder + "ssh", std::filesystem::perms::owner_all);
  Program program(
      launching({"--hostfile", folder + "hosts", "--remote_shell", folder + "ssh", "--main_process_ip", "127.0.0.1",
                 "--main_process_port", "29598", "--monitor", "--monitor_port", "0", "--monitor_seconds", "0.1"},
                rank_program(400, 20, "step of a machine")));
  const auto url = url_of(program);
  const auto state = state_when(url, [](const json& s) {
    return s["ranks"].size() == 2 && s["ranks"][0]["last_line"] != "" && s["ranks"][1]["last_line"] != "";
  });
  EXPECT_EQ(state["ranks"][0]["name"], "alpha");
  EXPECT_EQ(state["ranks"][1]["name"], "beta");
  EXPECT_TRUE(state["ranks"][0]["cpu_percent"].is_null());  // of ssh, which nobody wants to know
  std::ifstream command(folder + "command.alpha");
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(command), {}),
              AllOf(HasSubstr(" launch"), Not(HasSubstr("--monitor"))));  // one view, here
  program.signal(SIGTERM);
  program.wait();
}

TEST(MonitorPage, ShowsTheGpuOfEachRank) {
  const std::string folder = "LD_LIBRARY_PATH=" + bin("fake_nvml");
  const auto gpus = [&](const std::string& visible, std::vector<std::string> options) {
    options.insert(options.begin(), {accelerate_path(), "launch", "--num_processes", "2", "--monitor_port", "0",
                                     "--monitor_seconds", "0.1"});
    options.insert(options.end(), {"/bin/sleep", "60"});
    Program program(options, {.env = {folder, "CUDA_VISIBLE_DEVICES=" + visible}});
    const auto state = state_when(url_of(program), [](const json& s) {
      return s["ranks"].size() == 2 && !s["ranks"][0]["cpu_percent"].is_null();
    });
    program.signal(SIGTERM);
    program.wait();
    return std::pair{state["ranks"][0]["gpu"], state["ranks"][1]["gpu"]};
  };
  const json first{{"index", 0},
                   {"name", "NVIDIA A100-SXM4-80GB"},
                   {"busy_percent", 57},
                   {"used_bytes", 12ll << 30},
                   {"total_bytes", 80ll << 30}},
      second{{"index", 1},
             {"name", "NVIDIA A100-SXM4-80GB"},
             {"busy_percent", nullptr},
             {"used_bytes", 12ll << 30},
             {"total_bytes", 80ll << 30}};
  EXPECT_EQ(gpus("", {}), std::pair(first, second));
  EXPECT_EQ(gpus("GPU-second,0", {}), std::pair(second, first));
  EXPECT_EQ(gpus("", {"--gpu_ids", "1,5"}), std::pair(second, json()));
  EXPECT_EQ(gpus("", {"--cpu"}), std::pair(json(), json()));
}

TEST(MonitorPage, MistakesAreExplained) {
  const auto error = [](std::vector<std::string> options) {
    const auto result = Program(launching(std::move(options), {"/bin/true"})).wait();
    return std::to_string(result.exit_code) + " " + result.err;
  };
  EXPECT_THAT(error({"--monitor_port", "70000"}),
              AllOf(StartsWith("64 "), HasSubstr("--monitor_port is 70000, expected 1 to 65535")));
  EXPECT_THAT(error({"--monitor_seconds", "0", "--monitor"}),
              AllOf(StartsWith("64 "), HasSubstr("--monitor_seconds is 0")));
  EXPECT_THAT(error({"--monitor_port", "0", "--monitor_host", "no such host"}),
              AllOf(StartsWith("64 "), HasSubstr("--monitor_host is 'no such host'")));
  EXPECT_THAT(error({"--monitor_port", "0", "--monitor_host", "192.0.2.1"}),
              AllOf(StartsWith("71 "), HasSubstr("can't be served at 192.0.2.1:0")));
  EXPECT_THAT(error({"--monitor_peak_flops", "-1", "--monitor"}),
              AllOf(StartsWith("64 "), HasSubstr("--monitor_peak_flops is -1")));
  EXPECT_THAT(error({"--monitor_peak_flops", "1e12"}),
              AllOf(StartsWith("0 "), HasSubstr("--monitor_peak_flops has no effect without --monitor")));
  EXPECT_THAT(error({"--monitor_host", "0.0.0.0"}),
              AllOf(StartsWith("0 "), HasSubstr("--monitor_host has no effect without --monitor_port")));
  EXPECT_THAT(error({"--monitor_host", "0.0.0.0", "--monitor_port", "0"}),
              AllOf(StartsWith("0 "), HasSubstr("which other machines can reach: it asks for no password")));
  Program program(launching({"--monitor_port", "0"}, {"/bin/sleep", "60"}));
  const auto url = url_of(program);
  const std::string port = url.substr(url.rfind(':') + 1, url.size() - url.rfind(':') - 2);
  EXPECT_THAT(error({"--monitor_port", port}),
              AllOf(StartsWith("71 "), HasSubstr("Another program uses that port; --monitor_port 0 finds a free one")));
  program.signal(SIGTERM);
  program.wait();
}

// ---------------------------------------------------------------- steps of programs

TEST(MonitorSteps, PreparedOptimizersReportThem) {
  for (const bool by_itself : {false, true}) {
    Program program(launching({"--num_processes", "2", "--monitor_port", "0", "--monitor_seconds", "0.2"},
                              by_itself ? std::vector<std::string>{bin("monitor_training"), "itself"}
                                        : std::vector<std::string>{bin("monitor_training")}));
    const auto url = url_of(program);
    const auto state = state_when(
        url, [&](const json& s) { return all_step(s) && s["ranks"][0]["steps"].get<int64_t>() % 1000 > 40; });
    for (const auto& rank : state["ranks"]) {
      // At most 20 a second, by the sleeps: the optimizer that steps at every second batch is not added.
      EXPECT_GT(rank["steps_per_second"], 0);
      EXPECT_LT(rank["steps_per_second"], 21);
      EXPECT_EQ(rank["steps"].get<int64_t>() / 1000, by_itself ? 1 : 0);
      EXPECT_EQ(rank["logged"]["epoch"], 1) << rank;  // by accelerator.log, though there is no tracker
      EXPECT_TRUE(rank["logged"]["loss"].is_number()) << rank;
      EXPECT_FALSE(rank["logged"].contains("note")) << rank;
    }
    program.signal(SIGTERM);
    program.wait();
  }
}

/// A rank's rate as a number for each of its steps.
double per_step(const json& rank, const char* rate) {
  return rank[rate].get<double>() / rank["steps_per_second"].get<double>();
}

TEST(MonitorFigures, TokensOperationsAndWaitsOfATraining) {
  // Gradients are averaged in memory that both ranks see, or by gloo, which the Reducer waits for.
  for (const std::string way : {"averaged", "averaged by gloo", "sharded"}) {
    Program program(launching({"--num_processes", "2", "--monitor_port", "0", "--monitor_seconds", "0.2",
                               "--monitor_peak_flops", "1e9"},
                              {bin("monitor_training"), way.substr(0, way.find(' '))}),
                    {.env = {way.ends_with("gloo") ? "ACCELERATE_SHARED_MEMORY=0" : "ACCELERATE_SHARED_MEMORY=1"}});
    const auto state = state_when(url_of(program), [&](const json& s) {
      return all_step(s) && s["ranks"][0]["steps"] > 25 && s["ranks"][1]["steps"] > 25;
    });
    for (const auto& rank : state["ranks"]) {
      EXPECT_NEAR(per_step(rank, "tokens_per_second"), 32, 1e-6) << way;
      EXPECT_EQ(rank["tokens"].get<int64_t>() % 32, 0) << way;
      // For each of 16 x 24 + 24 parameters a token takes two operations forward, two backward, and two for the weight.
      EXPECT_NEAR(per_step(rank, "flops_per_second"), 32 * (4 * (16 * 24 + 24) + 2 * 16 * 24), 1e-3) << way;
      EXPECT_EQ(rank["utilisation"], rank["flops_per_second"].get<double>() / 1e9) << way;
      // At least 10 ms of a step are those of its batch, and more where the machine is busy.
      EXPECT_GT(per_step(rank, "data_share") * 1000, 9) << way;
      EXPECT_LE(rank["data_share"].get<double>() + rank["comm_share"].get<double>(), 1) << way;
    }
    // Rank 0 waits for the 100 ms of rank 1's work, or for a part of them where the machine is busy. The last one waits
    // for nobody, but takes part.
    const auto waited = [&](size_t rank) { return per_step(state["ranks"][rank], "comm_share"); };
    EXPECT_GT(waited(0), 0.01) << way;
    EXPECT_GT(waited(0), waited(1)) << way;
    program.signal(SIGTERM);
    program.wait();
  }
}

TEST(MonitorFigures, AreThoseOfTheProgramWhereItSaysThem) {
  Program program(launching({"--monitor_port", "0", "--monitor_seconds", "0.2"}, {bin("monitor_training"), "figures"}));
  const auto url = url_of(program);
  const auto state = state_when(url, [&](const json& s) { return all_step(s) && s["ranks"][0]["steps"] > 30; });
  const auto& rank = state["ranks"][0];
  EXPECT_EQ(rank["tokens"], rank["steps"].get<int64_t>() * 300);
  EXPECT_NEAR(per_step(rank, "tokens_per_second"), 300, 1e-6);
  EXPECT_NEAR(per_step(rank, "flops_per_second"), 6e9, 1);
  EXPECT_TRUE(rank["utilisation"].is_null());  // of what? nobody has said
  EXPECT_TRUE(rank["comm_share"].is_null());
  EXPECT_TRUE(rank["data_share"].is_null());
  EXPECT_THAT(state["summary"].get<std::string>(), testing::ContainsRegex("; [0-9.]+k? tokens/s$"));
  // A look each 0.2 seconds, however many steps are done by then.
  const auto history = state_when(
      url, [](const json& h) { return h["seconds"].size() > 1; }, "history.json");
  std::vector<std::string> names;
  for (const auto& figure : history["figures"]) names.push_back(figure["name"]);
  EXPECT_THAT(names, testing::ElementsAre("steps_per_second", "tokens_per_second", "flops_per_second", "resident_bytes",
                                          "cpu_percent"));
  program.signal(SIGTERM);
  program.wait();
}

TEST(MonitorSteps, APythonProgramReportsThemAsTheDocumentationSays) {
  std::ifstream file(std::string(ACCELERATE_SOURCE_DIR) + "/docs/monitor.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t begin = text.find("```python\n"), end = text.find("```", begin + 10);
  ASSERT_NE(begin, std::string::npos);
  const std::string script = support::scratch_dir() + "/monitored.py";
  std::ofstream(script) << text.substr(begin + 10, end - begin - 10)
                        << "for step in range(1, 1000):\n    time.sleep(0.05)\n    report_step(step)\n";
  Program program(launching({"--monitor_port", "0", "--monitor_seconds", "0.2"}, {script}),
                  {.env = {"PYTHON=python3"}});
  const auto state =
      state_when(url_of(program), [&](const json& s) { return all_step(s) && s["ranks"][0]["steps"] > 20; });
  EXPECT_GT(state["ranks"][0]["steps_per_second"], 0);
  EXPECT_LT(state["ranks"][0]["steps_per_second"], 21);
  program.signal(SIGTERM);
  program.wait();
  EXPECT_EQ(Program({"/usr/bin/env", "python3", "-c",
                     "exec(open('" + script + "').read().split('for step')[0]); report_step(1)"})
                .wait()
                .exit_code,
            0);  // without a monitor it does nothing
}

// ---------------------------------------------------------------- the table through a pipe

TEST(MonitorLines, AreWrittenNowAndThenBesideTheOutput) {
  Program program(
      launching({"--num_processes", "2", "--monitor", "--monitor_seconds", "0.3"}, rank_program(40, 20, "loss")));
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, Not(HasSubstr("state")));
  EXPECT_THAT(result.err, Not(HasSubstr("\033")));
  EXPECT_THAT(result.err, HasSubstr("\nrank  state "));
  EXPECT_TRUE(std::regex_search(
      result.err,
      std::regex(
          "\n0     running +[0-9]+ +0:0[01] +[0-9]+ +[0-9.]+ +[0-9-]+ +[0-9.]+ [KM]iB  loss [0-9]+\n1     running ")))
      << result.err;
  size_t tables = 0;
  for (size_t at = 0; (at = result.err.find("rank  state", at)) != std::string::npos; ++at) ++tables;
  EXPECT_THAT(tables, AllOf(Gt(1u), Lt(40u)));  // every 0.3 s for 2 s, and not after each step
}

TEST(MonitorLines, RedirectedOutputIsReadFromItsFile) {
  Program program(launching({"--num_processes", "2", "--monitor", "--monitor_seconds", "0.3", "--redirects", "3",
                             "--log_dir", support::scratch_dir()},
                            rank_program(30, 20, "hidden")));
  const auto result = program.wait();
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("hidden "));
}

TEST(MonitorLines, EndWithTheRanksThoughOutputIsStillWaiting) {
  // More than a pipe holds and nobody reads: the rank has ended long before the launcher can.
  Program program(launching({"--monitor", "--monitor_seconds", "0.05"},
                            {"/bin/sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x >&2; echo >&2"}));
  std::this_thread::sleep_for(milliseconds(1500));
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.signal;
  EXPECT_THAT(result.err, HasSubstr(std::string(200000, 'x')));
  EXPECT_LT(result.err.size(), 201000u);  // tables have not piled up
}

TEST(MonitorLines, HaveNoEscapesOnATerminalThatUnderstandsNone) {
  Program program(
      launching({"--num_processes", "2", "--monitor", "--monitor_seconds", "0.2"}, rank_program(10, 10, "loss")),
      {.env = {"TERM=dumb"}, .terminal = true});
  const auto result = program.wait();
  EXPECT_THAT(result.out, AllOf(HasSubstr("rank  state"), Not(HasSubstr("\033"))));
}

// ---------------------------------------------------------------- the terminal

class MonitorTerminal : public testing::Test {
 protected:
  /// Feeds the terminal with everything that came so far.
  void update(Program& program) {
    program.read_for(milliseconds(50));
    screen.feed(std::string_view(program.output()).substr(fed));
    fed = program.output().size();
  }
  bool wait_until_shown(Program& program, const std::string& text) {
    for (const auto end = Clock::now() + std::chrono::seconds(60); Clock::now() < end;) {
      update(program);
      if (screen.shows(text)) return true;
    }
    ADD_FAILURE() << "'" << text << "' did not appear:\n" << testing::PrintToString(screen.lines());
    return false;
  }
  Program::Options terminal() const { return {.env = {"TERM=xterm"}, .terminal = true, .rows = 20, .columns = 100}; }
  std::vector<std::string> two(int steps, double rate) const {
    return launching({"--num_processes", "2", "--monitor", "--monitor_seconds", "0.1"},
                     rank_program(steps, rate, "漢字 loss"));
  }
  /// After the end: undivided, and only output is left.
  void expect_clean(const Program& program) {
    screen.feed(std::string_view(program.output()).substr(fed));
    fed = program.output().size();
    EXPECT_FALSE(screen.divided());
    for (size_t i = 0; i < screen.rows(); ++i)
      EXPECT_THAT(screen.line(i), Not(AllOf(HasSubstr("rank"), HasSubstr("state")))) << i;
    EXPECT_EQ(screen.unknown(), 0u);
  }
  Screen screen{20, 100};
  size_t fed = 0;
};

TEST_F(MonitorTerminal, TheTableStaysBelowTheOutput) {
  Program program(two(60, 20), terminal());
  ASSERT_TRUE(wait_until_shown(program, "0     running"));
  ASSERT_TRUE(wait_until_shown(program, "漢字 loss 30"));
  EXPECT_TRUE(screen.divided());
  EXPECT_THAT(screen.line(15), StartsWith("────"));
  EXPECT_THAT(screen.line(16), StartsWith("monitor_rank, 0:0"));
  EXPECT_THAT(screen.line(17), StartsWith("rank  state"));
  EXPECT_THAT(screen.line(18), AllOf(StartsWith("0     running"), HasSubstr("漢字 loss ")));
  EXPECT_THAT(screen.line(19), StartsWith("1     running"));
  for (size_t i = 1; i < 14; ++i) EXPECT_THAT(screen.line(i), StartsWith("漢字 loss ")) << i;
  // All output is there, each line once and whole, and nothing of the table.
  screen.feed(std::string_view(program.output()).substr(fed));
  const auto before = program.output().size();
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  screen.feed(std::string_view(result.out).substr(before));
  EXPECT_FALSE(screen.divided());
  EXPECT_EQ(screen.unknown(), 0u);
  std::map<std::string, int> counts;
  for (const auto& line : screen.lines())
    if (!line.empty() && !line.starts_with("accelerate launch: ")) ++counts[line];
  EXPECT_EQ(counts.size(), 60u);
  for (const auto& [line, count] : counts) EXPECT_EQ(count, 2) << line;
}

TEST_F(MonitorTerminal, ProgressBarsAreUndisturbed) {
  const std::string bar =
      "for i in 1 2 3 4 5 6 7 8 9; do printf '\\r%s0%% of the bar' $i; sleep 0.15; done; echo; echo end; sleep 0.5";
  Program program(launching({"--monitor", "--monitor_seconds", "0.1"}, {"/bin/sh", "-c", bar}), terminal());
  ASSERT_TRUE(wait_until_shown(program, "40% of the bar"));
  EXPECT_TRUE(screen.divided());
  ASSERT_TRUE(wait_until_shown(program, "end"));
  size_t bars = 0;
  for (size_t i = 0; i < 15; ++i) bars += screen.line(i).find("of the bar") != std::string::npos;
  EXPECT_EQ(bars, 1u);
  const size_t before = fed;
  const auto result = program.wait();
  screen.feed(std::string_view(result.out).substr(before));
  EXPECT_FALSE(screen.divided());
}

TEST_F(MonitorTerminal, FollowsTheSizeOfTheTerminalAtOnce) {
  Program program(
      launching({"--num_processes", "2", "--monitor", "--monitor_seconds", "60"}, rank_program(2000, 20, "漢字 loss")),
      terminal());
  ASSERT_TRUE(wait_until_shown(program, "漢字 loss 20"));
  for (const auto& [rows, columns] : {std::pair<size_t, size_t>{30, 60}, {12, 120}, {24, 80}}) {
    update(program);
    screen.resize(rows, columns);
    program.resize(static_cast<int>(rows), static_cast<int>(columns));
    for (const auto end = Clock::now() + std::chrono::seconds(60);
         Clock::now() < end && !screen.line(rows - 1).starts_with("1     ");)
      update(program);
    EXPECT_THAT(screen.line(rows - 1), StartsWith("1     ")) << rows;
    EXPECT_THAT(screen.line(rows - 4), StartsWith("monitor_rank, ")) << rows;
    size_t tables = 0;
    for (size_t i = 0; i < rows; ++i) tables += screen.line(i).starts_with("rank  state");
    EXPECT_EQ(tables, 1u) << rows << " rows:\n" << testing::PrintToString(screen.lines());
  }
  // Too low for two parts: the output alone.
  screen.resize(6, 80);
  program.resize(6, 80);
  for (const auto end = Clock::now() + std::chrono::seconds(60);
       Clock::now() < end && (screen.divided() || screen.shows("rank  state"));)
    update(program);
  EXPECT_FALSE(screen.divided());
  EXPECT_FALSE(screen.shows("rank  state"));
  program.signal(SIGTERM);
  program.wait();
}

TEST_F(MonitorTerminal, ASlowReaderDelaysTheTableAndLosesNothing) {
  // Much more output than the terminal takes, and for a while nobody reads at all.
  Program program(
      launching({"--num_processes", "2", "--monitor", "--monitor_seconds", "0.05"},
                {"/bin/sh", "-c", "for i in $(seq 1 2000); do echo \"line $i of the rank\"; done; sleep 4"}),
      terminal());
  std::this_thread::sleep_for(milliseconds(3000));
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  size_t tables = 0;
  for (size_t at = 0; (at = result.out.find("rank  state", at)) != std::string::npos; ++at) ++tables;
  EXPECT_THAT(
      tables,
      AllOf(Gt(0u), Lt(40u)));  // 60 looks while nobody read must not have piled up; the second that follows has 20
  screen.feed(result.out);
  std::map<std::string, int> counts;
  for (const auto& line : screen.lines()) counts[line] += line.starts_with("line ");
  int64_t whole = 0;
  for (int i = 1; i <= 2000; ++i) whole += counts["line " + std::to_string(i) + " of the rank"];
  EXPECT_EQ(whole, 4000);
  EXPECT_FALSE(screen.divided());
}

TEST_F(MonitorTerminal, IsGivenBackAtCtrlC) {
  Program program(two(2000, 20), terminal());
  ASSERT_TRUE(wait_until_shown(program, "0     running"));
  program.type("\x03");
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 130);
  screen.feed(std::string_view(result.out).substr(fed));
  EXPECT_FALSE(screen.divided());
  EXPECT_TRUE(screen.shows("stopped by SIGINT"));
  EXPECT_FALSE(screen.shows("rank  state"));
}

TEST_F(MonitorTerminal, IsGivenBackWhenTheLauncherIsKilled) {
  Program program(two(2000, 20), terminal());
  ASSERT_TRUE(wait_until_shown(program, "0     running"));
  EXPECT_TRUE(screen.divided());
  program.signal(SIGKILL);
  const auto result = program.wait();
  EXPECT_EQ(result.signal, SIGKILL);
  screen.feed(std::string_view(result.out).substr(fed));
  EXPECT_FALSE(screen.divided());
  EXPECT_FALSE(screen.shows("rank  state"));
}

TEST_F(MonitorTerminal, IsGivenBackWhileTheJobIsStopped) {
  Program program(two(2000, 20), terminal());
  ASSERT_TRUE(wait_until_shown(program, "0     running"));
  program.type("\x1a");
  for (const auto end = Clock::now() + std::chrono::seconds(60); Clock::now() < end && screen.divided();)
    update(program);
  EXPECT_FALSE(screen.divided());
  EXPECT_FALSE(screen.shows("rank  state"));
  program.signal(SIGCONT);
  ASSERT_TRUE(wait_until_shown(program, "rank  state"));
  EXPECT_TRUE(screen.divided());
  program.signal(SIGTERM);
  program.wait();
}

TEST_F(MonitorTerminal, AFailureIsReportedOnTheWholeTerminal) {
  Program program(launching({"--num_processes", "2", "--max_restarts", "1", "--monitor", "--monitor_seconds", "0.1"},
                            rank_program(10, 10, "step")),
                  {.env = {"TERM=xterm", "FAIL=1"}, .terminal = true, .rows = 30, .columns = 150});
  screen = Screen(30, 150);
  ASSERT_TRUE(wait_until_shown(program, "0     running"));
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  screen.feed(std::string_view(result.out).substr(fed));
  EXPECT_FALSE(screen.divided());
  const auto lines = screen.lines();
  EXPECT_THAT(lines, testing::Contains(HasSubstr("rank 1 of 2 failed first: it ended with exit code 3")));
  EXPECT_THAT(lines, testing::Contains(HasSubstr("starting all processes again (restart 1 of 1)")));
}

// ---------------------------------------------------------------- a real browser

TEST(MonitorBrowser, ShowsLiveRanksAndNoForeignHtml) {
  ASSERT_NE(Browser::program(), "")
      << "no browser: this test needs chromium (Debian: chromium), which scripts/test.sh installs";
  const std::string attack =
      "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> &amp; loss";
  Program program(launching({"--num_processes", "2", "--monitor_port", "0", "--monitor_seconds", "0.2"},
                            rank_program(4000, 20, attack)));
  const auto url = url_of(program);
  Browser browser;
  browser.open(url);
  ASSERT_TRUE(browser.wait_until("document.querySelectorAll('#ranks tbody tr').length === 2"));
  const auto cell = [&](int row, const std::string& title) {
    return "[...document.querySelectorAll('#ranks tbody tr')[" + std::to_string(row) +
           "].cells][[...document.querySelectorAll('#ranks th')].findIndex(h => h.textContent === '" + title +
           "')].textContent";
  };
  for (int row = 0; row < 2; ++row) {
    EXPECT_EQ(browser.evaluate(cell(row, "rank")), std::to_string(row));
    EXPECT_TRUE(browser.wait_until(cell(row, "state") + " === 'running'"));
    EXPECT_TRUE(
        browser.wait_until("Number(" + cell(row, "step/s") + ") > 0 && Number(" + cell(row, "step/s") + ") < 28"));
    EXPECT_TRUE(browser.wait_until("/^[0-9]+$/.test(" + cell(row, "CPU %") + ")"));
    EXPECT_TRUE(browser.wait_until("/^[0-9.]+ [KM]iB$/.test(" + cell(row, "memory") + ")"));
  }
  EXPECT_EQ(browser.evaluate("[...document.querySelectorAll('#ranks th')].map(h => h.textContent).includes('GPU')"),
            false);
  // It is live: numbers change without anybody's doing.
  const int64_t steps = browser.evaluate("Number(" + cell(1, "steps") + ")");
  EXPECT_TRUE(browser.wait_until("Number(" + cell(1, "steps") + ") > " + std::to_string(steps + 10)));
  // Plots of what is known, each with a line, its range over the ranks, and a name for who can't see it.
  EXPECT_TRUE(browser.wait_until("document.querySelectorAll('#plots figure').length === 3"));
  for (const std::string name : {"steps_per_second", "resident_bytes", "cpu_percent"}) {
    const std::string plot = "document.querySelector('#plot-" + name + " svg')";
    EXPECT_TRUE(browser.wait_until(plot + ".querySelector('.mean').points.length > 3")) << name;
    EXPECT_TRUE(browser.wait_until(plot + ".querySelector('.range').points.length > 6")) << name;
    // Within the picture, and the mean between the extremes.
    EXPECT_EQ(browser.evaluate("[..." + plot +
                               ".querySelector('.mean').points].every(p => p.x >= 0 && p.x <= 260 && p.y "
                               ">= 12 && p.y <= 68)"),
              true)
        << name;
    EXPECT_THAT(browser.evaluate(plot + ".getAttribute('aria-label')").get<std::string>(), HasSubstr(", at most "));
  }
  EXPECT_THAT(
      browser.evaluate("document.querySelector('#plot-steps_per_second figcaption').textContent").get<std::string>(),
      testing::ContainsRegex("^steps [0-9.]+/s$"));
  // The line is text, to the letter, and nothing of it is alive.
  EXPECT_THAT(browser.evaluate(cell(0, "last line")).get<std::string>(), StartsWith(attack + " "));
  EXPECT_EQ(browser.evaluate("document.title"), "monitor_rank – accelerate launch");
  EXPECT_EQ(browser.evaluate("document.querySelectorAll('img').length"), 0);
  EXPECT_EQ(browser.evaluate("document.querySelectorAll('script').length"), 1);
  browser.save_picture(support::scratch_dir() + "/monitor.png");
  // A script that got in all the same would not run: the policy knows one nonce.
  browser.evaluate(
      "void document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = "
      "\"taken\"'}))");
  EXPECT_EQ(browser.evaluate("document.title"), "monitor_rank – accelerate launch");
  ASSERT_FALSE(browser.complaints().empty());
  for (const auto& complaint : browser.complaints())
    EXPECT_THAT(complaint, HasSubstr("Content Security Policy"));  // of that script, and nothing else
  for (const auto& address : browser.requests())
    EXPECT_THAT(address, testing::AnyOf(StartsWith(url), StartsWith("data:")));
  // A rank that is killed is seen, as is the end.
  program.signal(SIGTERM);
  program.wait();
  EXPECT_TRUE(
      browser.wait_until("document.getElementById('trouble').textContent.includes('does not answer any more')"));
  EXPECT_EQ(browser.evaluate("document.querySelectorAll('#ranks tbody tr').length"), 2);
}

TEST(MonitorBrowser, ShowsFiguresThatAProgramSays) {
  ASSERT_NE(Browser::program(), "")
      << "no browser: this test needs chromium (Debian: chromium), which scripts/test.sh installs";
  Program program(launching({"--monitor_port", "0", "--monitor_seconds", "0.2", "--monitor_peak_flops", "1e12"},
                            {bin("monitor_training"), "figures", "20000"}));
  Browser browser;
  browser.open(url_of(program));
  // 300 tokens and 6e9 operations a step, at most 20 steps a second; on a busy machine fewer.
  const auto cell = [](const std::string& title) {
    return "document.querySelector('#ranks tbody tr')?.cells[[...document.querySelectorAll('#ranks th')].findIndex(h "
           "=> "
           "h.textContent === '" +
           title + "')]?.textContent ?? ''";
  };
  EXPECT_TRUE(browser.wait_until("/^([0-9.]+|[1-6][.][0-9]k)$/.test(" + cell("token/s") + ")"));
  EXPECT_TRUE(browser.wait_until("/^[0-9.]+[MG]$/.test(" + cell("FLOP/s") + ")"));
  EXPECT_TRUE(browser.wait_until("Number(" + cell("MFU %") + ") > 0 && Number(" + cell("MFU %") + ") <= 12.5"));
  // One row is of one moment, whatever the machine's speed: as many of each as a step has, as far as digits go.
  const auto number = [&](const std::string& title) {
    return "(t => parseFloat(t) * ({k: 1e3, M: 1e6, G: 1e9}[t.slice(-1)] ?? 1))(" + cell(title) + ")";
  };
  const auto a_step = [&](const std::string& title, const std::string& expected) {
    return browser.wait_until("Math.abs(" + number(title) + " / " + number("step/s") + " / " + expected +
                              " - 1) < 0.1");
  };
  EXPECT_TRUE(a_step("token/s", "300"));
  EXPECT_TRUE(a_step("FLOP/s", "6e9"));
  EXPECT_TRUE(a_step("MFU %", "0.6"));
  EXPECT_EQ(browser.evaluate(cell("comm %")), "");  // which nobody knows
  EXPECT_TRUE(browser.wait_until("/tokens\\/s$/.test(document.getElementById('summary').textContent)"));
  for (const auto& [name, text] : {std::pair<std::string, std::string>{"tokens_per_second", "^tokens [0-9.]+k?/s$"},
                                   {"utilisation", "^model FLOPs utilisation [0-9.]+ %$"},
                                   {"flops_per_second", "^model FLOPs [0-9.]+ [MG]FLOP/s$"}}) {
    EXPECT_TRUE(browser.wait_until("document.querySelector('#plot-" + name + " .mean').points.length > 3")) << name;
    EXPECT_THAT(
        browser.evaluate("document.querySelector('#plot-" + name + " figcaption').textContent").get<std::string>(),
        testing::ContainsRegex(text));
  }
  EXPECT_THAT(browser.complaints(), testing::IsEmpty());
  program.signal(SIGTERM);
  program.wait();
}

TEST(MonitorBrowser, ShowsTheCurveOfWhatIsLogged) {
  ASSERT_NE(Browser::program(), "")
      << "no browser: this test needs chromium (Debian: chromium), which scripts/test.sh installs";
  Program program(
      launching({"--monitor_port", "0", "--monitor_seconds", "0.2"}, {bin("monitor_training"), "steps", "20000"}));
  Browser browser;
  browser.open(url_of(program));
  const std::string plot = "document.getElementById('plot-logged/loss')";
  EXPECT_TRUE(browser.wait_until(plot + "?.querySelector('.mean')?.points.length > 3"));
  EXPECT_THAT(browser.evaluate(plot + ".querySelector('figcaption').textContent").get<std::string>(),
              testing::ContainsRegex("^loss -?[0-9.]+$"));
  // It falls, below zero at last, and takes all of its plot's height.
  EXPECT_EQ(browser.evaluate("[...document.querySelectorAll('#plots figure')].slice(0, 2).map(f => f.id).join()"),
            "plot-logged/epoch,plot-logged/loss");
  EXPECT_TRUE(browser
                  .evaluate("(points => points[0].y < 13 && points[points.length - 1].y > 67)([..." + plot +
                            ".querySelector('.mean').points])")
                  .get<bool>());
  EXPECT_THAT(browser.complaints(), testing::IsEmpty());
  program.signal(SIGTERM);
  program.wait();
}

TEST(MonitorBrowser, AnotherSitesNameGetsNothing) {
  ASSERT_NE(Browser::program(), "")
      << "no browser: this test needs chromium (Debian: chromium), which scripts/test.sh installs";
  Program program(launching({"--monitor_port", "0"}, {"/bin/sh", "-c", "echo secret; sleep 60"}));
  const auto url = url_of(program);
  Browser browser;
  // A page of another origin can send a request, but gets to read nothing.
  browser.open("data:text/html,<title>other</title>");
  ASSERT_TRUE(browser.wait_until("document.title === 'other'"));
  EXPECT_EQ(browser.evaluate("fetch('" + url + "state.json').then(a => a.text(), () => 'refused')"), "refused");
  // .localhost names resolve to this machine in browsers, as a rebound name would; the Host header gives it away.
  std::string rebound = url;
  rebound.replace(rebound.find("127.0.0.1"), 9, "evil.localhost");
  browser.open(rebound);
  ASSERT_TRUE(browser.wait_until("document.body && document.body.innerText.includes('only')"));
  EXPECT_THAT(browser.evaluate("document.body.innerText").get<std::string>(), Not(HasSubstr("secret")));
  program.signal(SIGTERM);
  program.wait();
}

}  // namespace
