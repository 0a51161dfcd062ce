#include <cstdlib>

#include "accelerate/utils/error.hpp"
#include "scratch_folder.hpp"
#include "timeline/report.hpp"

// Any bytes are traces of ranks whose steps' parts sum up to them, which have a page, and which make one trace that can
// be read again; or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  using namespace accelerate::timeline;
  static const ScratchFolder folder;
  std::vector<std::filesystem::path> traces;
  for (const auto text : files_of(data, size))
    if (traces.size() < 3)
      traces.push_back(folder.write(("profile_" + std::to_string(traces.size()) + ".json").c_str(), text));
  try {
    const auto report = analyse(traces);
    for (const auto& rank : report.ranks)
      for (const auto& step : rank.steps)
        if (step.compute + step.exposed + step.data + step.weights + step.checkpoint + step.other != step.total ||
            step.other < 0)
          std::abort();
    to_text(report);
    to_html(report, "fuzz");
    merge(report, folder.path() / "merged.json");
    read_trace(folder.path() / "merged.json", [](const nlohmann::json&) {});
  } catch (const CheckpointError&) {
  }
  return 0;
}
