#include <bit>
#include <limits>

#include "formats/pickle.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {

PickleWriter::PickleWriter() { bytes_ = "\x80\x02"; }

template <class T> void PickleWriter::raw(T value) {
  for (size_t i = 0; i < sizeof(T); ++i) bytes_ += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
}

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value < 256) op('K'), raw(static_cast<uint8_t>(value));
  else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max())
    op('J'), raw(static_cast<int32_t>(value));
  else op('\x8a'), raw(uint8_t{8}), raw(value);
}

void PickleWriter::real(double value) {
  op('G');
  const auto bits = std::bit_cast<uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) bytes_ += static_cast<char>(bits >> shift);
}

template <class F> void PickleWriter::once(const std::string& key, F&& write) {
  const auto [entry, fresh] = memo_.try_emplace(key, static_cast<uint32_t>(memo_.size()));
  const auto slot = entry->second;
  if (fresh) write();
  if (slot < 256) op(fresh ? 'q' : 'h'), raw(static_cast<uint8_t>(slot));
  else op(fresh ? 'r' : 'j'), raw(slot);
}

void PickleWriter::text(const std::string& value) {
  if (!is_utf8(value))
    raise<CheckpointError>(
        "writing a pickle: a string of {} bytes is not UTF-8, which Python's str must be. Keep bytes in a uint8 "
        "tensor.",
        value.size());
  if (value.size() > std::numeric_limits<uint32_t>::max())
    raise<CheckpointError>("writing a pickle: a string of {} bytes is longer than the 4 GiB that fit.", value.size());
  once("s" + value, [&] {
    op('X');
    raw(static_cast<uint32_t>(value.size()));
    bytes_ += value;
  });
}

void PickleWriter::bytes(const std::string& value) {
  std::string characters;  // of the same numbers
  for (const char one : value) {
    const auto number = static_cast<unsigned char>(one);
    if (number >= 0x80) characters += static_cast<char>(0xc0 | (number >> 6));
    characters += static_cast<char>(number < 0x80 ? number : 0x80 | (number & 0x3f));
  }
  global("_codecs", "encode"), mark(), text(characters), text("latin1"), tuple_of_mark(), reduce();
}

void PickleWriter::global(const std::string& module, const std::string& name) {
  once("c" + module + "\n" + name, [&] { bytes_ += "c" + module + "\n" + name + "\n"; });
}

std::string PickleWriter::finish() {
  op('.');
  return std::move(bytes_);
}

}  // namespace accelerate::formats
