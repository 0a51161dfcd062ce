#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "accelerate/model/hooks.hpp"

namespace accelerate::detail {

/// Forgets the hook of a module by ModelRef::identity(), and does not tell the hook. For hooks that remove themselves,
/// which can't hold the module: it would live as long as they do. @return the two; nothing where there was none.
std::optional<std::pair<ModelRef, std::shared_ptr<ModelHook>>> take_hook(const void* identity);

}  // namespace accelerate::detail
