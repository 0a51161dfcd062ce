#include "accelerate/utils/archive.hpp"
#include "utils/raise.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstring>

namespace accelerate {

void ArchiveWriter::write_leaf(const std::string& text) {
  write(static_cast<int64_t>(text.size()));
  raw(text.data(), text.size());
}

void ArchiveWriter::write_leaf(const at::Tensor& tensor) {
  write(tensor.defined());
  if (!tensor.defined()) return;
  const at::Tensor plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
  write(static_cast<int8_t>(plain.scalar_type()));
  write(static_cast<int64_t>(plain.dim()));
  for (const int64_t size : plain.sizes()) write(size);
  raw(plain.data_ptr(), plain.nbytes());
}

void ArchiveWriter::write_leaf(const c10::IValue& value) {
  const auto bytes = torch::jit::pickle_save(value);
  write(std::string(bytes.begin(), bytes.end()));
}

void ArchiveReader::raw(void* data, size_t size) {
  if (size > bytes_.size() - at_)
    raise<CommError>(
        "receiving an object: the message ends after {} bytes, expected at least {} for this type; the ranks may run "
        "different programs or call with different types",
        bytes_.size(), at_ + size);
  if (size == 0) return;  // an empty tensor has no address
  std::memcpy(data, bytes_.data() + at_, size);
  at_ += size;
}

int64_t ArchiveReader::read_count() {
  int64_t count = 0;
  raw(&count, sizeof(count));
  // Each item takes no less than nothing, but a count beyond the message's own length can't be right unless items are
  // empty; bound the allocation by it.
  if (count < 0 || static_cast<uint64_t>(count) > bytes_.size())
    raise<CommError>(
        "receiving an object: found a list of {} items in a message of {} bytes; the ranks may run different programs "
        "or call with different types",
        count, bytes_.size());
  return count;
}

bool ArchiveReader::read_bool() {
  bool value = false;
  read(value);
  return value;
}

void ArchiveReader::read_leaf(std::string& text) {
  text.resize(static_cast<size_t>(read_count()));
  raw(text.data(), text.size());
}

void ArchiveReader::read_leaf(at::Tensor& tensor) {
  if (!read_bool()) {
    tensor = at::Tensor();
    return;
  }
  int8_t dtype = 0;
  read(dtype);
  std::vector<int64_t> sizes(static_cast<size_t>(read_count()));
  for (int64_t& size : sizes) read(size);
  // Custom checkpoints come from files: what they say is compared with what they hold before memory is asked for.
  const auto type = static_cast<at::ScalarType>(dtype);
  const bool known = dtype >= 0 && type < at::ScalarType::NumOptions && type != at::ScalarType::Undefined;
  const uint64_t room = known ? (bytes_.size() - at_) / c10::elementSize(type) : 0;
  bool fits = known, empty = false;
  int64_t count = 1;  // of elements, if none of the sizes were 0
  for (const int64_t size : sizes) {
    empty = empty || size == 0;
    fits = fits && size >= 0 && (size == 0 || !__builtin_mul_overflow(count, size, &count));
  }
  fits = fits && (empty || static_cast<uint64_t>(count) <= room);
  if (!fits)
    raise<CommError>(
        "receiving an object: found a tensor of dtype number {} and sizes [{}] where {} bytes are left; the ranks may "
        "run different programs or call with different types, or the file is damaged",
        static_cast<int>(dtype), fmt::join(sizes, ", "), bytes_.size() - at_);
  tensor = at::empty(sizes, at::TensorOptions().dtype(type));
  raw(tensor.data_ptr(), tensor.nbytes());
}

void ArchiveReader::read_leaf(c10::IValue& value) {
  std::string bytes;
  read(bytes);
  value = read_ivalue_ ? read_ivalue_(std::move(bytes))
                       : torch::jit::pickle_load(std::vector<char>(bytes.begin(), bytes.end()));
}

}  // namespace accelerate
