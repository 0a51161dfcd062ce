#include "profiler/module_profile.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "profiler/operator_flops.hpp"

namespace accelerate::profiler {
namespace {

/// "ReLU", "relu_" and "max_pool2d" without what ATen and torch::nn write differently.
std::string plain_name(std::string_view name) {
  std::string plain;
  for (const char c : name)
    if (std::isalnum(static_cast<unsigned char>(c))) plain += static_cast<char>(std::tolower(c));
  return plain;
}

}  // namespace

struct ModuleProfile::Impl {
  using Clock = std::chrono::steady_clock;
  /// An operator that the forward called by itself, with all that it called.
  struct Call {
    std::string name;
    std::optional<size_t> module;  ///< whose parameter it was given
    ModuleCost cost;
  };
  struct Context final : at::ObserverContext {
    std::optional<BegunCost> cost;
  };

  Impl(std::vector<ProfiledModule> given, const at::Device& computing) : modules(std::move(given)), device(computing) {
    for (size_t i = 0; i < modules.size(); ++i)
      for (const auto* parameter : modules[i].parameters) places[parameter].push_back(i);
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto context = std::make_unique<Context>();
    if (auto* const profile = current) profile->begins(function, *context);
    return context;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    if (auto* const profile = current) profile->ends(function, *static_cast<Context*>(context));
  }

  void begins(const at::RecordFunction& function, Context& context) {
    if (depth++ == 0) {
      constexpr std::string_view kSpace = "aten::";
      std::string_view name = function.name();
      if (name.starts_with(kSpace)) name.remove_prefix(kSpace.size());
      calls.push_back({.name = plain_name(name), .module = {}, .cost = {}});
      since = Clock::now();
    }
    if (!calls.back().module) calls.back().module = module_of(function);
    if (costed > 0) ++costed;  // what an operator that has a cost is made of
    else if ((context.cost = BegunCost::of(function))) costed = 1;
  }

  void ends(const at::RecordFunction& function, Context& context) {
    if (depth == 0) return;  // it began before start()
    if (costed > 0) --costed;
    Call& call = calls.back();
    if (context.cost) {
      const auto cost = context.cost->end(function);
      call.cost.flops += cost.flops, call.cost.macs += cost.macs;
    }
    if (--depth > 0) return;
    if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
    call.cost.seconds = std::chrono::duration<double>(Clock::now() - since).count();
  }

  /// The module of the first parameter among the inputs, views included. Tables that are tied to a layer are two
  /// modules': embedding() is of the one.
  std::optional<size_t> module_of(const at::RecordFunction& function) const {
    for (const auto& input : function.inputs()) {
      if (!input.isTensor() || !input.toTensor().defined()) continue;
      const at::Tensor& tensor = input.toTensor();
      auto found = places.find(tensor.unsafeGetTensorImpl());
      if (found == places.end() && !tensor.is_inference() && tensor.is_view())
        found = places.find(tensor._base().unsafeGetTensorImpl());
      if (found == places.end()) continue;
      const bool table = std::string_view(function.name()) == "aten::embedding";
      const auto fits = std::find_if(found->second.begin(), found->second.end(), [&](size_t module) {
        return modules[module].class_name.starts_with("Embedding") == table;
      });
      return fits == found->second.end() ? found->second.front() : *fits;
    }
    return std::nullopt;
  }

  /// The root first.
  std::vector<size_t> path_of(size_t module) const {
    std::vector<size_t> path;
    for (auto at = static_cast<int64_t>(module); at >= 0; at = modules[static_cast<size_t>(at)].parent)
      path.push_back(static_cast<size_t>(at));
    std::reverse(path.begin(), path.end());
    return path;
  }

  bool is_named(size_t module, const std::string& name) const {
    return modules[module].num_parameters == 0 && plain_name(modules[module].class_name) == name;
  }

  /// The module of a call that came after one of `before` and before one of `after`. @param last  the module of the
  /// latest call whose module is known
  size_t between(std::optional<size_t> before, std::optional<size_t> after, size_t last,
                 const std::string& name) const {
    // Modules are registered in the order of their use, mostly.
    for (size_t i = last + 1; i < after.value_or(modules.size()); ++i)
      if (is_named(i, name)) return i;
    const auto one = before ? path_of(*before) : std::vector<size_t>{0};
    const auto other = after ? path_of(*after) : std::vector<size_t>{0};
    size_t common = 0;
    while (common < one.size() && common < other.size() && one[common] == other[common]) ++common;
    const size_t parent = one[common - 1];
    std::vector<size_t> named;
    for (size_t i = parent + 1; i < modules.size(); ++i)
      if (modules[i].parent == static_cast<int64_t>(parent) && is_named(i, name)) named.push_back(i);
    return named.size() == 1 ? named.front() : parent;
  }

  std::vector<ProfiledModule> modules;
  at::Device device;
  std::unordered_map<const at::TensorImpl*, std::vector<size_t>> places;
  std::vector<Call> calls;
  Clock::time_point since;
  int64_t depth = 0;   ///< calls that are under way
  int64_t costed = 0;  ///< of them, the innermost within one whose cost is known, and that one
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  static inline thread_local Impl* current = nullptr;
};

ModuleProfile::ModuleProfile(std::vector<ProfiledModule> modules, const at::Device& device)
    : impl_(std::make_unique<Impl>(std::move(modules), device)) {}
ModuleProfile::~ModuleProfile() { stop(); }

void ModuleProfile::start() {
  impl_->calls.clear();
  impl_->depth = impl_->costed = 0;
  Impl::current = impl_.get();
  impl_->callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&Impl::begin, &Impl::end)
                                                   .needsInputs(true)
                                                   .needsOutputs(true)
                                                   .scopes({at::RecordScope::FUNCTION}));
}

void ModuleProfile::stop() {
  if (impl_->callback == at::INVALID_CALLBACK_HANDLE) return;
  at::removeCallback(std::exchange(impl_->callback, at::INVALID_CALLBACK_HANDLE));
  Impl::current = nullptr;
}

const std::vector<ProfiledModule>& ModuleProfile::modules() const { return impl_->modules; }

std::vector<ModuleCost> ModuleProfile::costs() const {
  const auto& [modules, calls] = std::tie(impl_->modules, impl_->calls);
  std::vector<std::optional<size_t>> after(calls.size());
  std::optional<size_t> next;
  for (size_t i = calls.size(); i-- > 0;) {
    after[i] = next;
    if (calls[i].module) next = calls[i].module;
  }
  std::vector<ModuleCost> costs(modules.size());
  std::optional<size_t> before;
  size_t last = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& call = calls[i];
    const size_t module = call.module ? *call.module : impl_->between(before, after[i], last, call.name);
    if (call.module || impl_->is_named(module, call.name)) last = module;
    ModuleCost& own = costs[module];
    own.flops += call.cost.flops, own.macs += call.cost.macs, own.seconds += call.cost.seconds;
    if (call.module) before = call.module;
  }
  for (size_t i = modules.size(); i-- > 1;) {  // children come after their parents
    ModuleCost& parent = costs[static_cast<size_t>(modules[i].parent)];
    parent.flops += costs[i].flops, parent.macs += costs[i].macs, parent.seconds += costs[i].seconds;
  }
  return costs;
}

}  // namespace accelerate::profiler
