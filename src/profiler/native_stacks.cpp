#include "profiler/native_stacks.hpp"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/Type.h>
#include <execinfo.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>

#include "observe/symbols.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::profiler {
namespace {

using Frames = std::vector<void*>;

/// A call before its functions have names.
struct Taken {
  uint64_t number, thread;
  std::string name;
  const Frames* frames;
};

/// Shared by all recordings of this process.
struct Taking {
  Mutex mutex;
  int64_t users ACCELERATE_GUARDED_BY(mutex) = 0;
  at::CallbackHandle callback ACCELERATE_GUARDED_BY(mutex) = at::INVALID_CALLBACK_HANDLE;
  std::vector<Taken> calls ACCELERATE_GUARDED_BY(mutex);
  std::set<Frames> different ACCELERATE_GUARDED_BY(mutex);  ///< loops come from few places; nodes stay where they are
};
Taking& taking() {
  static auto& only = *new Taking;  // a static Accelerator may end its profile after everything else
  return only;
}

std::unique_ptr<at::ObserverContext> take_stack(const at::RecordFunction& function) {
  if (!c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE)) return nullptr;
  constexpr int kMostFrames = 256;
  void* frames[kMostFrames];
  const int count = ::backtrace(frames, kMostFrames);
  Frames found(frames + std::min(count, 1), frames + count);  // the first is this function
  std::string name = function.name();
  auto& all = taking();
  const MutexLock lock(all.mutex);
  if (all.users > 0)
    all.calls.push_back(
        {function.handle(), function.threadId(), std::move(name), &*all.different.insert(std::move(found)).first});
  return nullptr;
}

bool begins_with_any(std::string_view text, std::initializer_list<std::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [&](auto one) { return text.starts_with(one); });
}

/// Whether every operator, or every program, goes through this function: then it tells nothing of where a call comes
/// from.
bool tells_nothing(const Symbols::Function& function) {
  std::string_view name = function.symbol;
  const auto skip = [&](std::string_view what) {
    if (name.starts_with(what)) name.remove_prefix(what.size());
  };
  skip("_Z");
  while (name.starts_with('Z')) name.remove_prefix(1);  // within another function: what counts is where that is
  skip("N");
  skip("K");
  if (begins_with_any(name, {"5torch2nn12ModuleHolder", "5torch2nn9AnyModule", "5torch2nn14NamedAnyModule",
                             "5torch2nn15AnyModuleHolder"}))
    return true;
  if (name.starts_with("5torch2nn")) return false;
  if (begins_with_any(name, {"2at", "3c10", "5torch", "St", "9__gnu_cxx", "10accelerate9residency"})) return true;
  return name == "_start" || begins_with_any(function.file, {"libtorch", "libc10", "libc.so", "libc-", "libstdc++",
                                                             "libc++", "libgcc_s", "libgomp", "libm.so", "ld-linux"});
}

/// The beginning of the brackets at the end; the end where there are none.
size_t before_brackets(std::string_view text, char open, char close) {
  if (!text.ends_with(close)) return text.size();
  int depth = 0;
  for (size_t i = text.size(); i-- > 0;) {
    if (text[i] == close) ++depth;
    if (text[i] == open && --depth == 0) return i;
  }
  return text.size();
}

/// Without the types of its inputs, and what stands behind them.
std::string_view without_inputs(std::string_view function) {
  if (const auto copy = function.find(" [clone"); copy != std::string_view::npos) function = function.substr(0, copy);
  for (const std::string_view ending : {" &&", " &", " const"})
    if (function.ends_with(ending)) function.remove_suffix(ending.size());
  return function.substr(0, before_brackets(function, '(', ')'));
}

struct StackFrame {
  std::string text;
  std::string module_class;
};

/// Nothing for those that are left out.
std::optional<StackFrame> describe(Symbols& symbols, const void* address) {
  constexpr size_t kLongest = 200;  // templates have names of thousands of letters
  const auto function = symbols.find(address, /*returns_to=*/true);
  if (!function || tells_nothing(*function)) return std::nullopt;
  const std::string whole = function->symbol.empty() ? "" : c10::demangle(function->symbol.c_str());
  std::string name(without_inputs(whole));
  if (name.size() > kLongest) name = name.substr(0, kLongest) + "...";
  return StackFrame{fmt::format("{}({:#x}){}{}", function->file, function->address, name.empty() ? "" : ": ", name),
                    module_class(whole)};
}

}  // namespace

std::string module_class(std::string_view function) {
  constexpr std::string_view kForward = "::forward", kImpl = "Impl", kFunction = "::forward(torch::autograd::Autograd";
  if (function.find(kFunction) != std::string_view::npos) return {};  // of torch::autograd::Function
  auto name = without_inputs(function);
  name = name.substr(0, before_brackets(name, '<', '>'));
  if (!name.ends_with(kForward)) return {};
  name.remove_suffix(kForward.size());
  name = name.substr(0, before_brackets(name, '<', '>'));
  name = name.substr(name.find_last_of(": ") + 1);  // npos + 1 is 0
  if (name.size() > kImpl.size() && name.ends_with(kImpl)) name.remove_suffix(kImpl.size());
  return std::string(name);
}

NativeStacks::NativeStacks(bool stacks, bool modules) : stacks_(stacks), modules_(modules) {
  void* frame[1];
  ::backtrace(frame, 1);  // loads the unwinder at the first time
  auto& all = taking();
  const MutexLock lock(all.mutex);
  if (all.users++ == 0) all.callback = at::addGlobalCallback(at::RecordFunctionCallback(&take_stack).needsIds(true));
}

NativeStacks::~NativeStacks() {
  auto& all = taking();
  const MutexLock lock(all.mutex);
  if (--all.users > 0) return;
  at::removeCallback(all.callback);
  all.calls.clear();
  all.different.clear();
}

CallSites NativeStacks::stop() const {
  std::vector<Taken> calls;
  {
    auto& all = taking();
    const MutexLock lock(all.mutex);
    calls = all.calls;
  }
  CallSites found;
  Symbols symbols;
  std::unordered_map<const void*, std::optional<StackFrame>> described;
  std::map<const Frames*, size_t> places;
  for (auto& call : calls) {
    const auto [place, is_new] = places.try_emplace(call.frames, found.sites.size());
    if (is_new) {
      auto& site = found.sites.emplace_back();
      for (const void* const address : *call.frames) {
        auto frame = described.find(address);
        if (frame == described.end()) frame = described.emplace(address, describe(symbols, address)).first;
        if (!frame->second) continue;
        if (stacks_) site.stack.push_back(frame->second->text);
        if (modules_ && !frame->second->module_class.empty()) site.modules.push_back(frame->second->module_class);
      }
      std::reverse(site.modules.begin(), site.modules.end());
    }
    found.calls.push_back({call.number, call.thread, std::move(call.name), place->second});
  }
  return found;
}

std::vector<const CallSite*> CallSites::of(const std::vector<torch::autograd::profiler::KinetoEvent>& events) const {
  std::vector<const CallSite*> found(events.size());
  if (calls.empty()) return found;
  // Kineto keeps no number that could be asked for here, but the same calls in the same order.
  std::map<uint64_t, std::vector<const Call*>> of_thread;
  for (const auto& call : calls) of_thread[call.thread].push_back(&call);
  std::vector<size_t> order(events.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return events[a].startNs() != events[b].startNs() ? events[a].startNs() < events[b].startNs()
                                                      : events[a].endNs() > events[b].endNs();
  });
  std::map<uint64_t, size_t> next;
  for (const size_t i : order) {
    const auto thread = of_thread.find(events[i].startThreadId());
    if (thread == of_thread.end() || events[i].deviceType() != c10::DeviceType::CPU) continue;
    // At the beginning and the end of a recording one of the two may have seen a call more.
    constexpr size_t kMostMissing = 16;
    auto& at = next[thread->first];
    const size_t end = std::min(thread->second.size(), at + kMostMissing);
    const std::string name = events[i].name();
    for (size_t k = at; k < end; ++k) {
      if (thread->second[k]->name != name) continue;
      found[i] = &sites[thread->second[k]->site];
      at = k + 1;
      break;
    }
  }
  return found;
}

}  // namespace accelerate::profiler
