#include "accelerate/model/compiled_model.hpp"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <streambuf>

#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate {

using torch::inductor::AOTIModelPackageLoader;

struct CompiledModelImpl::Impl {
  std::string package;
  std::unique_ptr<AOTIModelPackageLoader> loader;
};

namespace {

/// Compiled code asks for it when it is opened. Set before main(), when no other thread reads the environment.
[[maybe_unused]] const int kInputsAreChecked = ::setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);

/// Compiled code writes what it refuses to std::cerr, too, beside the exception that says it. Meanwhile what this
/// thread writes there goes nowhere; what others write passes.
class WithoutCerr {
 public:
  WithoutCerr() {
    [[maybe_unused]] static const auto* const there_for_good = new Filter;
    ++depth;
  }
  ~WithoutCerr() { --depth; }
  WithoutCerr(const WithoutCerr&) = delete;
  WithoutCerr& operator=(const WithoutCerr&) = delete;

 private:
  class Filter final : public std::streambuf {
   public:
    Filter() : next_(std::cerr.rdbuf(this)) {}

   protected:
    int_type overflow(int_type letter) override {
      if (depth > 0 || traits_type::eq_int_type(letter, traits_type::eof())) return traits_type::not_eof(letter);
      return next_->sputc(traits_type::to_char_type(letter));
    }
    std::streamsize xsputn(const char* text, std::streamsize size) override {
      return depth > 0 ? size : next_->sputn(text, size);
    }
    int sync() override { return next_->pubsync(); }

   private:
    std::streambuf* next_;
  };
  static inline thread_local int depth = 0;
};

/// The device that a package is for, if it says so, must be here: the loader would speak of a missing runner.
void check_device(const std::string& package, const std::string& name) {
  const auto metadata = AOTIModelPackageLoader::load_metadata_from_package(package, name);
  const auto found = metadata.find("AOTI_DEVICE_KEY");
  if (found == metadata.end() || found->second == "cpu") return;
  const auto here = at::getAccelerator();
  const std::string accelerator = here ? at::Device(*here).str() : "cpu";
  if (accelerator != found->second)
    raise<ConfigError>(
        "CompiledModel: '{}' was compiled for {}, and this machine (or this LibTorch) has {}; compile it for that, in "
        "Python by torch._inductor.aoti_compile_and_package",
        package, found->second, accelerator);
}

}  // namespace

CompiledModelImpl::CompiledModelImpl(const std::filesystem::path& package, const std::string& name)
    : torch::nn::Module("CompiledModel"), impl_(std::make_unique<Impl>(Impl{package.string(), nullptr})) {
  if (!std::filesystem::is_regular_file(package))
    raise<CheckpointError>("CompiledModel: found no file '{}', expected a package (.pt2) of aoti_compile_and_package",
                           package.string());
  try {
    check_device(impl_->package, name);
    impl_->loader = std::make_unique<AOTIModelPackageLoader>(impl_->package, name);
  } catch (const ConfigError&) {
    throw;
  } catch (const std::exception& error) {
    raise<CheckpointError>(
        "CompiledModel: '{}' can't be opened as model '{}': {}; expected a package that aoti_compile_and_package of "
        "this LibTorch's version wrote on a machine like this one",
        impl_->package, name, text_of(error));
  }
}

CompiledModelImpl::~CompiledModelImpl() = default;

std::vector<at::Tensor> CompiledModelImpl::forward(const std::vector<at::Tensor>& inputs) {
  if (c10::GradMode::is_enabled() && std::ranges::any_of(inputs, [](const at::Tensor& t) { return t.requires_grad(); }))
    raise<ConfigError>(
        "CompiledModel: an input of '{}' requires a gradient, but compiled code has no backward; run it under "
        "NoGradGuard, or train the model that it was exported from",
        impl_->package);
  // The dtype in which it computes was decided when it was compiled.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const WithoutCerr once;
  try {
    return impl_->loader->run(inputs);
  } catch (const std::exception& error) {
    raise<ShapeError>(
        "CompiledModel: '{}' refused its inputs: {}; expected as many tensors, of such dtypes, sizes, "
        "strides and devices, as it was exported with",
        impl_->package, text_of(error));
  }
}

at::Tensor CompiledModelImpl::only(const std::vector<at::Tensor>& outputs) const {
  if (outputs.size() != 1)
    raise<ShapeError>(
        "CompiledModel: '{}' has {} results, expected one; call it with a std::vector of tensors, which gives all",
        impl_->package, outputs.size());
  return outputs.front();
}

std::map<std::string, std::string> CompiledModelImpl::metadata() const {
  const auto metadata = impl_->loader->get_metadata();
  return {metadata.begin(), metadata.end()};
}

}  // namespace accelerate
