#include "utils/slurm.hpp"
#include "utils/raise.hpp"

#include <algorithm>
#include <charconv>

namespace accelerate::slurm {
namespace {

std::optional<int64_t> number(const Variable& variable, const char* name) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < 0)
    raise<ConfigError>(
        "environment: {} is '{}', expected a whole number as srun sets it. Unset SLURM_STEP_NUM_TASKS where srun did "
        "not start this process",
        name, *text);
  return value;
}

}  // namespace

std::string first_machine(const std::string& list) {
  std::string name;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      name += list[i];
      continue;
    }
    const size_t close = std::min(list.find(']', i), list.size());
    name += list.substr(i + 1, std::min(list.find_first_of("-,]", i), list.size()) - i - 1);
    i = close;
  }
  return name;
}

std::optional<Task> this_task(const Variable& variable) {
  const auto world_size = number(variable, "SLURM_STEP_NUM_TASKS");
  if (!world_size) return std::nullopt;
  const int64_t job = number(variable, "SLURM_JOB_ID").value_or(0),
                step = number(variable, "SLURM_STEP_ID").value_or(0);
  Task task{.rank = number(variable, "SLURM_PROCID").value_or(0),
            .world_size = *world_size,
            .local_rank = number(variable, "SLURM_LOCALID").value_or(0),
            .local_world_size = *world_size,
            .address = "127.0.0.1",
            .port = 15000 + (job % 1000 * 15 + step % 15),
            .step = std::to_string(job) + "." + std::to_string(step)};
  if (const auto here = variable("SLURM_GTIDS"))
    task.local_world_size = 1 + std::count(here->begin(), here->end(), ',');
  const auto machines = variable("SLURM_STEP_NODELIST");
  if (machines && number(variable, "SLURM_STEP_NUM_NODES").value_or(1) > 1) task.address = first_machine(*machines);
  return task;
}

}  // namespace accelerate::slurm
