#include <algorithm>
#include <limits>
#include <string>

#include "input/json.hpp"
#include "timeline/report.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::timeline {
namespace {

using nlohmann::json;

// Devices of a rank are processes of their own, as in its trace; their numbers begin above those of all ranks.
constexpr int64_t kDevices = 1'000'000, kDevicesOfRank = 1'000;
// Identifiers, by which arrows find their ends, are a rank's own.
constexpr int kIdentifierBits = 32;

/// Collects what is written, so that the disk is asked once in a while.
class Writer {
 public:
  Writer(const std::filesystem::path& file, const std::string& head) : file_("profile", file), text_(head) {}
  void add(const json& event) {
    if (any_) text_ += ",\n";
    any_ = true;
    text_ += event.dump(-1, ' ', false, json::error_handler_t::replace);
    if (text_.size() >= kMost) flush();
  }
  void finish(const std::string& tail) {
    text_ += tail;
    flush();
    file_.finish(/*flush=*/false);
  }

 private:
  static constexpr size_t kMost = size_t{1} << 20;
  void flush() {
    file_.write(text_);
    text_.clear();
  }
  AtomicFile file_;
  std::string text_;
  bool any_ = false;
};

/// Moves the events of one rank into the common timeline.
class Mover {
 public:
  Mover(const RankReport& rank, int64_t first, Writer& out)
      : rank_(rank), shift_(rank.head.base + rank.head.clock_offset - first), out_(out) {}

  void operator()(json& event) {
    if (!event.is_object()) return;
    const auto pid = event.find("pid"), phase = event.find("ph");
    // Events of no process (the spans of the recording itself) have their place in the ranks' own traces only.
    if (pid == event.end() || !whole_number(*pid) || phase == event.end()) return;
    const auto name = event.find("name");
    if (*phase == "M" &&
        (name == event.end() || *name == "process_name" || *name == "process_labels" || *name == "process_sort_index"))
      return;
    const auto category = event.find("cat");
    // The process may have a number that a device has, too; names of threads and ends of arrows have no category.
    const bool on_device = rank_.devices.contains(*whole_number(*pid)) &&
                           (category == event.end() || !category->is_string() || *phase == "f" ||
                            is_of_device(category->get_ref<const std::string&>()));
    *pid = on_device ? device(*whole_number(*pid)) : rank_.head.rank;
    if (const auto time = event.find("ts"); time != event.end())
      *time = *phase == "M" ? 0.0 : static_cast<double>(nanoseconds(*time) + shift_) / 1000;
    if (const auto id = event.find("id"); id != event.end())
      if (const auto number = whole_number(*id))
        *id = (rank_.head.rank << kIdentifierBits) + (*number & ((int64_t{1} << kIdentifierBits) - 1));
    out_.add(event);
  }

  /// The names of its processes, and their order.
  void finish() {
    const int64_t rank = rank_.head.rank;
    name_process(rank, fmt::format("rank {}{}", rank, rank_.head.host.empty() ? "" : " on " + rank_.head.host),
                 rank * kDevicesOfRank);
    for (const int64_t number : rank_.devices)
      name_process(device(number), fmt::format("rank {}, GPU {}", rank, number),
                   rank * kDevicesOfRank + 1 + number % kDevicesOfRank);
  }

 private:
  int64_t device(int64_t number) const { return kDevices + rank_.head.rank * kDevicesOfRank + number % kDevicesOfRank; }
  void name_process(int64_t pid, const std::string& name, int64_t order) {
    const json about{{"ph", "M"}, {"pid", pid}, {"tid", 0}, {"ts", 0}};
    json named = about, sorted = about;
    named.update({{"name", "process_name"}, {"args", {{"name", name}}}});
    sorted.update({{"name", "process_sort_index"}, {"args", {{"sort_index", order}}}});
    out_.add(named);
    out_.add(sorted);
  }

  const RankReport& rank_;
  int64_t shift_;
  Writer& out_;
};

}  // namespace

void merge(const Report& report, const std::filesystem::path& file) {
  int64_t first = std::numeric_limits<int64_t>::max();
  json ranks = json::array();
  for (const auto& rank : report.ranks) {
    first = std::min(first, rank.first);
    ranks.push_back({{"rank", rank.head.rank},
                     {"file", rank.head.file.filename().string()},
                     {"offset_ns", rank.head.clock_offset},
                     {"clock_known", rank.head.knows_clock}});
  }
  Writer out(file, fmt::format("{{\"schemaVersion\":1,\"displayTimeUnit\":\"ms\",\"baseTimeNanoseconds\":{},"
                               "\"accelerate_ranks\":{},\"traceEvents\":[\n",
                               first, ranks.dump(-1, ' ', false, json::error_handler_t::replace)));
  for (const auto& rank : report.ranks) {
    Mover mover(rank, first, out);
    read_trace(rank.head.file, [&](json& event) { mover(event); });
    mover.finish();
  }
  out.finish("\n]}\n");
}

}  // namespace accelerate::timeline
