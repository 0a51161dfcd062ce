#include "own_numbers.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "draws.hpp"

namespace accelerate::data::detail {
namespace {

/// A key that LibTorch itself leaves alone.
constexpr auto kNumbersKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local OwnNumbers* current = nullptr;

/// SplitMix64's: neighbouring seeds and steps get numbers that have nothing to do with each other.
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31U);
}

int64_t mixed(int64_t seed, int64_t with) {
  return static_cast<int64_t>(mixed(mixed(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(with)));
}

bool is_default(const c10::IValue& generator) {
  return generator.isNone() ||
         (generator.isGenerator() &&
          (!generator.toGenerator().defined() || generator.toGenerator() == at::detail::getDefaultCPUGenerator()));
}

/// Tells an operator that would draw from the default generator to draw from this thread's own.
void draw_own(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  bool on_cpu = true;
  for (const c10::IValue& value : arguments)
    if (value.isTensor() && value.toTensor().defined()) on_cpu = on_cpu && value.toTensor().device().is_cpu();
  if (current && on_cpu)
    for (size_t i = 0; i < arguments.size(); ++i)
      if (op.schema().arguments()[i].real_type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())) &&
          is_default(arguments[i]))
        torch::jit::peek(*stack, i, arguments.size()) = current->generator();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kNumbersKey), stack);
}

/// Operators that draw for a tensor. Those that make one draw by them, so they know its device.
bool draws(const c10::FunctionSchema& schema) {
  bool generator = false, tensor = false;
  for (const auto& argument : schema.arguments()) {
    tensor = tensor || argument.real_type()->isSubtypeOf(*c10::TensorType::get());
    generator = generator || argument.real_type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
  }
  return generator && tensor;
}

}  // namespace

void OwnNumbers::install() {
  // Kept for good: other statics may still read data when the program ends.
  static const auto* const registrations = [] {
    auto* kept = new std::vector<c10::RegistrationHandleRAII>();
    auto& dispatcher = c10::Dispatcher::singleton();
    kept->push_back(dispatcher.registerFallback(kNumbersKey, c10::KernelFunction::makeFallthrough(), "own numbers"));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (!op || !draws(op->schema())) continue;
      kept->push_back(dispatcher.registerImpl(name, kNumbersKey,
                                              c10::KernelFunction::makeFromBoxedFunction<&draw_own>(), std::nullopt,
                                              nullptr, "own numbers"));
    }
    return kept;
  }();
  (void)registrations;
}

OwnNumbers::OwnNumbers(int64_t pass_seed, int64_t step)
    : pass_seed_(pass_seed), step_(step), before_(std::exchange(current, this)), included_(kNumbersKey) {}

OwnNumbers::~OwnNumbers() { current = before_; }

void OwnNumbers::select(int64_t step) {
  step_ = step;
  generator_.reset();
}

const at::Generator& OwnNumbers::generator() {
  if (!generator_) generator_ = seeded_generator(mixed(pass_seed_, step_));
  return *generator_;
}

int64_t seed_of_rank(int64_t pass_seed, int64_t rank) { return mixed(pass_seed, ~rank); }

}  // namespace accelerate::data::detail
