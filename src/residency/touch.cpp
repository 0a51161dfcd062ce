#include "residency/touch.hpp"

#include "residency/member.hpp"
#include "residency/residency.hpp"

namespace accelerate::residency {
namespace {

struct Touch final : Handler {
  bool handle(OperatorCall& call, Next) override {
    if (!call.facts.needs_bytes) return false;
    call.for_each_tensor([&](const at::Tensor& tensor, size_t i) {
      Member* member = Member::of(tensor);
      if (!member) return;
      call.pins.add(member->unit(), call.writes(i));
      if (!call.unit_device && member->unit().owner().across_devices()) call.unit_device = tensor.device();
    });
    return false;
  }
};

}  // namespace

Handler& touch_handler() {
  static Touch touch;
  return touch;
}

}  // namespace accelerate::residency
