// Stands in for NVIDIA's management library, so that the monitor's reading of it is tested where there is no GPU: two
// devices, the second of which has a name only.
#include <cstring>

extern "C" {
struct Utilization {
  unsigned int gpu, memory;
};
struct Memory {
  unsigned long long total, free, used;
};

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  if (index > 1) return 2;
  *device = reinterpret_cast<void*>(static_cast<unsigned long>(index) + 1);
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char* name, void** device) {
  if (std::strcmp(name, "GPU-second") != 0) return 6;
  *device = reinterpret_cast<void*>(2UL);
  return 0;
}
int nvmlDeviceGetName(void*, char* name, unsigned int length) {
  std::strncpy(name, "NVIDIA A100-SXM4-80GB", length);
  return 0;
}
int nvmlDeviceGetIndex(void* device, unsigned int* index) {
  return *index = static_cast<unsigned int>(reinterpret_cast<unsigned long>(device) - 1), 0;
}
int nvmlDeviceGetUtilizationRates(void* device, Utilization* use) {
  if (device == reinterpret_cast<void*>(2UL)) return 3;  // not supported, as for parts of a GPU
  *use = {57, 31};
  return 0;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) { return *memory = {80ULL << 30, 68ULL << 30, 12ULL << 30}, 0; }
}
