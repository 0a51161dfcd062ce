#pragma once

#include <map>
#include <optional>
#include <string>

#include "accelerate/parallel/fsdp_plugin.hpp"

namespace support {

/// FSDP whose checkpoints have "full", "sharded" or "local" state; unset for any other word: plain training.
inline std::optional<accelerate::FullyShardedDataParallelPlugin> fsdp_saving(const std::string& state) {
  using accelerate::StateDictType;
  static const std::map<std::string, StateDictType> types{{"full", StateDictType::full_state_dict},
                                                          {"sharded", StateDictType::sharded_state_dict},
                                                          {"local", StateDictType::local_state_dict}};
  const auto type = types.find(state);
  if (type == types.end()) return std::nullopt;
  return accelerate::FullyShardedDataParallelPlugin{.state_dict_type = type->second};
}

}  // namespace support
