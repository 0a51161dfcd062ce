#include "comm/mesh.hpp"

#include <algorithm>
#include <utility>

#include "comm/group.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

Mesh& current() {
  static Mesh mesh;
  return mesh;
}

std::string text_of(const std::vector<AxisSize>& sizes) {
  std::vector<std::string> texts;
  for (const auto& [axis, size] : sizes) texts.push_back(fmt::format("{} {}", name_of(axis), size));
  return texts.empty() ? "no axis" : fmt::format("{}", fmt::join(texts, ", "));
}

/// @throws ConfigError where it is more than a number holds.
int64_t product_of(const std::vector<AxisSize>& sizes) {
  int64_t product = 1;
  for (const auto& [axis, size] : sizes)
    if (size < 1 || __builtin_mul_overflow(product, size, &product))
      raise<ConfigError>("mesh: found the axes {}, expected numbers of ranks, 1 at least", text_of(sizes));
  return product;
}

}  // namespace

const char* name_of(Axis axis) {
  switch (axis) {
    case Axis::pp:
      return "pp";
    case Axis::dp_replicate:
      return "dp_replicate";
    case Axis::dp_shard:
      return "dp_shard";
    case Axis::cp:
      return "cp";
    case Axis::sp:
      return "sp";
    case Axis::ep:
      return "ep";
    case Axis::tp:
      return "tp";
  }
  throw InternalError("axis without a name");
}

Mesh::Mesh(std::shared_ptr<Group> all, std::vector<AxisSize> sizes) : all_(std::move(all)), sizes_(std::move(sizes)) {
  const int64_t ranks = all_ ? all_->world_size() : 1;
  if (product_of(sizes_) != ranks)
    raise<ConfigError>(
        "mesh: found the axes {}, expected sizes whose product is the job's {} ranks; give one less of them, or others",
        text_of(sizes_), ranks);
  std::erase_if(sizes_, [](const AxisSize& one) { return one.size == 1; });
  for (size_t i = 0; i < sizes_.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (sizes_[i].axis == sizes_[j].axis)
        raise<ConfigError>("mesh: found the axis {} twice, expected each once", name_of(sizes_[i].axis));
}

int64_t Mesh::size(Axes axes) const {
  int64_t product = 1;
  for (const auto& [axis, size] : sizes_)
    if (axes.has(axis)) product *= size;
  return product;
}

int64_t Mesh::place(Axes axes) const { return place(axes, all_ ? all_->rank() : 0); }

int64_t Mesh::place(Axes axes, int64_t rank) const {
  int64_t place = 0, factor = 1;
  for (auto one = sizes_.rbegin(); one != sizes_.rend(); ++one) {
    if (axes.has(one->axis)) {
      place += rank % one->size * factor;
      factor *= one->size;
    }
    rank /= one->size;
  }
  return place;
}

int64_t Mesh::step(Axis axis) const {
  int64_t step = 1;
  for (auto one = sizes_.rbegin(); one != sizes_.rend(); step *= (one++)->size)
    if (one->axis == axis) return step;
  return 1;
}

std::shared_ptr<Group> Mesh::along(Axes axes) const {
  if (all_ && size(axes) == all_->world_size()) return all_;  // also a group of one, where somebody has made it
  if (size(axes) == 1) return nullptr;
  auto& group = groups_[axes];
  if (group) return group;
  std::vector<std::string> names;
  for (const auto& [axis, size] : sizes_)
    if (axes.has(axis)) names.emplace_back(name_of(axis));
  // The ranks of one group have the same place on all other axes.
  Axes rest{};
  for (const auto& [axis, size] : sizes_)
    if (!axes.has(axis)) rest = rest | Axes{axis};
  group = all_->split(fmt::format("{}", fmt::join(names, " x ")), [&](int64_t rank) { return place(rest, rank); });
  return group;
}

Mesh Mesh::folded(Axes from, const std::vector<AxisSize>& into) const {
  std::vector<AxisSize> sizes;
  int64_t replaced = 0;
  bool apart = false;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    if (!from.has(sizes_[i].axis)) {
      sizes.push_back(sizes_[i]);
      continue;
    }
    apart |= replaced > 0 && !from.has(sizes_[i - 1].axis);
    if (replaced++ == 0) sizes.insert(sizes.end(), into.begin(), into.end());
  }
  if (apart || product_of(into) != size(from))
    raise<ConfigError>(
        "mesh: the axes {} can't be folded into {}, expected axes beside each other, and as many ranks in both",
        text_of(sizes_), text_of(into));
  return {all_, std::move(sizes)};
}

const Mesh& mesh() { return current(); }
void set_mesh(Mesh mesh) { current() = std::move(mesh); }

}  // namespace accelerate::comm
