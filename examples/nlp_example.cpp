// The main job: fine-tunes MiniLM, a small BERT, to tell whether two English verses say the same. King James against
// Weymouth translation.
//   accelerate launch --num_processes 2 build/release/bin/nlp_example --model .deps/data/minilm --pairs
//   .deps/data/pairs.tsv
#include <accelerate/accelerate.hpp>
#include <accelerate/models/bert.hpp>
#include <accelerate/models/wordpiece.hpp>

#include "arguments.hpp"
#include "pairs.hpp"

namespace examples = accelerate_examples;
namespace models = accelerate::models;

void train(examples::Arguments args) {
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

  const auto pairs = examples::read_pairs(pairs_file, train_size, eval_size);
  const auto tokenizer = models::WordPieceTokenizer::from_pretrained(model_dir);
  const auto collate = examples::collate_by(tokenizer);
  auto train_loader = accelerate::data::DataLoader(
      pairs.train, {.batch_size = batch_size, .shuffle = true, .drop_last = true}, collate);
  auto eval_loader = accelerate::data::DataLoader(pairs.eval, {.batch_size = 4 * batch_size}, collate);

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
    examples::PairScore score;
    for (auto& batch : accelerate::tqdm(eval_dl, {.description = "evaluating"})) {
      const auto logits = m(batch.input_ids, batch.attention_mask, batch.token_type_ids);
      const auto [predicted, labels] = accelerator.gather_for_metrics(std::make_tuple(logits.argmax(1), batch.labels));
      score.add(predicted, labels);
    }
    accelerator.print("epoch", epoch + 1, "accuracy", score.accuracy(), "f1", score.f1(), "on", score.seen(),
                      "held-out pairs");
  }

  const auto weights = accelerator.get_state_dict(m);  // on all ranks: each may hold a part
  accelerator.on_main_process([&] {
    accelerator.unwrap_model(m)->save_pretrained(output_dir, weights);
    tokenizer.save_pretrained(output_dir);
  });
  accelerator.print("The model is in", output_dir, "(Python: AutoModelForSequenceClassification.from_pretrained)");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
