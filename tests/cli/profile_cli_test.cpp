// `accelerate profile`: programs that know nothing of it, traces of ranks that are joined, and the report in a browser.
#include <gmock/gmock.h>

#include <cstdlib>

#include "browser.hpp"
#include "program.hpp"
#include "timeline_support.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using timeline_test::Trace;

std::string content(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Two steps of a rank that waits for others in `waits` of 100 us each.
Trace two_steps(int64_t rank, int64_t ranks, double waits) {
  auto trace = Trace().of(rank, ranks);
  for (int i = 0; i < 2; ++i)
    trace.profiler_step(i + 1, 100 * i, 100 * i + 100)
        .ours("loader_wait", 100 * i, 100 * i + 5)
        .op("mm", 100 * i + 5, 100 * i + 100 - waits)
        .ours("comm_wait", 100 * i + 100 - waits, 100 * i + 100, 4096);
  trace.head["host_name"] = "one";
  return trace;
}

class ProfileCommand : public testing::Test {
 protected:
  ProfileCommand() : folder(timeline_test::folder(testing::UnitTest::GetInstance()->current_test_info()->name())) {
    for (int rank = 0; rank < 2; ++rank)
      timeline_test::write(folder / ("trace_" + std::to_string(rank)), two_steps(rank, 2, 20.0 * (rank + 1)).text());
    timeline_test::write(folder / "alone", two_steps(0, 1, 20).text());
  }
  /// A program that stands for one whose Accelerator has found the variables; then it does `more`.
  std::string rank_program(const std::string& more = "") const {
    const auto file = folder / "rank.sh";
    timeline_test::write(file,
                         "#!/bin/sh\ncd " + folder.string() +
                             "\nenv | grep '^ACCELERATE_PROFILE_' | sort > variables_${RANK:-alone}\n"
                             "echo from the program $*\n"
                             "cp ${RANK:+trace_}${RANK:-alone} $ACCELERATE_PROFILE_DIR/profile_${RANK:-0}.json\n" +
                             more + "\n");
    fs::permissions(file, fs::perms::owner_all);
    return file;
  }
  Result run(std::vector<std::string> arguments, std::vector<std::string> env = {}) const {
    arguments.insert(arguments.begin(), {accelerate_path(), "profile"});
    return Program(arguments, {.env = std::move(env), .folder = folder}).wait();
  }
  std::vector<std::string> files_in(const std::string& name) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder / name)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  const fs::path folder;
};

TEST_F(ProfileCommand, TellsAProgramThatKnowsNothingOfIt) {
  const auto result = run({rank_program(), "--lr", "0.1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "from the program --lr 0.1\n");  // nothing of ours between its lines
  EXPECT_EQ(content(folder / "variables_alone"), "ACCELERATE_PROFILE_DIR=" + (folder / "profile").string() + "\n");
  EXPECT_THAT(files_in("profile"), ElementsAre("merged.json", "profile_0.json", "report.html"));
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 0 (2 steps)"),
                                HasSubstr("Traces of 1 rank(s) are in " + (folder / "profile").string())));
}

TEST_F(ProfileCommand, EachOptionHasItsVariable) {
  const auto result =
      run({"--out", "elsewhere", "--skip_first", "1", "--wait", "2", "--warmup", "3", "--active", "4", "--repeat", "5",
           "--record_shapes", "--profile_memory", "--with_stack", "--with_flops", "--with_modules", rank_program()},
          {"ACCELERATE_PROFILE_DIR=/none"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(content(folder / "variables_alone"),
            "ACCELERATE_PROFILE_ACTIVE=4\nACCELERATE_PROFILE_DIR=" + (folder / "elsewhere").string() +
                "\nACCELERATE_PROFILE_FLOPS=1\nACCELERATE_PROFILE_MEMORY=1\nACCELERATE_PROFILE_MODULES=1\n"
                "ACCELERATE_PROFILE_RECORD_SHAPES=1\nACCELERATE_PROFILE_REPEAT=5\nACCELERATE_PROFILE_SKIP_FIRST=1\n"
                "ACCELERATE_PROFILE_STACK=1\nACCELERATE_PROFILE_WAIT=2\nACCELERATE_PROFILE_WARMUP=3\n");
  // Settings that an earlier command left in the environment are not meant.
  EXPECT_EQ(
      run({"--out", "again", rank_program()}, {"ACCELERATE_PROFILE_ACTIVE=9", "ACCELERATE_PROFILE_STACK=1"}).exit_code,
      0);
  EXPECT_EQ(content(folder / "variables_alone"), "ACCELERATE_PROFILE_DIR=" + (folder / "again").string() + "\n");
}

TEST_F(ProfileCommand, MistakesAreRefusedBeforeAnythingRuns) {
  const auto refused = [&](std::vector<std::string> words, const std::string& text) {
    const auto result = run(std::move(words));
    EXPECT_EQ(result.exit_code, 64);
    EXPECT_THAT(result.err, HasSubstr(text));
  };
  refused({}, "found no program");
  refused({"--wait", "1", rank_program()}, "--wait was given without --active");
  refused({"--active", "0", rank_program()}, "--active is '0', expected a whole number, 1 or more");
  refused({"--active", "2", "--warmup", "1x", rank_program()}, "--warmup is '1x'");
  refused({"--num_processes", "2", "launch", rank_program()}, "behind it");
  refused({"--num_processes", "0", rank_program()}, "--num_processes is '0'");
  refused({"--with_stacks", rank_program()}, "Did you mean '--with_stack'?");
  EXPECT_FALSE(fs::exists(folder / "variables_alone"));
}

TEST_F(ProfileCommand, TheProgramsEndIsItsOwn) {
  auto result = run({"--out", "a", rank_program("exit 7")});
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(result.err, HasSubstr("rank 0 (2 steps)"));
  result = run({"--out", "b", rank_program("kill -KILL $$")});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  result = run({"--out", "c", rank_program("echo '{' > $ACCELERATE_PROFILE_DIR/profile_0.json; exit 3")});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr("profile_0.json': it is not valid JSON"));
  result = run({"--out", "d", rank_program("rm $ACCELERATE_PROFILE_DIR/*")});
  EXPECT_EQ(result.exit_code, 65);
  EXPECT_THAT(result.err, AllOf(HasSubstr("found no trace in"), HasSubstr("made no accelerate::Accelerator")));
  result = run({"--out", "e", rank_program("rm $ACCELERATE_PROFILE_DIR/*; exit 4")});
  EXPECT_EQ(result.exit_code, 4);
  result = run({"--out", "f", "./no_such_program"});
  EXPECT_EQ(result.exit_code, 71);
  EXPECT_THAT(result.err, HasSubstr("'./no_such_program' can't be started: No such file or directory"));
}

/// A program that says which signals came, until none comes for two seconds, and from where: "kernel" is the
/// terminal's.
const char* const kListens =
    "exec python3 -c \"\n"
    "import signal as s, sys\n"
    "s.pthread_sigmask(s.SIG_BLOCK, {s.SIGINT, s.SIGTERM})\n"
    "print('ready', flush=True)\n"
    "heard = []\n"
    "while got := s.sigtimedwait({s.SIGINT, s.SIGTERM}, 2):\n"
    "  heard.append(s.Signals(got.si_signo).name + (' process' if got.si_code == 0 else ' kernel'))\n"
    "  print('heard', flush=True)\n"
    "print('all:', ', '.join(heard))\n"
    "sys.exit(9)\"";

TEST_F(ProfileCommand, CtrlCIsToldOnce) {
  Program program({accelerate_path(), "profile", rank_program(kListens)},
                  {.terminal = true, .folder = folder.string()});
  ASSERT_TRUE(program.wait_for("ready"));
  // Two signals of one number may become one before they are heard: so it is tried some times, and those of ours would
  // be among them.
  for (int i = 0; i < 10; ++i) {
    program.type("\x03");
    program.read_for(milliseconds(50));
  }
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_THAT(result.out, AllOf(HasSubstr("all: SIGINT kernel, SIGINT kernel"), HasSubstr("rank 0 (2 steps)")));
  EXPECT_THAT(result.out, Not(HasSubstr("SIGINT process")));
}

TEST_F(ProfileCommand, SignalsToItAloneReachTheProgram) {
  Program program({accelerate_path(), "profile", rank_program(kListens)}, {.folder = folder.string()});
  ASSERT_TRUE(program.wait_for("ready"));
  program.signal(SIGINT);
  ASSERT_TRUE(program.wait_for("heard"));
  program.signal(SIGTERM);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_THAT(result.out, HasSubstr("all: SIGINT process, SIGTERM process\n"));
  // Nor is it born deaf to what its parent holds back.
  EXPECT_EQ(run({"--no_merge", "--overwrite", "python3", "-c",
                 "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"})
                .out,
            "0\n");
}

TEST_F(ProfileCommand, ItsSuddenDeathStopsTheProgram) {
  Program program({accelerate_path(), "profile", rank_program("echo $$ > pid; exec sleep 60")},
                  {.folder = folder.string()});
  const auto pids = pids_in(folder / "pid", 1);
  ASSERT_EQ(pids.size(), 1);
  ::kill(program.pid(), SIGKILL);
  program.wait();
  EXPECT_TRUE(gone(pids[0]));
}

TEST_F(ProfileCommand, TwoRunsAreNotMixed) {
  EXPECT_EQ(run({rank_program()}).exit_code, 0);
  timeline_test::write(folder / "profile" / "profile_5.json", "{");
  timeline_test::write(folder / "profile" / "mine.txt", "kept");
  const auto result = run({rank_program()});
  EXPECT_EQ(result.exit_code, 64);
  EXPECT_THAT(result.err, HasSubstr("found 4 file(s) of an earlier profile"));
  EXPECT_EQ(run({"--overwrite", rank_program()}).exit_code, 0);
  EXPECT_THAT(files_in("profile"), ElementsAre("merged.json", "mine.txt", "profile_0.json", "report.html"));
}

TEST_F(ProfileCommand, SeveralProcessesAboveTheLauncherAndBelowIt) {
  auto result = run({"--num_processes", "2", rank_program()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 (2 steps)"), HasSubstr("The slowest rank is 0: 0.020 ms")));
  result = run({"--out", "second", "launch", "--num_processes", "2", "--cpu", rank_program("[ $RANK = 0 ] || exit 6")});
  EXPECT_EQ(result.exit_code, 6) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank 1 (2 steps)"));
  // The option of `launch` that says how many is its own, also behind "--".
  result = run({"--out", "third", "--no_merge", "--", "launch", "--num_processes", "2", "--cpu", rank_program()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(files_in("third"), ElementsAre("profile_0.json", "profile_1.json"));
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("accelerate profile merge " + (folder / "third").string()), Not(HasSubstr("2 steps"))));

  fs::create_directories(folder / "below");
  timeline_test::write(folder / "below" / "profile_7.json", "{}");  // each rank minds its own
  const auto below =
      launch({"--num_processes", "2", "--cpu", accelerate_path(), "profile", "--out", "below", rank_program()},
             {.folder = folder.string()});
  EXPECT_EQ(below.exit_code, 0) << below.err;
  EXPECT_THAT(files_in("below"), ElementsAre("profile_0.json", "profile_1.json", "profile_7.json"));
  EXPECT_THAT(below.err, HasSubstr("accelerate profile merge " + (folder / "below").string()));
  fs::remove(folder / "below" / "profile_0.json");
  const auto again =
      launch({"--num_processes", "2", "--cpu", accelerate_path(), "profile", "--out", "below", rank_program()},
             {.folder = folder.string()});
  EXPECT_EQ(again.exit_code, 64);
  EXPECT_THAT(again.err, HasSubstr("found 1 file(s) of an earlier profile there (profile_1.json)"));
}

TEST_F(ProfileCommand, MergeWritesOneTimelineAndPrintsNumbers) {
  const auto traces = folder / "traces";
  fs::create_directories(traces);
  for (const char* rank : {"0", "1"})
    fs::copy(folder / (std::string("trace_") + rank), traces / (std::string("profile_") + rank + ".json"));
  auto result = run({"merge", "traces"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("rank 1 (2 steps)"), HasSubstr("What to do:")));
  EXPECT_THAT(files_in("traces"), ElementsAre("merged.json", "profile_0.json", "profile_1.json"));
  EXPECT_EQ(timeline_test::read(traces / "merged.json")["accelerate_ranks"].size(), 2);

  result = run({"merge", "--json", "--html", "page.html", "--out", "all.json", "traces/"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto numbers = json::parse(result.out);
  EXPECT_EQ(numbers["ranks"][1]["overall"]["exposed_us"], 80);
  EXPECT_EQ(numbers["ranks"][1]["overall"]["data_us"], 10);
  EXPECT_THAT(content(folder / "page.html"), HasSubstr("\"Profile traces\""));
  EXPECT_EQ(content(folder / "all.json"), content(traces / "merged.json"));

  EXPECT_EQ(run({"merge", "nowhere"}).exit_code, 65);
  EXPECT_EQ(run({"merge"}).exit_code, 64);
  EXPECT_NE(run({"merge", "traces", "--html", "no/such/folder/page.html"}).exit_code, 0);
  timeline_test::write(traces / "profile_1.json", "{\"traceEvents\": [");
  result = run({"merge", "traces"});
  EXPECT_EQ(result.exit_code, 65);
  EXPECT_THAT(result.err, HasSubstr("profile_1.json': it is not valid JSON"));
}

/// The output of tests/cli/profile_peer.py.
std::string peer(const std::vector<std::string>& words) {
  const char* const python = std::getenv("ACCELERATE_TEST_PYTHON");
  std::vector<std::string> command{python, std::string(ACCELERATE_SOURCE_DIR) + "/tests/cli/profile_peer.py"};
  command.insert(command.end(), words.begin(), words.end());
  const auto result = Program(command).wait(milliseconds(150000));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return result.out;
}

/// Every number of our report is the peer's.
void expect_the_peers_numbers(const json& ours, const fs::path& traces) {
  const auto theirs = json::parse(peer({"shares", traces}));
  ASSERT_EQ(ours["ranks"].size(), theirs.size());
  for (size_t rank = 0; rank < theirs.size(); ++rank) {
    ASSERT_EQ(ours["ranks"][rank]["steps"].size(), theirs[rank].size());
    ASSERT_GT(theirs[rank].size(), 1);
    for (size_t step = 0; step < theirs[rank].size(); ++step)
      for (const auto& [name, value] : theirs[rank][step].items())
        EXPECT_NEAR(ours["ranks"][rank]["steps"][step].at(name).get<double>(), value.get<double>(), 0.1)
            << name << " of step " << step << " of rank " << rank;
  }
}

#define NEEDS_PYTHON()                        \
  if (!std::getenv("ACCELERATE_TEST_PYTHON")) \
  GTEST_SKIP() << "ACCELERATE_TEST_PYTHON is not set (scripts/test.sh sets it)"

TEST_F(ProfileCommand, TracesOfPyTorchsOwnProfilerAreReadToo) {
  NEEDS_PYTHON();
  const auto traces = folder / "traces";
  fs::create_directories(traces);
  const auto recorded =
      launch({"--num_processes", "2", "--cpu", std::string(ACCELERATE_SOURCE_DIR) + "/tests/cli/profile_peer.py",
              "record", traces},
             {.env = {"PATH=" + fs::path(std::getenv("ACCELERATE_TEST_PYTHON")).parent_path().string() + ":" +
                          std::getenv("PATH"),
                      "PYTHON=" + std::string(std::getenv("ACCELERATE_TEST_PYTHON"))}});
  ASSERT_EQ(recorded.exit_code, 0) << recorded.err;
  const auto result = run({"merge", "--json", "traces"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto ours = json::parse(result.out);
  expect_the_peers_numbers(ours, traces);
  EXPECT_THAT(ours["notes"].dump(), HasSubstr("don't say when threads waited"));
  EXPECT_EQ(ours["ranks"][0]["communication"][0]["kind"], "gloo:all_reduce");
}

// ---------------------------------------------------------------- a real program

class ProfileTraining : public ProfileCommand {
 protected:
  /// The report on three steps of two ranks of tests/cli/profile_training.cpp, which is compared with the peer's.
  json report_on(std::vector<std::string> words, std::vector<std::string> env = {}) const {
    words.insert(words.begin(), {"--num_processes", "2", "--skip_first", "1", "--warmup", "1", "--active", "3",
                                 "--repeat", "1", std::string(ACCELERATE_BIN_DIR) + "/profile_training"});
    const auto recorded = run(words, std::move(env));
    EXPECT_EQ(recorded.exit_code, 0) << recorded.err;
    const auto result = run({"merge", "--json", "profile"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    auto report = json::parse(result.out);
    if (std::getenv("ACCELERATE_TEST_PYTHON")) expect_the_peers_numbers(report, folder / "profile");
    EXPECT_EQ(report["ranks"].size(), 2);
    for (const auto& rank : report["ranks"]) {
      EXPECT_EQ(rank["steps"].size(), 3);
      EXPECT_GT(rank["overall"]["compute_us"], 0);
    }
    EXPECT_THAT(report["notes"].dump(), Not(HasSubstr("no steps")));
    EXPECT_THAT(report["notes"].dump(), Not(HasSubstr("don't say when threads waited")));
    return report;
  }
  static std::map<std::string, json> exchanges_of(const json& rank) {
    std::map<std::string, json> found;
    for (const auto& exchange : rank["communication"]) found[exchange["kind"]] = exchange;
    return found;
  }
};

TEST_F(ProfileTraining, AShardedModelGathersUnits) {
  // Shards that lie in memory which ranks share are not gathered.
  const auto report = report_on({"sharded"}, {"ACCELERATE_SHARED_MEMORY=0"});
  for (const auto& rank : report["ranks"]) {
    auto exchanges = exchanges_of(rank);
    ASSERT_TRUE(exchanges.contains("unit_gather") && exchanges.contains("gradient_reduce")) << rank["communication"];
    // 64 * 256 + 256 + 256 * 8 + 8 parameters of 4 bytes, in each of three steps.
    EXPECT_GE(exchanges["unit_gather"]["bytes"], 3 * 4 * (64 * 256 + 256 + 256 * 8 + 8));
    EXPECT_GT(rank["overall"]["communication_us"], 0);
    EXPECT_GE(rank["overall"]["communication_us"], rank["overall"]["exposed_us"]);
  }
  const auto merged = timeline_test::read(folder / "profile" / "merged.json");
  std::set<int64_t> of_units;
  for (const auto& event : merged["traceEvents"])
    if (event["name"].get<std::string>().starts_with("accelerate::unit_gather "))
      of_units.insert(event["pid"].get<int64_t>());
  EXPECT_THAT(of_units, ElementsAre(0, 1));
}

TEST_F(ProfileTraining, WaitingForDataIsSeen) {
  const auto report = report_on({"slow_data"});
  EXPECT_GT(report["overall"]["data_us"], 2 * 3 * 15'000);
  EXPECT_THAT(report["advice"].dump(), HasSubstr("\"data_wait\""));
}

TEST_F(ProfileTraining, ARankThatOthersWaitForIsNamed) {
  const auto report = report_on({"slow_rank"});
  EXPECT_EQ(report["slowest"]["rank"], 1);
  EXPECT_EQ(report["slowest"]["steps"], 3);
  EXPECT_GT(report["slowest"]["behind_us"], 0);
  EXPECT_GT(report["ranks"][0]["overall"]["exposed_us"], report["ranks"][1]["overall"]["exposed_us"]);
  EXPECT_THAT(report["advice"].dump(), HasSubstr("\"slowest_rank\""));
}

// ---------------------------------------------------------------- a real browser

TEST_F(ProfileCommand, ThePageShowsItAllInABrowser) {
  ASSERT_NE(Browser::program(), "")
      << "no browser: this test needs chromium (Debian: chromium), which scripts/test.sh installs";
  ASSERT_EQ(run({"--num_processes", "2", rank_program()}).exit_code, 0);
  const std::string url = "file://" + (folder / "profile" / "report.html").string();
  Browser browser;
  browser.open(url);
  ASSERT_TRUE(browser.wait_until("document.querySelectorAll('.lane').length === 2"));
  const auto text = [&](const std::string& id) {
    return browser.evaluate("document.getElementById('" + id + "').textContent").get<std::string>();
  };
  EXPECT_EQ(text("title"), "Profile profile");
  EXPECT_THAT(text("summary"), AllOf(HasSubstr("2 rank(s), 2 step(s)"), HasSubstr("65.0 % compute"),
                                     HasSubstr("30.0 % exposed communication"), HasSubstr("slowest rank is 0")));
  EXPECT_EQ(browser.evaluate("document.querySelectorAll('#advice li[data-rule=exposed_communication]').length"), 1);
  // Bars are as high as their parts: 75 of 100 of rank 0 compute, 55 of rank 1.
  EXPECT_EQ(browser.evaluate("document.querySelectorAll('.bar').length"), 4);
  const auto height = [&](int bar, const std::string& part) {
    return browser
        .evaluate("Number(document.querySelectorAll('.bar')[" + std::to_string(bar) + "].querySelector('." + part +
                  "').getAttribute('height'))")
        .get<double>();
  };
  EXPECT_NEAR(height(0, "compute") / height(1, "compute"), 75.0 / 55, 1e-6);
  EXPECT_NEAR(height(0, "exposed") / height(0, "data"), 20.0 / 5, 1e-6);
  // The step's picture: data, compute, exposed one after the other, and exposed communication ends the lane.
  EXPECT_EQ(browser.evaluate("[...document.querySelectorAll('.lane')[0].querySelectorAll('rect')].map(r => "
                             "r.getAttribute('class')).join()"),
            "data,compute,exposed");
  EXPECT_EQ(browser.evaluate("Math.round(document.querySelectorAll('.lane')[1].querySelectorAll('rect')[2].getAttribute"
                             "('width') * 10)"),
            4000);
  // One bar at a time is in the order of the tab key; arrows go on, Enter shows the step, and each bar has its words.
  EXPECT_EQ(browser.evaluate("document.querySelectorAll('.bar[tabindex=\"0\"]').length"), 1);
  const auto press = [&](const std::string& key) {
    browser.evaluate("void document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '" + key +
                     "', bubbles: true}))");
  };
  browser.evaluate("void document.querySelector('.bar[tabindex=\"0\"]').focus()");
  press("ArrowRight"), press("ArrowRight");
  EXPECT_THAT(browser.evaluate("document.activeElement.getAttribute('aria-label')").get<std::string>(),
              HasSubstr("step 2 of rank 0: 0.100 ms, compute 0.075 ms (75.0 %)"));
  EXPECT_THAT(text("timeline-text"), HasSubstr("Step 1:"));
  press("Enter");
  EXPECT_THAT(text("timeline-text"), HasSubstr("Step 2:"));
  EXPECT_EQ(browser.evaluate("document.activeElement.getAttribute('aria-pressed')"), "true");
  press("Home"), press("ArrowLeft");
  EXPECT_EQ(browser.evaluate("document.activeElement === document.querySelector('.bar')"), true);
  // Everything that has a role has a name, all fields have labels, all tables captions.
  EXPECT_EQ(browser.evaluate("[...document.querySelectorAll('svg[role], g[role]')].every(e => "
                             "e.getAttribute('aria-label'))"),
            true);
  EXPECT_EQ(browser.evaluate("[...document.querySelectorAll('select')].every(e => e.labels.length)"), true);
  EXPECT_EQ(browser.evaluate("[...document.querySelectorAll('table')].length"), 3);
  EXPECT_EQ(browser.evaluate("[...document.querySelectorAll('table')].every(e => e.caption.textContent)"), true);
  EXPECT_THAT(text("operators"), HasSubstr("aten::mm"));
  browser.evaluate(
      "void (document.getElementById('rank').selectedIndex = 1, "
      "document.getElementById('rank').dispatchEvent(new Event('change')))");
  EXPECT_THAT(text("operators"), HasSubstr("on rank 1"));
  // Light and dark have texts that can be read.
  const auto colour = "getComputedStyle(document.body).";
  const auto light = browser.evaluate(std::string(colour) + "backgroundColor");
  EXPECT_EQ(light, "rgb(255, 255, 255)");
  browser.prefer_dark();
  EXPECT_EQ(browser.evaluate(std::string(colour) + "backgroundColor"), "rgb(22, 24, 28)");
  EXPECT_EQ(browser.evaluate(std::string(colour) + "color"), "rgb(232, 232, 232)");
  browser.save_picture(folder / "report.png");
  EXPECT_THAT(browser.complaints(), testing::IsEmpty());
  for (const auto& address : browser.requests())
    EXPECT_THAT(address, testing::AnyOf(url, testing::StartsWith("data:")));
}

}  // namespace
