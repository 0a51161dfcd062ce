#include "accelerate/config/option.hpp"

/// The options of all commands but `launch`, whose settings are a table of their own (launch_table.cpp).
///
/// A new command is a row of command_tables() at the end of this file, its options above it, and a file in
/// cli/commands/ that registers what it does.
namespace accelerate::config {
namespace {

using enum Kind;

constexpr std::string_view kFourDtypes[] = {"float32", "float16", "int8", "int4"};

constexpr const char* kDefaultFile =
    "Config file (default: the one that `accelerate config` writes; see docs/settings.md)";

constexpr Option kConfig[] = {
    {.name = "config_file",
     .kind = text,
     .value = "FILE",
     .help = "Where to write (default: default_config.yaml in $HF_HOME/accelerate or the cache folder); a name that "
             "ends in .json gets JSON"},
};
constexpr Option kConfigDefault[] = {
    {.name = "save_location",
     .kind = text,
     .value = "FILE",
     .help = "Where to write (default: default_config.yaml in $HF_HOME/accelerate or the cache folder)",
     .flags = "--config_file"},
    {.name = "mixed_precision",
     .kind = text,
     .fallback = "no",
     .choices = "no|fp16|bf16",
     .help = "Number format of the computation"},
};
constexpr Option kConfigFile[] = {
    {.name = "config_file", .kind = text, .value = "FILE", .help = kDefaultFile},
};
constexpr Option kEstimateOurs[] = {
    {.name = "json", .kind = flag, .fallback = false, .help = "Print numbers of bytes as JSON instead of a table"},
    {.name = "strategy",
     .kind = text,
     .choices = "ddp|fsdp|zero1|zero2|zero3",
     .help = "Run the training loop dry (without memory) and print what a step of it needs on each process; for "
             "architectures of the zoo, from a config.json or built-in config"},
    {.name = "num_processes",
     .kind = integer,
     .value = "N",
     .help = "With --strategy: processes of the job (default: 1)"},
    {.name = "batch", .kind = integer, .value = "N", .help = "With --strategy: rows of a process's batch (default: 1)"},
    {.name = "seq",
     .kind = integer,
     .value = "N",
     .help = "With --strategy: tokens of a row (default: 128); not for models of images"},
    {.name = "mixed_precision",
     .kind = text,
     .choices = "no|bf16",
     .help = "With --strategy: number format of the computation (default: no)"},
};
constexpr Option kEnvOurs[] = {
    {.name = "json", .kind = flag, .fallback = false, .help = "Print JSON"},
};
constexpr Option kEstimateMemory[] = {
    {.name = "model_name",
     .kind = text,
     .value = "MODEL",
     .help = "A folder, a config.json, a .safetensors file (or the index of several), a .gguf file, a file of "
             "torch.save or TorchScript, or the name of a built-in config",
     .flags = "model_name",
     .required = true},
};
constexpr Option kEstimateOptions[] = {
    {.name = "library_name",
     .kind = text,
     .choices = "timm|transformers",
     .value = "LIBRARY",
     .help = "Refuse a model of another library"},
    {.name = "dtypes",
     .kind = words,
     .fallback = kFourDtypes,
     .choices = "float32|float16|int8|int4",
     .value = "DTYPE",
     .help = "What the weights are loaded in"},
    {.name = "trust_remote_code",
     .kind = flag,
     .fallback = false,
     .help = "As elsewhere; here code of a model is never run, and sizes come from its files"},
};
constexpr Option kGenerate[] = {
    {.name = "model",
     .kind = text,
     .value = "MODEL",
     .help = "A Hugging Face folder (config.json, weights, tokenizer) or a .gguf file",
     .flags = "model",
     .required = true},
};
constexpr Option kGenerateText[] = {
    {.name = "prompt",
     .kind = text,
     .value = "TEXT",
     .help = "What to answer (default: standard input; on a terminal, a conversation)",
     .flags = "--prompt,-p"},
    {.name = "chat",
     .kind = flag,
     .fallback = false,
     .help = "A conversation through a pipe, too: each line of standard input is answered, knowing those before"},
    {.name = "system",
     .kind = text,
     .value = "TEXT",
     .help = "The system message of the conversation (default: the template's)"},
    {.name = "raw",
     .kind = flag,
     .fallback = false,
     .help = "Continue the text as it is, without the model's chat template"},
    {.name = "max_new_tokens", .kind = integer, .value = "N", .help = "Tokens of an answer at most (default: 256)"},
    {.name = "stop",
     .kind = words,
     .value = "TEXT",
     .help = "Ends the answer where this appears; may be given several times"},
    {.name = "json",
     .kind = flag,
     .fallback = false,
     .help = "Print the answer and what was measured as JSON, at the end"},
    {.name = "stats",
     .kind = flag,
     .fallback = false,
     .help = "Say on standard error what was measured: times, tokens a second, memory of weights"},
};
constexpr Option kGenerateDrawing[] = {
    {.name = "temperature",
     .kind = number,
     .value = "T",
     .help =
         "Draw tokens, with logits divided by this; 0: take the likeliest (default: 0, or generation_config.json's)"},
    {.name = "top_k", .kind = integer, .value = "N", .help = "Draw from so many of the likeliest; 0: from all"},
    {.name = "top_p",
     .kind = number,
     .value = "P",
     .help = "Draw from the likeliest that have this probability together"},
    {.name = "repetition_penalty",
     .kind = number,
     .value = "X",
     .help = "Above 1: tokens that were there get less likely"},
    {.name = "num_beams",
     .kind = integer,
     .value = "N",
     .help = "More than 1: beam search (then the answer appears at its end)"},
    {.name = "length_penalty", .kind = number, .value = "X", .help = "With beams: above 0 favours long answers"},
    {.name = "seed", .kind = integer, .value = "N", .help = "Of the drawing (default: another one each time)"},
};
constexpr Option kGenerateMemory[] = {
    {.name = "max_memory",
     .kind = words,
     .value = "PLACE=SIZE",
     .help = "What weights may take, in bytes or with a unit, for example cpu=150MB, or 0=20GiB cpu=60GiB; the rest "
             "stays on disk and is read when it is needed"},
    {.name = "device_map",
     .kind = text,
     .value = "MAP",
     .help = "auto, balanced, balanced_low_0, sequential; cpu, disk or a GPU's number for all of it; or JSON such as "
             "'{\"\": \"disk\"}' (default: all in memory; auto with --max_memory)"},
    {.name = "dtype",
     .kind = text,
     .choices = "float32|float16|bfloat16",
     .help = "Number format of the weights in memory (default: float32; but weights in few bits stay as the file has "
             "them, and are multiplied with activations in 8 bits)"},
    {.name = "load_in_4bit",
     .kind = flag,
     .fallback = false,
     .help = "Keep the weights of linear layers in 4 bits; encoded while they are loaded"},
    {.name = "load_in_8bit", .kind = flag, .fallback = false, .help = "The same in 8 bits"},
    {.name = "bnb_4bit_quant_type",
     .kind = text,
     .choices = "nf4|fp4",
     .help = "With --load_in_4bit: the encoding (default: nf4)"},
    {.name = "exact_products",
     .kind = flag,
     .fallback = false,
     .help = "Multiply decoded weights, instead of codes with activations of 8 bits, where weights are in few bits"},
    {.name = "num_threads",
     .kind = integer,
     .value = "N",
     .help = "Threads that compute, 1 to 1024 (default: one for each core)"},
};
constexpr Option kProfile[] = {
    {.name = "program",
     .kind = words,
     .value = "PROGRAM [ARGUMENT ...]",
     .help = "What to run, with its arguments; `launch ...` is `accelerate launch ...`",
     .flags = "program"},
};
constexpr Option kProfileOptions[] = {
    {.name = "out", .kind = text, .fallback = "profile", .value = "FOLDER", .help = "Where the traces go"},
    {.name = "overwrite",
     .kind = flag,
     .fallback = false,
     .help = "Remove what an earlier profile left there; without, it is an error that there is some"},
    {.name = "num_processes",
     .kind = integer,
     .value = "N",
     .help = "Start so many processes by `accelerate launch` (default: the program itself)"},
    {.name = "no_merge",
     .kind = flag,
     .fallback = false,
     .help = "Leave the ranks' traces alone: no merged trace, report and summary"},
};
constexpr Option kProfileSchedule[] = {
    {.name = "skip_first", .kind = integer, .value = "N", .help = "Steps to leave out at the beginning, once"},
    {.name = "wait", .kind = integer, .value = "N", .help = "Then, in each cycle: steps to leave out"},
    {.name = "warmup", .kind = integer, .value = "N", .help = "Steps in which the profiler runs and keeps nothing"},
    {.name = "active",
     .kind = integer,
     .value = "N",
     .help = "Steps to record; needed for the others (default: everything, from begin to end)"},
    {.name = "repeat", .kind = integer, .value = "N", .help = "Cycles; 0: until the end"},
};
constexpr Option kProfileContents[] = {
    {.name = "record_shapes", .kind = flag, .fallback = false, .help = "Record shapes of inputs"},
    {.name = "profile_memory", .kind = flag, .fallback = false, .help = "Record what is allocated and released"},
    {.name = "with_stack", .kind = flag, .fallback = false, .help = "Record where operators are called"},
    {.name = "with_flops", .kind = flag, .fallback = false, .help = "Estimate operations of operators"},
    {.name = "with_modules", .kind = flag, .fallback = false, .help = "Record the modules that call operators"},
};
constexpr Option kProfileMerge[] = {
    {.name = "folder",
     .kind = text,
     .value = "FOLDER",
     .help = "Has the ranks' traces: profile_<rank>.json, or *.pt.trace.json of PyTorch",
     .flags = "folder",
     .required = true},
};
constexpr Option kProfileMergeOptions[] = {
    {.name = "json", .kind = flag, .fallback = false, .help = "Print the numbers as JSON"},
    {.name = "html", .kind = text, .value = "FILE", .help = "Write a page with plots, which needs no network"},
    {.name = "out",
     .kind = text,
     .value = "FILE",
     .help = "Where the joined trace goes (default: merged.json in the folder)"},
};
constexpr Option kTestOurs[] = {
    {.name = "num_processes",
     .kind = integer,
     .value = "N",
     .help = "Processes to test with (default: as the config file says, else 2)"},
    {.name = "cpu", .kind = flag, .fallback = false, .help = "Test on the CPU even where there is an accelerator"},
};
constexpr Option kTpuConfig[] = {
    {.name = "config_file", .kind = text, .value = "FILE", .help = kDefaultFile},
    {.name = "tpu_name", .kind = text, .value = "NAME", .help = "Name of the TPU pod (default: the config file's)"},
    {.name = "tpu_zone", .kind = text, .value = "ZONE", .help = "Its zone (default: the config file's)"},
};
constexpr Option kTpuPod[] = {
    {.name = "use_alpha", .kind = flag, .fallback = false, .help = "Call `gcloud alpha` instead of `gcloud`"},
    {.name = "command_file", .kind = text, .value = "FILE", .help = "File of commands, one a line, for every worker"},
    {.name = "command",
     .kind = words,
     .value = "COMMAND",
     .help = "A command for every worker; may be given several times"},
    {.name = "install_accelerate",
     .kind = flag,
     .fallback = false,
     .help = "Install Hugging Face Accelerate on the workers first"},
    {.name = "accelerate_version",
     .kind = text,
     .fallback = "latest",
     .value = "VERSION",
     .help = "Which one: latest, dev, or a version"},
    {.name = "debug", .kind = flag, .fallback = false, .help = "Print the command instead of running it"},
};
constexpr Option kMergeWeights[] = {
    {.name = "checkpoint_directory",
     .kind = text,
     .value = "FOLDER",
     .help = "Folder with sharded weights",
     .flags = "checkpoint_directory",
     .required = true},
    {.name = "output_path",
     .kind = text,
     .value = "OUTPUT",
     .help = "Folder for the merged weights",
     .flags = "output_path",
     .required = true},
};
constexpr Option kMergeOptions[] = {
    {.name = "unsafe_serialization",
     .kind = flag,
     .fallback = false,
     .help = "Write a torch archive (.bin) instead of safetensors"},
    {.name = "remove_checkpoint_dir",
     .kind = flag,
     .fallback = false,
     .help = "Remove the sharded weights after merging"},
};
constexpr Option kMergeAdditions[] = {
    {.name = "max_shard_size", .kind = text, .value = "SIZE", .help = "Several files of at most this size, as 5GB"},
    {.name = "tag", .kind = text, .value = "TAG", .help = "Of DeepSpeed's checkpoints, instead of the latest one"},
    {.name = "exclude_frozen_parameters",
     .kind = flag,
     .fallback = false,
     .help = "Of DeepSpeed's checkpoints only what was trained"},
};
constexpr Option kQuantize[] = {
    {.name = "in",
     .kind = text,
     .value = "IN",
     .help = "A Hugging Face folder (config.json, weights, tokenizer) or a .gguf file",
     .flags = "in",
     .required = true},
    {.name = "out",
     .kind = text,
     .value = "OUT",
     .help = "The folder to make, or for GGUF's encodings the .gguf file",
     .flags = "out",
     .required = true},
};
constexpr Option kQuantizeOptions[] = {
    {.name = "to",
     .kind = text,
     .choices = "nf4|fp4|int8|q4_0|q4_1|q5_0|q5_1|q8_0|q4_k|q5_k|q6_k",
     .help = "The encoding: nf4, fp4 and int8 make a folder as bitsandbytes and transformers have it (`accelerate "
             "quantize my_model my_model_nf4 --to nf4`); the others make a .gguf file (`accelerate quantize my_model "
             "q4.gguf --to q4_k`)",
     .required = true},
    {.name = "block_size",
     .kind = integer,
     .value = "N",
     .help = "Of nf4 and fp4: elements to a scale, a power of two from 32 to 4096 (default: 64, bitsandbytes' own)"},
    {.name = "double_quantize", .kind = flag, .fallback = false, .help = "Of nf4 and fp4: scales in 8 bits, too"},
    {.name = "skip_modules",
     .kind = words,
     .value = "NAME",
     .help = "Modules that stay as they are, besides the head: names (k_proj) or dotted paths; for a .gguf file also "
             "its tensors' names or what they begin with (blk.0)"},
    {.name = "compute_dtype",
     .kind = text,
     .choices = "float32|float16|bfloat16",
     .help = "Of nf4 and fp4: what config.json says that products are computed in (default: float32); of a .gguf "
             "file, then of int8, too: the dtype of blocks that stay numbers"},
    {.name = "threshold",
     .kind = number,
     .value = "X",
     .help = "Of int8: activations from here on are multiplied in full precision; 0: none (default: 6)"},
    {.name = "max_shard_size",
     .kind = text,
     .value = "SIZE",
     .help = "Of a folder: what a file of weights has at most, for example 5GB or 500MiB; what is more is in several "
             "files with an index (default: 50GB)"},
    {.name = "overwrite",
     .kind = flag,
     .fallback = false,
     .help = "Replace a file by a file, or the folder of a quantized model, which has nothing else, by another"},
    {.name = "json", .kind = flag, .fallback = false, .help = "Print the result as JSON"},
    {.name = "num_threads",
     .kind = integer,
     .value = "N",
     .help = "Threads that compute, 1 to 1024 (default: one for each core)"},
};
constexpr Option kQuantizeReport[] = {
    {.name = "report",
     .kind = flag,
     .fallback = false,
     .help = "Print each tensor's relative error (Frobenius norm of the difference to that of the tensor) and bytes"},
    {.name = "text",
     .kind = text,
     .value = "FILE",
     .help = "With --report: a text on which the perplexity is measured before and after, for language models; both "
             "are in memory for that, one at a time"},
    {.name = "max_tokens",
     .kind = integer,
     .value = "N",
     .help = "With --text: tokens of the text to read (default: 2048)"},
    {.name = "exact_products",
     .kind = flag,
     .fallback = false,
     .help = "With --text: multiply decoded weights, not codes with activations of 8 bits"},
};
constexpr Option kToFsdp2[] = {
    {.name = "config_file", .kind = text, .value = "FILE", .help = "Config file to convert", .required = true},
    {.name = "overwrite", .kind = flag, .fallback = false, .help = "Existing files may be replaced"},
    {.name = "output_file",
     .kind = text,
     .value = "FILE",
     .help = "Where to write (default: the same file, with --overwrite)"},
};
constexpr Option kCompletion[] = {
    {.name = "shell",
     .kind = text,
     .choices = "bash|zsh|fish",
     .value = "SHELL",
     .help = "bash, zsh or fish",
     .flags = "shell",
     .required = true},
};
constexpr Option kTrackReplay[] = {
    {.name = "file",
     .kind = text,
     .value = "FILE",
     .help = "What a tracker did not take, or the tracker jsonl wrote: lines of JSON",
     .flags = "file",
     .required = true},
};
constexpr Option kTrackReplayOptions[] = {
    {.name = "to", .kind = text, .value = "NAME", .help = "Tracker that gets the records", .required = true},
    {.name = "project_name",
     .kind = text,
     .value = "PROJECT",
     .help = "Open the run under this name (default: that in the file)"},
    {.name = "logging_dir",
     .kind = text,
     .value = "FOLDER",
     .help = "Where trackers that write files write them (default: the current folder)"},
    {.name = "init_kwargs",
     .kind = text,
     .value = "JSON",
     .help = "What init_trackers would give this tracker, e.g. '{\"run_id\": \"…\"}' to go on with a run of MLflow"},
};
constexpr Option kDocs[] = {
    {.name = "form",
     .kind = text,
     .choices = "man|markdown",
     .value = "FORM",
     .help = "man: a manual page; markdown: docs/settings.md",
     .flags = "form",
     .required = true},
};

}  // namespace

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
       {{"Positional", kMergeWeights}, {"", kMergeOptions}, {kAdditions, kMergeAdditions}}},
      {"profile",
       "Record what a program's steps cost, and sum it up",
       "accelerate profile [options] PROGRAM [ARGUMENT ...]",
       {{"Positional", kProfile},
        {"", kProfileOptions},
        {"Schedule", kProfileSchedule},
        {"Contents", kProfileContents}}},
      {"profile merge",
       "Join the ranks' traces and say what they mean",
       "accelerate profile merge FOLDER [options]",
       {{"Positional", kProfileMerge}, {"", kProfileMergeOptions}}},
      {"quantize",
       "Make a model's files in few bits",
       "accelerate quantize IN OUT --to NAME [options]",
       {{"Positional", kQuantize}, {"", kQuantizeOptions}, {"Report", kQuantizeReport}}},
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
      {"track", "Send to a tracker what was logged", "accelerate track replay FILE --to NAME", {}},
      {"track replay",
       "Send the records of a file to a tracker",
       "accelerate track replay FILE --to NAME [options]",
       {{"Positional", kTrackReplay}, {"", kTrackReplayOptions}}},
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
