#include "job.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "accelerate/utils/error.hpp"
#include "ours.hpp"
#include "ranks.hpp"

namespace equivalence {
namespace {

// A rank writes what it sees as it goes, so that nothing is lost with it: lines of text, a value's bytes behind each.

std::string file_of(const std::string& folder, size_t index, int64_t rank) {
  return folder + "/" + std::to_string(index) + "." + std::to_string(rank);
}

void put(std::ostream& out, const Observation& seen) {
  out << "saw " << seen.operation << " " << seen.name << " " << static_cast<int>(seen.value.scalar_type()) << " "
      << seen.value.dim();
  for (const int64_t size : seen.value.sizes()) out << " " << size;
  out << "\n";
  out.write(static_cast<const char*>(seen.value.const_data_ptr()), static_cast<std::streamsize>(seen.value.nbytes()));
}

/// The report that a rank has written; a part that it had not finished is left out.
RankReport get(const std::string& file) {
  RankReport report;
  std::ifstream in(file, std::ios::binary);
  for (std::string word; in >> word;) {
    if (word == "saw") {
      Observation seen;
      int type = 0;
      size_t dims = 0;
      in >> seen.operation >> seen.name >> type >> dims;
      std::vector<int64_t> sizes(in ? dims : 0);
      for (auto& size : sizes) in >> size;
      in.get();
      if (!in) break;
      seen.value = at::empty(sizes, at::TensorOptions().dtype(static_cast<at::ScalarType>(type)));
      in.read(static_cast<char*>(seen.value.mutable_data_ptr()), static_cast<std::streamsize>(seen.value.nbytes()));
      if (!in) break;
      report.seen.push_back(std::move(seen));
    } else if (word == "finished") {
      report.finished = true;
    } else if (word == "error") {
      in >> report.error;
      std::getline(in, report.error_text, '\0');
    }
  }
  return report;
}

const char* class_of(const accelerate::Error& error) {
  switch (error.kind()) {
    case accelerate::ErrorKind::config:
      return "ConfigError";
    case accelerate::ErrorKind::shape:
      return "ShapeError";
    case accelerate::ErrorKind::checkpoint:
      return "CheckpointError";
    case accelerate::ErrorKind::comm:
      return "CommError";
    case accelerate::ErrorKind::launch:
      return "LaunchError";
    case accelerate::ErrorKind::resource:
      return "ResourceError";
    case accelerate::ErrorKind::not_built:
      return "NotBuiltError";
    case accelerate::ErrorKind::internal:
      return "InternalError";
  }
  return "Error";
}

/// A case may take so long, on a machine that has other things to do, and so may the end of a process. An error of ours
/// comes 15 seconds after what it is about.
constexpr unsigned kSeconds = 50;

std::string text_of_end(const support::RankResult& result) {
  if (result.signal == SIGALRM) return "killed: it did not go on for " + std::to_string(kSeconds) + " s";
  if (result.output.find("[killed: the deadline") != std::string::npos) return "killed: it did not end";
  if (result.signal != 0) return "signal " + std::to_string(result.signal);
  return result.exit_code == 0 ? "" : "exit status " + std::to_string(result.exit_code);
}

/// By another program of this machine, between the choice of the port and its use.
bool port_was_taken(const Report& report) {
  return std::any_of(report.begin(), report.end(), [](const RankReport& rank) {
    return rank.error_text.find("rendezvous: can't listen on") != std::string::npos;
  });
}

/// Runs the first cases, up to the one that fails. @return how many are done with
size_t run_some(const std::vector<Case>& cases, size_t from, std::vector<Report>& reports) {
  namespace fs = std::filesystem;
  const std::string folder = support::scratch_dir() + "/job";
  fs::remove_all(folder);
  fs::create_directory(folder);
  for (size_t i = from; i < cases.size(); ++i)
    std::ofstream(folder + "/" + std::to_string(i - from)) << support::free_port() << "\n" << to_text(cases[i]);
  const int64_t ranks = cases[from].integer("ranks");
  const auto results = support::run_program(
      {"--rank", folder},
      {.world_size = ranks, .deadline = std::chrono::seconds(2 * kSeconds * (cases.size() - from + 1))});
  for (size_t i = 0; from + i < cases.size(); ++i) {
    Report report;
    bool failed = false, last = from + i + 1 == cases.size();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      report.push_back(get(file_of(folder, i, rank)));
      failed |= !report.back().finished;
    }
    if (failed && port_was_taken(report)) return i;  // again, with another one
    if (failed || last)
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto& result = results[static_cast<size_t>(rank)];
        auto& own = report[static_cast<size_t>(rank)];
        own.output = result.output;
        if (own.error.empty()) own.end = text_of_end(result);
        else if (result.signal != 0) own.end = text_of_end(result);
      }
    reports.push_back(std::move(report));
    if (failed) return i + 1;
  }
  return cases.size() - from;
}

}  // namespace

std::vector<Report> run_cases(const std::vector<Case>& cases) {
  std::vector<Report> reports;
  while (reports.size() < cases.size()) run_some(cases, reports.size(), reports);
  return reports;
}

int run_rank(const std::string& folder) {
  for (size_t index = 0; std::filesystem::exists(folder + "/" + std::to_string(index)); ++index) {
    ::alarm(kSeconds);  // the system ends what stands still, whatever it waits for
    std::ifstream in(folder + "/" + std::to_string(index));
    std::string port;
    std::getline(in, port);
    const Case what = parse(std::string(std::istreambuf_iterator<char>(in), {}));
    ::setenv("MASTER_PORT", port.c_str(), 1);
    ::setenv("ACCELERATE_SHARED_MEMORY", what["transport"] == "memory" ? "1" : "0", 1);
    // Half of the checkpoints in shards have a layout instead of a list of all parts.
    ::setenv("ACCELERATE_DCP_LISTED_PARTS", what.integer("seed") % 2 != 0 ? "0" : "1000000", 1);
    std::ofstream out(file_of(folder, index, support::rank()), std::ios::binary);
    const auto error = [&](const char* kind, const std::exception& exception) {
      out << "error " << kind << " " << exception.what() << '\0' << std::flush;
      return 3;
    };
    try {
      const auto machine = make_ours(what, folder + "/" + std::to_string(index) + "_saved",
                                     [&](int64_t, const Observation& seen) { put(out, seen); });
      interpret(what, *machine);
    } catch (const accelerate::Error& exception) {
      return error(class_of(exception), exception);
    } catch (const std::exception& exception) {
      return error("foreign", exception);
    }
    leave_job();
    out << "finished\n" << std::flush;
  }
  return 0;
}

}  // namespace equivalence
