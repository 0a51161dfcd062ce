#include <algorithm>
#include <cmath>

#include <torch/torch.h>

#include "models/generation/logits.hpp"
#include "models/generation/stop_strings.hpp"
#include "utils/raise.hpp"

// The rules of transformers, in which a row always has num_beams running beams and collects finished ones beside them.
// Scores of tokens are tensors; the few beams of a row are plain data.

namespace accelerate::models {
namespace {

using at::Tensor;

struct Beam {
  float score;  ///< running: sum of log-probabilities; finished: divided by the length's power
  std::vector<int64_t> tokens;
};

struct BeamRow {
  std::vector<Beam> running, finished;
  bool improvable = true;  ///< a running beam may still get into the finished ones
};

/// Candidates of one step, best first.
struct Candidates {
  Tensor scores, indices;  ///< [B, count] on the CPU; indices are beam * V + token
};

/// @param logits  of new token `new_tokens` + 1, where `scores` come from
Candidates best(const Tensor& scores, int64_t count, const Tensor& logits, int64_t new_tokens,
                const GenerationConfig& config, const std::optional<at::Generator>& generator) {
  if (!config.do_sample) {
    const auto [values, indices] = scores.topk(count, 1);
    const auto on_host = values.cpu();
    expect_finite(on_host.select(1, 0), logits, new_tokens, config);
    return {on_host, indices.cpu()};
  }
  const auto probabilities = scores.softmax(-1);
  expect_finite(probabilities.select(1, 0), logits, new_tokens, config);
  const auto indices = at::multinomial(probabilities, count, /*replacement=*/false, generator);
  return {scores.gather(1, indices).cpu(), indices.cpu()};
}

}  // namespace

Tensor beam_search(BatchDecoder& decoder, const Tensor& input_ids, const Tensor& attention_mask, int64_t max_length,
                   const GenerationConfig& config, const StopStrings& stops,
                   const std::optional<at::Generator>& generator) {
  constexpr float kImpossible = -1e9F;
  const int64_t rows = input_ids.size(0), prompt = input_ids.size(1), beams = config.num_beams;
  // So many that enough go on, even if the best of every beam end.
  const int64_t count = std::max<int64_t>(2, 1 + static_cast<int64_t>(config.eos_token_id.size())) * beams;
  std::vector<BeamRow> state(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = input_ids[r].cpu().contiguous();
    const Beam start{0, {row.const_data_ptr<int64_t>(), row.const_data_ptr<int64_t>() + prompt}};
    state[static_cast<size_t>(r)].running.assign(static_cast<size_t>(beams), start);
    for (int64_t b = 1; b < beams; ++b)
      state[static_cast<size_t>(r)].running[static_cast<size_t>(b)].score =
          kImpossible;  // all are equal: only the first one counts
  }
  const auto is_end = [&](int64_t token) {
    return std::find(config.eos_token_id.begin(), config.eos_token_id.end(), token) != config.eos_token_id.end();
  };
  const auto length_factor = [&](int64_t length) {
    return static_cast<float>(std::pow(static_cast<double>(length), config.length_penalty));
  };
  const auto full = [&](const BeamRow& row) { return static_cast<int64_t>(row.finished.size()) == beams; };

  auto logits = decoder.step(input_ids).repeat_interleave(beams, 0);
  decoder.reorder(torch::arange(rows, input_ids.options()).repeat_interleave(beams));
  auto tokens = without_padding(input_ids, attention_mask).repeat_interleave(beams, 0);  // [B * beams, length]
  for (int64_t length = prompt;;) {
    const auto scores = process_scores(logits.log_softmax(-1), tokens, length - prompt, config);
    const int64_t vocabulary = scores.size(1);
    if (count > beams * vocabulary)
      raise<ConfigError>("generate: num_beams is {}, too many for a vocabulary of {}.", beams, vocabulary);
    auto sums = torch::empty({rows, beams}, torch::kFloat);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t b = 0; b < beams; ++b)
        sums.data_ptr<float>()[r * beams + b] = state[static_cast<size_t>(r)].running[static_cast<size_t>(b)].score;
    const auto candidates =
        best((scores.view({rows, beams, vocabulary}) + sums.to(scores.device()).unsqueeze(2)).flatten(1), count, logits,
             length - prompt, config, generator);
    std::vector<int64_t> parents, last;
    bool all_end = true, any_improvable = false, all_full = true;
    for (int64_t r = 0; r < rows; ++r) {
      auto& row = state[static_cast<size_t>(r)];
      std::vector<Beam> running;
      std::vector<int64_t> from;
      std::vector<std::pair<Beam, int64_t>> spare;  // ended, with their parents
      const bool closed = !row.improvable || (config.early_stopping == EarlyStopping::yes && full(row));
      for (int64_t k = 0; k < count; ++k) {
        const float score = candidates.scores.const_data_ptr<float>()[r * count + k];
        const int64_t index = candidates.indices.const_data_ptr<int64_t>()[r * count + k], parent = index / vocabulary,
                      token = index % vocabulary;
        Beam beam{score, row.running[static_cast<size_t>(parent)].tokens};
        beam.tokens.push_back(token);
        const bool at_limit = length + 1 == max_length,
                   ends = at_limit || is_end(token) || (!stops.empty() && stops.end(beam.tokens));
        all_end = all_end && ends;
        if (ends && !at_limit && !stops.empty())
          spare.emplace_back(Beam{score + kImpossible, beam.tokens}, r * beams + parent);
        if (ends ? k >= beams || closed : static_cast<int64_t>(running.size()) == beams) continue;
        if (ends) {
          beam.score /= length_factor(length + 1 - prompt);
          row.finished.push_back(std::move(beam));
        } else {
          running.push_back(std::move(beam));
          from.push_back(r * beams + parent);
        }
      }
      // Any token can complete a stop string, so perhaps too few candidates go on: those that have ended fill the
      // places, with scores that never win.
      for (auto& [beam, parent] : spare) {
        if (static_cast<int64_t>(running.size()) == beams) break;
        running.push_back(std::move(beam));
        from.push_back(parent);
      }
      std::stable_sort(row.finished.begin(), row.finished.end(),
                       [](const Beam& a, const Beam& b) { return a.score > b.score; });
      if (static_cast<int64_t>(row.finished.size()) > beams) row.finished.resize(static_cast<size_t>(beams));
      all_full = all_full && full(row);
      if (running.empty()) continue;  // the last step
      const int64_t hoped_for = config.early_stopping == EarlyStopping::never && config.length_penalty > 0
                                    ? max_length - prompt
                                    : length + 1 - prompt;
      const auto top = std::max_element(running.begin(), running.end(), [](const Beam& a, const Beam& b) {
        return a.score < b.score;
      });  // candidates that were drawn are in no order
      row.improvable =
          row.improvable && (!full(row) || top->score / length_factor(hoped_for) > row.finished.back().score);
      any_improvable = any_improvable || row.improvable;
      row.running = std::move(running);
      for (const auto& beam : row.running) last.push_back(beam.tokens.back());
      parents.insert(parents.end(), from.begin(), from.end());
    }
    if (all_end || !any_improvable || (all_full && config.early_stopping == EarlyStopping::yes)) break;
    if (static_cast<int64_t>(parents.size()) != rows * beams)
      raise<InternalError>("beam search: a row has fewer than {} running beams.", beams);
    const auto order = torch::tensor(parents, at::kLong).to(input_ids.device()),
               next = torch::tensor(last, at::kLong).to(input_ids.device()).unsqueeze(1);
    decoder.reorder(order);
    tokens = torch::cat({tokens.index_select(0, order), next}, 1);
    ++length;
    logits = decoder.step(next);
  }
  int64_t longest = prompt;
  for (const auto& row : state) longest = std::max(longest, static_cast<int64_t>(row.finished.front().tokens.size()));
  auto result = torch::full({rows, longest},
                            config.pad_token_id.value_or(config.eos_token_id.empty() ? 0 : config.eos_token_id.front()),
                            at::kLong);
  for (int64_t r = 0; r < rows; ++r) {
    const auto& tokens_of = state[static_cast<size_t>(r)].finished.front().tokens;
    std::copy(tokens_of.begin(), tokens_of.end(), result.data_ptr<int64_t>() + r * longest);
  }
  return result.to(input_ids.device());
}

}  // namespace accelerate::models
