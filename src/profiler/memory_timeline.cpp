#include "profiler/memory_timeline.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/collection.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

namespace accelerate::profiler {
namespace {

using torch::profiler::impl::EventType;
using torch::profiler::impl::ExtraFields;
using torch::profiler::impl::Result;
using torch::profiler::impl::TensorMetadata;
using Operator = ExtraFields<EventType::TorchOp>;

constexpr size_t kNone = static_cast<size_t>(-1);

/// CPU memory comes with and without an index.
at::Device with_index(at::Device device) { return {device.type(), std::max<c10::DeviceIndex>(0, device.index())}; }

/// The outermost operator or node of autograd, with all within.
struct Call {
  int64_t begin_ns = 0;
  bool backward = false;
  std::vector<size_t> takes, makes;  // lifetimes
};

/// An event of memory, in the order of time.
struct AllocatorMoment {
  enum class What { allocated, released, used, gradient } what;
  int64_t time_ns;
  const void* data;
  at::Device device;
  int64_t bytes;
  size_t call;  // in which; kNone: outside of all
  bool backward;
};

int64_t bytes_of(const TensorMetadata& tensor) {
  int64_t elements = 1;
  for (size_t i = 0; i < tensor.sizes_.size(); ++i) {
    if (tensor.sizes_[i] == 0) return 0;
    if (i < tensor.strides_.size()) elements += (tensor.sizes_[i] - 1) * tensor.strides_[i];
  }
  return elements * static_cast<int64_t>(c10::elementSize(tensor.dtype_));
}

/// The tree of calls as lists.
class CallTreeReader {
 public:
  std::vector<Call> calls;
  std::vector<AllocatorMoment> moments;

  explicit CallTreeReader(const std::vector<std::shared_ptr<Result>>& roots) {
    for (const auto& root : roots) read(*root, kNone, false);
    std::stable_sort(moments.begin(), moments.end(),
                     [](const auto& a, const auto& b) { return a.time_ns < b.time_ns; });
  }

 private:
  void read(const Result& event, size_t call, bool backward) {
    if (const auto* const memory = std::get_if<ExtraFields<EventType::Allocation>>(&event.extra_fields_)) {
      const bool more = memory->alloc_size_ > 0;
      moments.push_back({more ? AllocatorMoment::What::allocated : AllocatorMoment::What::released,
                         event.start_time_ns_, memory->ptr_, with_index(memory->device()),
                         std::abs(memory->alloc_size_), call, backward});
    } else if (const auto* const op = std::get_if<Operator>(&event.extra_fields_)) {
      const bool node = op->scope_ == at::RecordScope::BACKWARD_FUNCTION;
      backward = backward || node || op->name_.starts_with("autograd::engine::evaluate_function");
      if (call == kNone && (node || is_operator(*op))) {
        call = calls.size();
        calls.push_back({.begin_ns = event.start_time_ns_, .backward = backward, .takes = {}, .makes = {}});
      }
      for (const auto& input : op->inputs_) {
        if (const auto* const tensor = std::get_if<TensorMetadata>(&input)) use(event, *tensor, call, backward);
        if (const auto* const list = std::get_if<std::vector<TensorMetadata>>(&input))
          for (const auto& tensor : *list) use(event, tensor, call, backward);
      }
      // The new gradient is detached and kept, or added to the old one; the first of these stays in both cases.
      if (node && op->name_ == "torch::autograd::AccumulateGrad" && !event.children_.empty())
        if (const auto* const first = std::get_if<Operator>(&event.children_.front()->extra_fields_);
            first && (first->name_ == "aten::detach" || first->name_ == "aten::add_") && !first->inputs_.empty())
          if (const auto* const tensor = std::get_if<TensorMetadata>(&first->inputs_.front()))
            use(*event.children_.front(), *tensor, call, backward, AllocatorMoment::What::gradient);
    }
    for (const auto& child : event.children_) read(*child, call, backward);
  }
  void use(const Result& event, const TensorMetadata& tensor, size_t call, bool backward,
           AllocatorMoment::What what = AllocatorMoment::What::used) {
    if (const void* const data = tensor.data_.value_of(); data && tensor.device_.type() != at::kMeta)
      moments.push_back(
          {what, event.start_time_ns_, data, with_index(tensor.device_), bytes_of(tensor), call, backward});
  }
  bool is_operator(const Operator& op) {
    if (op.scope_ != at::RecordScope::FUNCTION) return false;
    const auto known = operators_.try_emplace(op.name_ + "." + op.overload_name_);
    if (known.second)
      known.first->second = op.name_.starts_with("aten::") ||
                            c10::Dispatcher::singleton().findOp({op.name_, op.overload_name_}).has_value();
    return known.first->second;
  }
  std::unordered_map<std::string, bool> operators_;
};

/// A lifetime, and what tells of it.
struct Traced : Lifetime {
  size_t made_in = kNone, gone_in = kNone;  // calls
  bool made_backward = false;
  bool needed_backward = false;  // used or released there
  bool of_gradients = false;     // computed from them or from optimizers' states
};

std::vector<Traced> trace(std::vector<Call>& calls, const std::vector<AllocatorMoment>& moments) {
  std::vector<Traced> lifetimes;
  std::map<std::pair<const void*, at::DeviceType>, size_t> open;
  for (const auto& moment : moments) {
    const std::pair key(moment.data, moment.device.type());
    const auto found = open.find(key);
    using enum AllocatorMoment::What;
    if (moment.what == allocated) {
      // An allocator that does not tell the release of what it gave before the recording.
      if (found != open.end()) lifetimes[found->second].end_ns = moment.time_ns;
      open[key] = lifetimes.size();
      if (moment.call != kNone) calls[moment.call].makes.push_back(lifetimes.size());
      Traced& made = lifetimes.emplace_back();
      made.data = moment.data, made.device = moment.device, made.bytes = moment.bytes;
      made.begin_ns = moment.time_ns, made.made_in = moment.call, made.made_backward = moment.backward;
      continue;
    }
    const size_t place = found != open.end() ? found->second : lifetimes.size();
    if (found == open.end()) {
      Traced& older = lifetimes.emplace_back();
      older.data = moment.data, older.device = moment.device;
      open[key] = place;
    }
    Traced& one = lifetimes[place];
    if (one.begin_ns == Lifetime::kOutside) one.bytes = std::max(one.bytes, moment.bytes);
    one.needed_backward = one.needed_backward || moment.backward;
    if (moment.what == released) {
      one.end_ns = moment.time_ns, one.gone_in = moment.call;
      open.erase(key);
      continue;
    }
    if (moment.what == gradient) one.category = Category::gradient;
    if (moment.call != kNone) calls[moment.call].takes.push_back(place);
  }
  return lifetimes;
}

Category category_of(ProfileStorage::Kind kind) {
  switch (kind) {
    case ProfileStorage::Kind::parameter:
      return Category::parameter;
    case ProfileStorage::Kind::gradient:
      return Category::gradient;
    case ProfileStorage::Kind::optimizer_state:
      return Category::optimizer_state;
  }
  return Category::unknown;
}

class Judge {
 public:
  Judge(std::vector<Call> calls, std::vector<Traced>& lifetimes) : calls_(std::move(calls)), lifetimes_(lifetimes) {
    std::stable_sort(calls_.begin(), calls_.end(), [](auto& a, auto& b) { return a.begin_ns < b.begin_ns; });
  }

  void judge(const std::vector<ProfileStorage>& known) {
    std::map<const void*, size_t> last;
    for (size_t i = 0; i < lifetimes_.size(); ++i)
      if (lifetimes_[i].end_ns == Lifetime::kOutside) last[lifetimes_[i].data] = i;
    for (const auto& storage : known)
      if (const auto found = last.find(storage.data); found != last.end())
        lifetimes_[found->second].category = category_of(storage.kind);
    for (auto& one : lifetimes_)
      if (is_open(one) && one.made_in != kNone && one.made_in == one.gone_in) one.category = Category::temporary;
    follow_parameters();
    for (auto& one : lifetimes_) {
      if (!is_open(one) || one.begin_ns == Lifetime::kOutside) continue;
      if (one.made_backward) one.category = Category::autograd_detail;
      // For recordings in which nobody says which parameters there are.
      else if (one.needed_backward && !one.of_gradients) one.category = Category::activation;
    }
  }

 private:
  static bool is_open(const Traced& one) { return one.category == Category::unknown; }
  template <class F> bool takes(const Call& call, const F& what) const {
    return std::any_of(call.takes.begin(), call.takes.end(), [&](size_t i) { return what(lifetimes_[i]); });
  }
  static bool is_of_gradients(const Traced& one) {
    return one.of_gradients || one.category == Category::gradient || one.category == Category::optimizer_state;
  }

  /// Tensors that a forward computes from parameters are activations; those that it takes beside them are inputs.
  void follow_parameters() {
    const auto of_model = [](const Traced& one) {
      return one.category == Category::parameter || one.category == Category::activation;
    };
    for (const auto& call : calls_) {
      if (call.backward) continue;
      if (takes(call, is_of_gradients)) {  // a step of an optimizer, clipping
        for (const size_t i : call.makes) lifetimes_[i].of_gradients = true;
        continue;
      }
      if (!takes(call, of_model)) continue;
      for (const size_t i : call.makes)
        if (is_open(lifetimes_[i])) lifetimes_[i].category = Category::activation;
      set_inputs(call);
    }
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {  // and what inputs were made of
      const bool makes_input = std::any_of(call->makes.begin(), call->makes.end(),
                                           [&](size_t i) { return lifetimes_[i].category == Category::input; });
      if (!call->backward && makes_input) set_inputs(*call);
    }
  }
  void set_inputs(const Call& call) {
    for (const size_t i : call.takes)
      if (is_open(lifetimes_[i]) && !lifetimes_[i].made_backward) lifetimes_[i].category = Category::input;
  }

  std::vector<Call> calls_;
  std::vector<Traced>& lifetimes_;
};

}  // namespace

std::vector<Lifetime> memory_lifetimes(const torch::autograd::profiler::ProfilerResult& recording,
                                       const std::vector<ProfileStorage>& known) {
  CallTreeReader reader(recording.event_tree());
  auto traced = trace(reader.calls, reader.moments);
  Judge(std::move(reader.calls), traced).judge(known);
  std::vector<Lifetime> lifetimes(traced.begin(), traced.end());
  std::stable_sort(lifetimes.begin(), lifetimes.end(), [](auto& a, auto& b) { return a.begin_ns < b.begin_ns; });
  return lifetimes;
}

}  // namespace accelerate::profiler
