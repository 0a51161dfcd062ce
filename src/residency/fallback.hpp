#pragma once

namespace accelerate::residency {

/// From now on operators on tensors with the members' key come by the engine first. Once per process; cheap to repeat.
void install_fallback();

}  // namespace accelerate::residency
