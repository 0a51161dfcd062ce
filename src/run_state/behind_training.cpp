#include "run_state/behind_training.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "comm/group.hpp"
#include "comm/notes.hpp"
#include "parallel/layer.hpp"
#include "residency/homes/encoded.hpp"
#include "run_state/holdings.hpp"
#include "snapshot/counts.hpp"
#include "snapshot/put_off.hpp"
#include "utils/error_text.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

using snapshot::SnapshotCount;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

/// The tensors in a state dict, whatever its layout.
void tensors_in(const c10::IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) return found.push_back(value.toTensor());
  if (value.isList())
    for (const c10::IValue& item : value.toListRef()) tensors_in(item, found);
  if (value.isTuple())
    for (const c10::IValue& item : value.toTupleRef().elements()) tensors_in(item, found);
  if (value.isGenericDict())
    for (const auto& entry : value.toGenericDict()) tensors_in(entry.value(), found);
}

void refuse_unreadable(const parallel::Engines& engines, const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const char* found) {
    raise<ConfigError>(
        "save_state: behind_training is true, but {} {}, expected memory of the host, which is read while training "
        "goes on. Save without behind_training",
        name, found);
  };
  if (!tensor.defined() || tensor.is_meta()) return;
  if (!tensor.is_cpu()) refuse("lies on an accelerator");
  if (comes_and_goes(tensor)) refuse("is there only while operators use it (it is offloaded)");
  for (const auto& engine : engines)
    for (const auto& layer : engine->layers())
      if (layer->is_elsewhere(tensor)) refuse("lies on a disk between steps");
}

/// What is read later. @throws ConfigError for what can't be
std::vector<snapshot::NamedTensor> read_later(const RunState& run) {
  const auto engines = run.engines();
  std::vector<snapshot::NamedTensor> state;
  for (const auto& model : run.models) {
    std::set<const at::TensorImpl*> parameters;  // buffers change in forwards, and are copied
    for (const auto& [name, parameter] : model->model.parameters()) parameters.insert(parameter.unsafeGetTensorImpl());
    for (const auto& holding : holdings_of(*model)) {
      const auto* const tensor = holding.tensor.unsafeGetTensorImpl();
      if (!parameters.contains(tensor) || residency::encoded_weight(holding.tensor)) continue;  // files have no codes
      refuse_unreadable(engines, holding.names.front(), holding.value);
      state.push_back({holding.names.front(), holding.value});
    }
  }
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    std::vector<at::Tensor> tensors;
    tensors_in(run.optimizers[i].state_dict(), tensors);
    // Those that a second call makes anew were made for the dict, and are copied then.
    const auto name = fmt::format("a state of prepared optimizer {}", i);
    for (auto& tensor : tensors) refuse_unreadable(engines, name, tensor), state.push_back({name, std::move(tensor)});
  }
  return state;
}

/// Where shards lie in what all ranks see, a program's writes come there without a word.
std::vector<snapshot::NamedTensor> fixed_parameters(const RunState& run) {
  std::vector<snapshot::NamedTensor> all;
  for (const auto& model : run.models)
    for (const auto& [name, parameter] : model->model.parameters())
      if (!comes_and_goes(parameter)) all.push_back({name, parameter});
  return all;
}

void refuse_form(const RunState& run, const SaveOptions& options) {
  if (options.form == StateForm::deepspeed)
    throw ConfigError(
        "save_state: behind_training is true, but this run saves DeepSpeed's own files, expected plain training, or "
        "FSDP with sharded or local state. Save without behind_training");
  if (options.form == StateForm::sharded || options.form == StateForm::local) return;
  for (const auto& model : run.models)
    for (const auto& holding : holdings_of(*model))
      if (holding.in_pieces())
        raise<ConfigError>(
            "save_state: behind_training is true, but rank 0 saves '{}' whole and each rank has a piece of it, which "
            "can't be gathered while training communicates. Expected state_dict_type SHARDED_STATE_DICT or "
            "LOCAL_STATE_DICT; or save without behind_training",
            holding.names.front());
}

std::chrono::nanoseconds since(steady_clock::time_point begun) { return steady_clock::now() - begun; }

}  // namespace

/// What both threads know: the writer's thread outlives an Accelerator that could not wait for it.
struct BehindTraining::Shared {
  int64_t number = 0, rank = 0, world_size = 1;
  std::vector<int64_t> firsts;  ///< the ranks that are first on their disks, 0 among them
  std::shared_ptr<snapshot::Ledger> ledger;
  snapshot::LaterFiles later;
  Parts parts;
  std::unique_ptr<comm::Notes> notes;  ///< null: this process is alone

  std::atomic<bool> abandoned{false}, ended{false};
  Mutex mutex;
  std::condition_variable changed;
  std::string failure ACCELERATE_GUARDED_BY(mutex);
  bool begins ACCELERATE_GUARDED_BY(mutex) = false;  ///< the mark is set, training goes on

  /// A rank's part, as rank 0 and the first ranks on other disks get it.
  struct Report {
    std::string failure = {};
    std::vector<std::string> texts = {};  ///< of LaterFiles::together
    std::string files = {};
    ACCELERATE_FIELDS(failure, texts, files)
  };

  std::string key(const char* what, int64_t of) const { return fmt::format("checkpoint/{}/{}/{}", number, what, of); }
  /// Waits for a note. @throws CommError, also when the program has left
  std::string note(const char* what, int64_t of) {
    for (auto pause = milliseconds(1);; pause = std::min(2 * pause, milliseconds(50))) {
      if (auto found = notes->find(key(what, of))) return *found;
      if (abandoned) throw CommError("the program ended before the checkpoint was complete");
      std::this_thread::sleep_for(pause);
    }
  }

  /// On the writer's thread: what ranks do each by themselves.
  Report write() {
    Report report;
    try {
      const snapshot::ReadsBy by(*ledger);
      for (auto& write : later.writes) std::exchange(write, nullptr)();
      for (auto& together : later.together) report.texts.push_back(std::exchange(together.write, nullptr)());
    } catch (const std::exception& error) {
      report.failure = text_of(error);
    }
    if (auto wrong = ledger->finish(); report.failure.empty()) report.failure = std::move(wrong);
    return report;
  }

  /// What is left when all have written, by the first rank on each disk. @param reports  by rank
  void publish(const std::vector<Report>& reports) {
    if (rank == 0)
      for (size_t i = 0; i < later.together.size(); ++i) {
        std::vector<std::string> texts;
        for (const auto& report : reports) texts.push_back(report.texts.at(i));
        later.together[i].last(texts);
      }
    parts.files->add(parts.files->written_here());  // rank 0's last files among them
    for (const auto& report : reports)
      if (!report.files.empty()) parts.files->add(report.files);
    parts.folder->publish_here([this] { parts.files->write_manifest(parts.facts); });
  }

  /// @return what went wrong, the same on all ranks
  std::string run() {
    Report mine = write();
    const bool first = std::find(firsts.begin(), firsts.end(), rank) != firsts.end();
    if (!first) mine.files = parts.files->written_here();
    // Of a rank that is first what it wrote is not known before it has published; others on its disk wrote other files.
    if (!notes) {
      if (mine.failure.empty()) publish({mine});
      return mine.failure;
    }
    notes->leave(key("written", rank), to_bytes(mine));
    std::vector<Report> reports;
    for (int64_t other = 0; first && other < world_size; ++other)
      reports.push_back(from_bytes<Report>(note("written", other)));
    std::string verdict;
    for (size_t other = 0; other < reports.size(); ++other)
      if (verdict.empty() && !reports[other].failure.empty())
        verdict = fmt::format("on rank {}: {}", other, reports[other].failure);
    for (const int64_t publisher : firsts) {
      if (publisher == rank) {
        try {
          if (verdict.empty()) publish(reports);
        } catch (const std::exception& error) {
          verdict = fmt::format("on rank {}: {}", rank, text_of(error));
        }
        notes->leave(key("published", rank), verdict);
      } else if (auto theirs = note("published", publisher); verdict.empty()) {
        verdict = std::move(theirs);
      }
    }
    return verdict;
  }

  /// Training comes first. Where all cores are busy, a thread that begins to write at once, or is woken to, puts the
  /// one that trains off its core for milliseconds; of class SCHED_BATCH it waits for its turn.
  void wait_for_begin() {
    ::pthread_setname_np(::pthread_self(), "checkpoint");
    const sched_param none{};
    ::sched_setscheduler(0, SCHED_BATCH, &none);
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 5);
    MutexLock lock(mutex);
    while (!begins) lock.wait(changed);
  }

  void begin() {
    const MutexLock lock(mutex);
    begins = true;
    changed.notify_all();
  }

  void run_to_the_end() {
    wait_for_begin();
    std::string wrong;
    try {
      wrong = run();
    } catch (const std::exception& error) {
      wrong = text_of(error);
    }
    later = {};
    if (wrong.empty()) parts.folder->set_published();
    else counts::add(SnapshotCount::failures);
    parts = {};
    const MutexLock lock(mutex);
    failure = std::move(wrong);
    ended = true;
    changed.notify_all();
  }
};

BehindTraining::BehindTraining(const RunState& run, const SaveOptions& options, Parts parts)
    : shared_(std::make_shared<Shared>()), exceptions_(std::uncaught_exceptions()) {
  Shared& shared = *shared_;
  const auto group = comm::world_group();
  shared.rank = comm::rank();
  shared.world_size = comm::world_size();
  shared.firsts = parts.folder->firsts();
  shared.parts = std::move(parts);
  std::vector<snapshot::NamedTensor> state;  // held: none that is made below comes to lie in the place of one of these
  comm::on_all_ranks_or_throw<ConfigError>([&] {
    refuse_form(run, options);
    state = read_later(run);
    shared.ledger = std::make_shared<snapshot::Ledger>(state, fixed_parameters(run));
    if (group && !group->dry()) shared.notes = std::make_unique<comm::Notes>(*group);
  });
  {
    snapshot::PutOff off(shared.ledger);
    save(run, shared.parts.folder->where(), options);
    shared.later = std::move(off.files());
  }
  // The mark. What has thrown up to here has thrown on all ranks; from here on each writes.
  shared.number = snapshot::next_epoch();
  const auto numbers = gather_object(std::vector<int64_t>{shared.number});
  if (std::set(numbers.begin(), numbers.end()).size() != 1)
    raise<CheckpointError>("save_state: ranks have set {} marks, expected equally many: all ranks call save_state",
                           fmt::join(numbers, ", "));
  counts::add(SnapshotCount::marks);
  counts::add(SnapshotCount::state_bytes, shared.ledger->state_bytes());
  counts::add(SnapshotCount::copied_bytes, shared.ledger->copied_bytes());
  std::thread([shared = shared_] { shared->run_to_the_end(); }).detach();
  snapshot::set_current(shared.ledger);
  shared.begin();
}

void BehindTraining::wait() {
  const auto begun = steady_clock::now();
  Shared& shared = *shared_;
  if (const auto group = comm::world_group(); group && !group->dry()) {
    group->wait_until("wait_for_checkpoint", [&] { return shared.ended.load(); });
  } else {
    MutexLock lock(shared.mutex);
    while (!shared.ended) lock.wait(shared.changed);
  }
  counts::add(SnapshotCount::waited_ns, since(begun) / nanoseconds(1));
  snapshot::set_current(nullptr);
  const MutexLock lock(shared.mutex);
  if (!shared.failure.empty())
    raise<CheckpointError>("saving behind training: the checkpoint was not written, and the older one is untouched: {}",
                           std::exchange(shared.failure, {}));
}

BehindTraining::~BehindTraining() {
  constexpr auto kPatience = std::chrono::seconds(30);
  Shared& shared = *shared_;
  const auto begun = steady_clock::now();
  if (std::uncaught_exceptions() <= exceptions_) {
    MutexLock lock(shared.mutex);
    while (!shared.ended && since(begun) < kPatience) lock.wait_for(shared.changed, milliseconds(100));
    if (!shared.ended || !shared.failure.empty())
      logs::warn("accelerate.run_state",
                 "the checkpoint that was being written when the Accelerator ended is not complete ({}). Call "
                 "wait_for_checkpoint() or end_training() before the program ends",
                 shared.ended ? shared.failure : "it took too long");
  }
  shared.abandoned = true;
  shared.ledger->abandon();
  // A chunk or so more: its thread must not read what the program is about to take apart.
  {
    MutexLock lock(shared.mutex);
    while (!shared.ended && since(begun) < 2 * kPatience) lock.wait_for(shared.changed, milliseconds(10));
  }
  snapshot::set_current(nullptr);
}

}  // namespace accelerate::run_state
