#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/value.hpp"
#include "launch/job/place.hpp"
#include "utils/device_types.hpp"

namespace accelerate::launcher {

struct Host;

/// Names of settings and the texts that would follow their flags. The last of two for one setting counts.
using GivenSettings = std::vector<std::pair<std::string, std::string>>;

/// A launch as it is asked for.
struct LaunchRequest {
  std::vector<std::string> command;   ///< the program and its arguments
  GivenSettings settings;             ///< only what somebody gave, be it the default
  std::filesystem::path config_file;  ///< empty: none is read
};

/// The sources of a setting's value, the weakest first.
enum class ValueSource { fallback, file, environment, flag };

/// The launcher that starts the processes. The reference has a function for each, and what the processes find in their
/// environment depends on it.
enum class Launcher { simple, torchrun, deepspeed, tpu, sagemaker };

/// All settings of a launch, each with the value that wins: flag, else environment variable, else config file, else
/// default. They are the rows of the launch table (config/launch_table.cpp): a new row can be read here by its name.
class Settings {
 public:
  /// @throws ConfigError for values that can't be, contradictions, and what is wrong with the config file.
  Settings(const LaunchRequest& request, const Host& host);

  /// The value of a setting, null when it has none. @throws InternalError when there is no such setting.
  const config::Value& operator[](const std::string& name) const;
  ValueSource source(const std::string& name) const;
  bool on(const std::string& name) const { return config::truthy((*this)[name]); }
  /// Python's text of the value; "" when it has none.
  std::string text(const std::string& name) const;
  std::optional<int64_t> integer(const std::string& name) const;

  Launcher launcher() const { return launcher_; }
  /// The config file with all its keys, null when none was read.
  const config::Value& file() const { return file_; }
  /// Remarks for the user: flags that have no effect in this combination. A line each.
  const std::vector<std::string>& remarks() const { return remarks_; }

  int64_t num_processes() const;  ///< 0: nobody said, and there is no accelerator
  int64_t num_machines() const { return integer("num_machines").value_or(1); }
  /// MIN of --num_machines MIN:MAX.
  int64_t min_machines() const { return std::min(min_machines_.value_or(num_machines()), num_machines()); }
  /// Kind of the devices that the job computes on, unless it does on the CPU: the file's, else this machine's.
  const devices::DeviceType& device_type() const { return *device_type_; }
  bool computes_on_cpu() const { return on("cpu") || on("use_cpu"); }
  int64_t threads_per_process() const { return threads_; }
  /// The place of this process in another launcher's job, of which it is a rank. Then this launcher starts that one
  /// process.
  const std::optional<LaunchPlace>& place() const { return place_; }
  bool threads_chosen() const { return threads_chosen_; }  ///< by us: neither a flag nor the environment said how many

 private:
  struct Entry {
    config::Value value;
    ValueSource source = ValueSource::fallback;
    std::string error;  ///< why the value can't be, of a file whose job may not need it: for who reads it
  };
  void set(const std::string& name, config::Value value, ValueSource source);
  /// Writes MAX of "MIN:MAX" for num_machines in place of it, and remembers MIN.
  std::string without_minimum(const std::string& name, const std::string& text, ValueSource source,
                              const std::string& where);
  void take_flags(const GivenSettings& given);
  void take_environment(const Host& host);
  void take_slurm(const Host& host);
  void take_rdzv_conf();
  void take_torchrun_variables(const Host& host);
  void take_place(const Host& host);
  void take_file(const std::filesystem::path& path);
  void take_key(const std::string& key, const config::Value& value);
  void take_section(const std::string& section, const config::Value& content);
  void choose_paradigm();
  bool uses_section(const std::string& section) const;
  void check_flags() const;
  void fill_in(const Host& host);
  void name_strategy();
  void choose_threads(const Host& host);
  void remark();  // remarks.cpp

  std::map<std::string, Entry> entries_;
  config::Value file_;
  std::string file_name_;
  Launcher launcher_ = Launcher::simple;
  const devices::DeviceType* device_type_ = nullptr;
  std::vector<std::string> remarks_;
  std::optional<int64_t> min_machines_;
  std::optional<LaunchPlace> place_;
  std::string slurm_step_;  // the step whose tasks are this job's launchers
  int64_t threads_ = 1;
  bool threads_chosen_ = false;
};

}  // namespace accelerate::launcher
