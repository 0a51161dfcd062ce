#include "residency/devices.hpp"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <unordered_set>

#include "residency/member.hpp"

namespace accelerate::residency {
namespace {

thread_local std::optional<at::Device> last_device;  ///< where this thread last computed with members

/// For a thread that has computed with members of a model across devices: all its operators come by until the last such
/// model has gone, which the thread learns by its next operator.
struct UntilTheyEnd final : Handler {
  bool handle(OperatorCall&, Next) override;
};
UntilTheyEnd until_they_end;
thread_local std::optional<HandlerScope> all_come_by;

bool UntilTheyEnd::handle(OperatorCall&, Next) {
  if (!has_process_handler(Link::devices)) all_come_by.reset();
  return false;
}

const std::unordered_set<std::string_view> kMeantToCross = {
    "aten::to",         "aten::_to_copy",
    "aten::copy_",      "aten::copy",
    "aten::_copy_from", "aten::_copy_from_and_resize",
    "aten::set_",       "aten::set_data",
    "aten::type_as",    "aten::_has_compatible_shallow_copy_type",
};

bool has_place(const at::Tensor& tensor) { return !(tensor.dim() == 0 && tensor.is_cpu()); }

struct Devices final : Handler {
  /// Moves arguments where that is needed.
  bool handle(OperatorCall& call, Next next) override {
    if (call.unit_device) {
      last_device = call.unit_device;
      if (!all_come_by) all_come_by.emplace(Link::devices, until_they_end);
    }
    if (kMeantToCross.contains(call.name())) return false;
    std::optional<at::Device> front, written;
    bool differ = false, at_last = false;
    call.for_each_tensor([&](const at::Tensor& tensor, size_t i) {
      if (!has_place(tensor)) return;
      const at::Device device = tensor.device();
      differ |= front && *front != device;
      if (!front) front = device;
      if (!written && call.writes(i)) written = device;
      at_last |= last_device && *last_device == device;
    });
    if (!differ) return false;
    const at::Device target = written            ? *written
                              : call.unit_device ? *call.unit_device
                              : at_last          ? *last_device
                                                 : *front;
    next.compute(TorchLayers::program, [&] {
      call.map_tensors([&](const at::Tensor& tensor) {
        if (!has_place(tensor) || tensor.device() == target) return tensor;
        return tensor.to(target, /*non_blocking=*/tensor.is_cpu() && tensor.is_pinned());
      });
    });
    return false;
  }
};

}  // namespace

Handler& devices_handler() {
  static Devices devices;
  return devices;
}

}  // namespace accelerate::residency
