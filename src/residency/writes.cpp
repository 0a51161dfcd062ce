#include "residency/writes.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <vector>

#include "residency/home.hpp"
#include "residency/member.hpp"
#include "residency/residency.hpp"

namespace accelerate::residency {
namespace {

/// A member of less precision than its home keeps, and what the operator writes to in its place.
struct WideMember {
  const Member* member;
  at::Tensor values;  ///< 1-D
};

bool is_wide(const Member& member) {
  const Home& home = member.home();
  return home.keeps() && (*home.keeps() != member.part().dtype || home.lossy());
}

/// Autograd wants to see the operator on the tensors themselves: it refuses writes to leaves, or records them.
bool records(const OperatorCall& call) {
  if (!at::GradMode::is_enabled()) return false;
  bool any = false;
  call.for_each_tensor([&](const at::Tensor& tensor, size_t) { any |= tensor.requires_grad(); });
  return any;
}

}  // namespace

void carry_out_writes(OperatorCall& call, const Next& next, const Written& written) {
  std::vector<WideMember> wide;
  if (!records(call))
    for (Member* member : written)
      if (is_wide(*member)) wide.push_back({member, member->unit().owner().exact(*member)});
  const auto in_place_of = [&](const Member* member) {
    return std::find_if(wide.begin(), wide.end(), [&](const WideMember& one) { return one.member == member; });
  };
  if (wide.empty()) {
    next();
  } else {
    const std::vector<c10::IValue> originals(call.arguments().begin(), call.arguments().end());
    next.compute(TorchLayers::program, [&] {
      for (size_t i = 0; i < originals.size(); ++i)
        call.map_tensors(i, [&](const at::Tensor& tensor) {
          if (const auto found = in_place_of(Member::of(tensor)); found != wide.end())
            return found->values.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
          // Some operators want operands of one type (lerp_).
          return !call.writes(i) && tensor.scalar_type() == wide.front().member->part().dtype
                     ? tensor.to(wide.front().values.scalar_type())
                     : tensor;
        });
    });
    next();
    call.put_back(originals);
    // An operator that saved such a tensor for backward must hear of it.
    for (size_t i = 0; i < originals.size(); ++i)
      if (call.writes(i))
        for_each_tensor(originals[i], [&](const at::Tensor& tensor) {
          if (in_place_of(Member::of(tensor)) != wide.end()) tensor.unsafeGetTensorImpl()->bump_version();
        });
  }
  for (Member* member : written) {
    const auto found = in_place_of(member);
    member->unit().owner().wrote(*member, found == wide.end() ? at::Tensor() : found->values);
  }
}

}  // namespace accelerate::residency
