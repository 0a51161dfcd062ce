#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torch::autograd::profiler {
struct KinetoEvent;
}  // namespace torch::autograd::profiler

namespace accelerate::profiler {

/// The place of a call.
struct CallSite {
  std::vector<std::string> stack;    ///< innermost first: "program(0x12ab): function"
  std::vector<std::string> modules;  ///< classes whose forward was on the stack, outermost first
};

/// The places from which the operators of a recording were called. LibTorch's own frames are left out, other than those
/// of torch::nn.
struct CallSites {
  struct Call {
    uint64_t number = 0;  ///< LibTorch's of the operator: "Record function id" in traces
    uint64_t thread = 0;  ///< as LibTorch numbers them
    std::string name;
    size_t site = 0;  ///< its place in `sites`
  };
  std::vector<Call> calls;      ///< of each thread in the order of their begins
  std::vector<CallSite> sites;  ///< different ones

  /// For each event, in their order; null: nobody knows.
  std::vector<const CallSite*> of(const std::vector<torch::autograd::profiler::KinetoEvent>& events) const;
};

/// While it lives, each operator of the threads that Kineto sees has its native stack taken; only addresses, which are
/// given names at the end.
class NativeStacks {
 public:
  /// Which of the two are wanted.
  NativeStacks(bool stacks, bool modules);
  ~NativeStacks();
  NativeStacks(const NativeStacks&) = delete;
  NativeStacks& operator=(const NativeStacks&) = delete;

  /// The places that were recorded until now.
  CallSites stop() const;

 private:
  bool stacks_, modules_;
};

/// The class whose forward a function is, without its "Impl": "Bert" of "models::BertImpl::forward(at::Tensor const&)".
/// Empty: it is none.
std::string module_class(std::string_view function);

}  // namespace accelerate::profiler
