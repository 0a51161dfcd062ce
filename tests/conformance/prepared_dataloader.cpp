// The batches that each rank of a prepared loader sees. Where the reference is known to be wrong (its own test
// inventory lists the three defects), we must be right instead.
#include <torch/torch.h>

#include "accelerate/accelerator.hpp"
#include "accelerate/data.hpp"
#include "ranks.hpp"
#include "runner.hpp"

namespace conformance::prepared_dataloader_cases {
namespace {

namespace data = accelerate::data;

struct Numbers {
  int64_t n = 0, at = 0;
  std::optional<torch::Tensor> next() {
    if (at == n) return std::nullopt;
    return torch::scalar_tensor(static_cast<double>(at++));
  }
  void reset() { at = 0; }
};
struct SizedNumbers : Numbers {
  int64_t size() const { return n; }
};

std::vector<int64_t> integers(const torch::Tensor& t) {
  const auto longs = t.to(torch::kLong).contiguous();
  return {longs.data_ptr<int64_t>(), longs.data_ptr<int64_t>() + longs.numel()};
}

template <class Loader> json trace(const accelerate::Accelerator& accelerator, const Loader& loader, bool gather) {
  const accelerate::GradientState& state = accelerator.gradient_state();
  json batches = json::array(), ends = json::array(), gathered = json::array(), remainder;
  for (const torch::Tensor& batch : loader) {
    batches.push_back(integers(batch));
    ends.push_back(state.end_of_dataloader());
    remainder = state.remainder();
    if (!gather) continue;
    const auto sizes = accelerate::gather_object(std::vector<int64_t>{batch.size(0)});
    if (std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) != sizes.end())
      return {{"error", "batches differ in size between ranks: " + json(sizes).dump()}};
    for (const int64_t value : integers(accelerator.gather_for_metrics(batch))) gathered.push_back(value);
  }
  json length;
  try {
    length = loader.size();
  } catch (const accelerate::ConfigError&) {
    length = "TypeError";  // how the reference says that there is no length
  }
  return {{"batches", batches},
          {"end", ends},
          {"remainder_at_end", remainder},
          {"gather_for_metrics", gather ? gathered : json()},
          {"len", length},
          {"total_batch_size", loader.total_batch_size()}};
}

json rank(const json& file) {
  const accelerate::PartialState state;
  json found = json::array();
  for (const json& row : file.at("by_world_size").at(std::to_string(state.num_processes()))) {
    const int64_t n = row[0];
    const data::DataLoaderOptions options{.batch_size = row[1], .drop_last = row[6]};
    accelerate::AcceleratorState::reset(false);
    accelerate::GradientState::reset();
    accelerate::Accelerator accelerator(
        {.cpu = true,
         .dataloader_config = {
             .split_batches = row[3],
             .dispatch_batches = row[4].is_null() ? std::nullopt : std::optional<bool>(row[4].get<bool>()),
             .even_batches = row[5]}});
    const auto run = [&](auto dataset) {
      return trace(accelerator, accelerator.prepare(data::DataLoader(std::move(dataset), options)), row[5]);
    };
    try {
      if (row[2] == "map") {
        std::vector<torch::Tensor> samples;
        for (int64_t i = 0; i < n; ++i) samples.push_back(torch::scalar_tensor(static_cast<double>(i)));
        found.push_back(run(samples));
      } else if (row[2] == "iter") {
        found.push_back(run(SizedNumbers{{n}}));
      } else {
        found.push_back(run(Numbers{n}));
      }
    } catch (const std::exception& e) {
      found.push_back({{"error", e.what()}});
    }
  }
  return found;
}

constexpr const char* kEmptyShare =
    "dispatch with fewer samples than ranks: every rank gets a row (the reference gives one rank an empty batch, and "
    "gather hangs)";
constexpr const char* kNoFullBatch =
    "dispatch and drop_last without a full global batch: no steps (the reference ends with a TypeError)";
constexpr const char* kStreamShard =
    "stream without dispatch: remainder, total_batch_size and gather_for_metrics count the samples of all ranks (the "
    "reference returns repetitions)";
constexpr const char* kLength = "the length is the number of batches that the rank gets (the reference counts others)";

/// Empty when `found` is as it should be; `reason` is set when that is not what the reference says.
std::string compare(const json& row, int64_t ranks, const json& found, const json& expected, std::string& reason) {
  const int64_t n = row[0], global = row[1].get<int64_t>() * (row[3].get<bool>() ? 1 : ranks);
  const bool stream_shard = row[2] != "map" && row[4] == json(false), even = row[5], drop = row[6];
  json all = json::array();
  for (int64_t i = 0; i < (drop ? n - n % global : n); ++i) all.push_back(i);
  if (found.contains("error")) return "an error";
  if (expected.contains("error")) {
    reason = kNoFullBatch;
    return drop && row[4] != json(false) && n < global && found["batches"].empty() ? "" : "not: no steps";
  }
  if (expected["gather_for_metrics"].is_string()) {
    reason = kEmptyShare;
    const bool right = found["batches"].size() == 1 && found["batches"][0].size() == 1 &&
                       found["gather_for_metrics"] == all && found["end"] == expected["end"];
    return n < ranks && right ? "" : "not: a row for every rank";
  }
  for (const char* field : {"batches", "end"})
    if (found[field] != expected[field]) return field;
  const json remainder = found["batches"].empty() ? json() : drop ? json(-1) : json(n % global);
  if (even && found["gather_for_metrics"] != all) return "gather_for_metrics (by its meaning)";
  const json count = found["batches"].size();
  for (const char* field : {"gather_for_metrics", "remainder_at_end", "total_batch_size", "len"}) {
    if (found[field] == expected[field]) continue;
    const bool is_length = field == std::string("len");
    if (field == std::string("total_batch_size") && expected[field].is_null() && found[field] == global)
      continue;  // the reference has none here
    if (stream_shard && !is_length && (field != std::string("remainder_at_end") || found[field] == remainder) &&
        (field != std::string("total_batch_size") || found[field] == global)) {
      reason = kStreamShard;
    } else if (is_length && expected[field] != count && found[field] == count) {
      reason = kLength;
    } else {
      return field;
    }
  }
  return "";
}

void run(const json& file, Report& report) {
  for (const auto& [world_size, rows] : file.at("by_world_size").items()) {
    const int64_t ranks = std::stoll(world_size);
    const auto found = in_ranks("prepared_dataloader", file, ranks);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::string wrong, reason;
      for (size_t r = 0; r < found.size() && wrong.empty(); ++r) {
        wrong = compare(rows[i], ranks, found[r][i], rows[i][7][r], reason);
        if (!wrong.empty()) wrong += " on rank " + std::to_string(r) + ": " + found[r][i].dump();
      }
      if (wrong.empty() && !reason.empty()) report.differs({world_size, rows[i]}, reason);
      else
        report.check({world_size, rows[i]}, wrong.empty(),
                     [&] { return world_size + " ranks, " + rows[i].dump() + "\n    wrong: " + wrong; });
    }
  }
}

const Registration registration("prepared_dataloader", {run, rank});

}  // namespace
}  // namespace conformance::prepared_dataloader_cases
