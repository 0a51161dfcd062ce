#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

namespace equivalence {

std::vector<std::string> optimizer_names();
/// "sgd+adamw": the first for every second parameter, the second for the others. @param precise  false: what rounds
/// gradients must not let Adam turn noise into full steps
std::vector<std::unique_ptr<torch::optim::Optimizer>> make_optimizers(const std::string& names,
                                                                      const std::vector<at::Tensor>& parameters,
                                                                      double rate, bool precise);

}  // namespace equivalence
