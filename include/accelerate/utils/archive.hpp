#pragma once

/// Turns values into bytes for other ranks of the same program. Not a file format: both ends must be the same build.

#include <ATen/core/Tensor.h>

#include <string>
#include <type_traits>
#include <utility>

#include "accelerate/utils/nested.hpp"

namespace accelerate {

namespace detail {
template <class T>
struct IsArchived : std::bool_constant<std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
                                       nested::TensorLike<T> || nested::IValueLike<T>> {};
}  // namespace detail

/// Whether values of this type can be written and read.
template <class T> inline constexpr bool archivable = nested::all_leaves<T, detail::IsArchived, /*with_keys=*/true>;

class ACCELERATE_API ArchiveWriter {
 public:
  template <class T> void write(const T& value) {
    if constexpr (nested::Sequence<T> || nested::Mapping<T>) write(static_cast<int64_t>(value.size()));
    if constexpr (nested::OptionalLike<T>) write(value.has_value());
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) raw(&value, sizeof(T));
    else if constexpr (detail::IsArchived<T>::value) write_leaf(value);
    else if constexpr (nested::Mapping<T>)
      for (const auto& [key, child] : value) write(key), write(child);
    else if constexpr (std::is_same_v<T, std::vector<bool>>)
      for (const bool bit : value) write(bit);
    else if constexpr (nested::is_container<T>) nested::for_each_child(value, [&](const auto& child) { write(child); });
    else
      static_assert(archivable<T>,
                    "this type can't be sent to another rank: use numbers, strings, tensors, standard containers, or "
                    "declare ACCELERATE_FIELDS in your struct");
  }
  std::string take() { return std::move(bytes_); }

 private:
  void raw(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }
  void write_leaf(const std::string& text);
  void write_leaf(const at::Tensor& tensor);
  void write_leaf(const c10::IValue& value);
  std::string bytes_;
};

/// @throws CommError when the bytes end early (ranks that run different programs).
class ACCELERATE_API ArchiveReader {
 public:
  /// Makes a c10::IValue of the bytes that ArchiveWriter wrote for one.
  using IValueReader = c10::IValue (*)(std::string bytes);

  /// @param bytes        must outlive this
  /// @param read_ivalue  for bytes that may come from strangers; without it LibTorch's own reader, which trusts them
  explicit ArchiveReader(const std::string& bytes, IValueReader read_ivalue = nullptr)
      : bytes_(bytes), read_ivalue_(read_ivalue) {}

  template <class T> void read(T& value) {
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) raw(&value, sizeof(T));
    else if constexpr (detail::IsArchived<T>::value) read_leaf(value);
    else if constexpr (nested::Mapping<T> || nested::detail::is_instance<T, std::vector>) {
      value.clear();  // grows one by one, with what is there and not with what a count promises
      for (int64_t n = read_count(); n > 0; --n) read_item(value);
    } else if constexpr (nested::is_container<T>) {
      if constexpr (nested::Sequence<T>) read_count();
      if constexpr (nested::OptionalLike<T>) {
        value.reset();
        if (read_bool()) value.emplace();
      }
      nested::for_each_child(value, [&](auto& child) { read(child); });
    } else
      static_assert(archivable<T>,
                    "this type can't be received from another rank: use numbers, strings, tensors, standard "
                    "containers, or declare ACCELERATE_FIELDS in your struct");
  }

 private:
  template <class T> void read_item(T& container) {
    if constexpr (nested::Mapping<T>) {
      typename T::key_type key{};
      read(key), read(container[key]);
    } else if constexpr (std::is_same_v<T, std::vector<bool>>) container.push_back(read_bool());
    else read(container.emplace_back());
  }
  void raw(void* data, size_t size);
  int64_t read_count();
  bool read_bool();
  void read_leaf(std::string& text);
  void read_leaf(at::Tensor& tensor);
  void read_leaf(c10::IValue& value);
  const std::string& bytes_;
  IValueReader read_ivalue_;
  size_t at_ = 0;
};

template <class T> std::string to_bytes(const T& value) {
  ArchiveWriter writer;
  writer.write(value);
  return writer.take();
}
template <class T> T from_bytes(const std::string& bytes) {
  T value{};
  ArchiveReader reader(bytes);
  reader.read(value);
  return value;
}

}  // namespace accelerate
