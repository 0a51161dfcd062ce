#include "timeline/trace_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>

#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/fd.hpp"

namespace accelerate::timeline {
namespace {

using nlohmann::json;

constexpr const char* kEvents = "traceEvents";

// Nanoseconds. Times may be since 1970, when the head has no base for them; what is far from that is nonsense, and
// would overflow where times and offsets are added.
constexpr int64_t kEarliest = -100'000'000'000'000'000, kLatest = 2'500'000'000'000'000'000,
                  kLatestBase = 4'000'000'000'000'000'000, kMostOffset = -kEarliest;
constexpr int64_t kMostRanks = 1'000'000;

[[noreturn]] void refuse(const std::filesystem::path& file, const std::string& problem, const std::string& hint) {
  raise<CheckpointError>("trace '{}': {}. {}", file.string(), problem, hint);
}

const json* member(const json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  return found == object.end() ? nullptr : &*found;
}

std::optional<int64_t> number(const json& object, const char* name) {
  const auto* const value = member(object, name);
  return value ? whole_number(*value) : std::nullopt;
}

std::string text(const json& value) { return value.is_string() ? value.get<std::string>() : ""; }

/// The number between two parts of a name.
std::optional<int64_t> number_in(std::string_view name, std::string_view before, std::string_view after) {
  if (!name.starts_with(before) || !name.ends_with(after) || name.size() <= before.size() + after.size())
    return std::nullopt;
  name = name.substr(before.size(), name.size() - before.size() - after.size());
  int64_t result = 0;
  const auto end = std::from_chars(name.data(), name.data() + name.size(), result);
  return end.ec == std::errc() && end.ptr == name.data() + name.size() && result >= 0 && result < kMostRanks
             ? std::optional(result)
             : std::nullopt;
}

std::optional<int64_t> rank_in_name(const std::filesystem::path& file) {
  return number_in(file.filename().native(), "profile_", ".json");
}

void take_head(TraceHead& head, const std::string& name, const json& value) {
  const auto nonsense = [&](const json& found, const std::string& expected) {
    refuse(head.file, name + " has " + show_json(found) + ", expected " + expected,
           "Was the file changed by hand? Record it again.");
  };
  if (name == "baseTimeNanoseconds") {
    head.base = whole_number(value).value_or(0);
    if (head.base < 0 || head.base > kLatestBase) nonsense(value, "nanoseconds since 1970");
  }
  if (name == "host_name") head.host = text(value);
  if (name == "distributedInfo") {
    if (const auto rank = number(value, "rank")) {
      if (*rank < 0 || *rank >= kMostRanks) nonsense(*rank, "a rank");
      head.rank = *rank;
      head.knows_rank = true;
    }
    head.world_size = number(value, "world_size").value_or(0);
    if (const auto* const backend = member(value, "backend")) head.backend = text(*backend);
  }
  if (name == "accelerate_clock") {
    const auto offset = number(value, "offset_ns"), error = number(value, "error_ns");
    if (!offset || !error || *offset < -kMostOffset || *offset > kMostOffset)
      nonsense(value, "whole numbers offset_ns and error_ns");
    head.knows_clock = true;
    head.clock_offset = *offset;
    head.clock_error = *error;
  }
  if (name != "accelerate_steps") return;
  for (const auto& step : value) {
    const auto which = number(step, "step");
    const auto* const begin = member(step, "begin_us");
    const auto* const end = member(step, "end_us");
    if (!which || !begin || !begin->is_number() || !end || !end->is_number())
      nonsense(step, "step, begin_us and end_us");
    head.steps.push_back({.number = *which, .begin = nanoseconds(*begin), .end = nanoseconds(*end)});
  }
}

}  // namespace

int64_t nanoseconds(const json& microseconds) {
  const auto whole = whole_number(microseconds);
  int64_t time = 0;
  if (whole) return __builtin_mul_overflow(*whole, 1000, &time) || time < kEarliest || time > kLatest ? 0 : time;
  const double exact = microseconds.is_number() ? microseconds.get<double>() * 1000 : 0;
  return exact > static_cast<double>(kEarliest) && exact < static_cast<double>(kLatest) ? std::llround(exact) : 0;
}

std::optional<Lasting> lasting(const json& event) {
  static const std::string kNone;
  const auto* const phase = member(event, "ph");
  const auto* const begin = member(event, "ts");
  const auto* const duration = member(event, "dur");
  const auto* const name = member(event, "name");
  if (!phase || *phase != "X" || !begin || !begin->is_number() || !duration || !duration->is_number() || !name ||
      !name->is_string())
    return std::nullopt;
  const auto* const category = member(event, "cat");
  const int64_t from = nanoseconds(*begin);
  return Lasting{.category = category && category->is_string() ? category->get_ref<const std::string&>() : kNone,
                 .name = name->get_ref<const std::string&>(),
                 .begin = from,
                 .end = from + std::max<int64_t>(0, nanoseconds(*duration))};
}

TraceHead read_trace(const std::filesystem::path& file, const std::function<void(json& event)>& take) {
  const auto opened = open_regular(file);
  if (opened.file < 0) refuse(file, opened.problem, "Check the path and the rights.");
  const Fd fd(opened.file);
  TraceHead head{.file = file};
  bool has_events = false;
  std::string piece(size_t{1} << 20, '\0');
  const JsonStream stream{.more = [&]() -> std::string_view {
                            ssize_t got = 0;
                            do got = ::read(fd.get(), piece.data(), piece.size());
                            while (got < 0 && errno == EINTR);
                            if (got < 0)
                              refuse(file, std::string("can't read it: ") + std::strerror(errno), "Check the disk.");
                            return {piece.data(), static_cast<size_t>(got)};
                          },
                          .list = kEvents,
                          .take_element = take,
                          .take_member =
                              [&](const std::string& name, const json& value) {
                                if (name == kEvents) has_events = value.is_array();
                                else take_head(head, name, value);
                              }};
  const auto problem = parse_json_stream(stream);
  if (!problem.empty())
    refuse(file, (file.extension() == ".gz" ? "it is compressed and " : "it ") + problem,
           opened.size == 0 ? "It is empty: the program ended before it was written."
                            : "A program that is stopped while it writes leaves part of a file; compressed ones have "
                              "to be unpacked by gunzip.");
  if (!has_events)
    refuse(file, "it has no list traceEvents, expected a trace as Kineto writes it",
           "Is it a file of another kind, a memory timeline for example?");
  if (!head.knows_rank) head.rank = rank_in_name(file).value_or(0);
  std::sort(head.steps.begin(), head.steps.end(),
            [](const TraceStep& a, const TraceStep& b) { return a.begin < b.begin; });
  return head;
}

std::vector<std::filesystem::path> traces_in(const std::filesystem::path& folder) {
  std::vector<std::pair<int64_t, std::filesystem::path>> ours, others;
  size_t files = 0, compressed = 0;
  for (const auto& entry : read_folder<CheckpointError>("profile", folder)) {
    ++files;
    const std::string name = entry.path().filename();
    compressed += name.ends_with(".json.gz") ? 1 : 0;
    if (const auto rank = rank_in_name(entry.path())) ours.emplace_back(*rank, entry.path());
    else if (name.ends_with(".pt.trace.json")) others.emplace_back(0, entry.path());
  }
  auto& found = ours.empty() ? others : ours;
  if (found.empty())
    raise<CheckpointError>(
        "profile '{}': found no trace among {} files{}, expected profile_<rank>.json (or *.pt.trace.json of PyTorch). "
        "{}",
        folder.string(), files, compressed ? fmt::format(" ({} are compressed)", compressed) : "",
        compressed ? "Unpack them by gunzip." : "Record them with `accelerate profile --out FOLDER PROGRAM`.");
  std::sort(found.begin(), found.end());
  std::vector<std::filesystem::path> result;
  for (auto& [rank, path] : found) result.push_back(std::move(path));
  return result;
}

}  // namespace accelerate::timeline
