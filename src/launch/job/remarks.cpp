#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

#include "launch/job/deepspeed_machines.hpp"
#include "launch/job/option_values.hpp"
#include "launch/job/rendezvous.hpp"
#include "launch/job/settings.hpp"

namespace accelerate::launcher {

using config::Kind;
using config::Option;

void Settings::remark() {
  const auto unused = [&](const char* section, bool used, const std::string& needs) {
    if (used) return;
    for_each_option([&](const Option& option) {
      if (option.section && option.section == std::string(section) && source(option.name) == ValueSource::flag &&
          option.kind != Kind::unset)
        remarks_.push_back(fmt::format("{} has no effect without {}", flag_of(option), needs));
    });
  };
  unused("fsdp_config", on("use_fsdp") && launcher_ == Launcher::torchrun, "--use_fsdp");
  unused("megatron_lm_config", on("use_megatron_lm") && launcher_ == Launcher::torchrun, "--use_megatron_lm");
  unused("parallelism_config", on("use_parallelism_config"), "--use_parallelism_config");
  unused("fp8_config", text("mixed_precision") == "fp8", "--mixed_precision fp8");
  // Without a back end a program chooses: Python's by what is installed, C++'s torchao's.
  const std::string backend = in_small_letters(text("fp8_backend"));
  if (text("mixed_precision") == "fp8") {
    const auto only = [&](const char* owner, std::initializer_list<const char*> names) {
      for (const char* name : names) {
        if (backend == owner || source(name) != ValueSource::flag) continue;
        const std::string flag = flag_of(option_called(name));
        remarks_.push_back(
            backend.empty()
                ? fmt::format("{0} has no effect unless the program chooses {1}; give --fp8_backend {1}", flag, owner)
                : fmt::format("{} has no effect with --fp8_backend {}, but with {}", flag, backend, owner));
      }
    };
    only("te", {"fp8_use_autocast_during_eval", "fp8_margin", "fp8_interval", "fp8_format", "fp8_amax_history_len",
                "fp8_amax_compute_algo", "fp8_override_linear_precision"});
    if (!backend.empty()) only("ao", {"fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"});
    only("msamp", {"fp8_opt_level"});
  }
  if (launcher_ != Launcher::deepspeed)
    for (const char* name :
         {"deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
          "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_clipping", "zero3_init_flag",
          "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
          "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names", "deepspeed_as_of_version",
          "deepspeed_step_in_backward", "deepspeed_step_at_once"})
      if (source(name) == ValueSource::flag)
        remarks_.push_back(fmt::format("--{} has no effect without --use_deepspeed", name));
  const bool machines_by_deepspeed = deepspeed_starts_machines(*this);
  if (launcher_ == Launcher::deepspeed && !machines_by_deepspeed)
    for (const char* name : {"deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
                             "deepspeed_multinode_launcher"})
      if (source(name) == ValueSource::flag && text(name) != "standard")
        remarks_.push_back(fmt::format("--{} has no effect {}", name,
                                       !text("hostfile").empty() ? "beside --hostfile, which says who starts what where"
                                       : num_machines() == 1
                                           ? "with one machine, and --num_machines says no other number"
                                           : "with --deepspeed_multinode_launcher standard: this command runs "
                                             "on each machine, with its --machine_rank"));
  if (text("hostfile").empty())
    for (const std::string name : {"include", "exclude", "remote_shell"})
      if (source(name) == ValueSource::flag && !(name == "remote_shell" && machines_by_deepspeed))
        remarks_.push_back(fmt::format("--{} has no effect without --hostfile", name));
  if (launcher_ != Launcher::tpu)
    for (const char* name : {"vm", "env", "main_training_function", "downcast_bf16", "tpu_use_sudo", "tpu_use_cluster"})
      if (source(name) == ValueSource::flag)
        remarks_.push_back(flag_of(option_called(name)) + " has no effect without --tpu");
  if (launcher_ == Launcher::sagemaker)
    for_each_option([&](const Option& option) {
      const std::string name = option.name;
      if (source(name) != ValueSource::flag || name.starts_with("dynamo_") || name.starts_with("fp8_") ||
          option.kind == Kind::unset)
        return;
      for (const char* known :
           {"config_file", "quiet", "dry_run", "module", "no_python", "debug", "mixed_precision", "num_machines",
            "gradient_accumulation_steps", "aws_access_key_id", "aws_secret_access_key"})
        if (name == known) return;
      remarks_.push_back(flag_of(option) + " has no effect on Amazon SageMaker");
    });
  else
    for (const char* name : {"aws_access_key_id", "aws_secret_access_key"})
      if (source(name) == ValueSource::flag)
        remarks_.push_back(fmt::format("--{} has no effect: the config file is not one for Amazon SageMaker", name));
  if (in_small_letters(text("dynamo_backend")) == "no")
    for (const char* name :
         {"dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"})
      if (source(name) == ValueSource::flag)
        remarks_.push_back(fmt::format("--{} has no effect without --dynamo_backend", name));
  if (launcher_ != Launcher::simple && source("mpirun_hostfile") == ValueSource::flag)
    remarks_.emplace_back(
        "--mpirun_hostfile has no effect here: mpirun starts processes that compute on the CPU, with --cpu");
  for (const auto& group : config::launch_table().groups)
    if (group.title == std::string_view(config::kRetired))
      for (const auto& option : group.options)
        if (config::truthy((*this)[option.name]))
          remarks_.push_back(fmt::format("{} is retired and has no effect. {}",
                                         source(option.name) == ValueSource::flag
                                             ? flag_of(option)
                                             : fmt::format("'{}' in the config file {}", option.name, file_name_),
                                         option.help));
  if (on("multi_gpu") && !computes_on_cpu() && device_type_->backend != std::string_view("nccl"))
    remarks_.push_back(
        fmt::format("{} communicate through {}, which C++ programs of this library have no back end for: "
                    "they stop at their start, unless they compute on the CPU (--cpu)",
                    device_type_->plural, device_type_->backend));
  if (source("monitor_host") == ValueSource::flag && !integer("monitor_port"))
    remarks_.emplace_back("--monitor_host has no effect without --monitor_port");
  for (const std::string name : {"monitor_seconds", "monitor_peak_flops"})
    if (source(name) == ValueSource::flag && !integer("monitor_port") && !on("monitor"))
      remarks_.push_back(fmt::format("--{} has no effect without --monitor or --monitor_port", name));
  const auto entries = rendezvous_entries(text("rdzv_conf"));
  const bool waits = std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
    return entry.first.find("timeout") != std::string::npos || entry.first.find("keep_alive") != std::string::npos;
  });
  if (waits && source("rdzv_conf") == ValueSource::flag && num_machines() == 1)
    remarks_.emplace_back(
        "--rdzv_conf has no effect on one machine, where nobody needs to be waited for; how long the ranks wait for "
        "each other is InitProcessGroupKwargs.timeout in the program");
  if (source("same_network") == ValueSource::flag)
    remarks_.emplace_back(
        "--same_network has no effect: machines meet at --main_process_ip and --main_process_port, whether they are on "
        "one network or not");
  if (!slurm_step_.empty())
    remarks_.push_back(fmt::format("Slurm's step {}: machine {} of {}, meeting at {}:{}", slurm_step_,
                                   text("machine_rank"), text("num_machines"), text("main_process_ip"),
                                   text("main_process_port")));
  if (on("use_parallelism_config") && (!on("use_fsdp") || text("fsdp_version") != "2"))
    remarks_.emplace_back("the parallelism config is for FSDP version 2");
}

}  // namespace accelerate::launcher
