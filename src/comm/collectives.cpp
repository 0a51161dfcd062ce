#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
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

}  // namespace

int64_t rank() {
  const auto& world = world_group();
  return world ? world->rank() : 0;
}

int64_t world_size() {
  const auto& world = world_group();
  return world ? world->world_size() : 1;
}

void barrier() {
  if (Group* world = group()) world->barrier();
}

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
    // Small integer types have no reduction in the back ends; 32 bits hold what they can sum to.
    const bool widen = tensor.scalar_type() == at::kShort || tensor.scalar_type() == at::kBool;
    result = widen ? tensor.to(at::kInt) : tensor.detach().clone(at::MemoryFormat::Contiguous);
    world->all_reduce_(result, reduction);
    if (reduction == Reduction::mean) result = result / world->world_size();
    if (widen && !result.is_floating_point()) result = result.to(tensor.scalar_type());
  }
  return scale == 1.0 ? result : result * scale;
}

at::Tensor pad_to_largest(const at::Tensor& tensor, const PadOptions& options) {
  Group* world = group();
  if (!world || options.dim >= tensor.dim() || options.dim < -tensor.dim()) return tensor;
  const int64_t dim = options.dim < 0 ? options.dim + tensor.dim() : options.dim;
  if (world->debug()) {  // all other dimensions must agree
    auto sizes = tensor.sizes().vec();
    sizes[static_cast<size_t>(dim)] = 0;
    verify_shapes("pad_across_processes", {tensor.new_empty(sizes)});
  }
  const at::Tensor size = at::full({1}, tensor.size(dim), at::TensorOptions().dtype(at::kLong).device(tensor.device()));
  return ops::pad_to(tensor, world->all_gather(size).max().item<int64_t>(), options);
}

std::vector<std::string> all_gather_bytes(Group& group, const std::string& bytes) {
  const at::Tensor lengths =
      group.all_gather(at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong).to(group.device())).cpu();
  const int64_t longest = lengths.max().item<int64_t>();
  at::Tensor mine = at::zeros({longest}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), mine.data_ptr<uint8_t>());
  const at::Tensor all = group.all_gather(mine.to(group.device())).cpu();
  std::vector<std::string> result;
  for (int64_t rank = 0; rank < group.world_size(); ++rank)
    result.emplace_back(reinterpret_cast<const char*>(all.data_ptr<uint8_t>()) + rank * longest,
                        lengths[rank].item<int64_t>());
  return result;
}

std::string broadcast_bytes(Group& group, const std::string& bytes, int64_t from) {
  if (group.dry()) return bytes;  // peers that don't exist say what we say
  const bool mine = group.rank() == from;
  const int64_t length =
      group.broadcast(at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong).to(group.device()), from)
          .item<int64_t>();
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

void verify_shapes(const char* operation, const std::vector<at::Tensor>& tensors) {
  Group* world = group();
  if (!world || !world->debug()) return;
  std::vector<std::string> shapes;
  for (const auto& tensor : tensors)
    shapes.push_back(fmt::format("{} {}", tensor.sizes(), at::toString(tensor.scalar_type())));
  const auto all = all_gather_bytes(fmt::format("{}", fmt::join(shapes, ", ")));
  if (std::all_of(all.begin(), all.end(), [&](const auto& other) { return other == all.front(); })) return;
  std::string lines;
  for (size_t rank = 0; rank < all.size(); ++rank) lines += fmt::format("\n  - Process {}: {}", rank, all[rank]);
  raise<DistributedOperationException>(
      "{0}: the ranks' tensors differ in shape, and this operation needs equal shapes on all of them; "
      "pad_across_processes makes them equal.\nOperation: `{0}`\nInput shapes:{1}",
      operation, lines);
}

}  // namespace comm
}  // namespace accelerate
