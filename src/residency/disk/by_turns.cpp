#include "residency/disk/by_turns.hpp"

#include <memory>
#include <unordered_map>
#include <utility>

#include "residency/disk/disk_memory.hpp"

namespace accelerate::residency {
namespace {

struct Turn {
  std::shared_ptr<DiskMemory> disk;
  int64_t bytes = 0;  ///< on it
  std::vector<at::Tensor> tensors;
  std::vector<size_t> numbers;
};

/// A storage has one turn, however many of the tensors are in it.
std::vector<Turn> turns_of(const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kAtATime = 32 << 20;  // bytes, for large requests; another turn comes meanwhile
  std::vector<Turn> turns(1);
  std::unordered_map<const void*, size_t> turn_of;
  for (size_t number = 0; number < tensors.size(); ++number) {
    const at::Tensor& tensor = tensors[number];
    size_t turn = 0;
    if (const auto disk = DiskMemory::of(tensor)) {
      const auto [known, is_new] = turn_of.try_emplace(tensor.storage().unsafeGetStorageImpl(), turns.size() - 1);
      if (is_new) {
        const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
        const Turn& last = turns.back();
        if (last.bytes > 0 && (last.disk != disk || last.bytes + bytes > kAtATime)) turns.emplace_back();
        turns.back().disk = disk;
        turns.back().bytes += bytes;
        known->second = turns.size() - 1;
      }
      turn = known->second;
    }
    turns[turn].tensors.push_back(tensor);
    turns[turn].numbers.push_back(number);
  }
  return turns;
}

}  // namespace

void by_turns(const std::vector<at::Tensor>& tensors, bool changes,
              const std::function<void(const std::vector<at::Tensor>& some, const std::vector<size_t>& numbers)>& use) {
  if (tensors.empty()) return;
  const auto turns = turns_of(tensors);
  const auto bring = [&](size_t turn) {
    return turn < turns.size() && turns[turn].disk ? turns[turn].disk->bring(turns[turn].tensors) : nullptr;
  };
  auto coming = bring(0);
  for (size_t turn = 0; turn < turns.size(); ++turn) {
    const auto& [disk, bytes, some, numbers] = turns[turn];
    const auto here = std::exchange(coming, bring(turn + 1));
    if (here) here->wait();
    use(some, numbers);
    if (disk && changes) disk->send(some)->wait();
    else if (disk) disk->drop(some);
  }
}

}  // namespace accelerate::residency
