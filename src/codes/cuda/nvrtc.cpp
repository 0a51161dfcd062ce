#include <ATen/DynamicLibrary.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda.h>
#include <fmt/format.h>
#include <nvrtc.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "codes/cuda/launch.hpp"
#include "utils/error_text.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

// NVIDIA's compiler, which every LibTorch for CUDA brings along, and the driver are opened when a program first wants a
// kernel: nothing is linked.

namespace accelerate::codes::cuda {
namespace {

#define ACCELERATE_TEXT_OF(name) #name  // of what cuda.h may have put in the name's place
#define ACCELERATE_FUNCTION(name) \
  decltype(&::name) name = reinterpret_cast<decltype(&::name)>(library.sym(ACCELERATE_TEXT_OF(name)))

struct Compiler {
  /// The compiler of LibTorch's CUDA; or else LibTorch's own library that is linked to it.
  at::DynamicLibrary library{fmt::format("libnvrtc.so.{}", at::detail::getCUDAHooks().versionCUDART() / 1000).c_str(),
                             "libcaffe2_nvrtc.so", /*leak_handle=*/true};
  ACCELERATE_FUNCTION(nvrtcCreateProgram);
  ACCELERATE_FUNCTION(nvrtcCompileProgram);
  ACCELERATE_FUNCTION(nvrtcDestroyProgram);
  ACCELERATE_FUNCTION(nvrtcGetErrorString);
  ACCELERATE_FUNCTION(nvrtcGetProgramLogSize);
  ACCELERATE_FUNCTION(nvrtcGetProgramLog);
  ACCELERATE_FUNCTION(nvrtcGetCUBINSize);
  ACCELERATE_FUNCTION(nvrtcGetCUBIN);
  ACCELERATE_FUNCTION(nvrtcGetPTXSize);
  ACCELERATE_FUNCTION(nvrtcGetPTX);

  /// Code of a kernel for GPUs of one compute capability. @throws std::runtime_error with the compiler's messages
  std::string compile(const std::string& kernel, int major, int minor) const {
    const std::array<const char*, 2> names{"codes/cuda/arguments.cuh", "codes/cuda/kernels.cuh"},
        texts{kArgumentsText, kKernelsText};
    Program program{*this};
    nvrtcCreateProgram(&program.made, "#include \"codes/cuda/kernels.cuh\"\n", "entry.cu", 2, texts.data(),
                       names.data());
    const std::string define = "-DKERNEL=" + kernel;
    const auto compile_for = [&](const std::string& architecture) {
      const std::string option = "--gpu-architecture=" + architecture;
      const std::array<const char*, 5> options{option.c_str(), define.c_str(), "--std=c++17",
                                               "--device-as-default-execution-space",
                                               "--fmad=false"};  // as on CPUs: kernels say what they want fused
      return nvrtcCompileProgram(program.made, static_cast<int>(options.size()), options.data());
    };
    nvrtcResult result = compile_for(fmt::format("sm_{}{}", major, minor));
    const bool unknown = result == NVRTC_ERROR_INVALID_OPTION;
    if (unknown) result = compile_for("compute_80");  // a GPU newer than the compiler: its driver translates that
    if (result != NVRTC_SUCCESS)
      throw std::runtime_error(fmt::format("{} for compute capability {}.{}: {}. {}", kernel, major, minor,
                                           nvrtcGetErrorString(result),
                                           program.text(nvrtcGetProgramLogSize, nvrtcGetProgramLog)));
    return unknown ? program.text(nvrtcGetPTXSize, nvrtcGetPTX) : program.text(nvrtcGetCUBINSize, nvrtcGetCUBIN);
  }

 private:
  struct Program {
    const Compiler& compiler;
    nvrtcProgram made = nullptr;
    explicit Program(const Compiler& by) : compiler(by) {}
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;
    ~Program() {
      if (made) compiler.nvrtcDestroyProgram(&made);
    }
    template <class Size, class Get> std::string text(const Size& size_of, const Get& get) const {
      size_t size = 0;
      size_of(made, &size);
      std::string bytes(size, '\0');
      get(made, bytes.data());
      return bytes;
    }
  };
};

struct Driver {
  at::DynamicLibrary library{"libcuda.so.1", nullptr, /*leak_handle=*/true};
  ACCELERATE_FUNCTION(cuDeviceGet);
  ACCELERATE_FUNCTION(cuDeviceGetAttribute);
  ACCELERATE_FUNCTION(cuDevicePrimaryCtxRetain);
  ACCELERATE_FUNCTION(cuCtxGetCurrent);
  ACCELERATE_FUNCTION(cuCtxSetCurrent);
  ACCELERATE_FUNCTION(cuModuleLoadData);
  ACCELERATE_FUNCTION(cuModuleGetFunction);
  ACCELERATE_FUNCTION(cuLaunchKernel);
  ACCELERATE_FUNCTION(cuGetErrorString);

  void expect(CUresult result, const std::string& what) const {
    if (result == CUDA_SUCCESS) return;
    const char* why = nullptr;
    cuGetErrorString(result, &why);
    throw std::runtime_error(fmt::format("{}: {}", what, why ? why : "an unknown error"));
  }

  CUdevice number_of(const c10::Device& device) const {
    CUdevice number = 0;
    expect(cuDeviceGet(&number, device.index()), "cuDeviceGet");
    return number;
  }

  /// A thread that has not computed on this device yet may have no context.
  void bind(const c10::Device& device) const {
    CUcontext context = nullptr;
    expect(cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    if (context) return;
    expect(cuDevicePrimaryCtxRetain(&context, number_of(device)), "cuDevicePrimaryCtxRetain");
    expect(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  }
};

/// Kernels that have been compiled, by device. They stay until the process ends.
class CompiledKernels {
 public:
  /// @throws std::exception: there is no compiler, or no driver, or a kernel does not compile
  CUfunction find(const std::string& kernel, const c10::Device& device) {
    const std::lock_guard lock(mutex_);
    CUfunction& found = found_[{device.index(), kernel}];
    if (found) return found;
    int major = 0, minor = 0;
    for (const auto& [what, to] : {std::pair(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major),
                                   std::pair(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor)})
      driver.expect(driver.cuDeviceGetAttribute(to, what, driver.number_of(device)), "cuDeviceGetAttribute");
    driver.bind(device);
    CUmodule module = nullptr;
    driver.expect(driver.cuModuleLoadData(&module, compiler_.compile(kernel, major, minor).c_str()), kernel);
    driver.expect(driver.cuModuleGetFunction(&found, module, "entry"), kernel);
    return found;
  }

  const Driver driver;

 private:
  const Compiler compiler_;
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, std::string>, CUfunction> found_;
};

/// Null once something has failed, which is said once.
CUfunction find_or_warn(CompiledKernels*& kernels, const std::string& kernel, const c10::Device& device) {
  static std::atomic<bool> failed = false;
  if (failed) return nullptr;
  try {
    // For good: the driver may be gone before what is destroyed at exit.
    static CompiledKernels& only = *new CompiledKernels;
    kernels = &only;
    return only.find(kernel, device);
  } catch (const std::exception& error) {
    if (!failed.exchange(true))
      logs::warn(
          "accelerate.codes",
          "Weights in few bits are decoded on {} by LibTorch's operators, which is slower than by kernels: these "
          "could not be compiled ({}). LibTorch's libnvrtc and NVIDIA's driver are needed for that.",
          device.str(), text_of(error));
    return nullptr;
  }
}

bool start(const Launch& launch, const c10::Device& device) {
  const c10::DeviceGuard guard(device);
  CompiledKernels* kernels = nullptr;
  CUfunction const kernel = find_or_warn(kernels, launch.kernel, device);
  if (!kernel) return false;
  auto* const stream =
      static_cast<CUstream>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
  auto* arguments = const_cast<Arguments*>(&launch.arguments);  // which the driver copies
  std::array<void*, 1> parameters{arguments};
  try {
    kernels->driver.bind(device);
    kernels->driver.expect(kernels->driver.cuLaunchKernel(kernel, launch.blocks, 1, 1, launch.threads, 1, 1, 0, stream,
                                                          parameters.data(), nullptr),
                           launch.kernel);
  } catch (const std::runtime_error& error) {
    raise<InternalError>(
        "codes: a kernel could not be started on {}: {}. Earlier work on this device may have failed; "
        "CUDA_LAUNCH_BLOCKING=1 shows where.",
        device.str(), error.what());
  }
  return true;
}

}  // namespace

const Launcher kNvrtc = start;

}  // namespace accelerate::codes::cuda
