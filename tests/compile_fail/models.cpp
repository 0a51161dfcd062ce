// Types that are no models, and calls that the model's forward does not take. See check.py for the marks.
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <string>

#include "accelerate/accelerator/inference.hpp"
#include "accelerate/accelerator/prepared.hpp"
#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/model/callable.hpp"
#include "accelerate/residency.hpp"

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, int64_t times) { return x * times; }
};
TORCH_MODULE(Net);

struct Result {
  at::Tensor logits;  // no ACCELERATE_FIELDS: nobody finds it
};
struct OpaqueImpl : torch::nn::Module {
  Result forward(const at::Tensor& x) { return {x}; }
};
TORCH_MODULE(Opaque);

struct NoForwardImpl : torch::nn::Module {};
TORCH_MODULE(NoForward);

void calls(const accelerate::Prepared<Net>& prepared, const accelerate::Dispatched<Net>& dispatched, Net net,
           NoForward no_forward, const accelerate::PipelinedModel<Opaque>& pipelined, const at::Tensor& x) {
  prepared(x, 2);                    // fine
  prepared(x);                       // expect: the model's forward does not take these arguments
  dispatched(std::string("x"), 2);   // expect: the model's forward does not take these arguments
  accelerate::call(net, x, 2, 3);    // expect: the model's forward does not take these arguments
  accelerate::call(no_forward, x);   // expect: the model's forward does not take these arguments
  pipelined(x);                      // expect: the forward returns a type whose tensors can't be found
  accelerate::call(x, x);            // expect: ModelLike
  accelerate::Prepared<int>* model;  // expect: ModelLike
  auto scope = accelerate::residency::summon(std::string("net"));  // expect: ModelRef
  auto placed = accelerate::dispatch_model(x, {{"", "cpu"}});      // expect: ModelRef
}
