#include "accelerate/state/available.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <map>
#include <thread>

#include "comm/backends/backend.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace {

bool has_dtype(at::ScalarType dtype) {
  try {
    const auto type = at::getAccelerator();
    const bool there = type && at::accelerator::deviceCount() > 0;
    at::empty({1}, at::TensorOptions(dtype).device(there ? at::Device(*type) : at::Device(at::kCPU))).zero_();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

/// Its exit status is the answer. Nothing that it prints is seen, it has no input, and it is killed after ten seconds.
bool python_finds(const std::string& package) {
  const std::string python = environment::text("ACCELERATE_PYTHON").value_or("python3");
  // Not by modules of the current folder, which anybody may have put there.
  std::string program =
      "import sys; sys.path[:] = [p for p in sys.path if p]; import importlib.util as u; sys.exit(u.find_spec('" +
      package + "') is None)";
  std::string name = python, flag = "-c";
  char* const words[] = {name.data(), flag.data(), program.data(), nullptr};
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  for (const int fd : {0, 1, 2}) ::posix_spawn_file_actions_addopen(&files, fd, "/dev/null", O_RDWR, 0);
  pid_t child = -1;
  const int failed = ::posix_spawnp(&child, python.c_str(), &files, nullptr, words, environ);
  ::posix_spawn_file_actions_destroy(&files);
  if (failed != 0) return false;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  int status = 0;
  pid_t ended = 0;
  while ((ended = ::waitpid(child, &status, WNOHANG)) == 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (ended == 0) ::kill(child, SIGKILL), ::waitpid(child, &status, 0);
  return ended == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

bool is_device_available(const std::string& type) {
  try {
    const auto wanted = at::Device(type).type();
    const auto found = at::getAccelerator();
    return wanted == at::kCPU || (found == wanted && at::accelerator::deviceCount() > 0);
  } catch (const c10::Error&) {
    raise<ConfigError>("is_device_available: '{}' is no kind of device of LibTorch's, expected cuda, xpu, mps, ...",
                       type);
  }
}

bool is_bf16_available() { return has_dtype(at::kBFloat16); }
bool is_fp16_available() { return has_dtype(at::kHalf); }
bool is_gloo_available() { return comm::kGloo.available; }
bool is_nccl_available() { return comm::kNccl.available; }
bool is_mpi_available() { return comm::kMpi.available; }

bool is_shared_library_available(const std::string& name) {
  void* const library = ::dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library) ::dlclose(library);
  return library != nullptr;
}

bool is_python_package_available(const std::string& name) {
  if (name.empty() ||
      !std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.'; }))
    raise<ConfigError>("is_python_package_available: the package is called '{}', expected a name as after `import`",
                       name);
  static Mutex mutex;
  static std::map<std::pair<std::string, std::string>, bool> known;
  const MutexLock lock(mutex);
  const std::pair key(environment::text("ACCELERATE_PYTHON").value_or(""), name);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  return known[key] = python_finds(name);
}

}  // namespace accelerate
