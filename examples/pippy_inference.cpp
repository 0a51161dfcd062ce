// A model over several processes, each of which holds and computes a stage of it. The model is the ordinary one:
// nothing in it knows of stages.
//   build/release/bin/accelerate launch --cpu --num_processes 2 build/release/bin/pippy_inference
//   build/release/bin/accelerate launch --cpu --num_processes 2 build/release/bin/pippy_inference --model llama
//   --layers 12 --width 768 --batch_size 16 --sequence_length 256 --num_chunks 8
#include <accelerate/accelerate.hpp>
#include <accelerate/models/bert.hpp>
#include <accelerate/models/gpt2.hpp>
#include <accelerate/models/llama.hpp>

#include <chrono>
#include <cstdio>

#include "arguments.hpp"

namespace models = accelerate::models;

struct Settings {
  int64_t layers, width, batch_size, tokens, num_chunks, repeats;
};

constexpr int64_t kVocabulary = 2048, kHeadSize = 64;

template <class F> double milliseconds(int64_t repeats, F&& f) {
  double best = 1e18;
  for (int64_t i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

template <class Make> void run(const Settings& settings, Make&& make) {
  const accelerate::PartialState state;
  accelerate::set_seed(7);
  auto model = make();  // the same weights on every process; a checkpoint would give them too
  model->eval();
  const auto ids = torch::randint(0, kVocabulary, {settings.batch_size, settings.tokens});

  // One process alone, the others wait. It takes the batch in the same parts, so that the numbers can be compared to
  // the bit; a pipeline of one process takes it whole.
  const auto num_parts = state.num_processes() > 1 ? settings.num_chunks : 1;
  torch::Tensor alone;
  double alone_ms = 0;
  if (state.is_main_process()) {
    const torch::NoGradGuard no_grad;
    alone_ms = milliseconds(settings.repeats, [&] {
      std::vector<torch::Tensor> parts;
      for (const auto& part : ids.tensor_split(num_parts)) parts.push_back(model->forward(part));
      alone = torch::cat(parts);
    });
  }
  state.wait_for_everyone();

  auto pipeline =
      accelerate::prepare_pippy(model, {.num_chunks = settings.num_chunks, .gather_output = true}, ids.narrow(0, 0, 1));
  torch::Tensor logits;
  pipeline(ids);
  const double pipeline_ms = milliseconds(settings.repeats, [&] { logits = pipeline(ids); });

  const auto report = pipeline.report();
  for (int64_t rank = 0; rank < state.num_processes(); ++rank) {
    if (rank == state.process_index())
      std::printf(
          "process %lld holds %.1f of %.1f MiB; it ran %lld operators of its stage and worked out sizes of %lld "
          "others; received %.1f MiB\n",
          static_cast<long long>(rank), static_cast<double>(report.held_bytes) / (1 << 20),
          static_cast<double>(report.model_bytes) / (1 << 20), static_cast<long long>(report.operators),
          static_cast<long long>(report.skipped), static_cast<double>(report.bytes_received) / (1 << 20));
    std::fflush(stdout);
    state.wait_for_everyone();
  }
  if (!state.is_main_process()) return;
  std::printf("%lld rows in %lld parts over %lld processes: %.1f ms; one process alone: %.1f ms (%.2f times as fast)\n",
              static_cast<long long>(settings.batch_size), static_cast<long long>(num_parts),
              static_cast<long long>(state.num_processes()), pipeline_ms, alone_ms, alone_ms / pipeline_ms);
  std::printf("results are %s\n", torch::equal(logits, alone) ? "equal to the bit" : "different");
}

int main(int argc, char** argv) {
  return accelerate::record([&] {
    accelerate_examples::Arguments args(argc, argv);
    const auto model = args.get<std::string>("--model", "gpt2");
    const Settings settings{.layers = args.get<int64_t>("--layers", 6),
                            .width = args.get<int64_t>("--width", 256),
                            .batch_size = args.get<int64_t>("--batch_size", 8),
                            .tokens = args.get<int64_t>("--sequence_length", 64),
                            .num_chunks = args.get<int64_t>("--num_chunks", 4),
                            .repeats = args.get<int64_t>("--repeats", 3)};
    args.check();
    if (model == "bert") {
      models::BertConfig config;
      config.vocab_size = kVocabulary, config.hidden_size = settings.width, config.num_hidden_layers = settings.layers,
      config.num_attention_heads = settings.width / kHeadSize;
      config.intermediate_size = 4 * settings.width, config.max_position_embeddings = settings.tokens;
      run(settings, [&] { return models::BertForSequenceClassification(config); });
    } else if (model == "gpt2") {
      models::GPT2Config config;
      config.vocab_size = kVocabulary, config.n_embd = settings.width, config.n_layer = settings.layers,
      config.n_head = settings.width / kHeadSize, config.n_positions = settings.tokens;
      run(settings, [&] { return models::GPT2LMHeadModel(config); });
    } else if (model == "llama") {
      models::LlamaConfig config;
      config.vocab_size = kVocabulary, config.hidden_size = settings.width,
      config.intermediate_size = 3 * settings.width, config.num_hidden_layers = settings.layers,
      config.num_attention_heads = settings.width / kHeadSize;
      run(settings, [&] { return models::LlamaForCausalLM(config); });
    } else {
      throw accelerate::ConfigError("--model is '" + model + "', expected bert, gpt2 or llama");
    }
  });
}
