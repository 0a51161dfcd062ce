#include "launch/request.hpp"

#include <fmt/format.h>

namespace accelerate::launcher {
namespace {

/// The text of a flag for a field's value.
template <class T> std::string flag_text(const T& value) { return fmt::format("{}", value); }
std::string flag_text(const std::filesystem::path& value) { return value.string(); }
std::string flag_text(std::chrono::milliseconds value) {
  return flag_text(std::chrono::duration<double>(value).count());  // in seconds
}

}  // namespace

LaunchRequest request_of(const LaunchOptions& o) {
  GivenSettings given;
  const auto field = [&](const char* name, const auto& value) {
    if (value) given.emplace_back(name, flag_text(*value));
  };
  const auto text = [&](const char* name, const auto& value) {
    if (!value.empty()) given.emplace_back(name, flag_text(value));
  };
  field("module", o.module);
  field("no_python", o.no_python);
  field("num_processes", o.num_processes);
  field("num_machines", o.num_machines);
  field("machine_rank", o.machine_rank);
  text("main_process_ip", o.main_process_ip);
  field("main_process_port", o.main_process_port);
  field("cpu", o.cpu);
  text("mixed_precision", o.mixed_precision);
  field("gradient_accumulation_steps", o.gradient_accumulation_steps);
  field("num_cpu_threads_per_process", o.num_cpu_threads_per_process);
  field("debug", o.debug);
  field("quiet", o.quiet);
  text("log_dir", o.log_dir);
  field("redirects", o.redirects);
  field("tee", o.tee);
  field("max_restarts", o.max_restarts);
  field("role", o.role);
  field("monitor_interval", o.monitor_interval);
  field("grace_seconds", o.grace);
  field("dry_run", o.dry_run);
  given.insert(given.end(), o.settings.begin(), o.settings.end());
  return {o.command, given, o.config_file};
}

}  // namespace accelerate::launcher
