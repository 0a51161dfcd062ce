#include "utils/device_types.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

namespace accelerate::devices {
namespace {

namespace fs = std::filesystem;

/// Names of back ends, variables and distributed types: Hugging Face Accelerate 1.15 (state.py, utils/launch.py). A
/// machine with several kinds trains on the first.
constexpr DeviceType kTypes[] = {
    {"cuda", "GPUs", "MULTI_GPU", "nccl", "CUDA_VISIBLE_DEVICES", "dev/nvidia"},
    {"mlu", "MLUs", "MULTI_MLU", "cncl", "MLU_VISIBLE_DEVICES", "dev/cambricon_dev"},
    {"sdaa", "SDAAs", "MULTI_SDAA", "tccl", "SDAA_VISIBLE_DEVICES", "dev/tcaicard"},
    {"musa", "MUSAs", "MULTI_MUSA", "mccl", "MUSA_VISIBLE_DEVICES", "dev/mtgpu."},
    {"npu", "NPUs", "MULTI_NPU", "hccl", "ASCEND_RT_VISIBLE_DEVICES", "dev/davinci"},
    {"hpu", "HPUs", "MULTI_HPU", "hccl", "HABANA_VISIBLE_MODULES", "dev/accel/accel", "0x1da3"},
    {"neuron", "Neuron cores", "MULTI_NEURON", "neuron", "NEURON_RT_VISIBLE_CORES", "dev/neuron"},
    {"xpu", "XPUs", "MULTI_XPU", "xccl", "ZE_AFFINITY_MASK", "dev/dri/renderD", "0x8086"},
    {"mps", "GPUs of Apple", "", "", "", ""},
};

std::string first_word(const fs::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return word;
}

bool is_of(const DeviceType& type, const fs::path& root, const fs::path& node) {
  if (!*type.vendor) return true;
  for (const char* kind : {"drm", "accel"})
    if (first_word(root / "sys/class" / kind / node.filename() / "device/vendor") == type.vendor) return true;
  return false;
}

int64_t nodes(const DeviceType& type, const fs::path& root) {
  const fs::path pattern = root / type.nodes;
  const std::string prefix = pattern.filename();
  int64_t count = 0;
  std::error_code ignored;
  if (!*type.nodes) return 0;
  for (fs::directory_iterator entry(pattern.parent_path(), ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const std::string name = entry->path().filename();
    count += name.starts_with(prefix) && name.size() > prefix.size() &&
             name.find_first_not_of("0123456789", prefix.size()) == std::string::npos && is_of(type, root, name);
  }
  return count;
}

/// "550.40.07" as numbers, of which vectors know the order.
std::array<int, 3> version(const std::string& text) {
  std::array<int, 3> numbers{};
  std::istringstream in(text);
  for (int& number : numbers) {
    in >> number;
    in.ignore();
  }
  return numbers;
}

}  // namespace

std::span<const DeviceType> types() { return kTypes; }

const DeviceType* find(std::string_view name) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes), [&](auto& type) { return name == type.name; });
  return found == std::end(kTypes) ? nullptr : found;
}

const DeviceType* of_distributed_type(std::string_view multi_gpu) {
  for (const auto& type : kTypes)
    if (*type.distributed_type && multi_gpu == type.distributed_type) return &type;
  return nullptr;
}

int64_t count(const DeviceType& type, const fs::path& root, const Variable& variable) {
  const int64_t there = nodes(type, root);
  const auto visible = *type.visible ? variable(type.visible) : std::nullopt;
  if (there == 0 || !visible) return there;
  if (visible->empty() || *visible == "-1") return 0;
  return std::min<int64_t>(there, std::count(visible->begin(), visible->end(), ',') + 1);
}

const DeviceType* present(const fs::path& root) {
  for (const auto& type : kTypes)
    if (nodes(type, root) > 0) return &type;
  return nullptr;
}

bool peer_access_is_broken(const fs::path& root) {
  int64_t gpus = 0;
  bool affected = false;
  std::error_code ignored;
  for (fs::directory_iterator entry(root / "proc/driver/nvidia/gpus", ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    std::ifstream information(entry->path() / "information");
    for (std::string line; std::getline(information, line);)
      affected = affected || (line.starts_with("Model") && line.find("RTX 40") != std::string::npos);
    ++gpus;
  }
  if (gpus < 2 || !affected) return false;
  std::ifstream driver(root / "proc/driver/nvidia/version");
  for (std::string word; driver >> word;)  // the first word that is a version: "… Kernel Module  545.23.08  …"
    if (std::count(word.begin(), word.end(), '.') >= 1 && word.find_first_not_of("0123456789.") == std::string::npos)
      return version(word) < version("550.40.07");
  return false;
}

}  // namespace accelerate::devices
