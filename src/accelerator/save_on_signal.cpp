#include "accelerator/save_on_signal.hpp"

#include <c10/core/GradMode.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>

#include "comm/group.hpp"
#include "run_state/counts.hpp"
#include "run_state/manifest.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"
#include "utils/saved_exit_code.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace {

constexpr const char* kSaveLogger = "accelerate.save_on_signal";
/// The first is how schedulers and this launcher ask a process to end; the second is what Slurm sends some time before
/// the time limit (--signal=USR1@60), as its manual and most users' scripts have it.
constexpr std::array kSaveSignals = {SIGTERM, SIGUSR1};

// A handler may touch nothing but these.
sem_t signal_came;
std::atomic<int> signal_received{0};  ///< the first signal
std::atomic<pid_t> handled_by{0};     ///< the process; a fork has the handlers without the thread
std::array<struct sigaction, kSaveSignals.size()> signals_before{};

void on_save_signal(int signal) {
  const int error = errno;
  if (handled_by == ::getpid()) {
    int none = 0;
    if (signal_received.compare_exchange_strong(none, signal)) ::sem_post(&signal_came);
  } else {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  }
  errno = error;
}

void take_signals() {
  for (const int signal : kSaveSignals) {
    struct sigaction present {};
    ::sigaction(signal, nullptr, &present);
    if ((present.sa_flags & SA_SIGINFO) != 0 || (present.sa_handler != SIG_DFL && present.sa_handler != SIG_IGN))
      raise<ConfigError>(
          "Accelerator: found a handler of the program for SIG{} together with ProjectConfiguration::save_on_signal, "
          "expected none, because one of the two would never be called; remove the handler, or call save_state() from "
          "the loop yourself",
          ::sigabbrev_np(signal));
  }
  signal_received = 0;
  handled_by = ::getpid();
  ::sem_init(&signal_came, 0, 0);
  struct sigaction action {};
  action.sa_handler = on_save_signal;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSaveSignals.size(); ++i) ::sigaction(kSaveSignals[i], &action, &signals_before[i]);
}

void give_signals_back() {
  for (size_t i = 0; i < kSaveSignals.size(); ++i) ::sigaction(kSaveSignals[i], &signals_before[i], nullptr);
}

std::string name_of_signal() {
  const int signal = signal_received;
  return signal == 0 ? "a signal to another rank" : fmt::format("SIG{}", ::sigabbrev_np(signal));
}

}  // namespace

struct SaveOnSignal::Asked {
  std::atomic<bool> now{false};        ///< a save point has to look whether it is the one
  std::atomic<int64_t> passed{0};      ///< the place of the last save point that the training came to
  std::shared_ptr<comm::Group> group;  ///< null: this process is alone
  std::chrono::milliseconds patience{0};
  Mutex mutex;
  std::condition_variable changed;
  bool found ACCELERATE_GUARDED_BY(mutex) = false;  ///< the save point has come
  bool over ACCELERATE_GUARDED_BY(mutex) = false;

  /// A save point sees that it is asked, or is counted here: whichever thread comes second sees the other's word.
  int64_t how_far() {
    now = true;
    ::sem_post(&signal_came);
    return passed;
  }
  void set(bool Asked::*what) {
    const MutexLock lock(mutex);
    this->*what = true;
    changed.notify_all();
  }

  void serve();
  [[noreturn]] void give_up() const;
};

void SaveOnSignal::Asked::serve() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  ::pthread_setname_np(::pthread_self(), "save-on-signal");
  while (::sem_wait(&signal_came) != 0) {
  }
  MutexLock lock(mutex);
  if (over) return;
  ::pthread_setname_np(::pthread_self(), save_points::kSavingThread);  // which the launcher waits for
  if (group) group->call_ranks();
  else now = true;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (auto left = patience; !over && (found || left.count() > 0);
       left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()))
    lock.wait_for(changed, found ? std::chrono::milliseconds(60000) : left);
  if (!over) give_up();
}

void SaveOnSignal::Asked::give_up() const {
  logs::emit(LogLevel::error, kSaveLogger,
             fmt::format("save_on_signal: found no save point within {} s of {}, expected the next batch of a prepared "
                         "loader outside of an accumulation group, to which all ranks come; so nothing was saved and "
                         "the process ends. Iterate over loaders that prepare() returned; "
                         "InitProcessGroupKwargs::timeout is the time",
                         static_cast<double>(patience.count()) / 1000, name_of_signal()));
  const int signal = signal_received != 0 ? signal_received.load() : SIGTERM;
  ::signal(signal, SIG_DFL);
  sigset_t only;
  ::sigemptyset(&only);
  ::sigaddset(&only, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  ::raise(signal);
  std::abort();  // what is not reached
}

SaveOnSignal::SaveOnSignal(Accelerator& accelerator, const run_state::RunState& run, std::chrono::milliseconds patience)
    : accelerator_(accelerator), run_(run), asked_(std::make_shared<Asked>()) {
  if (save_points::detail::listener.load())
    throw ConfigError(
        "Accelerator: found another Accelerator of this process with ProjectConfiguration::save_on_signal, expected "
        "one, because a signal asks for one checkpoint; set it for the one that trains");
  take_signals();
  asked_->group = comm::world_group();
  asked_->patience = patience;
  if (asked_->group) asked_->group->answer_calls([asked = asked_] { return asked->how_far(); });
  thread_ = std::thread([asked = asked_] { asked->serve(); });
  save_points::detail::listener = this;
}

SaveOnSignal::~SaveOnSignal() { end(); }

void SaveOnSignal::end() {
  if (saving_ || !thread_.joinable()) return;
  save_points::detail::listener = nullptr;
  give_signals_back();
  asked_->set(&Asked::over);
  ::sem_post(&signal_came);
  thread_.join();
}

/// Of this save point: ranks may ask for different numbers of batches where they evaluate, never between two steps of
/// the training; so steps come first.
int64_t SaveOnSignal::next_place() {
  int64_t steps = 0;
  for (const auto& optimizer : run_.optimizers) {
    const auto counts = optimizer.step_counts();
    steps += counts.taken + counts.skipped;
  }
  points_ = steps == steps_ ? points_ + 1 : 1;
  steps_ = steps;
  return (steps << 32) + points_;
}

void SaveOnSignal::pass(const std::function<void()>& end_pass) {
  if (saving_) return;  // a hook of the save reads data
  const int64_t here = next_place();
  asked_->passed = here;
  if (!asked_->now || !accelerator_.sync_gradients()) return;
  if (!end_pass && evaluates()) return;  // it would draw its numbers yet, which a run that goes on from here does not
  if (const auto& group = asked_->group) {
    // Watchdogs answer whatever their ranks do: this is short, and the peers can go on to where this rank is.
    group->wait_until(
        "save_on_signal", [&] { return group->furthest().has_value(); }, /*in_step=*/false);
    if (here <= *group->furthest()) return;
  }
  save(end_pass);
}

/// No model trains, or nobody records gradients.
bool SaveOnSignal::evaluates() const {
  return !c10::GradMode::is_enabled() ||
         (!run_.models.empty() && std::none_of(run_.models.begin(), run_.models.end(),
                                               [](const auto& model) { return model->model.is_training(); }));
}

void SaveOnSignal::save(const std::function<void()>& end_pass) {
  saving_ = true;
  asked_->set(&Asked::found);
  try {
    // A run that goes on from here trains on; its next evaluation is a whole one.
    if (end_pass && evaluates()) end_pass();
    counts::add(run_state::CheckpointCount::checkpoints_on_signals);
    const auto folder = accelerator_.save_state();
    if (accelerator_.is_main_process())
      logs::warn(kSaveLogger, "{}: saved '{}' after {} steps; the process ends with exit code {}", name_of_signal(),
                 folder.string(), run_state::steps_taken(run_), kSavedExitCode);
  } catch (...) {
    saving_ = false;
    end();
    throw;
  }
  try {
    accelerator_.end_training();
  } catch (const std::exception& error) {  // a tracker's process may have heard the signal, too
    logs::warn(kSaveLogger, "{}: the checkpoint is saved, but ending the training failed: {}", name_of_signal(),
               error.what());
  }
  // The thread says so no longer: from here on the process has as long as any that was told to end.
  asked_->set(&Asked::over);
  thread_.join();
  std::exit(kSavedExitCode);
}

}  // namespace accelerate
