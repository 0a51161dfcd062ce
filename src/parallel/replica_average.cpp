#include "parallel/replica_average.hpp"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

#include "comm/group.hpp"

namespace accelerate::parallel {

void average_in_place(comm::Group& group, const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kMessageElements = 16 << 20;
  at::NoGradGuard no_grad;
  for (size_t begin = 0, end = 0; begin < tensors.size(); begin = end) {
    std::vector<at::Tensor> flat;
    const auto type = tensors[begin].scalar_type();
    const bool narrow = type == at::kHalf || type == at::kBFloat16;
    for (int64_t n = 0; end < tensors.size() && tensors[end].scalar_type() == type && n < kMessageElements; ++end)
      n += tensors[end].numel(), flat.push_back(tensors[end].detach().reshape({-1}).to(group.device()));
    at::Tensor sum = at::cat(flat);
    if (narrow) sum = sum.to(at::kFloat);
    group.all_reduce_(sum, Reduction::sum);
    sum.div_(group.world_size());
    int64_t at = 0;
    for (size_t i = begin; i < end; ++i) {
      const int64_t length = tensors[i].numel();
      tensors[i].detach().copy_(sum.narrow(0, at, length).view(tensors[i].sizes()));
      at += length;
    }
  }
}

}  // namespace accelerate::parallel
