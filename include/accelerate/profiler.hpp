#pragma once

/// The costs of this process's operators: PyTorch's profiler (Kineto), with its tables and files, for C++. Source:
/// torch.profiler and torch.autograd.profiler_util of PyTorch 2.13; `Accelerator.profile` of the reference.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs.hpp"

namespace accelerate {

/// The costs of one call, or of all calls of one kind, in a recording. Times are in microseconds, memory in bytes.
struct ProfileCosts {
  double cpu_time_total = 0;       ///< from begin to end, on the CPU
  double self_cpu_time_total = 0;  ///< of it, outside of the calls within
  double device_time_total = 0;    ///< of the kernels that it started, on the accelerator
  double self_device_time_total = 0;
  int64_t cpu_memory_usage = 0;  ///< allocated less released
  int64_t self_cpu_memory_usage = 0;
  int64_t device_memory_usage = 0;
  int64_t self_device_memory_usage = 0;
  int64_t flops = 0;
};

/// One call of an operator, a named scope, or a kernel.
struct ProfileEvent : ProfileCosts {
  int64_t id = 0;
  std::string name;  ///< steps of the schedule share one: ProfilerStep*
  std::string overload_name;
  double start_us = 0, end_us = 0;  ///< since the recording began
  uint64_t thread = 0;              ///< as LibTorch numbers them
  uint64_t forward_thread = 0;      ///< of a backward: which thread ran the forward
  int64_t sequence_number = -1;     ///< joins a backward with its forward
  bool is_backward = false;
  bool is_async = false;  ///< began and ended on different threads
  bool is_user_annotation = false;
  c10::DeviceType device_type = c10::DeviceType::CPU;
  int64_t device_index = 0;
  std::vector<std::vector<int64_t>> input_shapes;  ///< one list per input, empty for what is no tensor
  /// The stack of its call, innermost first: lines of TorchScript ("model.py(12): forward"), else functions of C++
  /// ("program(0x12ab): train", with the address that addr2line wants). A backward has its forward's.
  std::vector<std::string> stack;
  /// The modules in whose forward it was called, outermost first; of C++ their classes, without "Impl".
  std::vector<std::string> module_hierarchy;
  std::optional<int64_t> parent;  ///< its place in ProfileEvents::events
  std::vector<int64_t> children;  ///< calls directly within, as places
};

/// How a table looks.
struct ProfileTableOptions {
  /// The column that decides the order, the largest first, by PyTorch's names: "cpu_time_total", "self_cpu_time_total",
  /// "cpu_time", "cuda_time_total", "self_cuda_time_total", "device_time", "cpu_memory_usage", "self_cpu_memory_usage",
  /// "cuda_memory_usage", "count", "flops" and so on; "xpu" and "device" stand for "cuda", too. Unset: as they came.
  std::optional<std::string> sort_by;
  /// Rows at most; -1: all.
  int64_t row_limit = 100;
  int64_t max_src_column_width = 75;
  int64_t max_name_column_width = 55;
  int64_t max_shapes_column_width = 80;
  /// A line above the table.
  std::optional<std::string> header;
  /// Only calls that no other call made.
  bool top_level_events_only = false;
  /// "s", "ms" or "us" for all times; unset: each in what suits it.
  std::optional<std::string> time_unit;
};

/// All calls of one key.
struct ProfileAverage : ProfileCosts {
  std::string key;
  int64_t count = 0;
  bool is_async = false;
  bool is_user_annotation = false;
  bool top_level = true;  ///< the first of them was made by no other call
  c10::DeviceType device_type = c10::DeviceType::CPU;
  std::string input_shapes;  ///< as PyTorch writes them; empty where shapes don't tell calls apart
  std::vector<std::string> stack;
  double cpu_time() const { return count == 0 ? 0 : cpu_time_total / static_cast<double>(count); }
  double device_time() const { return count == 0 ? 0 : device_time_total / static_cast<double>(count); }
};

/// The settings and the process of a recording, beside its events.
struct ProfileContext {
  std::string device;  ///< of kernels: "cuda", "xpu", …; empty: none
  bool memory = false;
  bool flops = false;
};

/// Rows of a table: averages, in the order in which their first calls began.
class ACCELERATE_API ProfileAverages : public std::vector<ProfileAverage> {
 public:
  ProfileAverages() = default;
  explicit ProfileAverages(ProfileContext context) : context_(std::move(context)) {}
  /// PyTorch's table, to the letter. @throws ConfigError for an order or unit that does not exist.
  std::string table(const ProfileTableOptions& options = {}) const;
  double self_cpu_time_total() const;

 private:
  ProfileContext context_;
};

/// The calls of one recording, by the time at which they began.
struct ACCELERATE_API ProfileEvents {
  std::vector<ProfileEvent> events;
  ProfileContext context;

  /// Sums over calls of one name, or of one name and the same shapes, or with the same first lines of the stack.
  ProfileAverages key_averages(bool group_by_input_shape = false, int64_t group_by_stack_n = 0) const;
  /// The sum over all, with the key "Total".
  ProfileAverage total_average() const;
  /// One row per call.
  std::string table(const ProfileTableOptions& options = {}) const;
};

/// A storage whose purpose is known, for the memory timeline.
struct ProfileStorage {
  enum class Kind { parameter, gradient, optimizer_state };
  const void* data = nullptr;  ///< its beginning: tensor.storage().data()
  Kind kind = Kind::parameter;
};

/// The identity of this process, for the file of the trace.
struct ProfileProcess {
  /// How far its clock is from rank 0's.
  struct Clock {
    int64_t offset_ns = 0;  ///< to add to its times to get rank 0's
    int64_t error_ns = 0;   ///< at most
  };
  int64_t rank = 0;
  int64_t num_processes = 1;
  std::string backend;
  std::optional<Clock> clock;  ///< unset: nobody knows
  /// Asked when a recording with profile_memory has ended, on the thread that ends it: storages that live then.
  /// `Accelerator::profile` gives those of prepared models and optimizers. Unset: nobody knows.
  std::function<std::vector<ProfileStorage>()> storages;
};

/// Records from its construction to stop() or its end: operators of all threads, and this library's own spans (waits
/// for data, for units, for other ranks, files of checkpoints; docs/formats/profile_trace.md). Shapes, bytes,
/// operations and stacks are known of the thread that made it and of the threads of autograd that work for it; step()
/// and stop() are that thread's. One at a time in a process. Not collective.
class ACCELERATE_API Profile {
 public:
  /// @throws ConfigError for activities, keys or numbers that don't exist, and while another profiler records.
  [[nodiscard]] explicit Profile(ProfileKwargs kwargs = {}, ProfileProcess process = {});
  Profile(Profile&&) noexcept;
  Profile& operator=(Profile&&) = delete;
  /// Stops. A failure then is a warning; call stop() to catch it.
  ~Profile();

  /// The next step begins. With a schedule it starts and ends recordings.
  void step();
  /// Ends the recording, calls on_trace_ready, and writes the file of output_trace_dir. Nothing the second time.
  /// @throws ResourceError if the file can't be written; what on_trace_ready throws. The recording has ended then.
  void stop();

  int64_t step_num() const;
  /// Of the last recording that ended. @throws ConfigError before there is one.
  const ProfileEvents& events() const;
  ProfileAverages key_averages(bool group_by_input_shape = false, int64_t group_by_stack_n = 0) const {
    return events().key_averages(group_by_input_shape, group_by_stack_n);
  }
  ProfileAverage total_average() const { return events().total_average(); }
  /// Writes the last recording for chrome://tracing, Perfetto and HTA. @throws ResourceError, ConfigError as events().
  void export_chrome_trace(const std::filesystem::path& file) const;
  /// One line per call that has a stack: "outermost;…;innermost microseconds", for flame graphs.
  /// @param metric  "self_cpu_time_total", or with cuda, xpu or privateuse1 in the place of cpu.
  void export_stacks(const std::filesystem::path& file, const std::string& metric = "self_cpu_time_total") const;
  /// Writes how many bytes of a device were for what over the time of the last recording; what is told from what is in
  /// docs/profiling.md. The file's name says the form: .raw.json is a list of [ns since 1970 or -1, action, bytes,
  /// category], .json [times in µs, [[0, bytes of each category], …]], both as PyTorch writes them; .html is a page
  /// with a plot.
  /// @param device  "cpu", "cuda:0", …
  /// @throws ConfigError without profile_memory and record_shapes, for other names, and for a device of which nothing
  /// was recorded; ResourceError; CheckpointError where the folder is missing
  void export_memory_timeline(const std::filesystem::path& file, const std::string& device = "cpu") const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate
