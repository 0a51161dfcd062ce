#include "accelerate/codes/codes.hpp"

#include <c10/util/accumulate.h>

#include "accelerate/codes/kernels.hpp"
#include "codes/encodings.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

/// Rounded up, for any count: that of a file may be the largest number.
int64_t pieces(int64_t count, int64_t size) { return count / size + (count % size != 0); }

/// One tensor of codes is as it must be.
void expect(std::string_view what, std::string_view tensor, const at::Tensor& found, at::ScalarType dtype,
            at::IntArrayRef sizes, const at::Device& device, bool kept = false) {
  if (!found.defined())
    raise<ShapeError>("{}: {} is missing, expected {} {}", what, tensor, c10::toString(dtype), sizes);
  if (found.scalar_type() != dtype || found.sizes() != sizes || !found.is_contiguous() ||
      !(found.device() == device || (kept && found.is_meta())))
    raise<ShapeError>("{}: {} is {} {}{} on {}, expected {} {}, contiguous, on {}", what, tensor,
                      c10::toString(found.scalar_type()), found.sizes(), found.is_contiguous() ? "" : " with gaps",
                      found.device().str(), c10::toString(dtype), sizes, device.str());
}

void expect_none(std::string_view what, std::string_view tensor, bool there, Encoding encoding) {
  if (there) raise<ShapeError>("{}: found {}, which {} has none of", what, tensor, name(encoding));
}

}  // namespace

int64_t Codes::numel() const { return c10::multiply_integers(shape); }
int64_t Codes::columns() const { return shape.empty() ? 1 : shape.back(); }
int64_t Codes::rows() const { return shape.empty() ? 1 : c10::multiply_integers(shape.begin(), shape.end() - 1); }

int64_t Codes::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : {data, scales, nested ? nested->absmax : at::Tensor()})
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

at::Device Codes::device() const { return data.defined() && !data.is_meta() ? data.device() : at::Device(at::kCPU); }

Codes to(const Codes& codes, const at::Device& device) {
  if (codes.device() == device) return codes;
  Codes moved = unpacked(codes);
  for (at::Tensor* tensor : {&moved.data, &moved.scales, moved.nested ? &moved.nested->absmax : nullptr})
    if (tensor && tensor->defined()) *tensor = tensor->to(device);
  moved.packed = new_packed_cache();
  return moved;
}

void check(const Codes& codes, std::string_view what) {
  const Encoding encoding = codes.encoding;
  const bool kept = kernels::is_kept_once(codes);
  const at::Device device = codes.device();
  if (!at::isFloatingType(codes.dtype) || c10::elementSize(codes.dtype) < 2)
    raise<ShapeError>("{}: they are of a tensor of dtype {}, expected a floating-point one", what,
                      c10::toString(codes.dtype));
  for (const int64_t size : codes.shape)
    if (size < 0) raise<ShapeError>("{}: the shape {} has a negative size", what, at::IntArrayRef(codes.shape));
  if (!is_four_bit(encoding)) {
    if (codes.shape.empty())
      raise<ShapeError>("{}: a single number can't be {}, expected at least one dimension", what, name(encoding));
    expect_none(what, "scales that are codes", codes.nested.has_value(), encoding);
    if (codes.block_size != 0)
      raise<ShapeError>("{}: the block size is {}, expected 0 of {}", what, codes.block_size, name(encoding));
  }
  if (encoding == Encoding::int8_rowwise) {
    expect(what, "the codes", codes.data, at::kChar, codes.shape, device, kept);
    return expect(what, "the scales", codes.scales, at::kFloat, {codes.rows()}, device);
  }
  if (is_gguf(encoding)) {
    const auto& block = gguf_encoding(encoding);
    if (codes.columns() % block.block != 0)
      raise<ShapeError>("{}: rows of {} elements can't be {}, whose blocks have {}", what, codes.columns(),
                        name(encoding), block.block);
    expect_none(what, "scales beside the blocks", codes.scales.defined(), encoding);
    return expect(what, "the codes", codes.data, at::kByte,
                  {codes.rows(), codes.columns() / block.block * block.block_bytes}, device, kept);
  }
  const int64_t size = codes.block_size;
  if (size < 32 || size > 4096 || (size & (size - 1)) != 0)
    raise<ShapeError>("{}: the block size is {}, expected a power of two from 32 to 4096", what, size);
  const int64_t numel = codes.numel(), blocks = pieces(numel, size);
  expect(what, "the codes", codes.data, at::kByte, {pieces(numel, 2), 1}, device, kept);
  expect(what, "the scales", codes.scales, codes.nested ? at::kByte : at::kFloat, {blocks}, device, kept);
  if (!codes.nested) return;
  if (codes.nested->block_size < 1)
    raise<ShapeError>("{}: the block size of the scales is {}, expected at least 1", what, codes.nested->block_size);
  expect(what, "the scales' scales", codes.nested->absmax, at::kFloat, {pieces(blocks, codes.nested->block_size)},
         device);
}

}  // namespace accelerate::codes
