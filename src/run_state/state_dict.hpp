#pragma once

#include <string>
#include <vector>

#include "accelerate/run_state/state_dict.hpp"
#include "checkpoint/saved_state.hpp"
#include "formats/dcp.hpp"

/// Walking through state dicts.
namespace accelerate::run_state {

using distributed_checkpoint::ShardedTensor;
using distributed_checkpoint::StateDict;
using distributed_checkpoint::Value;

/// A value that is saved under a name of its own: everything that is neither a dict nor a list with tensors or dicts in
/// it, as in Python. A list of plain data is one.
struct Leaf {
  formats::DcpPath path;
  std::string name;
  const Value* value;  ///< of the dict
};

/// In the dict's order. Empty dicts have no leaves. @throws ConfigError if two have one name ({"a.b": …} and {"a":
/// {"b": …}}), and for what no file holds: bytes in lists of plain data, objects of TorchScript.
std::vector<Leaf> leaves_of(const StateDict& state);
/// The value that a leaf's path leads to.
Value& value_at(StateDict& state, const formats::DcpPath& path);

/// A leaf as ranks tell each other of it.
struct SentLeaf {
  struct Step {
    std::string key;
    int64_t index = -1;  ///< of a list; else it is a key
    ACCELERATE_FIELDS(key, index)
  };
  std::string name;
  std::vector<Step> path;
  int64_t rank = 0;
  bool is_tensor = false, is_sharded = false;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  int64_t replicas = 1;  ///< that hold its parts
  bool follows_rule = false;
  parallel::EqualShards equal = {};  ///< the rule
  ACCELERATE_FIELDS(name, path, rank, is_tensor, is_sharded, sizes, dtype, replicas, follows_rule, equal.begin,
                    equal.each, equal.members, equal.member_step, equal.replica_step)

  bool is_like(const SentLeaf& other) const;
  std::string text() const;  ///< "a tensor of size [3] and dtype Float"
};
/// @throws ConfigError for numbers of replicas that can't be, and where this rank's parts are not those of their rule
SentLeaf as_sent(const Leaf& leaf);
/// The rule of a leaf that has one, for the ranks of one replica.
formats::DcpShards rule_of(const SentLeaf& leaf, int64_t replica);
formats::DcpPath path_of(const SentLeaf& leaf);

/// "a tensor of size [3, 4]", "text", for messages.
std::string describe(const Value& value);

/// A tensor in memory, whole or this rank's parts of it, in the place of one in a file. @param name  for messages
/// @throws ConfigError for anything else.
checkpointing::StoredTensor stored_in_memory(const std::string& name, const Value& value);

}  // namespace accelerate::run_state
