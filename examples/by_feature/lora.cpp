// Low-rank adapters and an 8-bit optimizer: MiniLM learns to tell whether two verses say the same, once with adapters
// on the attention (and the head) alone and once in full, and both are compared on held-out pairs.
//   accelerate launch --num_processes 2 build/release/bin/lora --model .deps/data/minilm --pairs .deps/data/pairs.tsv
// With --load_in_4bit the adapters are beside weights in 4 bits (QLoRA). --only adapters or --only full leaves the
// other one out, so that a process's peak of memory is of that one alone.
#include <accelerate/accelerate.hpp>
#include <accelerate/models/bert.hpp>
#include <accelerate/models/wordpiece.hpp>

#include <algorithm>
#include <chrono>
#include <vector>

#include "../arguments.hpp"
#include "../pairs.hpp"

namespace examples = accelerate_examples;
namespace models = accelerate::models;

struct Settings {
  std::string model_dir, output_dir, only;
  int64_t train_size, eval_size, epochs, batch_size, rank;
  bool load_in_4bit;
};

void train(const Settings& settings, const examples::PairSets& pairs, bool with_adapters) {
  accelerate::Accelerator accelerator({.split_batches = true});
  accelerate::set_seed(42);
  const auto tokenizer = models::WordPieceTokenizer::from_pretrained(settings.model_dir);
  const auto collate = examples::collate_by(tokenizer);
  auto train_loader =
      accelerate::data::DataLoader(pairs.train, {.batch_size = settings.batch_size, .shuffle = true}, collate);
  auto eval_loader = accelerate::data::DataLoader(pairs.eval, {.batch_size = 4 * settings.batch_size}, collate);
  auto model = models::BertForSequenceClassification::from_pretrained(settings.model_dir, {.num_labels = 2});

  std::optional<accelerate::DispatchedModel> quantized;  // owns the codes
  if (with_adapters && settings.load_in_4bit)
    quantized = accelerate::load_and_quantize_model(
        accelerate::ModelRef(model),
        {.load_in_4bit = true, .bnb_4bit_quant_type = "nf4", .bnb_4bit_compute_dtype = torch::kFloat});

  // Before prepare, so that the engine averages what is trained. The head is new: it is trained whole.
  std::optional<accelerate::LoraAdapter> adapter;
  if (with_adapters) {
    adapter = accelerate::add_adapter(model, {.r = settings.rank,
                                              .lora_alpha = 2.0 * static_cast<double>(settings.rank),
                                              .lora_dropout = 0.05,
                                              .target_modules = {"query", "key", "value"},
                                              .base_model_name_or_path = "sentence-transformers/all-MiniLM-L6-v2"});
    for (auto& item : model->named_parameters())
      if (item.key().starts_with("classifier.")) item.value().set_requires_grad(true);
  }
  std::vector<torch::Tensor> trained;
  int64_t elements = 0, total = 0;
  for (const auto& parameter : model->parameters()) {
    total += parameter.numel();
    if (!parameter.requires_grad()) continue;
    trained.push_back(parameter);
    elements += parameter.numel();
  }
  auto optimizer =
      accelerate::optim::AdamW8bit(trained, accelerate::optim::AdamW8bitOptions(with_adapters ? 2e-3 : 1e-4));
  auto [m, opt, train_dl, eval_dl] = accelerator.prepare(model, optimizer, train_loader, eval_loader);

  std::vector<double> milliseconds;  // of each step
  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    m->train();
    for (auto& batch : accelerate::tqdm(train_dl, {.description = "epoch " + std::to_string(epoch)})) {
      const auto start = std::chrono::steady_clock::now();
      accelerator.backward(
          torch::cross_entropy_loss(m(batch.input_ids, batch.attention_mask, batch.token_type_ids), batch.labels));
      opt.step();
      opt.zero_grad();
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      milliseconds.push_back(time.count());
    }
  }
  std::nth_element(milliseconds.begin(), milliseconds.begin() + std::ssize(milliseconds) / 2, milliseconds.end());
  m->eval();
  torch::NoGradGuard no_grad;
  examples::PairScore score;
  double loss = 0;
  for (auto& batch : eval_dl) {
    const auto logits = m(batch.input_ids, batch.attention_mask, batch.token_type_ids);
    const auto [all, labels] = accelerator.gather_for_metrics(std::make_tuple(logits, batch.labels));
    score.add(all.argmax(1), labels);
    loss += torch::cross_entropy_loss(all, labels).item<double>() * static_cast<double>(labels.size(0));
  }
  accelerator.print(with_adapters ? "adapters:" : "in full: ", elements, "of", total, "elements are trained; accuracy",
                    score.accuracy(), "on", score.seen());
  accelerator.print("held-out loss", loss / static_cast<double>(score.seen()), "after", milliseconds.size(), "steps of",
                    milliseconds.at(milliseconds.size() / 2), "ms (the median); at most",
                    accelerator.memory().peak_resident >> 20, "MiB in memory");
  if (!adapter) return;
  const auto state = accelerator.get_state_dict(m);
  accelerator.on_main_process([&] { adapter->save(settings.output_dir, state); });
  accelerator.print("The adapter is in", settings.output_dir, "(Python: peft.PeftModel.from_pretrained)");
}

void run(examples::Arguments args) {
  const Settings settings{.model_dir = args.get<std::string>("--model", ".deps/data/minilm"),
                          .output_dir = args.get<std::string>("--output_dir", "build/lora_output"),
                          .only = args.get<std::string>("--only", ""),
                          .train_size = args.get<int64_t>("--train_size", 1600),
                          .eval_size = args.get<int64_t>("--eval_size", 400),
                          .epochs = args.get<int64_t>("--epochs", 1),
                          .batch_size = args.get<int64_t>("--batch_size", 16),
                          .rank = args.get<int64_t>("--rank", 8),
                          .load_in_4bit = args.flag("--load_in_4bit")};
  const auto pairs_file = args.get<std::string>("--pairs", ".deps/data/pairs.tsv");
  args.check();
  if (!settings.only.empty() && settings.only != "adapters" && settings.only != "full")
    throw accelerate::ConfigError("--only is '" + settings.only + "', expected adapters or full");
  const auto pairs = examples::read_pairs(pairs_file, settings.train_size, settings.eval_size);
  for (const bool with_adapters : {true, false})
    if (settings.only.empty() || with_adapters == (settings.only == "adapters")) train(settings, pairs, with_adapters);
}

int main(int argc, char** argv) {
  return accelerate::record([&] { run({argc, argv}); });
}
