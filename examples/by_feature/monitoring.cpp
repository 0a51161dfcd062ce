// A run while it goes: a table of the model, and what `accelerate launch` shows live.
//   accelerate launch --num_processes 2 --monitor build/release/bin/monitoring
//   accelerate launch --num_processes 2 --monitor_port 0 build/release/bin/monitoring --sharded --epochs 20
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"

namespace examples = accelerate_examples;

namespace {

constexpr int64_t kLength = 64;  ///< letters in a sample

/// Predicts the next letter of each place.
struct LettersImpl : torch::nn::Module {
  LettersImpl(int64_t width, int64_t layers) {
    register_module("letters", letters = torch::nn::Embedding(128, width));
    register_module("places", places = torch::nn::Embedding(kLength, width));
    const auto layer = torch::nn::TransformerEncoderLayerOptions(width, 4).dim_feedforward(4 * width).dropout(0);
    register_module("encoder", encoder = torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
                                   torch::nn::TransformerEncoderLayer(layer), layers)));
    register_module("head", head = torch::nn::Linear(torch::nn::LinearOptions(width, 128).bias(false)));
    accelerate::tie(letters, "weight", head, "weight");
  }
  /// @param text  [B, T] codes of letters; @return  [B, T, 128]
  torch::Tensor forward(const torch::Tensor& text) {
    const auto embedded = letters(text) + places(torch::arange(text.size(1), text.device()));
    const auto mask = torch::nn::TransformerImpl::generate_square_subsequent_mask(text.size(1)).to(text.device());
    return head(encoder(embedded.transpose(0, 1), mask).transpose(0, 1));
  }
  torch::nn::Embedding letters{nullptr}, places{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Letters);

std::vector<torch::data::Example<>> samples(int64_t count) {
  const std::string text = "she sells sea shells by the sea shore; the shells that she sells are sea shells for sure. ";
  std::vector<int64_t> codes;
  for (int64_t i = 0; i < kLength + static_cast<int64_t>(text.size()) + 1; ++i)
    codes.push_back(text[static_cast<size_t>(i) % text.size()]);
  const auto all = torch::tensor(codes);
  std::vector<torch::data::Example<>> result;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * 7 % static_cast<int64_t>(text.size());
    result.emplace_back(all.narrow(0, begin, kLength), all.narrow(0, begin + 1, kLength));
  }
  return result;
}

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 2), width = args.get<int64_t>("--width", 64);
  const bool sharded = args.flag("--sharded");
  args.check();

  accelerate::AcceleratorOptions options;
  if (sharded) options.fsdp_plugin.emplace();
  accelerate::Accelerator accelerator(options);
  torch::manual_seed(0);
  Letters network(width, 2);
  auto model = accelerator.prepare(network);
  auto [optimizer, loader] = accelerator.prepare(torch::optim::AdamW(network->parameters(), 3e-3),
                                                 accelerate::data::DataLoader(samples(512), {.batch_size = 8}));
  accelerator.print_summary(model, {.depth = 3});

  for (int64_t epoch = 1; epoch <= epochs; ++epoch) {
    torch::Tensor loss;
    for (const auto& batch : loader) {
      loss = torch::cross_entropy_loss(model(batch.data).flatten(0, 1), batch.target.flatten());
      accelerator.backward(loss);
      accelerate::report_tokens(batch.data.numel());  // before the step with which the monitor sees them
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto mean = accelerator.reduce(loss.detach(), "mean");
    accelerator.print("epoch", epoch, "loss", mean.item<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
