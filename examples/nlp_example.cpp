// The main job: fine-tunes MiniLM, a small BERT, to tell whether two English verses say the same. King James against
// Weymouth translation.
//   accelerate launch --num_processes 2 build/release/bin/nlp_example --model .deps/data/minilm --pairs
//   .deps/data/pairs.tsv
#include <accelerate/accelerate.hpp>
#include <accelerate/models/bert.hpp>
#include <accelerate/models/wordpiece.hpp>

#include <algorithm>
#include <fstream>
#include <random>

#include "arguments.hpp"

namespace models = accelerate::models;

struct Pair {
  int64_t label;
  std::string first, second;
};

struct Batch {
  torch::Tensor input_ids, attention_mask, token_type_ids, labels;
  ACCELERATE_FIELDS(input_ids, attention_mask, token_type_ids, labels)
};

// Rows of "label <tab> sentence <tab> sentence" behind a header, in a random order that is the same on every rank.
std::vector<Pair> read_pairs(const std::string& path) {
  std::ifstream in(path);
  if (!in)
    throw accelerate::ConfigError("nlp_example: --pairs '" + path +
                                  "' can't be opened; scripts/fetch_data.sh makes it");
  std::vector<Pair> pairs;
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    const size_t tab = line.find('\t'), second = line.find('\t', tab + 1);
    if (second == std::string::npos)
      throw accelerate::ConfigError("nlp_example: '" + path + "' line " + std::to_string(pairs.size() + 2) +
                                    " has fewer than 3 tab-separated fields");
    pairs.push_back({std::stoll(line.substr(0, tab)), line.substr(tab + 1, second - tab - 1), line.substr(second + 1)});
  }
  std::shuffle(pairs.begin(), pairs.end(), std::mt19937(42));
  return pairs;
}

void train(accelerate_examples::Arguments args) {
  const auto model_dir = args.get<std::string>("--model", ".deps/data/minilm");
  const auto output_dir = args.get<std::string>("--output_dir", "build/nlp_example_output");
  const auto train_size = args.get<int64_t>("--train_size", 3600), eval_size = args.get<int64_t>("--eval_size", 800);
  const auto epochs = args.get<int64_t>("--epochs", 1), batch_size = args.get<int64_t>("--batch_size", 16);
  const auto learning_rate = args.get<double>("--lr", 1e-4);
  const auto pairs_file = args.get<std::string>("--pairs", ".deps/data/pairs.tsv");
  args.check();

  // batch_size is the global one: each rank works on its share of every batch.
  accelerate::Accelerator accelerator({.split_batches = true});
  accelerate::set_seed(42);

  const auto pairs = read_pairs(pairs_file);
  if (train_size + eval_size > static_cast<int64_t>(pairs.size()))
    throw accelerate::ConfigError("nlp_example: --train_size + --eval_size exceed the " + std::to_string(pairs.size()) +
                                  " pairs");
  const std::vector<Pair> train_pairs(pairs.begin(), pairs.begin() + train_size),
      eval_pairs(pairs.begin() + train_size, pairs.begin() + train_size + eval_size);

  const auto tokenizer = models::WordPieceTokenizer::from_pretrained(model_dir);
  const auto collate = [&](const std::vector<Pair>& rows) {
    std::vector<std::string> first, second;
    std::vector<int64_t> labels;
    for (const auto& row : rows) first.push_back(row.first), second.push_back(row.second), labels.push_back(row.label);
    const auto tokens = tokenizer.encode_batch(
        first, second, {.truncation = true, .max_length = 128, .padding = models::Padding::longest});
    return Batch{tokens.input_ids, tokens.attention_mask, tokens.token_type_ids, torch::tensor(labels)};
  };
  auto train_loader = accelerate::data::DataLoader(
      train_pairs, {.batch_size = batch_size, .shuffle = true, .drop_last = true}, collate);
  auto eval_loader = accelerate::data::DataLoader(eval_pairs, {.batch_size = 4 * batch_size}, collate);

  auto model = models::BertForSequenceClassification::from_pretrained(model_dir, {.num_labels = 2});
  auto optimizer = torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(learning_rate));
  const int64_t steps = epochs * train_loader.size();
  auto scheduler = accelerate::optim::linear_schedule_with_warmup(optimizer, steps / 10, steps);
  auto [m, opt, train_dl, eval_dl, sched] = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler);

  accelerator.print("Fine-tuning on", train_size, "pairs for", epochs, "epoch(s) with", accelerator.num_processes(),
                    "process(es); then", eval_size, "held-out pairs.");
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    m->train();
    accelerate::ProgressBar bar(train_dl.size(), "epoch " + std::to_string(epoch + 1));
    for (auto& batch : train_dl) {
      auto step = accelerator.accumulate(m);
      auto loss =
          torch::cross_entropy_loss(m(batch.input_ids, batch.attention_mask, batch.token_type_ids), batch.labels);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(m->parameters(), 1.0);
      opt.step();
      sched.step();
      opt.zero_grad();
      bar.update();
      bar.set_postfix("loss " + std::to_string(loss.item<float>()));
    }
    bar.close();

    m->eval();
    torch::NoGradGuard no_grad;
    int64_t seen = 0, correct = 0, true_positive = 0, positive = 0, predicted_positive = 0;
    for (auto& batch : accelerate::tqdm(eval_dl, {.description = "evaluating"})) {
      const auto logits = m(batch.input_ids, batch.attention_mask, batch.token_type_ids);
      const auto [predicted, labels] = accelerator.gather_for_metrics(std::make_tuple(logits.argmax(1), batch.labels));
      seen += labels.size(0);
      correct += (predicted == labels).sum().item<int64_t>();
      true_positive += (predicted * labels).sum().item<int64_t>();
      positive += labels.sum().item<int64_t>();
      predicted_positive += predicted.sum().item<int64_t>();
    }
    const double accuracy = static_cast<double>(correct) / static_cast<double>(seen);
    const double f1 = 2.0 * static_cast<double>(true_positive) /
                      static_cast<double>(std::max<int64_t>(positive + predicted_positive, 1));
    accelerator.print("epoch", epoch + 1, "accuracy", accuracy, "f1", f1, "on", seen, "held-out pairs");
  }

  accelerator.wait_for_everyone();
  accelerator.on_main_process([&] {
    accelerator.unwrap_model(m)->save_pretrained(output_dir);
    tokenizer.save_pretrained(output_dir);
  });
  accelerator.print("The model is in", output_dir, "(Python: AutoModelForSequenceClassification.from_pretrained)");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
