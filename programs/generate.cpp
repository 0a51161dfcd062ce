// `accelerate generate`, which starts this with MODEL and pairs of an option and its text, checked against the table of
// options.
#include <accelerate/accelerate.hpp>
#include <accelerate/bigmodel.hpp>
#include <accelerate/models/auto_model.hpp>
#include <accelerate/models/generate.hpp>
#include <accelerate/models/tokenizer.hpp>
#include <accelerate/residency.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <limits>
#include <random>
#include <set>

#include <unistd.h>

#include "bigmodel/hub_cache.hpp"
#include "command.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "memory/loading_pages.hpp"
#include "models/blocks.hpp"
#include "residency/member.hpp"

namespace {

namespace fs = std::filesystem;
namespace models = accelerate::models;
using accelerate::ConfigError;
using command::GivenOptions;
using models::ChatMessage;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// ---- the model
// --------------------------------------------------------------------------------------------------------------------

accelerate::MaxMemory max_memory_of(const std::vector<std::string>& words) {
  accelerate::MaxMemory limits;
  for (const auto& word : words) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0)
      accelerate::raise<ConfigError>("--max_memory: found '{}', expected PLACE=SIZE, for example cpu=150MB or 0=20GiB",
                                     word);
    const std::string size = word.substr(equals + 1);
    // A number of bytes.
    const bool plain = size.find_first_not_of("0123456789") == std::string::npos && !size.empty() && size.size() < 19;
    limits.insert_or_assign(
        accelerate::Place(word.substr(0, equals)),
        plain ? accelerate::MemorySize(static_cast<int64_t>(std::stoll(size))) : accelerate::MemorySize(size));
  }
  return limits;
}

std::variant<std::string, accelerate::DeviceMap> device_map_of(const std::string& text) {
  if (!text.starts_with("{")) return text;  // a place or a strategy; another word is refused with the known ones
  const auto json = accelerate::parse_json<nlohmann::json>(text);
  if (!json.is_object())
    accelerate::raise<ConfigError>(
        "--device_map: found '{}', which is no JSON object, expected for example '{{\"model.embed_tokens\": \"cpu\", "
        "\"\": \"disk\"}}'",
        text);
  accelerate::DeviceMap map;
  for (const auto& [name, place] : json.items()) {
    const int64_t number = accelerate::whole_number(place).value_or(-1);
    if (number >= 0 && number <= 0xFFFF) map.emplace(name, accelerate::Place(static_cast<int>(number)));
    else if (place.is_string()) map.emplace(name, accelerate::Place(place.get<std::string>()));
    else
      accelerate::raise<ConfigError>(
          "--device_map: found {} for '{}', expected the number of a GPU, \"cpu\" or \"disk\"",
          accelerate::show_json(place), name);
  }
  return map;
}

/// A folder that holds nothing but a .gguf file means that file.
fs::path checkpoint_of(const fs::path& model) {
  const fs::path given = accelerate::bigmodel::local_model(model);
  if (!accelerate::is_folder(given) || accelerate::is_there(given / "config.json")) return given;
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(given, error), end; !error && entry != end; entry.increment(error))
    if (entry->path().extension() == ".gguf") files.push_back(entry->path());
  if (error)
    accelerate::raise<accelerate::CheckpointError>("the folder '{}' can't be read: {}. Check its rights.",
                                                   given.string(), error.message());
  if (files.size() == 1) return files.front();
  accelerate::raise<accelerate::CheckpointError>(
      "'{}' has no config.json and {} .gguf files, expected a folder with a model; name the file if there are several",
      given.string(), files.size());
}

at::ScalarType dtype_of(const std::string& name) {
  return name == "float16" ? at::kHalf : name == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

models::AutoLoadOptions loading_of(const GivenOptions& given) {
  models::AutoLoadOptions options;
  if (const auto words = given.all("max_memory"); !words.empty()) options.max_memory = max_memory_of(words);
  if (const auto map = given.text("device_map")) options.device_map = device_map_of(*map);
  else if (!options.max_memory) options.device_map = at::hasCUDA() ? "0" : "cpu";
  if (const auto dtype = given.text("dtype")) options.dtype = dtype_of(*dtype);
  if (given.text("bnb_4bit_quant_type") && !given.on("load_in_4bit"))
    accelerate::raise<ConfigError>("--bnb_4bit_quant_type was given without --load_in_4bit, expected both");
  if (given.on("load_in_4bit") || given.on("load_in_8bit")) {
    const auto dtype = dtype_of(given.text("dtype").value_or("float32"));
    options.quantization = {.load_in_8bit = given.on("load_in_8bit"),
                            .load_in_4bit = given.on("load_in_4bit"),
                            .bnb_4bit_quant_type = given.text("bnb_4bit_quant_type").value_or("nf4"),
                            .bnb_4bit_compute_dtype = dtype,
                            .torch_dtype = dtype};
  }
  // As they are in the file they are smaller and faster, also where parts of them come and go.
  options.keep_codes = !at::hasCUDA();
  options.exact_products = given.on("exact_products");
  return options;
}

// ---- the conversation
// --------------------------------------------------------------------------------------------------------------------

struct Measured {
  int64_t prompt_tokens = 0, new_tokens = 0;
  double first_token = 0, seconds = 0;  ///< of the answer, from its beginning

  double tokens_per_second() const {
    return new_tokens > 1 ? static_cast<double>(new_tokens - 1) / (seconds - first_token) : 0;
  }
};

/// The reading of so many is shown from its beginning, that of fewer ones if it takes long all the same.
constexpr int64_t kManyTokens = 256;

class Speaker {
 public:
  Speaker(models::AutoModelForCausalLM model, models::Tokenizer tokenizer, models::GenerationConfig config,
          at::Device device, int64_t layers, bool streams, bool limited)
      : model_(std::move(model)),
        tokenizer_(std::move(tokenizer)),
        config_(std::move(config)),
        device_(device),
        layers_(layers),
        streams_(streams),
        limited_(limited) {}

  std::string answer(const std::string& text, bool special_tokens, Measured& measured) {
    const auto ids = tokenizer_.encode(text, special_tokens);
    if (ids.empty()) accelerate::raise<ConfigError>("the prompt is empty, expected a text");
    const auto begin = Clock::now();
    measured = {.prompt_tokens = static_cast<int64_t>(ids.size())};
    models::StreamDecoder decoder(tokenizer_, /*skip_special_tokens=*/true, config_.stop_strings);
    std::string said;
    const auto say = [&](const std::string& piece) {
      said += piece;
      if (!streams_ || piece.empty()) return;
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
    models::GenerateOptions options{.tokenizer = tokenizer_};
    command::Bar reading("reading " + std::to_string(measured.prompt_tokens) + " tokens", "layer",
                         std::chrono::milliseconds(measured.prompt_tokens < kManyTokens ? 500 : 0));
    if (layers_ > 0) {
      reading.show(0, layers_);
      options.on_layer = [&](int64_t layer) { reading.show(layer, layers_); };
    }
    auto config = config_;
    // The default is a wish, which ends with the model's context; a number that was asked for is kept or refused.
    const int64_t room = model_.max_positions().value_or(std::numeric_limits<int64_t>::max()) - measured.prompt_tokens;
    if (!limited_ && room >= 0 && *config.max_new_tokens > room) config.max_new_tokens = room + 1;
    if (config_.num_beams == 1)
      options.on_tokens = [&](const at::Tensor& tokens) {
        if (measured.new_tokens++ == 0) {
          measured.first_token = seconds_since(begin);
          reading.finish(layers_);
        }
        say(decoder.push(tokens.item<int64_t>()));
        return !command::interrupted && !decoder.stopped();
      };
    const at::Tensor all =
        models::generate(model_, torch::tensor(ids, at::kLong).unsqueeze(0).to(device_), config, options);
    reading.finish(layers_);
    if (config_.num_beams > 1) {
      for (const int64_t id :
           std::vector<int64_t>(all.data_ptr<int64_t>() + ids.size(), all.data_ptr<int64_t>() + all.numel()))
        ++measured.new_tokens, say(decoder.push(id));
      measured.first_token = seconds_since(begin) / static_cast<double>(std::max<int64_t>(measured.new_tokens, 1));
    }
    say(decoder.finish());
    if (streams_) std::printf("\n"), std::fflush(stdout);
    if (config.max_new_tokens != config_.max_new_tokens && measured.new_tokens == *config.max_new_tokens)
      std::fprintf(stderr, "accelerate generate: the answer ends here because the model's %lld positions are full\n",
                   static_cast<long long>(*model_.max_positions()));
    measured.seconds = seconds_since(begin);
    return said;
  }

 private:
  models::AutoModelForCausalLM model_;
  models::Tokenizer tokenizer_;
  models::GenerationConfig config_;
  at::Device device_;
  int64_t layers_;  ///< blocks that read the prompt one after the other
  bool streams_;
  bool limited_;  ///< the number of new tokens was asked for
};

/// Refuses options that change nothing in this conversation.
void refuse_without_effect(const GivenOptions& given) {
  if (given.on("chat") && given.text("prompt"))
    accelerate::raise<ConfigError>("--chat takes its prompts from standard input: leave --prompt or --chat out");
  if (!given.on("raw")) return;
  if (given.text("system"))
    accelerate::raise<ConfigError>(
        "--system was given with --raw, which has no place for a system message: put its text before the prompt's, or "
        "leave one of them out");
  if (given.on("chat"))
    accelerate::raise<ConfigError>(
        "--chat was given with --raw, by which a text is continued as it is and no answer knows those before: leave "
        "one of them out");
}
void refuse_without_effect(const models::GenerationConfig& config, const GivenOptions& given) {
  for (const char* option : {"top_k", "top_p"})
    if (given.text(option) && !config.do_sample)
      accelerate::raise<ConfigError>(
          "--{} was given with --temperature 0, by which the likeliest token is taken each time, expected one of them",
          option);
  if (given.text("seed") && !config.do_sample)
    accelerate::raise<ConfigError>(
        "--seed was given and nothing is drawn, expected --temperature above 0, --top_k or --top_p with it");
  if (given.text("length_penalty") && config.num_beams == 1)
    accelerate::raise<ConfigError>("--length_penalty was given without beams, which it compares, expected --num_beams");
}

models::GenerationConfig generation_of(const fs::path& checkpoint, const models::Tokenizer& tokenizer,
                                       const GivenOptions& given) {
  auto config = models::GenerationConfig::from_pretrained(checkpoint);
  config.max_new_tokens = 256;
  if (const auto most = given.whole("max_new_tokens")) config.max_new_tokens = most;
  if (auto stops = given.all("stop"); !stops.empty()) config.stop_strings = std::move(stops);
  given.read("temperature", config.temperature);
  if (given.text("temperature") && config.temperature < 0)
    accelerate::raise<ConfigError>("--temperature is {}, expected more than 0, or 0 for the likeliest token each time",
                                   config.temperature);
  given.read("top_k", config.top_k);
  given.read("top_p", config.top_p);
  given.read("repetition_penalty", config.repetition_penalty);
  given.read("num_beams", config.num_beams);
  given.read("length_penalty", config.length_penalty);
  if (given.text("temperature")) config.do_sample = config.temperature != 0;
  else if (given.text("top_k") || given.text("top_p")) config.do_sample = true;
  refuse_without_effect(config, given);
  if (!config.do_sample) config.temperature = 1;
  if (config.eos_token_id.empty() && tokenizer.eos_token_id()) config.eos_token_id = {*tokenizer.eos_token_id()};
  config.validate();
  return config;
}

bool is_in_few_bits(const at::Tensor& tensor) {
  const auto* const member = accelerate::residency::Member::of(tensor);
  return member && member->encoded();
}

nlohmann::ordered_json report_of(const Measured& measured, double load_seconds, const torch::nn::Module& module,
                                 const accelerate::DispatchedModel& weights) {
  const auto stats = accelerate::residency::stats();
  int64_t all_bytes = 0;
  std::set<const at::TensorImpl*> seen;  // tied weights are one
  for (const auto& tensor : module.parameters())
    if (seen.insert(tensor.unsafeGetTensorImpl()).second && !is_in_few_bits(tensor))
      all_bytes += static_cast<int64_t>(tensor.nbytes());
  all_bytes += weights.code_bytes();
  return {{"prompt_tokens", measured.prompt_tokens},
          {"new_tokens", measured.new_tokens},
          {"load_seconds", load_seconds},
          {"first_token_seconds", measured.first_token},
          {"tokens_per_second", measured.tokens_per_second()},
          {"streamed_weight_bytes", weights.streamed_bytes()},
          {"peak_resident_weight_bytes", all_bytes - weights.streamed_bytes() + stats.peak_resident_bytes},
          {"weight_bytes_fetched", stats.bytes_fetched}};
}

int talk(const fs::path& model, const GivenOptions& given) {
  refuse_without_effect(given);
  if (const auto threads = given.threads()) at::set_num_threads(*threads);
  if (const auto seed = given.whole("seed")) torch::manual_seed(static_cast<uint64_t>(*seed));
  else torch::manual_seed(std::random_device()());

  const auto begin = Clock::now();
  const torch::NoGradGuard no_grad;
  const fs::path checkpoint = checkpoint_of(model);
  const auto tokenizer = models::Tokenizer::from_pretrained(checkpoint);
  const auto config = generation_of(checkpoint, tokenizer, given);
  const auto options = loading_of(given);
  const auto language_model = models::AutoModelForCausalLM::from_pretrained(checkpoint, options);
  const auto& weights = *language_model.dispatched();
  if (given.on("exact_products") && weights.code_bytes() == 0)
    accelerate::raise<ConfigError>(
        "--exact_products was given for weights that are numbers, expected weights in few bits: those of a file that "
        "has some, or of --load_in_4bit and --load_in_8bit");
  accelerate::return_freed_memory();
  accelerate::give_loading_pages_back();
  const double load_seconds = seconds_since(begin);

  std::vector<ChatMessage> messages;
  if (const auto system = given.text("system")) messages.push_back({"system", *system});
  const bool json = given.on("json"), raw = given.on("raw");
  Speaker speaker(language_model, tokenizer, config, weights.main_device(),
                  static_cast<int64_t>(models::blocks_of(*language_model.module()).size()), !json,
                  given.text("max_new_tokens").has_value());
  command::listen_for(SIGINT);  // ends the answer
  const auto one = [&](const std::string& prompt) {
    Measured measured;
    messages.push_back({"user", prompt});
    const std::string said = raw ? speaker.answer(prompt, true, measured)
                                 : speaker.answer(tokenizer.apply_chat_template(messages), false, measured);
    messages.push_back({"assistant", said});
    auto report = report_of(measured, load_seconds, *language_model.module(), weights);
    if (json) {
      nlohmann::ordered_json result{{"text", said}};
      result.update(report);
      std::cout << result.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
    } else if (given.on("stats")) {
      std::cerr << "accelerate generate: loaded in " << load_seconds << " s; " << measured.prompt_tokens
                << " tokens read, the first one written after " << measured.first_token << " s; " << measured.new_tokens
                << " tokens written, " << measured.tokens_per_second()
                << " a second; weights: " << static_cast<double>(weights.streamed_bytes()) / 1e6
                << " MB come and go, at most " << report["peak_resident_weight_bytes"].get<double>() / 1e6
                << " MB of them present\n";
    }
  };

  const bool person = ::isatty(STDIN_FILENO);
  if (const auto prompt = given.text("prompt")) {
    one(*prompt);
  } else if (person || given.on("chat")) {
    if (person)
      std::fprintf(stderr, "A conversation with %s. Ctrl-C ends an answer, Ctrl-D the conversation.\n",
                   model.filename().c_str());
    const auto next_line = [&](std::string& line) {
      if (person) std::fprintf(stderr, "> ");
      return static_cast<bool>(std::getline(std::cin, line));
    };
    for (std::string line; next_line(line);) {
      command::interrupted = 0;
      if (!line.empty()) one(line);
    }
    if (person) std::fprintf(stderr, "\n");
    return 0;
  } else {
    one({std::istreambuf_iterator<char>(std::cin), {}});
  }
  return command::interrupted ? command::exit_code_of(command::interrupted) : 0;
}

}  // namespace

int main(int argc, char** argv) {
  return command::main_of("generate", 1, argc, argv, [](const std::vector<std::string>& words) {
    return talk(words.front(), command::GivenOptions(words, 1));
  });
}
