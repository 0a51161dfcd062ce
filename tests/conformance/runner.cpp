#include "runner.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>

#include "accelerate/utils/error.hpp"
#include "accelerate/utils/log_sink.hpp"
#include "rank_server.hpp"
#include "ranks.hpp"

namespace conformance {

namespace fs = std::filesystem;

void Report::check(bool passed, const std::function<std::string()>& detail) {
  if (passed) {
    ++passed_;
    return;
  }
  ++failed_;
  constexpr size_t kDetails = 5;
  if (details_.size() < kDetails) details_.push_back(detail());
}

void Report::check(const json& row, bool passed, const std::function<std::string()>& detail) {
  const std::string name = name_of(row);
  const auto listed = listed_.find(name);
  met_.insert(name);
  if (listed == listed_.end()) return check(passed, detail);
  check(false, [&] {
    return passed ? "this row passes now: take it off the list of those that differ: " + name
                  : "this row differs in another way than its reason says (" + listed->second + "): " + detail();
  });
}

void Report::guarded(const json& row, const std::function<void()>& checks) {
  try {
    checks();
  } catch (const std::exception& error) {
    check(false, [&] { return "this row could not be run: " + row.dump() + "\n    " + error.what(); });
  }
}

namespace {

/// docs/differences.md, where users read of each difference.
bool is_documented(const std::string& reason) {
  static const std::string page = [] {
    std::ifstream in(CONFORMANCE_PAGE);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  return page.find("\n| " + reason + " |") != std::string::npos;
}

}  // namespace

void Report::differs(const json& row, const std::string& reason) {
  const std::string name = name_of(row);
  if (!is_documented(reason))
    check(false, [&] { return "docs/differences.md has no row for this: " + reason + "\n    " + name; });
  const auto listed = listed_.find(name);
  met_.insert(name);
  found_[name] = reason;
  if (listed == listed_.end() ? complete_ : listed->second != reason)
    check(false, [&] {
      return "this row differs from the reference and is not on the list of those that may, with this reason: " + name +
             "\n    " + reason;
    });
}

std::vector<std::string> Report::not_met() const {
  std::vector<std::string> names;
  for (const auto& [name, reason] : listed_)
    if (complete_ && !met_.contains(name)) names.push_back(name);
  return names;
}

std::string Report::name_of(const json& row) {
  const std::string text = row.dump();
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char number[20];
  std::snprintf(number, sizeof number, " #%08x", static_cast<unsigned>(hash ^ hash >> 32));
  constexpr size_t kLength = 100;
  std::string begin = text.substr(0, kLength);
  while (begin.size() < text.size() && (static_cast<unsigned char>(text[begin.size()]) & 0xc0) == 0x80)
    begin.pop_back();  // not in the middle of a letter
  return begin + number;
}

std::map<std::string, Kind>& kinds() {
  static std::map<std::string, Kind> all;
  return all;
}

std::vector<json> in_ranks(const std::string& kind, const json& file, int64_t world_size) {
  const fs::path dir = fs::path(support::scratch_dir()) / kind / std::to_string(world_size);
  fs::create_directories(dir);
  std::ofstream(dir / "cases.json") << file;
  const auto results = support::run_program({"--rank-of", kind, "--dir", dir.string()},
                                            {.world_size = world_size, .deadline = std::chrono::seconds(240)});
  std::vector<json> found;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    if (results[rank].exit_code != 0) {
      std::string text = "a rank failed:";
      for (size_t r = 0; r < results.size(); ++r)
        text += "\n[rank " + std::to_string(r) + "] exit code " + std::to_string(results[r].exit_code) + ", signal " +
                std::to_string(results[r].signal) + "\n" + results[r].output;
      throw std::runtime_error(text);
    }
    std::ifstream stream(dir / ("rank_" + std::to_string(rank) + ".json"));
    found.push_back(json::parse(stream));
  }
  return found;
}

bool throws_error(const std::function<void()>& f, std::string* what) {
  try {
    f();
  } catch (const accelerate::Error& e) {
    if (what) *what = e.what();
    return true;
  }
  return false;
}

bool close(const json& found, const json& expected, double tolerance) {
  if (expected.is_number() && found.is_number())
    return std::abs(found.get<double>() - expected.get<double>()) <= tolerance;
  if (expected.is_array() && found.is_array() && expected.size() == found.size()) {
    for (size_t i = 0; i < expected.size(); ++i)
      if (!close(found[i], expected[i], tolerance)) return false;
    return true;
  }
  if (expected.is_object() && found.is_object() && expected.size() == found.size()) {
    for (const auto& [key, value] : expected.items())
      if (!found.contains(key) || !close(found[key], value, tolerance)) return false;
    return true;
  }
  return found == expected;
}

namespace {

fs::path folder_of_cases;

}  // namespace

json companion(const std::string& name) {
  for (const fs::path& folder : {folder_of_cases, fs::path(CONFORMANCE_CASES)}) {
    std::ifstream stream(folder / (name + ".json"));
    if (stream) return json::parse(stream);
  }
  throw std::runtime_error("there is no " + name + ".json beside the cases");
}

namespace {

/// Where the lists of rows that differ are, and what to do with them.
struct Lists {
  fs::path folder;
  bool complete = false;  ///< the cases are those of which the lists were made
  bool write = false;     ///< make the lists instead of obeying them
};

fs::path list_of(const Lists& lists, const std::string& name) { return lists.folder / (name + ".json"); }

/// {reason: [names]} of a file, turned around.
Differing listed(const fs::path& file) {
  Differing result;
  std::ifstream stream(file);
  if (!stream) return result;
  const auto reasons = json::parse(stream);
  for (const auto& [reason, names] : reasons.items())
    for (const auto& row : names) result.emplace(row, reason);
  return result;
}

void write_differing(const Report& report, const fs::path& file) {
  json reasons = json::object();
  for (const auto& [name, reason] : report.found()) reasons[reason].push_back(name);
  if (reasons.empty()) fs::remove(file);
  else std::ofstream(file) << reasons.dump(1) << "\n";
}

/// Prints a file's line; true unless a row failed.
bool run_file(const fs::path& path, const Kind& kind, const Lists& lists) {
  const std::string name = path.stem().string();
  Report report(lists.write ? Differing{} : listed(list_of(lists, name)), lists.complete && !lists.write);
  std::string broken;
  try {
    std::ifstream stream(path);
    kind.run(json::parse(stream), report);
  } catch (const std::exception& e) {
    broken = e.what();
  }
  if (lists.write) write_differing(report, list_of(lists, name));
  const auto not_met = report.not_met();
  const bool good = broken.empty() && report.failed() == 0 && report.passed() > 0 && not_met.empty();
  std::cout << name << ": " << report.passed() << " passed, " << report.failed() << " failed (" << report.found().size()
            << " differ on purpose)\n";
  if (!broken.empty()) std::cout << "  the file could not be run: " << broken << "\n";
  if (broken.empty() && report.passed() == 0) std::cout << "  FAILED no row has passed\n";
  for (const auto& detail : report.details()) std::cout << "  FAILED " << detail << "\n";
  for (const auto& row : not_met)
    std::cout << "  FAILED the list of rows that differ has one that is not there: " << row << "\n";
  std::map<std::string, int64_t> counts;
  for (const auto& [row, reason] : report.found()) ++counts[reason];
  for (const auto& [reason, count] : counts) std::cout << "  " << count << " differ: " << reason << "\n";
  return good;
}

int run_rank(const std::string& kind, const fs::path& dir) {
  std::ifstream stream(dir / "cases.json");
  const json found = kinds().at(kind).rank(json::parse(stream));
  std::ofstream out(dir / ("rank_" + std::to_string(support::rank()) + ".json"));
  out << found;
  return out.good() ? 0 : 1;
}

int usage() {
  std::cerr << "usage: conformance_tests --cases DIR [--only NAME] [--differing DIR | --write-differing DIR]\n"
               "  Runs every DIR/*.json and prints one line per file. NAME is a file name with or without .json.\n"
               "  --differing: the folder with the lists of rows that differ on purpose, which then have to name all "
               "of them.\n"
               "  That is so by itself for this repository's own cases; rows of others need not be listed.\n"
               "  --write-differing: writes these lists anew, instead of obeying them.\n";
  return 64;
}

int run(const std::vector<std::string>& arguments) {
  std::map<std::string, std::string> flags;
  for (size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& flag = arguments[i];
    static const std::set<std::string> known{"--cases", "--only",      "--rank-of",
                                             "--dir",   "--differing", "--write-differing"};
    if (i + 1 == arguments.size() || !known.contains(flag)) return usage();
    flags[flag] = arguments[i + 1];
  }
  if (flags.contains("--rank-of")) return run_rank(flags["--rank-of"], flags["--dir"]);
  if (!flags.contains("--cases")) return usage();
  const fs::path folder = flags["--cases"];
  if (!fs::is_directory(folder)) {
    std::cerr << "conformance_tests: " << folder << " is no folder, expected one with *.json files\n";
    return 66;
  }
  folder_of_cases = folder;
  Lists lists{CONFORMANCE_DIFFERING, fs::equivalent(folder, CONFORMANCE_CASES)};
  if (flags.contains("--differing")) lists = {flags["--differing"], true};
  if (flags.contains("--write-differing")) lists = {flags["--write-differing"], lists.complete, true};
  std::string only = flags["--only"];
  if (only.ends_with(".json")) only.resize(only.size() - 5);
  std::map<std::string, fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".json" && (only.empty() || entry.path().stem() == only))
      files[entry.path().stem().string()] = entry.path();
  if (files.empty()) {
    std::cerr << "conformance_tests: found no " << (only.empty() ? "*" : only) << ".json in " << folder << "\n";
    return 66;
  }
  bool good = true;
  for (const auto& [name, path] : files) {
    const auto kind = kinds().find(name);
    if (kind == kinds().end()) {
      std::cout << name << ": no runner\n";
      good = good && only.empty();  // asked for by name, it must be run
    } else {
      good = run_file(path, kind->second, lists) && good;
    }
    std::cout.flush();
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) {
  return support::main_or_rank_server(argc, argv, [](int count, char** arguments) {
    accelerate::set_log_sink([](const accelerate::LogRecord&) {});  // thousands of rows ask for what is warned of
    try {
      return conformance::run({arguments + 1, arguments + count});
    } catch (const std::exception& e) {
      std::cerr << "conformance_tests: " << e.what() << "\n";
      return 1;
    }
  });
}
