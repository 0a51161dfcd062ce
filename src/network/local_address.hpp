#pragma once

#include <optional>
#include <string>

namespace accelerate {

/// The address (in numbers) from which this machine sends to `host`, a name or an address: how others of that network
/// reach this machine. Nothing is sent but what looking the name up takes.
/// @return nothing when the name has no address; or when there is no way there, and errno says why not
std::optional<std::string> local_address_towards(const std::string& host);

}  // namespace accelerate
