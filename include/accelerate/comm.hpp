#pragma once

/// How bytes move between ranks. Every function here is collective unless it says otherwise: all ranks of the group
/// call it, in the same order. With one process they do nothing. Source: features table 1.7, collective conformance.

#include <string>
#include <string_view>
#include <vector>

#include "accelerate/utils/archive.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate {

/// `none` is the plain sum over ranks, as in the reference (where `sum` and `none` differ in name only).
enum class Reduction { sum, mean, max, none };
/// "sum", "mean", "max" or "none". @throws ConfigError.
ACCELERATE_API Reduction reduction_from_string(std::string_view text);

namespace comm {
/// Collectives on single tensors and byte strings in the group of all ranks. Before anything moves, ranks tell each
/// other in 24 bytes what they are about to do. @throws CommError naming a peer that is late, gone or out of step,
/// DistributedOperationException on all ranks as verify(), ShapeError for tensors that the back end can't send.
ACCELERATE_API at::Tensor all_gather(const at::Tensor& tensor);  ///< [n, ...] -> [P*n, ...]; a scalar counts as [1]
/// A tensor with from_process's values.
ACCELERATE_API at::Tensor broadcast(const at::Tensor& tensor, int64_t from_process);
ACCELERATE_API at::Tensor all_reduce(const at::Tensor& tensor, Reduction reduction, double scale);
/// Each padded along one dimension to the largest size over all ranks, see pad_across_processes.
ACCELERATE_API std::vector<at::Tensor> pad_to_largest(const std::vector<at::Tensor>& tensors,
                                                      const PadOptions& options);
/// One string per rank, lengths may differ.
ACCELERATE_API std::vector<std::string> all_gather_bytes(const std::string& bytes);
ACCELERATE_API std::string broadcast_bytes(const std::string& bytes, int64_t from_process);
ACCELERATE_API int64_t rank();
ACCELERATE_API int64_t world_size();
ACCELERATE_API void barrier();
ACCELERATE_API const char* name_of(Reduction reduction);  ///< "sum"

/// The first three for tensors that verify() has found alike on all ranks, or that are so by construction: they ask
/// nobody. Others may end the process, on a thread of the transport.
namespace agreed {
ACCELERATE_API at::Tensor all_gather(const at::Tensor& tensor);
ACCELERATE_API at::Tensor broadcast(const at::Tensor& tensor, int64_t from_process);
ACCELERATE_API at::Tensor all_reduce(const at::Tensor& tensor, Reduction reduction, double scale);
}  // namespace agreed

/// Compares what ranks are about to do: the operation, and the shapes, dtypes and devices of the tensors. One exchange
/// of 24 bytes. @param operation  "broadcast"; lives as long as the program
/// @param how  what else must be the same: "from rank 0"
/// @throws DistributedOperationException that lists each rank's, on all ranks; the group is as good as before
ACCELERATE_API void verify_shapes(const char* operation, const std::vector<at::Tensor>& tensors,
                                  const std::string& how = {});

template <class T> std::vector<at::Tensor> tensors_of(const T& data) {
  std::vector<at::Tensor> tensors;
  nested::for_each_tensor(data, [&](const at::Tensor& t) { tensors.push_back(t); });
  return tensors;
}
template <class T> void verify(const char* operation, const T& data, const std::string& how = {}) {
  if (world_size() > 1) verify_shapes(operation, tensors_of(data), how);
}
}  // namespace comm

/// Concatenates every tensor over all ranks along dimension 0, in rank order. Shapes, dtypes and kinds of device must
/// be equal on all ranks (see pad_across_processes; gather_object takes anything); so in broadcast() and reduce().
/// @throws DistributedOperationException (a CommError) that lists each rank's, on all ranks, where they are not.
template <class T> T gather(const T& data) {
  comm::verify("gather", data);
  return nested::map_tensors(data, [](const at::Tensor& t) { return comm::agreed::all_gather(t); });
}

/// The lists of all ranks, one after the other. T: anything that an Archive takes (numbers, strings, tensors,
/// containers, structs with ACCELERATE_FIELDS, IValue).
template <class T> std::vector<T> gather_object(const std::vector<T>& objects) {
  if (comm::world_size() == 1) return objects;
  std::vector<T> all;
  for (const std::string& bytes : comm::all_gather_bytes(to_bytes(objects)))
    for (auto&& object : from_bytes<std::vector<T>>(bytes)) all.push_back(std::move(object));
  return all;
}

/// Every tensor with the values that `from_process` has.
template <class T> T broadcast(const T& data, int64_t from_process = 0) {
  comm::verify("broadcast", data, "from rank " + std::to_string(from_process));
  return nested::map_tensors(data, [&](const at::Tensor& t) { return comm::agreed::broadcast(t, from_process); });
}

/// Replaces each object by `from_process`'s. The lists must be equally long.
template <class T> std::vector<T>& broadcast_object_list(std::vector<T>& objects, int64_t from_process = 0) {
  if (comm::world_size() > 1)
    objects = from_bytes<std::vector<T>>(comm::broadcast_bytes(to_bytes(objects), from_process));
  return objects;
}

/// Reduces every tensor over all ranks; `scale` multiplies the result. The mean by default, as the reference's
/// function; the member Accelerator::reduce() gives the sum.
template <class T> T reduce(const T& data, Reduction reduction = Reduction::mean, double scale = 1.0) {
  comm::verify("reduce", data, comm::name_of(reduction));
  return nested::map_tensors(data, [&](const at::Tensor& t) { return comm::agreed::all_reduce(t, reduction, scale); });
}
template <class T> T reduce(const T& data, std::string_view reduction, double scale = 1.0) {
  return reduce(data, reduction_from_string(reduction), scale);
}

/// Pads every tensor along one dimension to the largest size over all ranks; tensors without that dimension stay. Ranks
/// must have as many tensors, of as many dimensions, of the same dtypes; the other sizes may differ, but in debug mode.
/// @throws DistributedOperationException as gather().
template <class T> T pad_across_processes(const T& data, const PadOptions& options = {}) {
  const auto padded = comm::pad_to_largest(comm::tensors_of(data), options);
  size_t next = 0;
  return nested::map_tensors(data, [&](const at::Tensor&) { return padded[next++]; });
}
template <class T> T pad_across_processes(const T& data, int64_t dim, double pad_index = 0, bool pad_first = false) {
  return pad_across_processes(data, PadOptions{.dim = dim, .pad_index = pad_index, .pad_first = pad_first});
}

}  // namespace accelerate
