#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include "accelerate/utils/version.hpp"
#include "program.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Clock = std::chrono::steady_clock;

/// `-q --num_processes n /bin/sh -c script`
std::vector<std::string> shells(int n, const std::string& script, std::vector<std::string> options = {}) {
  options.insert(options.begin(), {"--num_processes", std::to_string(n)});
  options.insert(options.end(), {"/bin/sh", "-c", script});
  return options;
}

std::vector<std::string> with_launch(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {accelerate_path(), "launch"});
  return arguments;
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) result.push_back(line);
  return result;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  auto result = lines(text);
  std::sort(result.begin(), result.end());
  return result;
}

std::string content(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A fresh folder for one test.
class Launch : public testing::Test {
 protected:
  Launch() : folder(support::scratch_dir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder);
    fs::create_directories(folder);
  }
  std::string write(const std::string& name, const std::string& text, bool executable = false) const {
    std::ofstream(folder / name) << text;
    if (executable) fs::permissions(folder / name, fs::perms::owner_all);
    return folder / name;
  }
  /// A script whose rank and background grandchild write their numbers to `pids` and then live for a minute. The
  /// grandchild is hard to get rid of.
  std::string with_grandchild(const std::string& before = "") const {
    return before + " (trap '' INT TERM HUP; exec sleep 60) & echo $! >> " + pids() + "; echo $$ >> " + pids() +
           "; wait; wait; wait";
  }
  std::string pids() const { return folder / "pids"; }

  const fs::path folder;
};

// ---------------------------------------------------------------- command line

TEST(Cli, HelpVersionAndUnknownCommands) {
  auto run = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), accelerate_path());
    return Program(arguments).wait();
  };
  EXPECT_EQ(run({"--version"}).out, std::string("accelerate ") + ACCELERATE_VERSION + "\n");
  EXPECT_THAT(run({"--help"}).out, HasSubstr("launch"));
  const auto none = run({});
  EXPECT_NE(none.exit_code, 0);
  EXPECT_THAT(none.err, HasSubstr("Usage"));
  const auto typo = run({"lunch"});
  EXPECT_EQ(typo.exit_code, 64);
  EXPECT_THAT(typo.err, HasSubstr("Did you mean 'launch'?"));
}

TEST(Cli, LaunchHelpListsEveryOptionOnce) {
  const auto help = launch({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  // Growth of this list is a decision.
  for (const char* option : {"--num_processes",
                             "--num_machines",
                             "--machine_rank",
                             "--main_process_ip",
                             "--main_process_port",
                             "--cpu",
                             "--num_cpu_threads_per_process",
                             "--mixed_precision",
                             "--gradient_accumulation_steps",
                             "--debug",
                             "-m, --module",
                             "--no_python",
                             "--log_dir",
                             "--redirects",
                             "-t, --tee",
                             "--quiet, -q",
                             "--fsdp_version",
                             "--megatron_lm_tp_degree",
                             "--dry_run",
                             "--monitor_interval",
                             "--grace_seconds",
                             "-h, --help"})
    EXPECT_THAT(help.out, HasSubstr("\n  " + std::string(option) + " ")) << option;
  size_t options = 0;
  for (const auto& line : lines(help.out)) options += line.starts_with("  -");
  EXPECT_EQ(options, 151u);
}

TEST(Cli, MistakesAreExplained) {
  auto error = [](const std::vector<std::string>& arguments) {
    const auto result = launch(arguments);
    EXPECT_EQ(result.exit_code, 64) << result.err;
    return result.err;
  };
  EXPECT_THAT(error({"--num_proceses", "2", "/bin/true"}), HasSubstr("Did you mean '--num_processes'?"));
  EXPECT_THAT(error({"--num-procesess=2", "/bin/true"}), HasSubstr("Did you mean '--num"));
  EXPECT_THAT(error({"--num_processes", "two", "/bin/true"}), HasSubstr("two"));
  EXPECT_THAT(error({}), HasSubstr("no program was given"));
  EXPECT_THAT(error({"/no/such/program"}), HasSubstr("there is no program '/no/such/program'"));
  EXPECT_THAT(error({"no-such-program"}), HasSubstr("in the current folder or in PATH"));
  EXPECT_THAT(error({"/"}), HasSubstr("is a folder"));
  EXPECT_THAT(error({"--num_machines", "2", "--num_processes", "2", "/bin/true"}),
              HasSubstr("--machine_rank must be given"));
  EXPECT_THAT(error({"--tee", "7", "/bin/true"}), HasSubstr("--tee is '7'"));
}

TEST_F(Launch, ProgramsThatCannotRun) {
  Result result;
  for (const std::string bytes : {"#!/bin/sh\necho\n", "\177ELF\1"}) {
    result = launch({write("notes", bytes + std::string(1, bytes[0] == '#' ? '\n' : '\0'))});
    EXPECT_EQ(result.exit_code, 64);
    EXPECT_THAT(result.err, HasSubstr("chmod +x"));
  }
  result = launch({write("garbage", "\x01\x02\x03", true)});
  EXPECT_EQ(result.exit_code, 71);
  EXPECT_THAT(result.err, HasSubstr("#!interpreter"));
  result = launch({write("lost", "#!/no/interpreter\n", true)});
  EXPECT_EQ(result.exit_code, 71);
  EXPECT_THAT(result.err, HasSubstr("interpreter"));
  write("training", "#!/bin/sh\n", true);
  result = launch({"./trainin"}, {.env = {}, .input = "", .terminal = false, .read_output = true, .folder = folder});
  EXPECT_THAT(result.err, HasSubstr("Did you mean './training'?"));
}

TEST_F(Launch, TextThatIsNotExecutableIsForPython) {
  EXPECT_EQ(launch({"-q", write("train", "print('ran')\n")}).out, "ran\n");
  EXPECT_EQ(launch({"-q", write("shell", "#!/bin/sh\necho shell\n", true)}).out, "shell\n");
}

// As cron, systemd and containers call it, which activate nothing.
TEST_F(Launch, PythonOfTheEnvironmentInWhichTheLauncherLies) {
  fs::create_directories(folder / "venv/bin");
  write("venv/pyvenv.cfg", "");
  write("venv/bin/python", "#!/bin/sh\necho that of the environment\n", true);
  for (const bool linked : {true, false}) {
    const fs::path own = folder / "venv/bin/accelerate";
    fs::remove(own);
    if (linked) fs::create_symlink(accelerate_path(), own);
    else fs::copy_file(accelerate_path(), own);
    const auto out = Program({own, "launch", "-q", write("s.py", "print('another')\n")}).wait().out;
    EXPECT_EQ(out, "that of the environment\n") << linked;
  }
}

TEST_F(Launch, ArgumentsAfterTheProgramAreItsOwn) {
  const auto result = launch({"-q", "--cpu", "/bin/echo", "--num_processes", "7", "--help", "-q"});
  EXPECT_EQ(result.out, "--num_processes 7 --help -q\n");
}

TEST_F(Launch, DashesAndUnderscoresAreTheSame) {
  EXPECT_EQ(launch({"-q", "--num-processes", "2", "--mixed-precision=bf16", "/bin/sh", "-c",
                    "echo $WORLD_SIZE $ACCELERATE_MIXED_PRECISION"})
                .out,
            "2 bf16\n2 bf16\n");
}

// ---------------------------------------------------------------- what is run, and with which environment

TEST_F(Launch, EveryRankKnowsItsPlace) {
  const auto result = launch(shells(
      3, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $ACCELERATE_USE_CPU $OMP_NUM_THREADS",
      {"--cpu", "--num_cpu_threads_per_process", "5"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(sorted_lines(result.out), (std::vector<std::string>{"0 0 3 3 127.0.0.1 True 5", "1 1 3 3 127.0.0.1 True 5",
                                                                "2 2 3 3 127.0.0.1 True 5"}));
}

TEST_F(Launch, ThreadsChosenAreMentionedUnlessQuiet) {
  EXPECT_THAT(launch({"/bin/true"}).err, HasSubstr("OMP_NUM_THREADS=1"));
  EXPECT_EQ(launch({"-q", "/bin/true"}).err, "");
  EXPECT_EQ(launch({"/bin/true"}, {.env = {"OMP_NUM_THREADS=3"}}).err, "");
  // Under DeepSpeed, too, where the reference leaves it to torchrun.
  const std::vector<std::string> words{"-q",
                                       "--use_deepspeed",
                                       "--num_processes",
                                       "2",
                                       "--main_process_port",
                                       "0",
                                       "/bin/sh",
                                       "-c",
                                       "echo threads: $OMP_NUM_THREADS"};
  EXPECT_THAT(launch(words).out, HasSubstr("threads: 1\n"));
  EXPECT_THAT(launch(words, {.env = {"OMP_NUM_THREADS=3"}}).out, HasSubstr("threads: 3\n"));
}

TEST_F(Launch, PythonFilesModulesAndNoPython) {
  ASSERT_EQ(::access("/usr/bin/python3", X_OK), 0) << "there is no /usr/bin/python3 here (Debian: python3)";
  const Program::Options here{
      .env = {"PYTHON=/usr/bin/python3"}, .input = "", .terminal = false, .read_output = true, .folder = folder};
  write("train.py", "import sys, os\nprint('script', sys.argv[1:], os.environ.get('WORLD_SIZE'))\n");
  EXPECT_EQ(launch({"-q", "train.py", "--lr", "1"}, here).out, "script ['--lr', '1'] None\n");
  EXPECT_EQ(launch({"-q", "--num_processes", "2", "train.py"}, here).out, "script [] 2\nscript [] 2\n");
  EXPECT_EQ(launch({"-q", "-m", "train", "x"}, here).out, "script ['x'] None\n");
  write("direct.py", "#!/bin/sh\necho shell $1\n", true);
  EXPECT_EQ(launch({"-q", "--no_python", "direct.py", "x"}, here).out, "shell x\n");
  EXPECT_THAT(
      launch({"train.py"},
             {.env = {"PYTHON=/no/python"}, .input = "", .terminal = false, .read_output = true, .folder = folder})
          .err,
      HasSubstr("PYTHON is '/no/python'"));
  // An active virtual environment wins over PATH.
  fs::create_directories(folder / "venv/bin");
  write("venv/bin/python", "#!/bin/sh\necho from the environment\n", true);
  EXPECT_EQ(launch({"-q", "train.py"}, {.env = {"VIRTUAL_ENV=" + (folder / "venv").string(), "PYTHON="},
                                        .input = "",
                                        .terminal = false,
                                        .read_output = true,
                                        .folder = folder})
                .out,
            "from the environment\n");
}

TEST_F(Launch, InputGoesToRankZero) {
  const auto result = launch(shells(2, "echo $RANK: $(cat)", {"-q"}), {.env = {}, .input = "words"});
  EXPECT_EQ(sorted_lines(result.out), (std::vector<std::string>{"0: words", "1:"}));
}

// ---------------------------------------------------------------- ports

TEST_F(Launch, FreePortIsChosenAlsoForABusyOne) {
  std::vector<std::string> ports;
  for (const auto& options : {std::vector<std::string>{"-q"}, {"-q", "--main_process_port", "0"}}) {
    const auto out = sorted_lines(launch(shells(2, "echo $MASTER_PORT", options)).out);
    ASSERT_EQ(out.size(), 2u);
    EXPECT_EQ(out[0], out[1]);
    EXPECT_GT(std::stoi(out[0]), 1024);
    ports.push_back(out[0]);
  }
  EXPECT_NE(ports[0], ports[1]);

  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  socklen_t length = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  const auto port = std::to_string(ntohs(address.sin_port));
  const auto result =
      launch(shells(2, "[ $MASTER_PORT != " + port + " ] && echo not " + port, {"--main_process_port", port}));
  ::close(fd);
  // Two jobs with one config file.
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("the port " + port + " is in use"));
  EXPECT_EQ(result.out, "not " + port + "\nnot " + port + "\n");
  EXPECT_EQ(launch(shells(2, "echo $MASTER_PORT", {"-q", "--main_process_port", port})).out, port + "\n" + port + "\n");
}

// ---------------------------------------------------------------- output

TEST_F(Launch, LinesOfFourRanksStayWhole) {
  // Each line is written in two pieces, so that anything less than forwarding whole lines mixes them.
  const std::string script =
      "x=$(printf %0200d 0); i=0; while [ $i -lt 2000 ]; do printf \"<$RANK $i $x\"; printf \"$x>\\n\"; i=$((i+1)); "
      "done";
  const auto result = launch(shells(4, script, {"-q"}));
  EXPECT_EQ(result.exit_code, 0);
  std::map<char, int> next;
  const std::string zeros(400, '0');
  for (const auto& line : lines(result.out)) {
    ASSERT_GT(line.size(), 2u);
    const char rank = line[1];
    ASSERT_EQ(line, std::string("<") + rank + " " + std::to_string(next[rank]) + " " + zeros + ">");
    ++next[rank];
  }
  EXPECT_EQ(next, (std::map<char, int>{{'0', 2000}, {'1', 2000}, {'2', 2000}, {'3', 2000}}));
}

TEST_F(Launch, StreamsThatShareATargetDoNotMixEither) {
  const auto result = Program({"/bin/sh", "-c",
                               accelerate_path() + " launch -q --num_processes 2 /bin/sh -c '" +
                                   "x=$(printf %03000d 0); i=0; while [ $i -lt 300 ]; do printf \"<o$x\"; printf "
                                   "\"<e$x\" >&2; printf \"o>\\n\"; printf \"e>\\n\" >&2; i=$((i+1)); done' 2>&1"})
                          .wait();
  std::map<std::string, int> count;
  for (const auto& line : lines(result.out)) ++count[line];
  const std::string zeros(3000, '0');
  EXPECT_EQ(count, (std::map<std::string, int>{{"<o" + zeros + "o>", 600}, {"<e" + zeros + "e>", 600}}));
}

TEST_F(Launch, ProgressBarIsShownWhileItMoves) {
  Program program(with_launch(shells(2, "if [ $RANK = 0 ]; then printf '\\r 10%%' >&2; sleep 30; fi", {"-q"})));
  EXPECT_TRUE(program.wait_for("\r 10%"));
  program.signal(SIGINT);
  EXPECT_EQ(program.wait().exit_code, 130);
}

TEST_F(Launch, LogFilesHaveTorchrunsLayout) {
  const std::string script = "echo out $RANK; echo err $RANK >&2";
  const auto result =
      launch(shells(2, script, {"-q", "--log_dir", folder / "logs", "--tee", "0:3,1:2", "--redirects", "1:1"}));
  ASSERT_EQ(std::distance(fs::directory_iterator(folder / "logs"), fs::directory_iterator()), 1);
  const fs::path run = fs::directory_iterator(folder / "logs")->path() / "attempt_0";
  EXPECT_EQ(content(run / "0/stdout.log"), "out 0\n");
  EXPECT_EQ(content(run / "0/stderr.log"), "err 0\n");
  EXPECT_EQ(content(run / "1/stdout.log"), "out 1\n");
  EXPECT_EQ(content(run / "1/stderr.log"), "err 1\n");
  EXPECT_EQ(result.out, "[default0]:out 0\n");  // rank 1's is redirected
  EXPECT_EQ(sorted_lines(result.err), (std::vector<std::string>{"[default0]:err 0", "[default1]:err 1"}));
}

TEST_F(Launch, LinesAreMarkedAsTorchrunDoes) {
  const auto lines_of = [&](const std::string& tee, std::vector<std::string> env = {}) {
    const auto result = launch(
        shells(1, "echo out; echo err >&2", {"-q", "--log_dir", folder / "logs", "--tee", tee, "--role", "trainer"}),
        {.env = std::move(env)});
    return std::pair(result.out, result.err);
  };
  EXPECT_EQ(lines_of("1"), std::pair(std::string("[trainer0]:out\n"), std::string("err\n")));
  EXPECT_EQ(lines_of("2"), std::pair(std::string("out\n"), std::string("[trainer0]:err\n")));
  EXPECT_EQ(lines_of("1", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=<${role_name} $rank/${local_rank} $$ $x> "}).first,
            "<trainer 0/0 $ $x> out\n");
}

// Each rank of mpirun's would else start as many again, in a job of its own.
TEST_F(Launch, InsideMpirunALauncherIsOneRank) {
  bool found = false;
  for (const char* mpirun : {"mpirun.openmpi", "mpirun.mpich"}) {
    const std::string there = Program({"/bin/sh", "-c", std::string("command -v ") + mpirun}).wait().out;
    if (there.empty()) continue;
    found = true;
    const auto file =
        write("c.yaml", "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nnum_machines: 1\n");
    const auto result =
        Program({"/usr/bin/env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                 "OMPI_MCA_rmaps_base_oversubscribe=1", mpirun, "-n", "2", accelerate_path(), "launch", "--config_file",
                 file, "/bin/sh", "-c", "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_PORT"})
            .wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(sorted_lines(result.out),
              (std::vector<std::string>{"0 of 2, 0 of 2 at 29500", "1 of 2, 1 of 2 at 29500"}))
        << mpirun;
  }
  if (!found) GTEST_SKIP() << "no mpirun here";
}

TEST_F(Launch, LogFolderAloneKeepsACopy) {
  const auto result = launch({"-q", "--log_dir", folder / "logs", "/bin/sh", "-c", "echo out; echo err >&2"});
  const fs::path run = fs::directory_iterator(folder / "logs")->path() / "attempt_0";
  EXPECT_EQ(content(run / "0/stdout.log"), "out\n");
  EXPECT_EQ(content(run / "0/stderr.log"), "err\n");
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.err, "err\n");
}

TEST_F(Launch, LogFolderThatCannotBeMade) {
  const auto result = launch({"--log_dir", write("file", "") + "/logs", "/bin/true"});
  EXPECT_EQ(result.exit_code, 71);
  EXPECT_THAT(result.err, HasSubstr("--log_dir"));
}

TEST_F(Launch, RedirectedErrorsAreStillReported) {
  const auto result = launch(shells(2, "echo last words >&2; [ $RANK = 0 ] || exit 9; sleep 30",
                                    {"--log_dir", folder / "logs", "--redirects", "3"}));
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_THAT(result.err, HasSubstr("| last words"));
  EXPECT_THAT(result.err, HasSubstr("attempt_0/1"));
}

TEST_F(Launch, SlowReaderSlowsTheRanksAndFillsNoMemory) {
  Program program(with_launch(shells(2, "yes a line that is written again and again", {"-q"})), {.read_output = false});
  std::this_thread::sleep_for(milliseconds(1500));
  int64_t kilobytes = 0;
  std::ifstream status("/proc/" + std::to_string(program.pid()) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) kilobytes = std::stoll(line.substr(8));
  EXPECT_GT(kilobytes, 0);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  EXPECT_LT(kilobytes, 200 << 10);
#else
  EXPECT_LT(kilobytes, 8 << 10);
#endif
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait().exit_code, 143);
}

TEST_F(Launch, ReaderThatGoesAwayEndsTheRanks) {
  for (int n : {1, 2}) {
    Program program(with_launch(shells(n, "exec yes", {"-q"})));
    ASSERT_TRUE(program.wait_for("y\n"));
    program.close_output();
    EXPECT_EQ(program.wait().exit_code, 128 + SIGPIPE);
  }
}

// ---------------------------------------------------------------- failures

TEST_F(Launch, FirstFailureIsNamedThoughOthersDieAfter) {
  // Rank 0 waits for the end of rank 1, as one does in a collective, and dies of it at once, often before the kernel
  // reports the end of rank 1. Exit code 69 is that of a CommError; but programs exist that exit with 1 whatever
  // happens.
  const std::string fifo = folder / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string code : {"69", "1", "69", "1", "69", "1"}) {
    const std::string words = code == "69" ? "" : "echo the reason >&2;";  // without words, the code must do
    const auto result =
        launch(shells(2, "if [ $RANK = 1 ]; then exec 3>" + fifo + "; sleep 0.2; " + words + " exit 3; else cat <" +
                             fifo + "; echo a consequence >&2; exit " + code + "; fi"));
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_THAT(result.err, HasSubstr("rank 1 of 2 failed first: it ended with exit code 3"));
    EXPECT_THAT(result.err, HasSubstr(words.empty() ? "rank 1" : "    | the reason\n"));
    EXPECT_THAT(result.err, Not(HasSubstr("| a consequence")));
    EXPECT_THAT(result.err, HasSubstr("rank 0 ended with exit code " + code));
    EXPECT_THAT(result.err, HasSubstr("/bin/sh -c"));
  }
}

TEST_F(Launch, LossOfAPeerIsNotTheCauseEvenIfItIsSeenFirst) {
  // --monitor_interval leaves the other rank the time to fail by itself.
  const std::vector<std::pair<std::string, std::string>> cases{
      {"exit 3", "exit 69"}, {"kill -9 $$", "exit 1"}, {"kill -9 $$", "kill -ABRT $$"}};
  for (const auto& [cause, consequence] : cases) {
    const auto result = launch(
        shells(2, "if [ $RANK = 0 ]; then echo peer lost >&2; " + consequence + "; else sleep 0.5; " + cause + "; fi",
               {"--monitor_interval", "5"}));
    EXPECT_THAT(result.err, HasSubstr("rank 1 of 2 failed first"));
    EXPECT_THAT(result.err, Not(HasSubstr("stopped by the launcher")));
  }
}

TEST_F(Launch, WhoOnlyReportsAPeersFailureWaitsForItsReason) {
  // Rank 0 still unwinds when rank 1 has heard and left: longer than the usual patience.
  const auto result = launch(shells(
      2,
      "if [ $RANK = 1 ]; then echo rank 0 failed >&2; exit 69; else sleep 1; echo the disk is full >&2; exit 1; fi"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 0 of 2 failed first: it ended with exit code 1"),
                                HasSubstr("    | the disk is full\n"), Not(HasSubstr("| rank 0 failed"))));
}

TEST_F(Launch, TailHasTheLastTwentyLines) {
  const auto result = launch(shells(
      2, "[ $RANK = 1 ] || exec sleep 30; i=1; while [ $i -le 100 ]; do echo line $i. >&2; i=$((i+1)); done; exit 1"));
  const std::string report = result.err.substr(result.err.find("failed first"));
  EXPECT_THAT(report, HasSubstr("| line 81.\n"));
  EXPECT_THAT(report, HasSubstr("| line 100.\n"));
  EXPECT_THAT(report, Not(HasSubstr("| line 80.\n")));
  EXPECT_THAT(report, HasSubstr("rank 0 was stopped by the launcher"));
}

TEST_F(Launch, KilledRank) {
  const auto result = launch(shells(3, "[ $RANK = 2 ] && kill -9 $$; exec sleep 1000"));
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err, HasSubstr("rank 2 of 3 failed first: it was killed by signal 9 (SIGKILL)"));
  EXPECT_THAT(result.err, HasSubstr("out of memory"));
}

TEST_F(Launch, OneProcessFails) {
  const auto result = launch({"/bin/sh", "-c", "exit 42"});
  EXPECT_EQ(result.exit_code, 42);
  EXPECT_THAT(result.err, HasSubstr("rank 0 of 1 failed: it ended with exit code 42"));
  EXPECT_EQ(launch({"/bin/sh", "-c", "kill -SEGV $$"}).exit_code, 139);
  EXPECT_EQ(lines(launch({"-q", "/bin/sh", "-c", "exit 42"}).err).size(), 1u);
}

TEST_F(Launch, RankThatIgnoresTermIsKilledAfterTheGrace) {
  const auto result =
      launch(shells(2, "if [ $RANK = 0 ]; then trap '' TERM; while :; do sleep 1; done; fi; sleep 0.3; exit 4",
                    {"--grace_seconds", "1"}));
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.err, HasSubstr("rank 0 did not stop and was killed by the launcher"));
}

TEST_F(Launch, RankMayCleanUpWithinTheGrace) {
  const auto result =
      launch(shells(2, "if [ $RANK = 0 ]; then trap 'echo saved; exit 0' TERM; echo ready >" +
                           (folder / "ready").string() + "; while :; do sleep 0.1; done; fi; while [ ! -e " +
                           (folder / "ready").string() + " ]; do sleep 0.05; done; exit 4"));
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.out, HasSubstr("saved"));
}

TEST_F(Launch, EarlyGoodEndOfOneRankLeavesTheOthersAlone) {
  const auto result = launch(shells(2, "[ $RANK = 0 ] && exit 0; sleep 1; echo finished", {"-q"}));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "finished\n");
}

TEST_F(Launch, ErrorFileOfTheRankIsRead) {
  const auto result = launch(shells(2,
                                    "[ $RANK = 0 ] && exec sleep 30; echo '{\"message\": {\"message\": \"ValueError: "
                                    "bad batch\"}}' > $TORCHELASTIC_ERROR_FILE; exit 1"));
  EXPECT_THAT(result.err, HasSubstr("ValueError: bad batch"));
}

TEST_F(Launch, ErrorFileIsHandedOnToWhoStartedTheLauncher) {
  const std::string file = folder / "outer.json";
  const auto run = [&](const std::string& script, const std::vector<std::string>& flags = {}) {
    const auto result = launch(shells(2, script, flags), {.env = {"TORCHELASTIC_ERROR_FILE=" + file}});
    std::ifstream in(file);
    return std::pair(result.exit_code, std::string(std::istreambuf_iterator<char>(in), {}));
  };
  const std::string waits = "[ $RANK = 0 ] && exec sleep 30; ";
  const auto told = run(waits + "echo '{\"message\": {\"message\": \"bad batch\"}}' >$TORCHELASTIC_ERROR_FILE; exit 5");
  EXPECT_EQ(told.first, 5);
  EXPECT_THAT(told.second, AllOf(HasSubstr("\"message\":\"bad batch\""), HasSubstr("\"errorCode\":5")));
  EXPECT_THAT(run(waits + "exit 6").second, HasSubstr("rank 1 of 2 ended with exit code 6"));
  const auto restarted = run("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 7", {"--max_restarts", "1"});
  EXPECT_EQ(restarted, std::pair(0, std::string()));
  EXPECT_FALSE(fs::exists(file)) << "the job has ended well";
}

TEST_F(Launch, FailureLeavesNoGrandchildren) {
  const auto result =
      launch(shells(2, with_grandchild("[ $RANK = 1 ] && { while [ $(cat " + pids() +
                                       " 2>/dev/null | wc -l) -lt 2 ]; do sleep 0.05; done; exit 5; };")));
  EXPECT_EQ(result.exit_code, 5);
  for (pid_t pid : pids_in(pids(), 2)) EXPECT_TRUE(gone(pid)) << pid;
}

// ---------------------------------------------------------------- signals to the launcher

TEST_F(Launch, StopSignalsLeaveNoOrphan) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    fs::remove(pids());
    Program program(with_launch(shells(2, with_grandchild(), {"--grace_seconds", "5"})));
    const auto all = pids_in(pids(), 4);
    program.signal(number);
    const auto result = program.wait();
    EXPECT_EQ(result.exit_code, 128 + number);
    for (pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid << " after signal " << number;
  }
}

TEST_F(Launch, RanksGetTheSignalItself) {
  Program program(with_launch(shells(
      2, "trap 'echo got INT; exit 0' INT; trap 'echo got USR1' USR1; echo ready; while :; do sleep 0.1; done")));
  ASSERT_TRUE(program.wait_for("ready\nready"));
  program.signal(SIGUSR1);
  ASSERT_TRUE(program.wait_for("got USR1\ngot USR1"));
  program.signal(SIGINT);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_THAT(result.out, HasSubstr("got INT\ngot INT"));
}

TEST_F(Launch, StubbornRanksAreKilledAfterTheGraceOrASecondCtrlC) {
  const std::string script = "trap '' INT TERM;" + with_grandchild() + "; while :; do sleep 1; done";
  for (const bool second : {false, true}) {
    fs::remove(pids());
    Program program(with_launch(shells(2, script, {"--grace_seconds", second ? "1000" : "1"})));
    const auto all = pids_in(pids(), 4);
    program.signal(SIGINT);
    std::this_thread::sleep_for(milliseconds(300));
    if (second) program.signal(SIGINT);
    const auto result = program.wait();
    EXPECT_EQ(result.exit_code, 130);
    EXPECT_THAT(result.err, HasSubstr("were killed"));
    for (pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid;
  }
}

TEST_F(Launch, DeathOfTheLauncherTakesTheRanksAndTheirChildrenAlong) {
  for (int n : {1, 2}) {
    fs::remove(pids());
    Program program(with_launch(shells(n, "trap '' INT TERM HUP;" + with_grandchild())));
    const auto all = pids_in(pids(), static_cast<size_t>(2 * n));
    program.signal(SIGKILL);
    EXPECT_EQ(program.wait().signal, SIGKILL);
    for (pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid;
  }
}

TEST_F(Launch, RanksDieWithTheLauncherEvenWithoutTheWarden) {
  Program program(with_launch(shells(2, "echo $$ >> " + pids() + "; exec sleep 60")));
  const auto ranks = pids_in(pids(), 2);
  const std::string launcher = std::to_string(program.pid());
  int wardens = 0;
  for (int look = 0; wardens == 0 && look < 1000; ++look) {  // it takes its name when it runs, ranks or no ranks
    if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::ifstream children("/proc/" + launcher + "/task/" + launcher + "/children");
    for (pid_t pid; children >> pid;)
      if (content("/proc/" + std::to_string(pid) + "/comm") == "accelerate-ward\n") ++wardens, ::kill(pid, SIGKILL);
  }
  EXPECT_EQ(wardens, 1);
  program.signal(SIGKILL);
  program.wait();
  for (pid_t pid : ranks) EXPECT_TRUE(gone(pid)) << pid;
}

TEST_F(Launch, AKilledLauncherLeavesNoTemporaryFolder) {
  Program program(with_launch(shells(2, "echo ready; exec sleep 60")), {.env = {"TMPDIR=" + folder.string()}});
  ASSERT_TRUE(program.wait_for("ready"));
  EXPECT_FALSE(fs::is_empty(folder));  // where ranks may leave why they failed
  program.signal(SIGKILL);
  program.wait();
  const auto end = Clock::now() + std::chrono::seconds(60);
  while (!fs::is_empty(folder) && Clock::now() < end) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(fs::is_empty(folder));
}

TEST_F(Launch, SignalsAreTakenWhileThousandsOfRanksStart) {
  Program program(
      with_launch({"-q", "--num_processes", "4000", "/bin/sh", "-c", "echo $$ >> " + pids() + "; exec sleep 100"}));
  pids_in(pids(), 20);
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait().exit_code, 128 + SIGTERM);
  const auto started = lines(content(pids())).size();
  EXPECT_LT(started, 4000u);
}

// A folder of logs may be one where everybody can write. The first attempt makes what the second one meets.
TEST_F(Launch, LogsAreNotWrittenThroughLinks) {
  for (const std::string& trap :
       {"ln -s " + (folder / "victim").string() + " $run/attempt_1",
        "mkdir -p $run/attempt_1/0; ln -s " + (folder / "victim/file").string() + " $run/attempt_1/0/stdout.log"}) {
    fs::remove_all(folder / "logs");
    fs::create_directories(folder / "victim");
    std::ofstream(folder / "victim/file") << "precious";
    const std::string script = "run=$(dirname $(dirname $(dirname $TORCHELASTIC_ERROR_FILE))); [ $RANK = 1 ] || { " +
                               trap + "; }; echo lost; exit 1";
    const auto result = launch(
        {"-q", "--num_processes", "2", "--max_restarts", "1", "--log_dir", folder / "logs", "/bin/sh", "-c", script});
    EXPECT_NE(result.exit_code, 0);
    EXPECT_THAT(result.err, HasSubstr("is a link")) << trap;
    EXPECT_EQ(content(folder / "victim/file"), "precious");
    EXPECT_EQ(std::distance(fs::directory_iterator(folder / "victim"), {}), 1);
  }
}

TEST_F(Launch, SignalsReachProgramsOfTestsThatIgnoreThem) {  // as where ctest runs in a shell's background, by nohup
  for (const int number : {SIGINT, SIGHUP}) {
    const auto before = ::signal(number, SIG_IGN);
    Program program(with_launch(shells(1, "echo ready; exec sleep 60")));
    ::signal(number, before);
    ASSERT_TRUE(program.wait_for("ready"));
    program.signal(number);
    EXPECT_EQ(program.wait().exit_code, 128 + number);
  }
}

TEST_F(Launch, IgnoredSignalsStayIgnored) {  // nohup
  Program program({"/bin/sh", "-c",
                   "trap '' HUP; exec " + accelerate_path() +
                       " launch -q --num_processes 2 /bin/sh -c 'echo ready; sleep 1; echo done'"});
  ASSERT_TRUE(program.wait_for("ready\nready"));
  program.signal(SIGHUP);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("done\ndone"));
}

// ---------------------------------------------------------------- terminal

const Program::Options kTerminal{.env = {}, .input = "", .terminal = true};

TEST_F(Launch, OneProcessHasTheTerminalToItself) {
  Program program(with_launch({"-q", "/bin/sh", "-c",
                               "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo three terminals; read line; echo read $line"}),
                  kTerminal);
  ASSERT_TRUE(program.wait_for("three terminals"));
  program.type("typed\n");
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("read typed"));
}

// Debuggers, prompts and colours; the others have nobody to talk to.
TEST_F(Launch, TheFirstOfSeveralProcessesHasTheTerminal) {
  const std::string terminals = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo three terminals of $RANK; ";
  Program program(
      with_launch(shells(2, terminals + "[ $RANK = 0 ] || exec sleep 1; read line; echo read $line", {"-q"})),
      kTerminal);
  ASSERT_TRUE(program.wait_for("three terminals of 0"));
  program.type("typed\n");
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("read typed"));
  EXPECT_THAT(result.out, Not(HasSubstr("terminals of 1")));
}

TEST_F(Launch, PythonOfSeveralProcessesHoldsNothingBack) {
  const auto command = [](int ranks) {
    auto words = with_launch(
        shells(ranks, "echo unbuffered ${PYTHONUNBUFFERED:-no}, lines ${ACCELERATE_LAUNCH_LINES:-no}", {"-q"}));
    words.insert(words.begin(), {"/usr/bin/env", "-u", "PYTHONUNBUFFERED"});
    return words;
  };
  EXPECT_EQ(Program(command(1)).wait().out, "unbuffered no, lines 1\n");
  EXPECT_EQ(Program(command(2)).wait().out, "unbuffered 1, lines 1\nunbuffered 1, lines 1\n");
  EXPECT_THAT(Program(command(1), kTerminal).wait().out, HasSubstr("unbuffered no, lines no"));
  const auto own = launch(shells(2, "echo ${PYTHONUNBUFFERED:-empty}", {"-q"}), {.env = {"PYTHONUNBUFFERED="}});
  EXPECT_EQ(own.out, "empty\nempty\n");
}

TEST_F(Launch, CtrlCOnTheTerminal) {
  for (int n : {1, 2}) {
    fs::remove(pids());
    // The background process ignores Ctrl-C, as background processes of a script do.
    Program program(with_launch(shells(n, with_grandchild(), {"--grace_seconds", "5"})), kTerminal);
    const auto all = pids_in(pids(), static_cast<size_t>(2 * n));
    program.type("\x03");
    EXPECT_EQ(program.wait().exit_code, 130);
    for (pid_t pid : all) EXPECT_TRUE(gone(pid)) << pid << " of " << n;
  }
}

TEST_F(Launch, RanksLearnTheWidthOfTheTerminal) {
  Program program(with_launch(shells(2, "echo columns ${ACCELERATE_LAUNCH_COLUMNS:-none} of $RANK")), kTerminal);
  const auto out = program.wait().out;
  EXPECT_THAT(out, HasSubstr("columns 80 of 1"));
  EXPECT_THAT(out, HasSubstr("columns none of 0"));  // it has the terminal itself
  EXPECT_EQ(sorted_lines(launch(shells(2, "echo columns ${ACCELERATE_LAUNCH_COLUMNS:-none}", {"-q"})).out).front(),
            "columns none");
}

// ---------------------------------------------------------------- cost

/// A start takes 6 MB and some milliseconds; LibTorch alone would take a hundred of either.
TEST_F(Launch, ManyRanksAndLittleMemory) {
  const auto result = Program(with_launch({"-q", "--num_processes", "256", "/bin/sh", "-c", "echo $RANK"})).wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 256);
  std::cout << "256 ranks: the launcher's largest memory: " << result.usage.ru_maxrss << " kB\n";
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  EXPECT_LT(result.usage.ru_maxrss, 20000);
#endif
}

// Ranks that end when they are asked to are not waited for any longer, however long they might have taken.
TEST_F(Launch, RestartsAsSoonAsTheOthersHaveStopped) {
  const auto result =
      launch({"-q", "--num_processes", "2", "--max_restarts", "1", "--grace_seconds", "1000", "/bin/sh", "-c",
              "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && { echo again $RANK; exit; }; "
              "[ $RANK = 1 ] && kill -9 $$; exec sleep 1000"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(sorted_lines(result.out), testing::ElementsAre("again 0", "again 1"));
}

// It sleeps, and is woken some ten times a second: whoever polls is woken more often, or never sleeps.
TEST_F(Launch, WaitingCostsNoProcessorTime) {
  const auto usage = launch(shells(2, "exec sleep 2", {"-q"})).usage;
  EXPECT_GT(usage.ru_nvcsw, 5) << "times that it slept";
  EXPECT_LT(usage.ru_nvcsw, 500);
}

}  // namespace
