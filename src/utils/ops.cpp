#include "accelerate/utils/ops.hpp"
#include "utils/raise.hpp"
#include "utils/run_counts.hpp"

#include <ATen/ATen.h>

namespace accelerate::ops {

at::Tensor to_device(const at::Tensor& tensor, const at::Device& device, bool non_blocking) {
  if (!tensor.defined()) return tensor;
  const bool moves = tensor.device() != device;
  counts::add(moves ? RunCount::tensors_moved : RunCount::tensors_in_place);
  return moves ? tensor.to(device, non_blocking) : tensor;
}

at::Tensor slice(const at::Tensor& tensor, int64_t begin, int64_t end) { return tensor.slice(0, begin, end); }

at::Tensor concatenate(const std::vector<at::Tensor>& tensors, int64_t dim) {
  if (tensors.size() == 1) return tensors[0];
  try {
    return at::cat(tensors, dim);
  } catch (const c10::Error& error) {
    std::vector<std::string> sizes;
    for (const auto& tensor : tensors)
      sizes.push_back(tensor.defined() ? fmt::format("{}", tensor.sizes()) : "undefined");
    raise<ShapeError>(
        "concatenate: found tensors of sizes {}, expected ones that follow each other along dimension {}, so of equal "
        "sizes in all others. ({})",
        fmt::join(sizes, ", "), dim, error.what_without_backtrace());
  }
}

at::Tensor stack(const std::vector<at::Tensor>& tensors) { return at::stack(tensors); }

at::Tensor pin_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() ? tensor.pin_memory() : tensor;
}

at::Tensor pad_to(const at::Tensor& tensor, int64_t size, const PadOptions& options) {
  const int64_t dim = options.dim < 0 ? options.dim + tensor.dim() : options.dim;
  const int64_t missing = size - tensor.size(dim);
  if (missing == 0) return tensor;
  if (missing < 0)
    raise<ShapeError>("pad: found {} entries along dimension {}, expected at most {}", tensor.size(dim), dim, size);
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = size;
  at::Tensor padded = at::full(sizes, options.pad_index, tensor.options());
  padded.narrow(dim, options.pad_first ? missing : 0, tensor.size(dim)).copy_(tensor);
  return padded;
}

at::Tensor pad_rows(const at::Tensor& tensor, int64_t batch_size, int64_t num_processes, int64_t dim) {
  if (num_processes < 1)
    raise<ConfigError>("pad_input_tensors: num_processes is {}, expected at least 1", num_processes);
  // The reference's formula, kept to the letter because callers rely on its sizes (it is not a round-up: 12 rows on 2
  // processes become 16).
  const int64_t per_process = batch_size / num_processes;
  const int64_t rest = batch_size - per_process * num_processes;
  int64_t padding = num_processes - (per_process == 0 ? batch_size : per_process);
  if (rest > padding && padding < 1) padding = rest - padding;
  auto sizes = tensor.sizes().vec();
  sizes.at(0) = batch_size + padding;
  at::Tensor padded = at::zeros(sizes, tensor.options());
  padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor);
  return padded;
}

at::Tensor to_fp32(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16)
             ? tensor.to(at::kFloat)
             : tensor;
}

int64_t batch_size(const at::Tensor& tensor) {
  if (tensor.dim() == 0)
    throw ShapeError("find_batch_size: found a scalar tensor, expected at least one dimension (the batch)");
  return tensor.size(0);
}

}  // namespace accelerate::ops
