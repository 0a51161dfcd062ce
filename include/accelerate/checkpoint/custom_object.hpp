#pragma once

/// Objects of a program in its checkpoints: anything with state_dict() and load_state_dict(), or what an archive takes.

#include <ATen/core/ivalue.h>

#include <concepts>
#include <functional>
#include <string>
#include <utility>

#include "accelerate/utils/archive.hpp"

namespace accelerate::checkpointing {

/// Bytes as a uint8 tensor, which Python reads too, and back. @throws CheckpointError for anything else.
ACCELERATE_API c10::IValue bytes_as_object(const std::string& bytes);
ACCELERATE_API std::string object_as_bytes(const c10::IValue& object);
/// Lets `read` take values out of such bytes, which may be of a stranger's file: of tensors and of plain data in
/// c10::IValue, all on the CPU; deeper than 100 levels, larger than the file or of other kinds is an error.
/// @throws CheckpointError unless they hold what is read
ACCELERATE_API void read_object_bytes(const c10::IValue& object, const std::function<void(ArchiveReader&)>& read);
/// @throws CheckpointError for a tensor that read_object_bytes() would refuse: sparse or quantized
ACCELERATE_API void check_can_be_read_again(const at::Tensor& tensor);

/// A user's object in a checkpoint.
struct CustomObject {
  std::function<c10::IValue()> state_dict;
  std::function<void(const c10::IValue&)> load_state_dict;
};

template <class T> CustomObject custom_object(T& object) {
  if constexpr (requires(c10::IValue state) {
                  { object.state_dict() } -> std::convertible_to<c10::IValue>;
                  object.load_state_dict(state);
                }) {
    return {[&object] { return c10::IValue(object.state_dict()); },
            [&object](const c10::IValue& state) { object.load_state_dict(state); }};
  } else {
    return {[&object] {
              nested::for_each_tensor(object, check_can_be_read_again);
              return bytes_as_object(to_bytes(object));
            },
            [&object](const c10::IValue& state) {
              T read{};
              read_object_bytes(state, [&read](ArchiveReader& reader) { reader.read(read); });
              object = std::move(read);
            }};
  }
}

}  // namespace accelerate::checkpointing
