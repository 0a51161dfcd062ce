// Fully sharded training, and what it holds in memory when, with every layer as a unit. Fine-tunes MiniLM (a BERT) on
// pairs of verses; with --gpt trains a GPT-2 on the same text instead.
//   accelerate launch --num_processes 2 build/release/bin/fsdp_with_peak_mem_tracking --model .deps/data/minilm --pairs
//   .deps/data/pairs.tsv accelerate launch --num_processes 2 build/release/bin/fsdp_with_peak_mem_tracking --gpt
//   --pairs .deps/data/pairs.tsv
#include <accelerate/accelerate.hpp>
#include <accelerate/models/bert.hpp>
#include <accelerate/models/gpt2.hpp>
#include <accelerate/models/wordpiece.hpp>

#include <fstream>

#include "../arguments.hpp"

namespace models = accelerate::models;
namespace residency = accelerate::residency;

struct Row {
  int64_t label;
  std::string first, second;
};
struct Batch {
  torch::Tensor input_ids, attention_mask, token_type_ids, labels;
  ACCELERATE_FIELDS(input_ids, attention_mask, token_type_ids, labels)
};

std::vector<Row> read_rows(const std::string& path, int64_t count) {
  std::ifstream in(path);
  if (!in) throw accelerate::ConfigError("--pairs '" + path + "' can't be opened; scripts/fetch_data.sh makes it");
  std::vector<Row> rows;
  std::string line;
  std::getline(in, line);
  while (static_cast<int64_t>(rows.size()) < count && std::getline(in, line)) {
    const size_t tab = line.find('\t'), second = line.find('\t', tab + 1);
    rows.push_back({std::stoll(line.substr(0, tab)), line.substr(tab + 1, second - tab - 1), line.substr(second + 1)});
  }
  return rows;
}

// The memory of this process, in MiB: VmRSS now, VmHWM at most so far.
int64_t memory(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(field)) return std::stoll(line.substr(field.size() + 1)) / 1024;
  return 0;
}

class MemoryReport {
 public:
  explicit MemoryReport(const accelerate::Accelerator& accelerator) : accelerator_(accelerator) {}
  void operator()(const std::string& phase) const {
    accelerator_.print(phase + ":", "whole parameters at most", residency::stats().peak_resident_bytes >> 20,
                       "MiB in this process; process", memory("VmRSS:"), "MiB, at most", memory("VmHWM:"), "MiB");
    residency::reset_stats();
  }

 private:
  const accelerate::Accelerator& accelerator_;
};

// The loop, for any model. `loss_of(model, batch)`.
template <class Model, class Loader, class LossOf>
void train(accelerate::Accelerator& accelerator, Model model, Loader loader, const LossOf& loss_of) {
  const MemoryReport report(accelerator);
  report("loaded");
  auto optimizer = torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-4));
  auto [m, opt, dl] = accelerator.prepare(model, optimizer, loader);
  report("sharded");
  m->train();
  double first_loss = 0, last_loss = 0;
  int64_t step = 0;
  for (auto& batch : dl) {
    auto loss = loss_of(m, batch);
    if (step == 0) report("first forward");
    accelerator.backward(loss);
    if (step == 0) report("first backward");
    accelerator.clip_grad_norm_(m->parameters(), 1.0);
    opt.step();
    opt.zero_grad();
    if (step == 0) report("first step");
    last_loss = accelerator.reduce(loss.detach(), "mean").template item<double>();
    if (step++ == 0) first_loss = last_loss;
  }
  report("training");
  accelerator.print("loss", first_loss, "->", last_loss, "in", step, "steps on", accelerator.num_processes(),
                    "process(es), sharded:", to_string(accelerator.distributed_type()));
}

void run(accelerate_examples::Arguments args) {
  const bool gpt = args.flag("--gpt");
  const auto model_dir = args.get<std::string>("--model", ".deps/data/minilm"),
             pairs = args.get<std::string>("--pairs", ".deps/data/pairs.tsv");
  const auto train_size = args.get<int64_t>("--train_size", 320), batch_size = args.get<int64_t>("--batch_size", 16);
  args.check();

  accelerate::Accelerator accelerator({.split_batches = true,
                                       .fsdp_plugin = accelerate::FullyShardedDataParallelPlugin{
                                           .backward_prefetch = accelerate::BackwardPrefetch::backward_pre,
                                           .auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap,
                                           .transformer_cls_names_to_wrap = {{gpt ? "GPT2Block" : "BertLayer"}}}});
  accelerate::set_seed(42);
  const accelerate::data::DataLoaderOptions options{.batch_size = batch_size, .shuffle = true, .drop_last = true};
  if (gpt) {
    // Letters are tokens: each predicts the next one.
    constexpr int64_t kLength = 96;
    auto loader = accelerate::data::DataLoader(read_rows(pairs, train_size), options, [](const std::vector<Row>& rows) {
      auto ids = torch::full({static_cast<int64_t>(rows.size()), kLength}, static_cast<int64_t>(' '), torch::kLong);
      for (size_t r = 0; r < rows.size(); ++r)
        for (size_t i = 0; i < std::min<size_t>(rows[r].first.size(), kLength); ++i)
          ids[static_cast<int64_t>(r)][static_cast<int64_t>(i)] =
              static_cast<int64_t>(static_cast<unsigned char>(rows[r].first[i]));
      return ids;
    });
    models::GPT2Config config;
    config.vocab_size = 256;
    config.n_positions = kLength;
    config.n_embd = 384;
    config.n_layer = 6;
    config.n_head = 6;
    train(accelerator, models::GPT2LMHeadModel(config), loader, [](const auto& model, const torch::Tensor& ids) {
      return torch::cross_entropy_loss(model(ids).slice(1, 0, -1).flatten(0, 1), ids.slice(1, 1).flatten());
    });
    return;
  }
  const auto tokenizer = models::WordPieceTokenizer::from_pretrained(model_dir);
  auto loader = accelerate::data::DataLoader(read_rows(pairs, train_size), options, [&](const std::vector<Row>& rows) {
    std::vector<std::string> first, second;
    std::vector<int64_t> labels;
    for (const auto& row : rows) first.push_back(row.first), second.push_back(row.second), labels.push_back(row.label);
    const auto tokens = tokenizer.encode_batch(
        first, second, {.truncation = true, .max_length = 128, .padding = models::Padding::longest});
    return Batch{tokens.input_ids, tokens.attention_mask, tokens.token_type_ids, torch::tensor(labels)};
  });
  train(accelerator, models::BertForSequenceClassification::from_pretrained(model_dir, {.num_labels = 2}), loader,
        [](const auto& model, const Batch& batch) {
          return torch::cross_entropy_loss(model(batch.input_ids, batch.attention_mask, batch.token_type_ids),
                                           batch.labels);
        });
}

int main(int argc, char** argv) {
  return accelerate::record([&] { run({argc, argv}); });
}
