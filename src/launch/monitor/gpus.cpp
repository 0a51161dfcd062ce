#include "launch/monitor/gpus.hpp"

#include <dlfcn.h>

#include <cctype>
#include <charconv>
#include <sstream>
#include <string_view>

namespace accelerate::launcher {

/// The few functions and structs of nvml.h that are needed, from NVIDIA's NVML reference manual; their layout is part
/// of the library's stable interface.
struct Gpus::Library {
  using Device = void*;
  struct Utilization {
    unsigned int gpu, memory;
  };
  struct Memory {
    unsigned long long total, free, used;
  };

  void* handle = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_index)(unsigned int, Device*) = nullptr;
  int (*by_uuid)(const char*, Device*) = nullptr;
  int (*index_of)(Device, unsigned int*) = nullptr;
  int (*utilization)(Device, Utilization*) = nullptr;
  int (*memory)(Device, Memory*) = nullptr;
  int (*name)(Device, char*, unsigned int) = nullptr;

  /// Null when there is no such library, or no driver behind it.
  static Library* open() {
    void* handle = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) return nullptr;
    auto* library = new Library{.handle = handle};
    const auto find = [&](auto& function, const char* name) {
      return (function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name))) !=
             nullptr;
    };
    if (find(library->init, "nvmlInit_v2") && find(library->shutdown, "nvmlShutdown") &&
        find(library->by_index, "nvmlDeviceGetHandleByIndex_v2") &&
        find(library->by_uuid, "nvmlDeviceGetHandleByUUID") && find(library->index_of, "nvmlDeviceGetIndex") &&
        find(library->utilization, "nvmlDeviceGetUtilizationRates") &&
        find(library->memory, "nvmlDeviceGetMemoryInfo") && find(library->name, "nvmlDeviceGetName") &&
        library->init() == 0)
      return library;
    ::dlclose(handle);
    delete library;
    return nullptr;
  }
};

Gpus::~Gpus() {
  if (!library_) return;
  library_->shutdown();
  ::dlclose(library_->handle);
  delete library_;
}

std::vector<std::optional<GpuUse>> Gpus::look(const std::vector<std::string>& names) {
  std::vector<std::optional<GpuUse>> uses(names.size());
  if (!tried_) library_ = Library::open(), tried_ = true;
  for (size_t i = 0; library_ && i < names.size(); ++i) {
    const std::string& name = names[i];
    unsigned int index = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
    const bool number = error == std::errc() && end == name.data() + name.size();
    Library::Device device = nullptr;
    Library::Utilization busy{};
    Library::Memory memory{};
    if (name.empty() || (number ? library_->by_index(index, &device) : library_->by_uuid(name.c_str(), &device)) != 0)
      continue;
    if (library_->index_of(device, &index) != 0 || library_->memory(device, &memory) != 0) continue;
    const bool known = library_->utilization(device, &busy) == 0;
    char model[96] = "";
    if (library_->name(device, model, sizeof(model)) != 0) *model = '\0';
    uses[i] = GpuUse{.index = index,
                     .name = model,
                     .busy_percent = known ? std::optional<int64_t>(busy.gpu) : std::nullopt,
                     .used_bytes = static_cast<int64_t>(memory.used),
                     .total_bytes = static_cast<int64_t>(memory.total)};
  }
  return uses;
}

std::optional<double> peak_flops_of(const GpuUse& gpu) {
  // Dense, bf16 with fp32 sums (fp16 where there is no bf16), from NVIDIA's data sheets. The longer names first.
  constexpr std::pair<std::string_view, double> kKnown[] = {
      {"H100 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H200 NVL", 835e12}, {"GH200", 989e12}, {"B200", 2250e12},
      {"H200", 989e12},      {"H100", 989e12},     {"A100", 312e12},     {"A30", 165e12},   {"A40", 149.7e12},
      {"L40S", 362e12},      {"L4", 121e12},       {"V100", 125e12},     {"T4", 65e12},
  };
  if (!gpu.busy_percent) return std::nullopt;  // a part of a GPU
  const auto is_part_of_a_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (const auto& [name, peak] : kKnown)
    if (const size_t at = gpu.name.find(name); at != std::string::npos) {
      const size_t end = at + name.size();
      if ((at == 0 || !is_part_of_a_word(gpu.name[at - 1])) &&
          (end == gpu.name.size() || !is_part_of_a_word(gpu.name[end])))
        return peak;
    }
  return std::nullopt;
}

std::vector<std::string> gpu_names(const std::string& visible_devices, int64_t local_world_size) {
  std::vector<std::string> visible, names;
  std::istringstream list(visible_devices);
  for (std::string name; std::getline(list, name, ',');) visible.push_back(name);
  for (int64_t i = 0; i < local_world_size; ++i)
    names.push_back(visible.empty()                            ? std::to_string(i)
                    : i < static_cast<int64_t>(visible.size()) ? visible[static_cast<size_t>(i)]
                                                               : "");
  return names;
}

}  // namespace accelerate::launcher
