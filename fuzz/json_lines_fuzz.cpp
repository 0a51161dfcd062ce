#include <cstdlib>

#include "accelerate/trackers/memory_tracker.hpp"
#include "scratch_folder.hpp"
#include "trackers/json_lines.hpp"

// Any bytes are a file of records that any tracker can be given, and that come back as they are when they are written
// again; or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  static const ScratchFolder folder;
  const auto read = [](const std::filesystem::path& path, GeneralTracker& tracker) {
    size_t records = 0;
    read_json_lines(path, [&](const JsonLine& line) {
      if (!line.record) return;
      line.record->write(tracker, line.log_kwargs);
      ++records;
    });
    return records;
  };
  const auto path = folder.write("log.jsonl", {reinterpret_cast<const char*>(data), size});
  MemoryTracker first, second;
  size_t records = 0;
  try {
    records = read(path, first);
  } catch (const CheckpointError&) {
    return 0;
  }
  folder.write("again.jsonl", "");
  JsonLinesTracker again({.project_name = "again", .path = folder.path() / "again.jsonl"});
  again.start();
  if (read(path, again) != records) std::abort();
  again.finish();
  if (read(folder.path() / "again.jsonl", second) != records) std::abort();
  if (first.rows.size() != second.rows.size() || first.images.size() != second.images.size()) std::abort();
  return 0;
}
