// Prompts are split between the processes, each continues its own, and the main process prints all of them.
//   accelerate launch --num_processes 2 build/release/bin/distributed_inference --model
//   .deps/data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
#include <accelerate/accelerate.hpp>
#include <accelerate/models/generate.hpp>
#include <accelerate/models/llama.hpp>
#include <accelerate/models/tokenizer.hpp>

#include "arguments.hpp"

namespace examples = accelerate_examples;
namespace models = accelerate::models;

void infer(examples::Arguments args) {
  const auto path = args.get("--model", "");
  const auto new_tokens = args.get<int64_t>("--max_new_tokens", 16);
  args.check();

  accelerate::Accelerator accelerator;
  const std::vector<std::string> questions = {"What is the capital of France?", "What is the capital of Japan?",
                                              "Name a colour.", "What is 2 + 2?", "Who wrote Hamlet?"};

  // A folder or a .gguf file. Every process has the whole model: the prompts are split.
  auto model = models::LlamaForCausalLM::from_pretrained(path);
  model->to(accelerator.device());
  model->eval();
  const auto tokenizer = models::Tokenizer::from_pretrained(path);
  auto config = models::GenerationConfig::from_pretrained(path);
  config.max_new_tokens = new_tokens;

  // The first processes get one more where the number does not divide; one without any has nothing to generate.
  const auto mine = accelerator.split_between_processes(questions);
  std::vector<std::string> answers;
  if (!mine.empty()) {
    std::vector<std::string> prompts;
    for (const auto& question : mine) prompts.push_back(tokenizer.apply_chat_template({{"user", question}}));
    const auto batch = tokenizer.encode_batch(prompts);
    const auto ids = models::generate(model, batch.input_ids.to(accelerator.device()), config,
                                      {.attention_mask = batch.attention_mask.to(accelerator.device())})
                         .cpu();
    for (int64_t i = 0; i < ids.size(0); ++i) {
      const auto row = ids[i].slice(0, batch.input_ids.size(1)).contiguous();  // what is new
      answers.push_back(tokenizer.decode({row.const_data_ptr<int64_t>(), row.const_data_ptr<int64_t>() + row.numel()}));
    }
  }
  const auto all = accelerate::gather_object(answers);  // in the order of the processes, which is that of the questions
  for (size_t i = 0; i < all.size(); ++i) accelerator.print(questions[i], "->", all[i]);
  accelerator.print(all.size(), "of", questions.size(), "questions were answered by", accelerator.num_processes(),
                    "processes");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { infer({argc, argv}); });
}
