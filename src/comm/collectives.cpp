#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string_view>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "comm/shared_memory.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {

Reduction reduction_from_string(std::string_view text) {
  if (text == "sum") return Reduction::sum;
  if (text == "mean") return Reduction::mean;
  if (text == "max") return Reduction::max;
  if (text == "none") return Reduction::none;
  raise<ConfigError>("reduce: reduction is '{}', expected sum, mean, max or none", text);
}

namespace comm {
namespace {

/// Null alone. A program that was launched as one of several but never said so would silently compute wrong results.
Group* group() {
  if (const auto& world = world_group()) return world.get();
  if (environment::integer({"WORLD_SIZE"}).value_or(1) > 1)
    throw ConfigError(
        "collective: WORLD_SIZE is greater than 1 but this process has not joined its peers; construct an Accelerator "
        "or a PartialState first");
  return nullptr;
}

/// Each rank's bytes; `lengths`, by rank, are known to all.
std::vector<std::string> gather_texts(Group& group, const std::string& bytes, const std::vector<int64_t>& lengths,
                                      const char* operation) {
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  if (SharedMemory* const board = group.board();
      board && longest <= static_cast<int64_t>(SharedMemory::most_to_exchange()))
    return board->exchange(operation, bytes);
  at::Tensor mine = at::zeros({longest}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), mine.data_ptr<uint8_t>());
  const at::Tensor all = group.all_gather(mine.to(group.device()), operation).cpu();
  std::vector<std::string> result;
  for (size_t rank = 0; rank < lengths.size(); ++rank)
    result.emplace_back(reinterpret_cast<const char*>(all.data_ptr<uint8_t>()) + static_cast<int64_t>(rank) * longest,
                        lengths[rank]);
  return result;
}

using Note = std::array<int64_t, 3>;

struct Agreed {
  std::vector<int64_t> numbers;
  std::vector<std::string> carried;  ///< by rank: its text, and zeros behind it
  int64_t most;                      ///< longer texts were not carried
};

/// Every operation begins with this: ranks tell each other what they are about to do, in messages of one size, since
/// messages of different sizes would end the process on a thread of the transport. Only a short sum of `what` travels;
/// the texts do where sums differ, so that all ranks can say the same.
/// @param what    the same on ranks that are in step
/// @param number  each rank's own
/// @param text    each rank's own; it travels along where the message has room
Agreed agree(Group& group, const char* operation, const std::string& what, int64_t number = 0,
             std::string_view text = {}) {
  const Note note{static_cast<int64_t>(std::hash<std::string_view>()(what)), static_cast<int64_t>(what.size()), number};
  std::vector<Note> notes(static_cast<size_t>(group.world_size()));
  SharedMemory* const board = group.board();  // asked once: it may be there the next time
  constexpr size_t kMessage = 128;
  const auto size = static_cast<int64_t>(board ? SharedMemory::most_to_exchange() : kMessage);
  Agreed agreed{.numbers = {}, .carried = {}, .most = size - static_cast<int64_t>(sizeof note)};
  std::string message(reinterpret_cast<const char*>(note.data()), sizeof note);
  if (static_cast<int64_t>(text.size()) <= agreed.most) message += text;
  if (board) {
    agreed.carried = board->exchange(operation, message);
  } else {
    const at::Tensor mine = at::zeros({size}, at::kByte);  // the transport may keep it longer than a failed wait
    std::copy(message.begin(), message.end(), mine.data_ptr<uint8_t>());
    const at::Tensor all = group.all_gather(mine.to(group.device()), operation).cpu();
    for (int64_t rank = 0; rank < group.world_size(); ++rank)
      agreed.carried.emplace_back(reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>()) + rank * size, size);
  }
  for (size_t rank = 0; rank < notes.size(); ++rank) {
    auto& theirs = agreed.carried[rank];
    std::memcpy(notes[rank].data(), theirs.data(), std::min(sizeof note, theirs.size()));
    theirs.erase(0, sizeof note);
  }
  const auto column = [&](size_t which) {
    std::vector<int64_t> one;
    for (const Note& of_rank : notes) one.push_back(of_rank[which]);
    return one;
  };
  constexpr size_t kSum = 0, kLength = 1, kNumber = 2;
  const auto sums = column(kSum);
  if (std::all_of(sums.begin(), sums.end(), [&](int64_t sum) { return sum == sums.front(); })) {
    agreed.numbers = column(kNumber);
    return agreed;
  }
  std::string lines;
  const auto texts = gather_texts(group, what, column(kLength), operation);
  for (size_t rank = 0; rank < texts.size(); ++rank)
    lines += fmt::format("\n  - Process {}: {}", group.global_ranks()[rank], texts[rank]);
  raise<DistributedOperationException>(
      "{0}: the ranks are about to do different things, expected the same operation on tensors of the same shapes, "
      "dtypes and devices on all of them.\nOperation: `{0}`\nInput shapes:{1}\nRanks that have batches of different "
      "sizes can pad_across_processes() first, or send them as objects (gather_object, gather_for_metrics with "
      "use_gather_object); ranks in different operations took different ways through the program.",
      operation, lines);
}

std::string description(const char* operation, const std::vector<at::Tensor>& tensors, const std::string& how,
                        const std::function<std::string(const at::Tensor&)>& shape) {
  std::vector<std::string> texts;
  for (const auto& tensor : tensors)
    texts.push_back(tensor.defined() ? fmt::format("{} {} {}", shape(tensor), at::toString(tensor.scalar_type()),
                                                   c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true))
                                     : "undefined");
  return fmt::format("{}{}{} of {}", operation, how.empty() ? "" : " ", how,
                     texts.empty() ? "no tensors" : fmt::format("{}", fmt::join(texts, ", ")));
}

}  // namespace

int64_t rank() {
  const auto& world = world_group();
  return world ? world->rank() : 0;
}

int64_t world_size() {
  const auto& world = world_group();
  return world ? world->world_size() : 1;
}

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return "sum";
    case Reduction::mean:
      return "mean";
    case Reduction::max:
      return "max";
    case Reduction::none:
      return "none";
  }
  throw InternalError("reduction without a name");
}

void barrier() {
  if (Group* world = group()) agree(*world, "barrier", "barrier");
}

namespace agreed {

at::Tensor all_gather(const at::Tensor& tensor) {
  if (Group* world = group()) return world->all_gather(tensor);
  return tensor;
}

at::Tensor broadcast(const at::Tensor& tensor, int64_t from_process) {
  if (Group* world = group()) return world->broadcast(tensor, from_process);
  return tensor;
}

at::Tensor all_reduce(const at::Tensor& tensor, Reduction reduction, double scale) {
  at::Tensor result = tensor;
  if (Group* world = group()) {
    // Small integer types have no reduction in the back ends; 32 bits hold what they can sum to. A sum in half
    // precision overflows where the mean, or what is scaled, does not.
    const auto type = tensor.scalar_type();
    const bool small = type == at::kShort || type == at::kBool, half = type == at::kHalf || type == at::kBFloat16;
    result = small  ? tensor.to(at::kInt)
             : half ? tensor.detach().to(at::kFloat)
                    : tensor.detach().clone(at::MemoryFormat::Contiguous);
    result = result.contiguous();
    world->all_reduce_(result, reduction);
    if (reduction == Reduction::mean) result = result / world->world_size();
    if (half) return (scale == 1.0 ? result : result * scale).to(type);
    if (small && !result.is_floating_point()) result = result.to(type);
  }
  return scale == 1.0 ? result : result * scale;
}

}  // namespace agreed

at::Tensor all_gather(const at::Tensor& tensor) {
  verify_shapes("gather", {tensor});
  return agreed::all_gather(tensor);
}

at::Tensor broadcast(const at::Tensor& tensor, int64_t from_process) {
  verify_shapes("broadcast", {tensor}, "from rank " + std::to_string(from_process));
  return agreed::broadcast(tensor, from_process);
}

at::Tensor all_reduce(const at::Tensor& tensor, Reduction reduction, double scale) {
  verify_shapes("reduce", {tensor}, name_of(reduction));
  return agreed::all_reduce(tensor, reduction, scale);
}

std::vector<at::Tensor> pad_to_largest(const std::vector<at::Tensor>& tensors, const PadOptions& options) {
  constexpr const char* kName = "pad_across_processes";
  Group* world = group();
  if (!world) return tensors;
  const auto dim_in = [&](const at::Tensor& tensor) -> std::optional<int64_t> {
    if (!tensor.defined() || options.dim >= tensor.dim() || options.dim < -tensor.dim()) return std::nullopt;
    return options.dim < 0 ? options.dim + tensor.dim() : options.dim;
  };
  agree(*world, kName,
        description(kName, tensors, fmt::format("along dimension {}", options.dim), [&](const at::Tensor& tensor) {
          std::vector<std::string> sizes;
          for (int64_t i = 0; i < tensor.dim(); ++i)
            sizes.push_back(world->debug() && i != dim_in(tensor) ? std::to_string(tensor.size(i)) : "*");
          return fmt::format("[{}]", fmt::join(sizes, ", "));
        }));
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors)
    if (const auto dim = dim_in(tensor)) sizes.push_back(tensor.size(*dim));
  if (sizes.empty()) return tensors;
  const at::Tensor all = world->all_gather(at::tensor(sizes, at::kLong).unsqueeze(0).to(world->device()), kName).cpu();
  const at::Tensor largest = std::get<0>(all.max(0));
  std::vector<at::Tensor> padded;
  int64_t next = 0;
  for (const auto& tensor : tensors)
    padded.push_back(dim_in(tensor) ? ops::pad_to(tensor, largest[next++].item<int64_t>(), options) : tensor);
  return padded;
}

std::vector<std::string> all_gather_bytes(Group& group, const std::string& bytes) {
  constexpr const char* kName = "gather_object";
  auto [lengths, texts, most] = agree(group, kName, kName, static_cast<int64_t>(bytes.size()), bytes);
  if (*std::max_element(lengths.begin(), lengths.end()) > most) return gather_texts(group, bytes, lengths, kName);
  for (size_t rank = 0; rank < texts.size(); ++rank) texts[rank].resize(static_cast<size_t>(lengths[rank]));
  return texts;
}

std::string broadcast_bytes(Group& group, const std::string& bytes, int64_t from) {
  if (group.dry()) return bytes;  // peers that don't exist say what we say
  const bool mine = group.rank() == from;
  const auto what = fmt::format("broadcast of objects from rank {}", from);
  const auto [lengths, texts, most] = agree(group, "broadcast_object_list", what, static_cast<int64_t>(bytes.size()),
                                            mine ? std::string_view(bytes) : std::string_view());
  const int64_t length = lengths[static_cast<size_t>(from)];
  if (length <= most) return texts[static_cast<size_t>(from)].substr(0, static_cast<size_t>(length));
  at::Tensor buffer = at::empty({length}, at::kByte);
  if (mine) std::copy(bytes.begin(), bytes.end(), buffer.data_ptr<uint8_t>());
  buffer = group.broadcast(buffer.to(group.device()), from).cpu();
  return {reinterpret_cast<const char*>(buffer.data_ptr<uint8_t>()), static_cast<size_t>(length)};
}

std::vector<std::string> all_gather_bytes(const std::string& bytes) {
  if (Group* world = group()) return all_gather_bytes(*world, bytes);
  return {bytes};
}

std::string broadcast_bytes(const std::string& bytes, int64_t from_process) {
  if (Group* world = group()) return broadcast_bytes(*world, bytes, from_process);
  return bytes;
}

void verify_shapes(const char* operation, const std::vector<at::Tensor>& tensors, const std::string& how) {
  if (Group* world = group())
    agree(*world, operation, description(operation, tensors, how, [](const at::Tensor& tensor) {
      return fmt::format("{}", tensor.sizes());
    }));
}

}  // namespace comm
}  // namespace accelerate
