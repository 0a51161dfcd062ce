#include "sagemaker/follow.hpp"
#include "utils/raise.hpp"

#include <charconv>
#include <cstdio>
#include <ctime>
#include <map>

namespace sagemaker {
namespace {

constexpr const char* kLogGroup = "/aws/sagemaker/TrainingJobs";
volatile std::sig_atomic_t interrupted = 0;

void remember(int number) { interrupted = number; }

double poll_seconds(const Environment& environment) {
  const auto found = environment.find("ACCELERATE_SAGEMAKER_POLL_SECONDS");
  if (found == environment.end() || found->second.empty()) return 10;
  double seconds = 0;
  const std::string& text = found->second;
  if (const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
      error != std::errc() || end != text.data() + text.size() || !(seconds > 0 && seconds < 1e6))
    accelerate::raise<accelerate::ConfigError>(
        "ACCELERATE_SAGEMAKER_POLL_SECONDS is '{}', expected a number of seconds above 0", text);
  return seconds;
}

void pause(double seconds) {
  const auto whole = static_cast<std::time_t>(seconds);
  const timespec time{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
  ::nanosleep(&time, nullptr);  // a signal ends it early
}

/// The output of the job's machines, each in a stream of its own.
class Logs {
 public:
  Logs(Aws& aws, std::string job) : aws_(aws), job_(std::move(job)) {}

  void print() {
    if (!readable_) return;
    try {
      Json query{{"logGroupName", kLogGroup}, {"logStreamNamePrefix", job_ + "/"}, {"orderBy", "LogStreamName"}};
      while (true) {
        const Json page = aws_.call("logs", "Logs_20140328.DescribeLogStreams", query);
        for (const auto& stream : list_in(page, "logStreams")) next_.try_emplace(text_in(stream, "logStreamName"));
        const auto next = text_in(page, "nextToken");
        if (next.empty()) break;
        query["nextToken"] = next;
      }
      for (auto& [stream, token] : next_) print(stream, token);
    } catch (const AwsError& error) {
      if (error.code == "ResourceNotFoundException") return;  // nothing has been printed yet
      if (error.status >= 500 || error.status == 0) return;   // next time
      readable_ = false;
      std::fprintf(stderr, "accelerate launch: the job's output can't be shown here: %s\n", error.what());
    }
  }

 private:
  void print(const std::string& stream, std::string& token) {
    while (true) {
      Json query{{"logGroupName", kLogGroup}, {"logStreamName", stream}, {"startFromHead", true}};
      if (!token.empty()) query["nextToken"] = token;
      const Json page = aws_.call("logs", "Logs_20140328.GetLogEvents", query);
      const Json events = list_in(page, "events");
      // JOB/algo-1-1700000000: which machine it is matters where there are several.
      const std::string host = stream.substr(stream.rfind('/') + 1);
      const std::string mark = next_.size() > 1 ? "[" + host.substr(0, host.rfind('-')) + "] " : "";
      for (const auto& event : events) std::printf("%s%s\n", mark.c_str(), text_in(event, "message").c_str());
      const std::string next = text_in(page, "nextForwardToken");
      const bool end = next.empty() || next == token || events.empty();
      if (!next.empty()) token = next;
      if (end) return;
    }
  }

  Aws& aws_;
  const std::string job_;
  std::map<std::string, std::string> next_;  ///< of each stream: where to go on
  bool readable_ = true;
};

}  // namespace

Interruption::Interruption() {
  struct sigaction once {};
  once.sa_handler = remember;
  once.sa_flags = SA_RESETHAND;
  ::sigaction(SIGINT, &once, &before_int_);
  ::sigaction(SIGTERM, &once, &before_term_);
  if (before_int_.sa_handler == SIG_IGN) ::sigaction(SIGINT, &before_int_, nullptr);  // a background job of a script
}

Interruption::~Interruption() {
  ::sigaction(SIGINT, &before_int_, nullptr);
  ::sigaction(SIGTERM, &before_term_, nullptr);
}

bool Interruption::happened() { return interrupted != 0; }
int Interruption::signal() { return interrupted; }

Json follow(Aws& aws, const std::string& job, const Environment& environment) {
  const double seconds = poll_seconds(environment);
  Logs logs(aws, job);
  size_t shown = 0;
  std::string last;
  Json description;
  while (!Interruption::happened()) {
    try {
      description = aws.call("sagemaker", "SageMaker.DescribeTrainingJob", {{"TrainingJobName", job}});
    } catch (const AwsError& error) {
      // The job goes on without us; so do we, when it is the network that fails.
      if (error.status != 0 && error.status < 500) throw;
      std::fprintf(stderr, "accelerate launch: %s; the job goes on, and is asked for again\n", error.what());
      pause(seconds);
      continue;
    }
    const Json steps = list_in(description, "SecondaryStatusTransitions");
    for (size_t i = 0; i < steps.size(); ++i) {
      const std::string line = text_in(steps[i], "Status") + " - " + text_in(steps[i], "StatusMessage");
      if (i < shown && !(i + 1 == shown && line != last)) continue;
      std::printf(
          "%s%s\n",
          time_text(i + 1 < steps.size() ? field(steps[i], "StartTime") : field(description, "LastModifiedTime"))
              .c_str(),
          line.c_str());
      last = line;
    }
    shown = steps.size();
    logs.print();
    std::fflush(stdout);
    const std::string status = text_in(description, "TrainingJobStatus");
    if (status == "Completed" || status == "Failed" || status == "Stopped") {
      pause(std::min(seconds, 2.0));
      logs.print();
      std::fflush(stdout);
      break;
    }
    pause(seconds);
  }
  return description;
}

}  // namespace sagemaker
