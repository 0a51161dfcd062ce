#include "parallel/sharding/ddp_settings.hpp"

#include "parallel/gradient_hook.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

void refuse_settings_of_ddp(const DistributedDataParallelKwargs& kwargs, const InsteadOfDdp& instead) {
  const DistributedDataParallelKwargs defaults;
  const auto refuse = [&](const char* field, const std::string& value, const std::string& why) {
    raise<ConfigError>(
        "Accelerator: DistributedDataParallelKwargs::{} is {}, but models are sharded ({}), where {}; leave it out",
        field, value, instead.engine, why);
  };
  if (kwargs.bucket_cap_mb != defaults.bucket_cap_mb)
    refuse("bucket_cap_mb", fmt::format("{}", kwargs.bucket_cap_mb),
           fmt::format("gradients travel by units: {}", instead.sizes));
  if (kwargs.static_graph)
    refuse("static_graph", "true", "nothing is taken from the first step's graph that a later one could break");
  if (kwargs.comm_hook != defaults.comm_hook) refuse("comm_hook", name_of(kwargs.comm_hook), instead.types);
  if (kwargs.communication_hook)
    refuse("communication_hook", "set", "gradients are cut over ranks instead of averaged in buckets");
}

}  // namespace accelerate::parallel
