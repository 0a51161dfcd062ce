// Batches and objects of types that nobody can look into. See check.py for the marks.
#include <string>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/data/metrics.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/split.hpp"

struct Opaque {
  at::Tensor ids;
};
struct Batch {
  at::Tensor ids;
  std::vector<int64_t> lengths;
  ACCELERATE_FIELDS(ids, lengths)
};

void batches(const Batch& batch, const Opaque& opaque, const at::Tensor& tensor) {
  accelerate::gather_object(std::vector{batch});         // fine
  accelerate::gather_object(std::vector{opaque});        // expect: this type can't be sent to another rank
  accelerate::gather_for_metrics(std::string("seven"));  // expect: gather_for_metrics takes nested tensors
  accelerate::gather_for_metrics(batch);                 // expect: gather_for_metrics takes nested tensors
  accelerate::split_between_processes(7, 2, 0);          // expect: split_between_processes takes
  accelerate::nested::map_tensors(batch, [](const std::string& s) { return s; });  // expect: at::Tensor
  accelerate::nested::map_tensors(tensor, [](const at::Tensor&) { return 1; });    // expect: at::Tensor
}
