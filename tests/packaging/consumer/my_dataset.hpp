// The README's program leaves this to its reader.
#include <torch/data.h>

struct MyDataset : torch::data::Dataset<MyDataset> {
  torch::Tensor x = torch::randn({64, 20}), y = (x.sum(1) > 0).to(torch::kLong);
  torch::data::Example<> get(size_t i) override { return {x[static_cast<int64_t>(i)], y[static_cast<int64_t>(i)]}; }
  std::optional<size_t> size() const override { return 64; }
};
