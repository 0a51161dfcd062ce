// Sequences of different lengths: padded to the longest of their batch, masked in the loss, and gathered although every
// process has another width.
//   accelerate launch --num_processes 2 build/release/bin/variable_length
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"

using Sequence = std::vector<int64_t>;
constexpr int64_t kLetters = 8, kNothing = -100;  // what cross_entropy_loss leaves out

struct Batch {
  torch::Tensor ids;     // [B, T] int64, 0 where a sequence has ended
  torch::Tensor labels;  // [B, T] int64, kNothing there
  ACCELERATE_FIELDS(ids, labels)
};

// The task: mark each letter that the sequence has had before.
Batch pad(const std::vector<Sequence>& sequences) {
  size_t longest = 0;
  for (const auto& sequence : sequences) longest = std::max(longest, sequence.size());
  const std::vector<int64_t> shape{static_cast<int64_t>(sequences.size()), static_cast<int64_t>(longest)};
  Batch batch{torch::zeros(shape, torch::kLong), torch::full(shape, kNothing, torch::kLong)};
  auto ids = batch.ids.accessor<int64_t, 2>(), labels = batch.labels.accessor<int64_t, 2>();
  for (int64_t b = 0; b < shape[0]; ++b) {
    std::array<bool, kLetters> seen{};
    const auto& sequence = sequences[static_cast<size_t>(b)];
    for (int64_t t = 0; t < static_cast<int64_t>(sequence.size()); ++t) {
      const int64_t letter = ids[b][t] = sequence[static_cast<size_t>(t)];
      labels[b][t] = std::exchange(seen[static_cast<size_t>(letter)], true);
    }
  }
  return batch;
}

struct TaggerImpl : torch::nn::Module {
  torch::nn::Embedding embed = register_module("embed", torch::nn::Embedding(kLetters, 16));
  torch::nn::GRU gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(16, 48).batch_first(true)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(48, 2));
  torch::Tensor forward(const torch::Tensor& ids) { return head(std::get<0>(gru(embed(ids)))); }  // [B, T, 2]
};
TORCH_MODULE(Tagger);

void train(accelerate_examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 8);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  std::vector<Sequence> sequences(500);
  for (auto& sequence : sequences) {
    const auto letters = torch::randint(kLetters, {3 + torch::randint(22, {1}).item<int64_t>()});
    sequence.assign(letters.data_ptr<int64_t>(), letters.data_ptr<int64_t>() + letters.numel());
  }
  Tagger tagger;
  auto [model, optimizer, loader] =
      accelerator.prepare(tagger, torch::optim::AdamW(tagger->parameters(), 1e-2),
                          accelerate::data::DataLoader(sequences, {.batch_size = 16, .shuffle = true}, pad));
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (Batch& batch : loader) {
      const auto logits = model(batch.ids).flatten(0, 1);
      accelerator.backward(torch::cross_entropy_loss(logits, batch.labels.flatten()));  // ignores kNothing
      optimizer.step();
      optimizer.zero_grad();
    }

  torch::NoGradGuard no_grad;
  int64_t letters = 0, right = 0, places = 0, rows = 0;
  for (Batch& batch : loader) {
    // gather needs equal shapes: the widths of all processes' batches become that of the widest.
    const auto [predicted, labels] = accelerator.gather_for_metrics(accelerator.pad_across_processes(
        std::make_tuple(model(batch.ids).argmax(2), batch.labels), {.dim = 1, .pad_index = kNothing}));
    const auto counts = labels != kNothing;
    letters += counts.sum().item<int64_t>();
    right += (counts & (predicted == labels)).sum().item<int64_t>();
    places += labels.numel();
    rows += labels.size(0);
  }
  accelerator.print(rows, "sequences,", letters, "letters in", places,
                    "places; marked right:", static_cast<double>(right) / static_cast<double>(letters));
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
