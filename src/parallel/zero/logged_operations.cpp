#include "parallel/zero/logged_operations.hpp"

namespace accelerate::zero {

const LoggedOperation* logged_operation(std::string_view name) {
  using enum comm::Collective;
  static constexpr LoggedOperation kKnown[] = {
      {"all_reduce", all_reduce},
      {"all_gather", all_gather},
      {"all_gather_into_tensor", all_gather},
      {"all_gather_object", all_gather},
      {"reduce_scatter", reduce_scatter},
      {"reduce_scatter_tensor", reduce_scatter},
      {"broadcast", broadcast},
      {"broadcast_object_list", broadcast},
      {"barrier", barrier},
      {"monitored_barrier", barrier},
      {"send", send},
      {"isend", send},
      {"recv", recv},
      {"irecv", recv},
      {"batch_isend_irecv", send},
      {"reduce", {}},
      {"gather", {}},
      {"scatter", {}},
      {"all_to_all", {}},
      {"all_to_all_single", {}},
  };
  for (const auto& known : kKnown)
    if (known.name == name) return &known;
  return nullptr;
}

}  // namespace accelerate::zero
