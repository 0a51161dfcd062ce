#include "launch/monitor/gpus.hpp"

#include <dlfcn.h>

#include <charconv>
#include <sstream>

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
        find(library->memory, "nvmlDeviceGetMemoryInfo") && library->init() == 0)
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
    uses[i] = GpuUse{.index = index,
                     .busy_percent = known ? std::optional<int64_t>(busy.gpu) : std::nullopt,
                     .used_bytes = static_cast<int64_t>(memory.used),
                     .total_bytes = static_cast<int64_t>(memory.total)};
  }
  return uses;
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
