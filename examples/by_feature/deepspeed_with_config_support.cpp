// Trains by a DeepSpeed configuration, whose optimizer and schedule are used where it has some, with DeepSpeed's
// checkpoints: a small language model learns the letters of a text.
//   accelerate launch --num_processes 2 --use_deepspeed
//     --deepspeed_config_file examples/configs/deepspeed/zero_stage2_config.json
//     build/release/bin/deepspeed_with_config_support
//   … --resume_from_checkpoint build/deepspeed_output/epoch_0
#include <accelerate/accelerate.hpp>
#include <accelerate/models/gpt2.hpp>

#include <cmath>
#include <filesystem>

#include "../arguments.hpp"

namespace fs = std::filesystem;

struct Settings {
  fs::path output_dir, resume_from;
  int64_t epochs, batch_size, accumulation, warmup;
  double lr, weight_decay;
};

constexpr int64_t kContext = 32;

/// Rows of letters, each one place on from the one before.
std::vector<torch::Tensor> rows() {
  const std::string text =
      "What is split over many hands is carried by none of them alone: each keeps a part, asks its neighbours for the "
      "rest when it is needed, gives it back, and goes on. So a model grows past what one machine remembers. ";
  std::vector<torch::Tensor> all;
  for (size_t i = 0; i + kContext < text.size(); ++i) {
    std::vector<int64_t> letters(text.begin() + static_cast<int64_t>(i),
                                 text.begin() + static_cast<int64_t>(i) + kContext + 1);
    all.push_back(torch::tensor(letters));
  }
  return all;
}

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& letters) {
  return torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), letters.slice(1, 1).flatten());
}

/// Whether the configuration that this run goes by has a section.
bool is_configured(const accelerate::Accelerator& accelerator, const char* section) {
  return accelerator.state().deepspeed_plugin().deepspeed_config().contains(section);
}

template <class Optimizer, class Schedule>
void train(accelerate::Accelerator& accelerator, const Settings& settings, accelerate::models::GPT2LMHeadModel model,
           Optimizer& optimizer, const Schedule& schedule) {
  const auto all = rows();
  auto [m, opt, sched, loader] = accelerator.prepare(
      model, optimizer, schedule,
      accelerate::data::DataLoader(all, {.batch_size = settings.batch_size, .shuffle = true, .drop_last = true}));
  int64_t first_epoch = 0;
  if (!settings.resume_from.empty()) {
    const auto [path, client_state] =
        m.load_checkpoint(settings.resume_from.parent_path(), settings.resume_from.filename().string());
    first_epoch = client_state.at("epoch").toInt() + 1;
    accelerator.print("goes on after", path.filename().string());
  }
  for (int64_t epoch = first_epoch; epoch < settings.epochs; ++epoch) {
    loader.set_epoch(epoch);
    m->train();
    double sum = 0;
    for (auto& letters : loader) {
      const auto group = accelerator.accumulate(m);
      const auto loss = loss_of(m(letters.slice(1, 0, -1)), letters);
      accelerator.backward(loss);
      opt.step();
      sched.step();
      opt.zero_grad();
      sum += accelerator.reduce(loss.detach(), "mean").template item<double>();
    }
    const double mean = sum / static_cast<double>(loader.size());
    accelerator.print("epoch", epoch, "perplexity", std::exp(mean));
    m.save_checkpoint(settings.output_dir, "epoch_" + std::to_string(epoch), {{"epoch", epoch}, {"loss", mean}});
  }
  // Whole fp32 weights out of the last one, as a process without the others would read them.
  accelerator.wait_for_everyone();
  if (accelerator.is_main_process()) {
    const auto weights = accelerate::get_fp32_state_dict_from_zero_checkpoint(settings.output_dir);
    std::printf("%zu weights in fp32 from %s\n", weights.size(), settings.output_dir.c_str());
  }
  accelerator.end_training();
}

void run(accelerate_examples::Arguments args) {
  const Settings settings{.output_dir = args.get<std::string>("--output_dir", "build/deepspeed_output"),
                          .resume_from = args.get<std::string>("--resume_from_checkpoint", ""),
                          .epochs = args.get<int64_t>("--num_train_epochs", 3),
                          .batch_size = args.get<int64_t>("--per_device_train_batch_size", 8),
                          .accumulation = args.get<int64_t>("--gradient_accumulation_steps", 1),
                          .warmup = args.get<int64_t>("--num_warmup_steps", 5),
                          .lr = args.get<double>("--learning_rate", 3e-3),
                          .weight_decay = args.get<double>("--weight_decay", 0.01)};
  args.check();
  accelerate::Accelerator accelerator({.gradient_accumulation_steps = settings.accumulation});
  if (accelerator.distributed_type() != accelerate::DistributedType::DEEPSPEED)
    throw accelerate::ConfigError(
        "this example goes by a DeepSpeed configuration: start it by `accelerate launch --use_deepspeed` with one");
  accelerate::set_seed(1);
  accelerate::models::GPT2Config config;
  config.vocab_size = 128, config.n_positions = kContext, config.n_embd = 64, config.n_layer = 2, config.n_head = 4;
  config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0;
  accelerate::models::GPT2LMHeadModel model(config);
  const int64_t steps = settings.epochs * static_cast<int64_t>(rows().size()) / settings.batch_size;

  if (is_configured(accelerator, "optimizer")) {
    accelerate::DummyOptim optimizer(model->parameters(), settings.lr, settings.weight_decay);
    accelerate::DummyScheduler schedule{
        .optimizer = optimizer, .total_num_steps = steps, .warmup_num_steps = settings.warmup};
    if (!is_configured(accelerator, "scheduler"))
      schedule.lr_scheduler_callable = [&](torch::optim::Optimizer& made) {
        return accelerate::optim::linear_schedule_with_warmup(made, settings.warmup, steps);
      };
    return train(accelerator, settings, model, optimizer, schedule);
  }
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(settings.lr).weight_decay(settings.weight_decay));
  train(accelerator, settings, model, optimizer,
        accelerate::optim::linear_schedule_with_warmup(optimizer, settings.warmup, steps));
}

int main(int argc, char** argv) {
  return accelerate::record([&] { run({argc, argv}); });
}
