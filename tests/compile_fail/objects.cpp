// Objects that prepare can't prepare, and samples and data sets that a loader can't read. See check.py for the marks.
#include <torch/data/dataloader.h>
#include <torch/data/datasets/tensor.h>
#include <torch/data/samplers/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <vector>

#include "accelerate/accelerator.hpp"
#include "accelerate/data/loader.hpp"
#include "accelerate/optim/schedules.hpp"

struct PlainImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

void prepares(accelerate::Accelerator& accelerator, torch::optim::SGD& sgd, PlainImpl& plain, torch::nn::Linear net) {
  torch::optim::StepLR step(sgd, 1);
  torch::optim::ReduceLROnPlateauScheduler plateau(sgd);
  const auto dataset = torch::data::datasets::TensorDataset(at::Tensor());
  accelerator.prepare(net, std::string("as it is"), accelerate::optim::from_torch(sgd, step));  // fine
  accelerator.prepare(step);     // expect: accelerate::optim::from_torch(optimizer, schedule)
  accelerator.prepare(plateau);  // expect: accelerate::optim::from_torch(optimizer, schedule)
  accelerator.prepare(std::make_shared<torch::optim::StepLR>(sgd, 1));  // expect: accelerate::optim::from_torch
  accelerator.prepare(plain);                                           // expect: prepare takes a module by its holder
  accelerator.prepare(std::make_unique<PlainImpl>());                   // expect: prepare takes a module by its holder
  accelerator.prepare(torch::data::make_data_loader(dataset));  // expect: accelerate::data::DataLoader of the data
}

struct Digit {
  at::Tensor pixels;
  int64_t label;
};
struct Named {
  at::Tensor pixels;
  int64_t label;
  ACCELERATE_FIELDS(pixels, label)
};
struct NoSize {
  at::Tensor get(size_t) { return {}; }
};

void loaders(const std::vector<Digit>& digits, const std::vector<Named>& named) {
  using accelerate::data::DataLoader;
  DataLoader fine(named, {.batch_size = 2});                                                             // fine
  DataLoader own(digits, {.batch_size = 2}, [](std::vector<Digit> samples) { return samples.size(); });  // fine
  DataLoader hidden(digits, {.batch_size = 2});     // expect: declare ACCELERATE_FIELDS(first, second, ...)
  DataLoader endless(NoSize{}, {.batch_size = 2});  // expect: this is no data set: it needs size() and get(i)
}
