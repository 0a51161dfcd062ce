// nlp_example with everything on: mixed precision, gradient accumulation, checkpoints by steps or epochs, going on from
// one of them to the very same weights, and trackers.
//   accelerate launch --num_processes 2 build/release/bin/complete_nlp_example --checkpointing_steps epoch
//   --with_tracking accelerate launch --num_processes 2 build/release/bin/complete_nlp_example --checkpointing_steps
//   epoch
//   --with_tracking --resume_from_checkpoint build/complete_output/epoch_0
#include <accelerate/accelerate.hpp>
#include <accelerate/models/bert.hpp>
#include <accelerate/models/wordpiece.hpp>

#include "complete.hpp"
#include "pairs.hpp"

namespace examples = accelerate_examples;
namespace models = accelerate::models;

void train(examples::Arguments args) {
  const examples::CompleteOptions options(args);
  const auto model_dir = args.get<std::string>("--model", ".deps/data/minilm"),
             pairs_file = args.get<std::string>("--pairs", ".deps/data/pairs.tsv");
  const auto train_size = args.get<int64_t>("--train_size", 3600), eval_size = args.get<int64_t>("--eval_size", 800),
             epochs = args.get<int64_t>("--num_epochs", 3), batch_size = args.get<int64_t>("--batch_size", 16),
             seed = args.get<int64_t>("--seed", 42);
  const auto learning_rate = args.get<double>("--lr", 1e-4);
  args.check();

  accelerate::Accelerator accelerator(options.accelerator());
  accelerate::set_seed(seed);

  const auto pairs = examples::read_pairs(pairs_file, train_size, eval_size);
  const auto tokenizer = models::WordPieceTokenizer::from_pretrained(model_dir);
  auto train_loader = accelerate::data::DataLoader(
      pairs.train, {.batch_size = batch_size, .shuffle = true, .drop_last = true}, examples::collate_by(tokenizer));
  auto eval_loader =
      accelerate::data::DataLoader(pairs.eval, {.batch_size = 4 * batch_size}, examples::collate_by(tokenizer));

  auto model = models::BertForSequenceClassification::from_pretrained(model_dir, {.num_labels = 2});
  auto optimizer = torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(learning_rate));
  // Steps of the optimizer: a schedule stands still while gradients accumulate.
  const int64_t steps = epochs * train_loader.size() / options.gradient_accumulation_steps;
  auto scheduler = accelerate::optim::linear_schedule_with_warmup(optimizer, steps / 10, steps);
  auto [m, opt, train_dl, eval_dl, sched] = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler);

  if (options.with_tracking)
    accelerator.init_trackers("complete_nlp_example", {{"lr", learning_rate},
                                                       {"num_epochs", epochs},
                                                       {"seed", seed},
                                                       {"batch_size", batch_size},
                                                       {"mixed_precision", accelerator.mixed_precision()}});
  examples::Progress progress;
  examples::Checkpoints checkpoints(accelerator, options, progress);

  // A restored loader starts its next pass where it stood, so an epoch may be the rest of one.
  for (int64_t epoch = train_dl.iteration(); epoch < epochs; ++epoch) {
    m->train();
    for (auto& batch : accelerate::tqdm(train_dl, {.description = "epoch " + std::to_string(epoch)})) {
      {
        auto step = accelerator.accumulate(m);
        const auto logits = m(batch.input_ids, batch.attention_mask, batch.token_type_ids);
        const auto loss = torch::cross_entropy_loss(logits, batch.labels);
        accelerator.backward(loss);
        if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(m->parameters(), 1.0);
        opt.step();
        sched.step();
        opt.zero_grad();
        // Of all processes, since a checkpoint holds the main process's sum for all.
        progress.loss += accelerator.reduce(loss.detach(), "mean").item<double>();
      }
      ++progress.steps;
      checkpoints.after_step();
    }

    m->eval();
    examples::PairScore score;
    for (auto& batch : eval_dl) {
      const torch::NoGradGuard no_grad;
      const auto logits = m(batch.input_ids, batch.attention_mask, batch.token_type_ids);
      const auto [predicted, labels] = accelerator.gather_for_metrics(std::make_tuple(logits.argmax(1), batch.labels));
      score.add(predicted, labels);
    }
    const double mean_loss = std::exchange(progress.loss, 0) / static_cast<double>(train_dl.size());
    accelerator.print("epoch", epoch, "accuracy", score.accuracy(), "f1", score.f1(), "train_loss", mean_loss);
    if (options.with_tracking)
      accelerator.log({{"accuracy", score.accuracy()}, {"f1", score.f1()}, {"train_loss", mean_loss}, {"epoch", epoch}},
                      epoch);
    checkpoints.after_epoch(epoch);
  }

  const auto weights = accelerator.get_state_dict(m);  // on all ranks: each may hold a part
  accelerator.on_main_process([&] {
    accelerator.unwrap_model(m)->save_pretrained(options.output_dir, weights);
    tokenizer.save_pretrained(options.output_dir);
  });
  accelerator.print("after", progress.steps, "steps the model is in", options.output_dir.string());
  accelerator.end_training();
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
