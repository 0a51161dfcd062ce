#include "launch/starters/sagemaker.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "launch/job/environment.hpp"
#include "launch/job/job.hpp"
#include "launch/job/require.hpp"
#include "launch/system/process.hpp"

namespace accelerate::launcher {
namespace {

void check_for_sagemaker(const Job& job) {
  const Settings& s = job.settings;
  const std::string& program = job.command.front();
  require(!s.on("module"),
          "--module can't be used on Amazon SageMaker, whose containers start a file: name the script itself");
  require(!s.on("no_python") || std::filesystem::path(program).extension() != ".py",
          "--no_python can't be used for {} on Amazon SageMaker, whose containers run scripts by Python: leave it out",
          program);
  require(s.text("aws_access_key_id").empty() == s.text("aws_secret_access_key").empty(),
          "--aws_access_key_id and --aws_secret_access_key belong together: give both, or neither");
}

/// The text that accelerate-sagemaker reads through a pipe: nobody else can read secrets there.
std::string sagemaker_plan(const Job& job, const Host& host) {
  const Settings& s = job.settings;
  config::Value text{{"config", s.file()},
                     {"command", job.command},
                     {"environment", protocol(s, host)},
                     {"num_machines", s.num_machines()},
                     {"dry_run", s.on("dry_run")},
                     {"quiet", job.quiet()},
                     {"keys", nullptr}};
  if (!s.text("aws_access_key_id").empty())
    text["keys"] = {{"id", s.text("aws_access_key_id")}, {"secret", s.text("aws_secret_access_key")}};
  return text.dump();
}

/// Ctrl-C goes to the whole group; whoever waits must not be the first to go.
class PatientWait {
 public:
  PatientWait() {
    struct sigaction ignore {};
    ignore.sa_handler = SIG_IGN;
    ::sigaction(SIGINT, &ignore, &interrupt_);
    ::sigaction(SIGPIPE, &ignore, &pipe_);
  }
  ~PatientWait() { restore(); }
  void restore() const {
    ::sigaction(SIGINT, &interrupt_, nullptr);
    ::sigaction(SIGPIPE, &pipe_, nullptr);
  }

 private:
  struct sigaction interrupt_ {
  }, pipe_{};
};

}  // namespace

int launch_on_sagemaker(const Job& job, const Host& host) {
  check_for_sagemaker(job);
  const std::string path = program_beside_this("accelerate-sagemaker", "jobs on Amazon SageMaker are created by");
  const std::string text = sagemaker_plan(job, host);
  Pipe input = make_pipe();
  const PatientWait patience;
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) raise_no_process();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(128 + SIGTERM);
    patience.restore();
    ::dup2(input.read.get(), STDIN_FILENO);
    char* const argv[] = {const_cast<char*>(path.c_str()), nullptr};
    ::execv(path.c_str(), argv);
    ::_exit(127);
  }
  input.read.reset();
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(input.write.get(), text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) break;  // it has ended already, and said why
    if (count > 0) done += static_cast<size_t>(count);
  }
  input.write.reset();
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace accelerate::launcher
