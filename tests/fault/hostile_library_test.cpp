// The library reads hostile files, or refuses them with an error of ours. No signal, no other exception,
// no waiting, no more memory than 64 MB and 20 times the file.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>

#include <ATen/Parallel.h>

#include <filesystem>
#include <map>

#include "accelerate/bigmodel/offload.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/models/generate.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/models/tokenizer.hpp"
#include "accelerate/models/wordpiece.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/dcp.hpp"
#include "hostile_files.hpp"
#include "limited_child.hpp"
#include "ranks.hpp"
#include "utils/raise.hpp"

namespace {

namespace fs = std::filesystem;
using hostile::Reader;

void read_dcp(const fs::path& folder) {
  const accelerate::formats::DcpCheckpoint checkpoint(folder);
  for (const auto& entry : checkpoint.entries()) {
    if (std::holds_alternative<accelerate::formats::DcpTensorInfo>(entry.content)) checkpoint.read_full(entry.name);
    else checkpoint.read_object(entry.name);
  }
}

/// Does with a folder what `accelerate merge-weights` does.
void merge(const fs::path& folder) {
  for (const bool safe : {true, false}) {
    try {
      accelerate::merge_fsdp_weights(folder, folder / "merged", {.safe_serialization = safe});
    } catch (const accelerate::Error&) {
    }
  }
}

/// Does with one what `accelerate generate` does.
void speak(const fs::path& folder) {
  namespace models = accelerate::models;
  const torch::NoGradGuard no_grad;
  const auto ids = models::Tokenizer::from_pretrained(folder).encode("ab");
  auto config = models::GenerationConfig::from_pretrained(folder);
  if (config.num_beams > 4) return;  // takes what it says
  config.max_new_tokens = 2;
  auto model = models::AutoModelForCausalLM::from_pretrained(folder);
  models::generate(model, torch::tensor(ids, at::kLong).unsqueeze(0), config);
}

void read_gguf(const fs::path& path) {
  const accelerate::GgufFile file(path);
  for (const auto& name : file.names()) {
    at::Tensor values = at::empty(file.info(name).shape, at::kFloat);
    file.read(name, values);
  }
  file.config_json();
}

/// By all that open such a file. The second one's refusal is as good as the first one's.
void read(Reader reader, const fs::path& path) {
  switch (reader) {
    case Reader::safetensors:
    case Reader::index:
      for (const auto& [name, tensor] : accelerate::load_checkpoint_files(path)) tensor.clone();
      return;
    case Reader::archive:
      try {
        accelerate::checkpointing::load_object(path);
      } catch (const accelerate::Error&) {
      }
      accelerate::load_checkpoint_files(path.parent_path());
      return;
    case Reader::custom: {
      std::pair<std::vector<std::string>, std::map<std::string, c10::IValue>> object;
      return accelerate::checkpointing::custom_object(object).load_state_dict(
          accelerate::checkpointing::load_object(path));
    }
    case Reader::dcp:
      merge(path);
      return read_dcp(path);
    case Reader::gguf:
      return read_gguf(path);
    case Reader::model_config:
      accelerate::models::LlamaConfig::from_pretrained(path);
      return;
    case Reader::model:
      return speak(path);
    case Reader::tokenizer:
      accelerate::models::Tokenizer::from_pretrained(path).encode("ab ba aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!");
      return;
    case Reader::wordpiece:
      accelerate::models::WordPieceTokenizer::from_pretrained(path).encode("a b");
      return;
    case Reader::offload: {
      const accelerate::OffloadedWeightsLoader weights({.save_folder = path});
      for (const auto& name : weights.names()) weights[name].clone();
      return;
    }
    case Reader::deepspeed:
      accelerate::DeepSpeedConfig(path.string());
      return;
    case Reader::launch_config:
    case Reader::hostfile:
      return;  // programs read those
  }
}

enum class End { none, read, refused, other };

/// A process's report of a case, in memory that its parent sees, too.
struct Report {
  End end = End::none;
  size_t message_bytes = 0;
  char message[400] = "";
};

void say(Report& report, End end, const std::string& message) {
  report.message_bytes = message.size();
  message.copy(report.message, sizeof report.message - 1);
  report.end = end;  // last: it may be killed at any moment
}

void try_to_read(const hostile::Case& hostile_case, const fs::path& path, Report& report) {
  ::malloc_trim(0);  // what others have freed counts as gone
  const auto bytes = hostile::address_space() + hostile::allowed_bytes(hostile::bytes_of(hostile_case));
  const rlimit limit{bytes, RLIM_INFINITY}, none{RLIM_INFINITY, RLIM_INFINITY};
  ::setrlimit(RLIMIT_AS, &limit);
  try {
    read(hostile_case.reader, path);
    say(report, End::read, "");
  } catch (const accelerate::Error& error) {
    say(report, End::refused, error.what());
  } catch (const std::exception& error) {
    say(report, End::other, error.what());
  }
  ::setrlimit(RLIMIT_AS, &none);
}

TEST(HostileFiles, AreReadOrRefusedByTheLibrary) {
  at::set_num_threads(1);
  auto cases = hostile::cases();
  std::erase_if(cases, [](const auto& c) { return c.reader == Reader::launch_config || c.reader == Reader::hostfile; });
  const size_t bytes = cases.size() * sizeof(Report);
  auto* reports =
      static_cast<Report*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(reports, MAP_FAILED);
  const fs::path folder = support::scratch_dir();
  // A process for some of them, since starting one with LibTorch in it takes longer than most cases; the one in which
  // it ends is at fault, and the next process goes on behind it.
  constexpr size_t kAtATime = 20;
  for (size_t done = 0; done < cases.size();) {
    const size_t end = std::min(done + kAtATime, cases.size());
    std::vector<fs::path> paths;
    for (size_t i = done; i < end; ++i) paths.push_back(hostile::write(cases[i], folder / std::to_string(i)));
    const auto outcome = hostile::run_limited(RLIM_INFINITY, [&] {
      at::set_num_threads(1);
      for (size_t i = done; i < end; ++i) try_to_read(cases[i], paths[i - done], reports[i]);
      return 0;
    });
    for (size_t i = done; i < end; ++i) fs::remove_all(folder / std::to_string(i));
    while (done < end && reports[done].end != End::none) ++done;
    if (done == end) continue;
    ADD_FAILURE() << cases[done].name
                  << (outcome.late ? ": it waits"
                                   : fmt::format(": signal {}, exit status {}: {}", outcome.signal, outcome.exit_code,
                                                 outcome.output));
    ++done;
  }
  std::map<End, int> ends;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [end, message_bytes, message] = reports[i];
    EXPECT_NE(end, End::other) << cases[i].name << ": " << message;
    EXPECT_LT(message_bytes, 1500u) << cases[i].name
                                    << ": a message must stay readable whatever the file holds: " << message;
    if (cases[i].name.find("_good_") != std::string::npos) {
      EXPECT_EQ(end, End::read) << cases[i].name << ", what the others damage: " << message;
    }
    ++ends[end];
  }
  ::munmap(reports, bytes);
  EXPECT_GT(ends[End::refused], 400);
  std::printf("%d read, %d refused\n", ends[End::read], ends[End::refused]);
}

}  // namespace
