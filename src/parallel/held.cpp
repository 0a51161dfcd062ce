#include "accelerate/parallel/held.hpp"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "comm/mesh.hpp"
#include "parallel/slice_of.hpp"

namespace accelerate::parallel {

Slice Slice::all_of(at::IntArrayRef sizes) { return range(sizes, 0, c10::multiply_integers(sizes)); }

Slice Slice::range(at::IntArrayRef sizes, int64_t begin, int64_t numel) {
  return {.corner = std::vector<int64_t>(sizes.size(), 0), .sizes = sizes.vec(), .begin = begin, .numel = numel};
}

bool Held::counts(comm::Axes apart) const {
  return (mesh ? *mesh : comm::mesh()).place(comm::kAllAxes - cut - apart) == 0;
}

at::Tensor slice_of(const at::Tensor& like, const at::Tensor& value, int64_t begin, int64_t numel) {
  at::Tensor ordered = value.detach();
  if (!like.is_non_overlapping_and_dense()) {
    ordered = ordered.contiguous();
  } else if (ordered.strides() != like.strides()) {
    ordered = at::empty_strided(like.sizes(), like.strides(), value.options().requires_grad(false));
    ordered.copy_(value);
  }
  return ordered.as_strided({ordered.numel()}, {1}).narrow(0, begin, numel);
}

at::Tensor box_like(const at::Tensor& whole, const Slice& slice) {
  if (whole.sizes() == slice.sizes) return whole;
  const auto options = whole.options().device(at::kMeta).requires_grad(false);
  if (!whole.is_non_overlapping_and_dense()) return at::empty(slice.sizes, options);
  return at::empty_strided(slice.sizes, at::infer_dense_strides(slice.sizes, whole.strides()), options);
}

at::Tensor slice_of(const Held& held, const at::Tensor& whole) {
  const Slice& slice = held.slice;
  if (slice.numel == 0) return whole.new_empty(held.value.sizes());
  at::Tensor box = whole.detach();
  for (int64_t dim = 0; dim < box.dim(); ++dim)
    box = box.narrow(dim, slice.corner[static_cast<size_t>(dim)], slice.sizes[static_cast<size_t>(dim)]);
  if (held.value.sizes() == slice.sizes) return box.clone(at::MemoryFormat::Contiguous);
  return slice_of(box_like(held.whole, slice), box, slice.begin, slice.numel).clone();
}

void put_into(const Held& held, const at::Tensor& values, const at::Tensor& whole) {
  const Slice& slice = held.slice;
  if (slice.numel == 0) return;
  at::Tensor place = whole;
  for (int64_t dim = 0; dim < place.dim(); ++dim)
    place = place.narrow(dim, slice.corner[static_cast<size_t>(dim)], slice.sizes[static_cast<size_t>(dim)]);
  if (held.value.sizes() == slice.sizes) return void(place.copy_(values));
  const at::Tensor like = box_like(held.whole, slice);
  const auto strides = like.is_non_overlapping_and_dense() ? like.strides().vec() : like.contiguous().strides().vec();
  const bool in_place = place.strides() == strides && place.is_non_overlapping_and_dense();
  const at::Tensor box = in_place ? place : at::empty_strided(place.sizes(), strides, whole.options()).copy_(place);
  box.as_strided({box.numel()}, {1}, box.storage_offset()).narrow(0, slice.begin, slice.numel).copy_(values);
  if (!in_place) place.copy_(box);
}

}  // namespace accelerate::parallel
