// The equivalence fuzzer: random training programs, in real ranks, against plain LibTorch in one process. See
// docs/equivalence.md.
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "judge.hpp"
#include "layouts.hpp"
#include "random.hpp"
#include "rank_server.hpp"
#include "shrink.hpp"

namespace equivalence {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kUsage = R"(usage: equivalence [options] [FILE or FOLDER of cases ...]
Runs the cases of the files, then, with --count, --minutes or no files, cases drawn from seeds, FROM, FROM + 1, ...

  --from N|TEXT    the first seed, or a text to make it of (default: 1)
  --count N        so many seeds
  --minutes M      until so much time has passed; also ACCELERATE_EQUIVALENCE_MINUTES
  --set NAME=VALUE a setting of all cases, e.g. layout=fsdp2
  --plain          nothing done to parameters and gradients by other names than Accelerator's
  --show           print the cases instead of running them
  --keep FOLDER    where shrunk cases that failed go (default: equivalence-failures)
  --no-shrink      leave them as they are
  --stop           at the first failure
)";

struct Options {
  uint64_t from = 1;
  std::optional<int64_t> count;
  std::optional<double> minutes;
  Wish wish;
  bool show = false, shrink = true, stop = false;
  std::string keep = "equivalence-failures";
  std::vector<std::string> files;
};

/// FNV-1a, as small a number as people like to type.
uint64_t seed_of(const std::string& text) {
  if (!text.empty() && text.find_first_not_of("0123456789") == std::string::npos && text.size() < 16)
    return std::stoull(text);
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash % 1'000'000'000;
}

std::optional<Options> parse_options(const std::vector<std::string>& words) {
  Options options;
  for (size_t i = 0; i < words.size(); ++i) {
    const auto value = [&]() -> std::string {
      if (i + 1 >= words.size()) throw std::runtime_error("equivalence: " + words[i] + " needs a value");
      return words[++i];
    };
    const std::string& word = words[i];
    if (word == "--from") options.from = seed_of(value());
    else if (word == "--count") options.count = std::stoll(value());
    else if (word == "--minutes") options.minutes = std::stod(value());
    else if (word == "--plain") options.wish.plain = true;
    else if (word == "--show") options.show = true;
    else if (word == "--no-shrink") options.shrink = false;
    else if (word == "--stop") options.stop = true;
    else if (word == "--keep") options.keep = value();
    else if (word == "--set") {
      const std::string text = value();
      options.wish.settings[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
    } else if (word.starts_with("-")) {
      return std::nullopt;
    } else {
      options.files.push_back(word);
    }
  }
  return options;
}

std::vector<std::string> files_of(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const auto& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(path))
      if (entry.path().extension() == ".case") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

struct Named {
  std::string name;
  Case what;
};

class Fuzzer {
 public:
  explicit Fuzzer(const Options& options)
      : options_(options), refusals_(read_refusals(ACCELERATE_SOURCE_DIR "/docs/equivalence.md")) {}

  /// Cases of one number of ranks.
  void run(const std::vector<Named>& named) {
    std::vector<Case> cases;
    for (const auto& [name, what] : named) cases.push_back(what);
    const auto reports = run_cases(cases);
    for (size_t i = 0; i < named.size() && !done(); ++i) {
      const Verdict verdict = verdict_of(cases[i], reports[i]);
      ++counts_[verdict.kind.empty() ? "right" : verdict.failed() ? "failed" : verdict.kind];
      if (verdict.failed()) failed(named[i], verdict, reports[i]);
    }
  }
  bool done() const { return options_.stop && !failures_.empty(); }

  int end() const {
    for (const auto& [kind, names] : failures_) {
      std::printf("%zu x %s:", names.size(), kind.c_str());
      for (size_t i = 0; i < std::min<size_t>(names.size(), 8); ++i) std::printf(" %s", names[i].c_str());
      std::printf("%s\n", names.size() > 8 ? " ..." : "");
    }
    std::printf("equivalence:");
    for (const auto& [what, count] : counts_) std::printf(" %ld %s", long{count}, what.c_str());
    std::printf("\n");
    return failures_.empty() ? 0 : 1;
  }

 private:
  void failed(const Named& named, const Verdict& verdict, const Report& report) {
    auto& of_kind = failures_[verdict.kind + " (" + named.what["layout"].substr(0, 4) + ")"];
    of_kind.push_back(named.name);
    std::printf("FAILED %s: %s\n%s\n", named.name.c_str(), verdict.kind.c_str(), verdict.text.c_str());
    if (verdict.kind == "crash" || verdict.kind == "end")
      for (const auto& own : report) std::printf("%s\n", own.output.substr(0, 3000).c_str());
    // One of a kind is enough to look at.
    Case small = named.what;
    if (options_.shrink && of_kind.size() == 1) {
      const auto fails = [&](const std::vector<Case>& cases) {
        std::vector<bool> all;
        for (const auto& one : verdicts_of(cases)) all.push_back(one.kind == verdict.kind);
        return all;
      };
      const bool waits = verdict.kind == "hang" || verdict.kind == "does not end";
      small = shrink(small, fails, waits ? 8 : 40);
      std::printf("shrunk:\n%s%s\n", to_text(small).c_str(), verdicts_of({small})[0].text.c_str());
    }
    if (options_.files.empty() && of_kind.size() <= 3) {
      std::filesystem::create_directories(options_.keep);
      std::ofstream(options_.keep + "/" + named.name + ".case") << "# " << verdict.kind << "\n" << to_text(small);
    }
    std::fflush(stdout);
  }

  Verdict verdict_of(const Case& what, const Report& report) const {
    const Verdict verdict = judge(what, report, refusals_);
    if (!verdict.kind.starts_with("numbers")) return verdict;
    const auto precise = in_double(what);
    return precise && verdicts_of({*precise})[0].kind.empty() ? Verdict{"right in fp64", verdict.text} : verdict;
  }

  /// The verdicts of cases with any numbers of ranks.
  std::vector<Verdict> verdicts_of(const std::vector<Case>& cases) const {
    std::map<int64_t, std::vector<size_t>> by_ranks;
    for (size_t i = 0; i < cases.size(); ++i) by_ranks[cases[i].integer("ranks")].push_back(i);
    std::vector<Verdict> verdicts(cases.size());
    for (const auto& [ranks, indices] : by_ranks) {
      std::vector<Case> same;
      for (const size_t i : indices) same.push_back(cases[i]);
      const auto reports = run_cases(same);
      for (size_t i = 0; i < indices.size(); ++i) verdicts[indices[i]] = verdict_of(same[i], reports[i]);
    }
    return verdicts;
  }

  const Options& options_;
  const std::vector<Refusal> refusals_;
  std::map<std::string, int64_t> counts_;
  std::map<std::string, std::vector<std::string>> failures_;
};

int fuzz(const Options& options) {
  Fuzzer fuzzer(options);
  // Starting ranks costs as much as some ten cases.
  const size_t together = options.stop ? 8 : 32;
  std::map<int64_t, std::vector<Named>> waiting;
  const auto take = [&](const Named& named) {
    if (options.show) {
      std::printf("# %s\n%s\n", named.name.c_str(), to_text(named.what).c_str());
      return;
    }
    auto& same = waiting[named.what.integer("ranks")];
    same.push_back(named);
    if (same.size() < together) return;
    fuzzer.run(same);
    same.clear();
  };
  const auto finish = [&] {
    for (auto& [ranks, same] : waiting)
      if (!same.empty() && !fuzzer.done()) fuzzer.run(same);
    waiting.clear();
  };
  for (const auto& file : files_of(options.files)) take({file, read(file)});
  finish();
  if (options.files.empty() || options.minutes || options.count) {
    std::printf("equivalence: seeds from %lu on\n", static_cast<unsigned long>(options.from));
    std::fflush(stdout);
    const auto begin = Clock::now();
    const auto goes_on = [&](int64_t n) {
      if (fuzzer.done()) return false;
      if (options.minutes)
        return Clock::now() - begin < std::chrono::duration<double, std::ratio<60>>(*options.minutes);
      return n < options.count.value_or(1);
    };
    for (int64_t n = 0; goes_on(n); ++n) {
      const uint64_t seed = options.from + static_cast<uint64_t>(n);
      const Case what = draw(seed, options.wish);
      take({std::to_string(seed), what});
      take({std::to_string(seed) + "-sgd", with_plain_sgd(what)});
    }
    finish();
  }
  return options.show ? 0 : fuzzer.end();
}

int run(int argc, char** argv) {
  at::set_num_threads(1);
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 2 && words[0] == "--rank") return run_rank(words[1]);
  auto options = parse_options(words);
  if (options && !options->minutes && !options->count)
    if (const char* minutes = std::getenv("ACCELERATE_EQUIVALENCE_MINUTES")) options->minutes = std::stod(minutes);
  if (!options) {
    std::fputs(kUsage, stderr);
    return 64;
  }
  return fuzz(*options);
}

}  // namespace
}  // namespace equivalence

int main(int argc, char** argv) {
  try {
    return support::main_or_rank_server(argc, argv, equivalence::run);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 70;
  }
}
