// split_between_processes of lists, maps and tensors.
#include <torch/torch.h>

#include "accelerate/accelerator.hpp"
#include "ranks.hpp"
#include "runner.hpp"

namespace conformance::split_between_processes_cases {
namespace {

/// The reference's dictionary {"a": [0, ...], "b": ["s0", ...]}, whose values have two types.
json split_map(const accelerate::Accelerator& accelerator, int64_t n, bool padding) {
  std::map<std::string, std::vector<int64_t>> numbers;
  std::map<std::string, std::vector<std::string>> texts;
  for (int64_t i = 0; i < n; ++i) numbers["a"].push_back(i), texts["b"].push_back("s" + std::to_string(i));
  json found = accelerator.split_between_processes(numbers, padding);
  found.update(json(accelerator.split_between_processes(texts, padding)));
  return found;
}

json rank(const json& file) {
  const accelerate::Accelerator accelerator({.cpu = true});
  json found = json::array();
  for (const json& row : file.at("by_world_size").at(std::to_string(accelerator.num_processes()))) {
    const int64_t n = row[1];
    std::vector<int64_t> list;
    for (int64_t i = 0; i < n; ++i) list.push_back(i);
    if (row[0] == "list") {
      found.push_back(accelerator.split_between_processes(list, row[2]));
    } else if (row[0] == "dict") {
      found.push_back(split_map(accelerator, n, row[2]));
    } else {
      const auto part = accelerator.split_between_processes(torch::arange(n), row[2]).contiguous();
      found.push_back(std::vector<int64_t>(part.data_ptr<int64_t>(), part.data_ptr<int64_t>() + part.numel()));
    }
  }
  return found;
}

void run(const json& file, Report& report) {
  for (const auto& [world_size, rows] : file.at("by_world_size").items()) {
    const auto found = in_ranks("split_between_processes", file, std::stoll(world_size));
    for (size_t i = 0; i < rows.size(); ++i) {
      json all = json::array();
      for (const json& rank : found) all.push_back(rank[i]);
      report.check(all == rows[i][3], [&, &rows = rows] { return rows[i].dump() + "\n    found " + all.dump(); });
    }
  }
}

const Registration registration("split_between_processes", {run, rank});

}  // namespace
}  // namespace conformance::split_between_processes_cases
