#include "residency/touch.hpp"

#include <algorithm>

#include "residency/member.hpp"
#include "residency/residency.hpp"
#include "residency/writes.hpp"

namespace accelerate::residency {
namespace {

struct Touch final : Handler {
  bool handle(OperatorCall& call, Next next) override {
    if (!call.facts.needs_bytes) return false;
    Written written;
    call.for_each_tensor([&](const at::Tensor& tensor, size_t i) {
      Member* member = Member::of(tensor);
      if (!member) {
        Member::refuse_gone(tensor);  // rather than LibTorch, with its stack behind
        return;
      }
      const bool writes = call.writes(i);
      Unit& unit = member->unit();
      if (unit.is_alone()) return;  // there, and everything counts as written afterwards
      if (!call.unit_device && unit.owner().across_devices()) call.unit_device = tensor.device();
      if (!member->is_slice()) unit.owner().look_at_homes(unit);
      if ((unit.fixed() || member->is_behind()) && !member->is_slice()) unit.owner().bring_up_to_date(unit, *member);
      if (unit.fixed() && (!writes || unit.owner().writes_together())) return;  // always there
      if (writes && member->is_slice()) unit.owner().note_piece_write(unit);
      call.pins.add(unit, writes);
      const bool has_to_hear = member->home().keeps() || (unit.owner().has_scribe() && !member->is_slice());
      if (writes && has_to_hear && std::find(written.begin(), written.end(), member) == written.end())
        written.push_back(member);
    });
    if (written.empty()) return false;
    carry_out_writes(call, next, written);
    return true;
  }
};

}  // namespace

Handler& touch_handler() {
  static Touch touch;
  return touch;
}

}  // namespace accelerate::residency
