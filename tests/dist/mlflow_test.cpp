// MLflow by REST, against a real server and read back by the real client; and servers that are not what they should be.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "message_of.hpp"
#include "program.hpp"
#include "read_trackers.hpp"
#include "scratch.hpp"
#include "variable.hpp"

namespace {

using namespace accelerate;
using nlohmann::json;
using support::message_of;
using support::scratch;
using support::Variable;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string address(uint16_t port) { return "http://127.0.0.1:" + std::to_string(port); }

/// `mlflow server` on a free port, in a folder of its own.
class MlflowServerProcess {
 public:
  MlflowServerProcess()
      : port_(support::free_port()),
        uri_("MLFLOW_TRACKING_URI", address(port_)),
        server_({support::trackers_python(), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port",
                 std::to_string(port_), "--workers", "1", "--backend-store-uri", "sqlite:///runs.db",
                 "--artifacts-destination", "./artifacts"},
                folder()) {
    EXPECT_TRUE(server_.wait_for("Application startup complete", std::chrono::seconds(60))) << server_.errors();
  }
  ~MlflowServerProcess() { ::kill(-server_.pid(), SIGKILL); }  // its whole group: its workers outlive it

 private:
  static cli_test::Program::Options folder() {
    std::filesystem::create_directories(scratch("server"));
    return {.folder = scratch("server").string()};
  }
  uint16_t port_;
  Variable uri_;
  cli_test::Program server_;
};

TEST(MlflowTracker, IsReadByTheRealClient) {
  SKIP_WITHOUT_TRACKERS_PYTHON();
  const MlflowServerProcess server;
  TrackerValues config{
      {"lr", 1e-5}, {"adam", TrackerValues{{"beta", 0.9}}}, {"on", true}, {"long", std::string(7000, 'x')}};
  for (int number = 0; number < 120; ++number) config["parameter " + std::to_string(number)] = number;
  std::string run_id;
  {
    Accelerator accelerator({.log_with = {"mlflow"}, .project_dir = scratch("project")});
    accelerator.init_trackers("an experiment", config,
                              {{"mlflow", TrackerValues{{"run_name", "first"},
                                                        {"description", "what it is"},
                                                        {"tags", TrackerValues{{"team", "vision"}}}}}});
    for (int64_t step = 0; step < 1500; ++step)
      accelerator.log({{"train/loss", 1.0 / static_cast<double>(step + 1)}}, step);
    accelerator.log({{"odd", std::nan("")}, {"note", "left out"}}, 7,
                    {{"mlflow", TrackerValues{{"timestamp", 1234567}}}});
    accelerator.log_images({{"pictures", torch::full({2, 6, 5, 3}, 9, torch::kByte)}}, 3);
    accelerator.log_table("answers", {"n", "text"}, {{1, "one"}});
    accelerator.log_table("answers", {"n", "text"}, {{2, "two"}});
    const auto tracker = std::dynamic_pointer_cast<MlflowTracker>(accelerator.get_tracker("mlflow", true));
    ASSERT_TRUE(tracker);
    std::filesystem::create_directories(scratch("files/below"));
    std::ofstream(scratch("files/a b.txt")) << "abc";
    std::ofstream(scratch("files/below/c.txt")) << "cd";
    tracker->log_artifacts(scratch("files"), "kept");
    run_id = tracker->run_id();
    accelerator.end_training();
  }
  json found = support::read_trackers("mlflow", run_id);
  EXPECT_EQ(found.at("experiment"), "an experiment");
  EXPECT_EQ(found.at("run_name"), "first");
  EXPECT_EQ(found.at("status"), "FINISHED");
  EXPECT_EQ(found.at("config").size(), config.size() - 1) << "all but the one that is too long";
  EXPECT_EQ(found.at("config").at("lr"), "1e-05");
  EXPECT_EQ(found.at("config").at("adam"), "{'beta': 0.9}");
  EXPECT_EQ(found.at("config").at("on"), "True");
  EXPECT_EQ(found.at("tags").at("team"), "vision");
  EXPECT_EQ(found.at("tags").at("mlflow.note.content"), "what it is");
  const json& losses = found.at("values").at("train/loss");
  ASSERT_EQ(losses.size(), 1500u);
  EXPECT_EQ(losses.at(2).at(0), 2);
  EXPECT_EQ(losses.at(2).at(1), "0.3333333333333333");
  EXPECT_EQ(found.at("values").at("odd"), (json{{7, "nan", 1234567}}));
  EXPECT_FALSE(found.at("values").contains("note"));
  EXPECT_EQ(found.at("artifacts").at("kept/a b.txt"), 3);
  EXPECT_EQ(found.at("artifacts").at("kept/below/c.txt"), 2);
  EXPECT_TRUE(found.at("artifacts").contains("images/pictures/3_1.png"));
  EXPECT_EQ(found.at("tables").at("answers.json"), (json{{1, "one"}, {2, "two"}}));

  // Going on with that run, and a run below it.
  {
    const Variable again("MLFLOW_RUN_ID", run_id);
    MlflowTracker tracker({.project_name = "ignored"});
    tracker.connect();
    tracker.log({{"train/loss", 0.25}}, 1500);
    tracker.finish();
  }
  EXPECT_EQ(support::read_trackers("mlflow", run_id).at("values").at("train/loss").size(), 1501u);
  MlflowTracker nested(
      {.project_name = "an experiment", .init_kwargs = {{"nested_run", true}, {"parent_run_id", run_id}}});
  nested.connect();
  EXPECT_THAT(message_of<ConfigError>([&] { nested.log({{"a?b", 1}}, 0); }), HasSubstr("'?'"));
  nested.finish();
  found = support::read_trackers("mlflow", nested.run_id());
  EXPECT_EQ(found.at("tags").at("mlflow.parentRunId"), run_id);
  EXPECT_EQ(found.at("experiment"), "an experiment");
}

TEST(MlflowTracker, KeepsTheNumbersWhereNobodyAnswers) {
  const Variable uri("MLFLOW_TRACKING_URI", address(support::free_port()));
  const Variable limit("ACCELERATE_TRACKER_TIMEOUT", "1");
  Accelerator accelerator({.log_with = {"mlflow"}, .project_dir = scratch("project")});
  accelerator.init_trackers("run");
  for (int64_t step = 0; step < 10; ++step) accelerator.log({{"loss", 0.5}}, step);
  accelerator.end_training();
  int64_t lines = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scratch("project") / "unsent")) {
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) lines += json::parse(line).at("kind") == "log";
  }
  EXPECT_EQ(lines, 10);
}

/// A server that says where a run's artifacts are to go, and another one there: what each is told of who we are.
TEST(MlflowTracker, OnlyItsOwnServerGetsThePassword) {
  SKIP_WITHOUT_TRACKERS_PYTHON();
  const auto seen = scratch("seen.txt");
  std::filesystem::remove(seen);
  const uint16_t port = support::free_port();
  const std::string script = R"(
import http.server, json, sys
class Server(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        host, who = self.headers["Host"].split(":")[0], self.headers.get("Authorization", "nobody")
        with open(sys.argv[2], "a") as file:
            print(host, self.command, who.split()[0], file=file)
        place = f"http://localhost:{sys.argv[1]}/there"
        text = json.dumps({"experiment": {"experiment_id": "1", "lifecycle_stage": "active"},
                           "run": {"info": {"run_id": "r", "experiment_id": "1", "artifact_uri": place}}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_GET = do_POST = do_PUT = answer
    def log_message(self, *arguments): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Server)
print("listens", flush=True)
server.serve_forever()
)";
  cli_test::Program server({support::trackers_python(), "-c", script, std::to_string(port), seen.string()});
  ASSERT_TRUE(server.wait_for("listens", std::chrono::seconds(60))) << server.errors();
  const Variable uri("MLFLOW_TRACKING_URI", address(port));
  const Variable user("MLFLOW_TRACKING_USERNAME", "me"), password("MLFLOW_TRACKING_PASSWORD", "secret");
  MlflowTracker tracker({.project_name = "run"});
  tracker.connect();
  tracker.log_images({{"picture", torch::full({1, 6, 5, 3}, 9, torch::kByte)}}, 3);
  tracker.finish();
  std::ifstream in(seen);
  std::set<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.insert(line);
  EXPECT_TRUE(lines.contains("127.0.0.1 POST Basic"));
  EXPECT_TRUE(lines.contains("localhost PUT nobody")) << testing::PrintToString(lines);
  EXPECT_FALSE(lines.contains("localhost PUT Basic"));
}

TEST(MlflowTracker, WhatTheServerSaysReachesNoTerminalRaw) {
  SKIP_WITHOUT_TRACKERS_PYTHON();
  const uint16_t port = support::free_port();
  const std::string script = R"(
import http.server, json, sys
class Server(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        text = json.dumps({"error_code": "BAD\x1b[1m", "message": "first\x1b[2J line\nsecond"}).encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_GET = do_POST = do_PUT = answer
    def log_message(self, *arguments): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Server)
print("listens", flush=True)
server.serve_forever()
)";
  cli_test::Program server({support::trackers_python(), "-c", script, std::to_string(port)});
  ASSERT_TRUE(server.wait_for("listens", std::chrono::seconds(60))) << server.errors();
  const Variable uri("MLFLOW_TRACKING_URI", address(port));
  MlflowTracker tracker({.project_name = "run"});
  std::string said;
  try {
    tracker.connect();
  } catch (const std::exception& error) {
    said = error.what();
  }
  EXPECT_THAT(said, testing::AllOf(HasSubstr("400 BAD first line\nsecond"), testing::Not(HasSubstr("\033"))));
}

TEST(MlflowTracker, RefusesWhatItCanNotDo) {
  EXPECT_THAT(message_of<ConfigError>([] { MlflowTracker tracker({}); }), HasSubstr("mlflow server"));
  const Variable uri("MLFLOW_TRACKING_URI", address(support::free_port()));
  const auto said = [](TrackerValues init_kwargs) {
    return message_of<ConfigError>([&] { MlflowTracker tracker({.init_kwargs = std::move(init_kwargs)}); });
  };
  EXPECT_THAT(said({{"nested_run", true}}), HasSubstr("parent_run_id"));
  EXPECT_THAT(said({{"colour", "red"}}), AllOf(HasSubstr("colour"), HasSubstr("run_name")));
  EXPECT_THAT(said({{"tags", "no JSON"}}), HasSubstr("tags"));
  const Variable insecure("MLFLOW_TRACKING_INSECURE_TLS", "true");
  const Variable certificates("MLFLOW_TRACKING_SERVER_CERT_PATH", "file.pem");
  EXPECT_THAT(said({}), HasSubstr("expected one"));
}

}  // namespace
