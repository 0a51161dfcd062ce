#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Gives freed memory, of the host and of devices, back to the system: allocators keep it for later. Not collective.
ACCELERATE_API void return_freed_memory();

/// Empties the caller's variables and gives the memory that this frees back to the system: tensors, holders of modules,
/// prepared objects, optimizers, smart pointers, optionals, containers. An object without an empty value is moved away:
/// only assigning to it or destroying it makes sense then. Objects that other variables, or an Accelerator
/// (free_memory()), share live on. Not collective. `release_memory(model, inputs);`
template <class... Objects> void release_memory(Objects&... objects) {
  const auto empty = [](auto& object) {
    using Object = std::remove_reference_t<decltype(object)>;
    if constexpr (requires { object.reset(); }) object.reset();
    else if constexpr (std::is_assignable_v<Object&, std::nullptr_t> &&
                       !std::is_convertible_v<Object, std::string_view>)
      object = nullptr;
    else if constexpr (std::is_default_constructible_v<Object> && std::is_move_assignable_v<Object>) object = Object();
    else {
      static_assert(std::is_move_constructible_v<Object> && !std::is_const_v<Object>,
                    "release_memory: this can't be emptied; hold it by std::unique_ptr or std::optional");
      const Object gone(std::move(object));
    }
  };
  (empty(objects), ...);
  return_freed_memory();
}

}  // namespace accelerate
