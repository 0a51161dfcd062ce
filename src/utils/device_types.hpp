#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

/// Kinds of accelerators, a row each: all that depends on the kind is here. Without LibTorch: the launcher reads it
/// too.
namespace accelerate::devices {

struct DeviceType {
  const char* name;              ///< c10's: "cuda"
  const char* plural;            ///< in sentences: "GPUs"
  const char* distributed_type;  ///< the reference's DistributedType of several: "MULTI_GPU"; "" if it knows none
  const char* backend;           ///< through which several communicate: "nccl"; "" if there is nothing
  const char* visible;           ///< the variable that names the devices a process sees; "" if there is none
  const char* nodes;             ///< path of a device's node without its number; "" if there is none
  const char* vendor = "";       ///< of the PCI device, where nodes of several makers have one name
};

std::span<const DeviceType> types();
const DeviceType* find(std::string_view name);                      ///< null if there is none of that name
const DeviceType* of_distributed_type(std::string_view multi_gpu);  ///< null if it is no kind of several devices

/// The variable, or nothing when it is unset.
using Variable = std::function<std::optional<std::string>(const char* name)>;

/// Devices of this kind that a process may use: nodes, limited by the variable that hides some.
/// @param root  "/", or a folder that stands in for it in tests.
int64_t count(const DeviceType& type, const std::filesystem::path& root, const Variable& variable);

/// The first kind of which this machine has nodes; null if it has none.
const DeviceType* present(const std::filesystem::path& root);

/// Several NVIDIA GPUs of which one can't exchange data with another directly, as its old driver claims that it can:
/// RTX 40xx before 550.40.07, which hang or give wrong numbers unless NCCL is told not to.
bool peer_access_is_broken(const std::filesystem::path& root);

}  // namespace accelerate::devices
