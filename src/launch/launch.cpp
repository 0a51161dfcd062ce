#include "accelerate/launch.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>

#include "launch/job.hpp"
#include "launch/log_files.hpp"
#include "launch/ports.hpp"
#include "launch/program.hpp"
#include "launch/report.hpp"
#include "launch/supervisor.hpp"

namespace accelerate {

int launch(const LaunchOptions& options) {
  using namespace launcher;
  // Descriptors 0, 1 and 2 must exist, or a pipe of ours would become somebody's standard stream.
  for (int fd = ::open("/dev/null", O_RDWR); fd >= 0; fd = ::dup(fd))
    if (fd > STDERR_FILENO) {
      ::close(fd);
      break;
    }
  const Host host = Host::current();
  Job job = make_job(options, host);
  command_line(job, host);  // complain before anything is created
  if (job.distributed()) {
    if (job.main_port == 0) job.main_port = choose_port();
    else if (job.machine_rank == 0) require_free_port(job.main_port);
  }
  const LogFiles logs(job);
  if (!options.quiet) {
    if (job.omp_threads_chosen)
      std::fprintf(stderr, "accelerate launch: OMP_NUM_THREADS=%lld for each process; --num_cpu_threads_per_process changes it\n", static_cast<long long>(job.omp_threads));
    if (!logs.folder().empty()) std::fprintf(stderr, "accelerate launch: log files are in %s\n", logs.folder().c_str());
  }
  return supervise(job, host, logs, report).exit_code();
}

}  // namespace accelerate
