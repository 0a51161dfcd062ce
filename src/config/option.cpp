#include "accelerate/config/option.hpp"

#include <algorithm>

namespace accelerate::config {
namespace {

std::vector<std::string> split(const char* text, char separator) {
  std::vector<std::string> parts(1);
  for (const char* c = text; *c; ++c) {
    if (*c == separator) parts.emplace_back();
    else parts.back() += *c;
  }
  return parts;
}

using enum Kind;

constexpr const char* kDefaultFile =
    "Config file (default: the one that `accelerate config` writes; see docs/settings.md)";

constexpr Option kConfig[] = {
    {"config_file", text, nullptr, nullptr, "FILE",
     "Where to write (default: default_config.yaml in $HF_HOME/accelerate or the cache folder); a name that ends in "
     ".json gets JSON"},
};
constexpr Option kConfigDefault[] = {
    {"save_location", text, nullptr, nullptr, "FILE",
     "Where to write (default: default_config.yaml in $HF_HOME/accelerate or the cache folder)", "--config_file"},
    {"mixed_precision", text, "\"no\"", "no|fp16|bf16", nullptr, "Number format of the computation"},
};
constexpr Option kConfigFile[] = {{"config_file", text, nullptr, nullptr, "FILE", kDefaultFile}};
constexpr Option kEstimateOurs[] = {
    {"json", flag, "false", nullptr, nullptr, "Print numbers of bytes as JSON instead of a table"},
    {"strategy", text, nullptr, "ddp|fsdp|zero1|zero2|zero3", nullptr,
     "Run the training loop dry (without memory) and print what a step of it needs on each process; for architectures "
     "of the zoo, from a config.json or built-in config"},
    {"num_processes", integer, nullptr, nullptr, "N", "With --strategy: processes of the job (default: 1)"},
    {"batch", integer, nullptr, nullptr, "N", "With --strategy: rows of a process's batch (default: 1)"},
    {"seq", integer, nullptr, nullptr, "N",
     "With --strategy: tokens of a row (default: 128); not for models of images"},
    {"mixed_precision", text, nullptr, "no|bf16", nullptr,
     "With --strategy: number format of the computation (default: no)"},
};
constexpr Option kEnvOurs[] = {{"json", flag, "false", nullptr, nullptr, "Print JSON"}};
constexpr Option kEstimateMemory[] = {
    {"model_name", text, nullptr, nullptr, "MODEL",
     "A folder, a config.json, a .safetensors file (or the index of several), a .gguf file, a file of torch.save or "
     "TorchScript, or the name of a built-in config",
     "model_name", nullptr, nullptr, Form::none, true}};
constexpr Option kEstimateOptions[] = {
    {"library_name", text, nullptr, "timm|transformers", "LIBRARY", "Refuse a model of another library"},
    {"dtypes", words, "[\"float32\", \"float16\", \"int8\", \"int4\"]", "float32|float16|int8|int4", "DTYPE",
     "What the weights are loaded in"},
    {"trust_remote_code", flag, "false", nullptr, nullptr,
     "As elsewhere; here code of a model is never run, and sizes come from its files"},
};
constexpr Option kGenerate[] = {{"model", text, nullptr, nullptr, "MODEL",
                                 "A Hugging Face folder (config.json, weights, tokenizer) or a .gguf file", "model",
                                 nullptr, nullptr, Form::none, true}};
constexpr Option kGenerateText[] = {
    {"prompt", text, nullptr, nullptr, "TEXT",
     "What to answer (default: standard input; on a terminal, a conversation)", "--prompt,-p"},
    {"system", text, nullptr, nullptr, "TEXT", "The system message of the conversation (default: the template's)"},
    {"raw", flag, "false", nullptr, nullptr, "Continue the text as it is, without the model's chat template"},
    {"max_new_tokens", integer, nullptr, nullptr, "N", "Tokens of an answer at most (default: 256)"},
    {"stop", words, nullptr, nullptr, "TEXT", "Ends the answer where this appears; may be given several times"},
    {"json", flag, "false", nullptr, nullptr, "Print the answer and what was measured as JSON, at the end"},
    {"stats", flag, "false", nullptr, nullptr,
     "Say on standard error what was measured: times, tokens a second, memory of weights"},
};
constexpr Option kGenerateDrawing[] = {
    {"temperature", number, nullptr, nullptr, "T",
     "Draw tokens, with logits divided by this; 0: take the likeliest (default: 0, or generation_config.json's)"},
    {"top_k", integer, nullptr, nullptr, "N", "Draw from so many of the likeliest; 0: from all"},
    {"top_p", number, nullptr, nullptr, "P", "Draw from the likeliest that have this probability together"},
    {"repetition_penalty", number, nullptr, nullptr, "X", "Above 1: tokens that were there get less likely"},
    {"num_beams", integer, nullptr, nullptr, "N", "More than 1: beam search (then the answer appears at its end)"},
    {"length_penalty", number, nullptr, nullptr, "X", "With beams: above 0 favours long answers"},
    {"seed", integer, nullptr, nullptr, "N", "Of the drawing (default: another one each time)"},
};
constexpr Option kGenerateMemory[] = {
    {"max_memory", words, nullptr, nullptr, "PLACE=SIZE",
     "What weights may take, in bytes or with a unit, for example cpu=150MB, or 0=20GiB cpu=60GiB; the rest stays on "
     "disk and is read when it is needed"},
    {"device_map", text, nullptr, nullptr, "MAP",
     "auto, balanced, balanced_low_0, sequential; cpu, disk or a GPU's number for all of it; or JSON such as '{\"\": "
     "\"disk\"}' (default: all in memory; auto with --max_memory)"},
    {"dtype", text, nullptr, "float32|float16|bfloat16", nullptr,
     "Number format of the weights in memory (default: float32)"},
    {"num_threads", integer, nullptr, nullptr, "N", "Threads that compute (default: one for each core)"},
};
constexpr Option kTestOurs[] = {
    {"num_processes", integer, nullptr, nullptr, "N",
     "Processes to test with (default: as the config file says, else 2)"},
    {"cpu", flag, "false", nullptr, nullptr, "Test on the CPU even where there is an accelerator"}};
constexpr Option kTpuConfig[] = {
    {"config_file", text, nullptr, nullptr, "FILE", kDefaultFile},
    {"tpu_name", text, nullptr, nullptr, "NAME", "Name of the TPU pod (default: the config file's)"},
    {"tpu_zone", text, nullptr, nullptr, "ZONE", "Its zone (default: the config file's)"},
};
constexpr Option kTpuPod[] = {
    {"use_alpha", flag, "false", nullptr, nullptr, "Call `gcloud alpha` instead of `gcloud`"},
    {"command_file", text, nullptr, nullptr, "FILE", "File of commands, one a line, for every worker"},
    {"command", words, nullptr, nullptr, "COMMAND", "A command for every worker; may be given several times"},
    {"install_accelerate", flag, "false", nullptr, nullptr, "Install Hugging Face Accelerate on the workers first"},
    {"accelerate_version", text, "\"latest\"", nullptr, "VERSION", "Which one: latest, dev, or a version"},
    {"debug", flag, "false", nullptr, nullptr, "Print the command instead of running it"},
};
constexpr Option kMergeWeights[] = {
    {"checkpoint_directory", text, nullptr, nullptr, "FOLDER", "Folder with sharded weights", "checkpoint_directory",
     nullptr, nullptr, Form::none, true},
    {"output_path", text, nullptr, nullptr, "OUTPUT", "Folder for the merged weights", "output_path", nullptr, nullptr,
     Form::none, true},
};
constexpr Option kMergeOptions[] = {
    {"unsafe_serialization", flag, "false", nullptr, nullptr, "Write a torch archive (.bin) instead of safetensors"},
    {"remove_checkpoint_dir", flag, "false", nullptr, nullptr, "Remove the sharded weights after merging"},
};
constexpr Option kToFsdp2[] = {
    {"config_file", text, nullptr, nullptr, "FILE", "Config file to convert", nullptr, nullptr, nullptr, Form::none,
     true},
    {"overwrite", flag, "false", nullptr, nullptr, "Existing files may be replaced"},
    {"output_file", text, nullptr, nullptr, "FILE", "Where to write (default: the same file, with --overwrite)"},
};
constexpr Option kCompletion[] = {{"shell", text, nullptr, "bash|zsh|fish", "SHELL", "bash, zsh or fish", "shell",
                                   nullptr, nullptr, Form::none, true}};
constexpr Option kDocs[] = {{"form", text, nullptr, "man|markdown", "FORM",
                             "man: a manual page; markdown: docs/settings.md", "form", nullptr, nullptr, Form::none,
                             true}};

}  // namespace

std::vector<std::string> Option::spellings() const {
  if (flags && !*flags) return {};
  std::vector<std::string> all = flags ? split(flags, ',') : std::vector<std::string>{"--" + std::string(name)};
  if (positional()) return all;
  for (size_t i = 0, n = all.size(); i < n; ++i) {
    std::string dashed = all[i];
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    if (dashed != all[i]) all.push_back(dashed);
  }
  return all;
}

std::vector<std::string> Option::choice_list() const {
  return choices ? split(choices, '|') : std::vector<std::string>{};
}

const Option* CommandTable::find(std::string_view wanted) const {
  for (const auto& group : groups)
    for (const auto& option : group.options)
      if (wanted == option.name && option.kind != Kind::unset) return &option;
  return nullptr;
}

const std::vector<CommandTable>& command_tables() {
  static const std::vector<CommandTable> all{
      {"config",
       "Ask about this machine and write a config file",
       "accelerate config [default|update] [options]",
       {{"", kConfig}}},
      {"config default",
       "Write a config file for this machine without asking",
       "accelerate config default [options]",
       {{"", kConfigDefault}}},
      {"config update",
       "Read a config file and write it as this version does",
       "accelerate config update [options]",
       {{"", kConfigFile}}},
      {"estimate-memory",
       "Say how much memory a model needs",
       "accelerate estimate-memory MODEL [options]",
       {{"Positional", kEstimateMemory}, {"", kEstimateOptions}, {kAdditions, kEstimateOurs}}},
      {"env",
       "Say what is installed, for bug reports",
       "accelerate env [options]",
       {{"", kConfigFile}, {kAdditions, kEnvOurs}}},
      {"generate",
       "Let a language model answer",
       "accelerate generate MODEL [options]",
       {{"Positional", kGenerate},
        {"Text", kGenerateText},
        {"Choice of tokens", kGenerateDrawing},
        {"Memory", kGenerateMemory}}},
      launch_table(),
      {"merge-weights",
       "Merge sharded weights into one file",
       "accelerate merge-weights [options] FOLDER OUTPUT",
       {{"Positional", kMergeWeights}, {"", kMergeOptions}}},
      {"test",
       "Test this machine under the chosen config",
       "accelerate test [options]",
       {{"", kConfigFile}, {kAdditions, kTestOurs}}},
      {"to-fsdp2",
       "Convert a config file from FSDP version 1 to 2",
       "accelerate to-fsdp2 --config_file FILE [options]",
       {{"", kToFsdp2}}},
      {"tpu-config",
       "Run commands on all workers of a TPU pod",
       "accelerate tpu-config [options]",
       {{"Config", kTpuConfig}, {"TPU", kTpuPod}}},
      {"completion",
       "Print a completion script for a shell",
       "accelerate completion bash|zsh|fish",
       {{"Positional", kCompletion}}},
      {"docs",
       "Print the reference of all commands and settings",
       "accelerate docs man|markdown",
       {{"Positional", kDocs}}},
  };
  return all;
}

}  // namespace accelerate::config
