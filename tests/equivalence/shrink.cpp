#include "shrink.hpp"

#include <algorithm>

#include "layouts.hpp"

namespace equivalence {
namespace {

bool possible(const Case& what) {
  const auto& layout = layout_named(what["layout"]);
  const bool leaves_out = std::any_of(what.program.begin(), what.program.end(), [](const Operation& operation) {
    return operation.integer("part") + operation.integer("spread") + operation.integer("replicas") != 0;
  });
  return std::find(layout.ranks.begin(), layout.ranks.end(), what.integer("ranks")) != layout.ranks.end() &&
         std::count(layout.precisions.begin(), layout.precisions.end(), what["precision"]) > 0 &&
         (layout.optimizer.empty() || layout.optimizer == what["optimizer"]) && (layout.finds_unused || !leaves_out);
}

class Shrinking {
 public:
  Shrinking(const Fails& fails, int64_t rounds) : fails_(fails), rounds_(rounds) {}

  /// Chunks that can go, one of them at a time and then all together.
  void drop_operations(Case& what) {
    for (size_t length = std::max<size_t>(what.program.size() / 2, 1); length > 0; length /= 2) {
      std::vector<Case> smaller;
      std::vector<size_t> begins;
      for (size_t begin = 0; begin < what.program.size(); begin += length) {
        smaller.push_back(without(what, begin, length));
        begins.push_back(begin);
      }
      const auto failing = ask(smaller);
      Case all = what;
      std::vector<Case> candidates;
      for (size_t i = smaller.size(); i-- > 0;)
        if (failing[i]) {
          all = without(all, begins[i], length);
          candidates.push_back(smaller[i]);
        }
      if (candidates.empty()) continue;
      what = candidates.size() > 1 && ask({all})[0] ? all : candidates.back();
    }
  }

  /// The simplest value of each setting with which it fails.
  void simplify_settings(Case& what) {
    for (bool simpler = true; simpler;) {
      std::vector<Case> smaller;
      for (const auto& [name, values] : simpler_settings())
        for (const auto& value : values) {
          if (what[name] == value) break;
          smaller.push_back(what);
          smaller.back().settings[name] = value;
        }
      simpler = take_first(what, smaller);
    }
  }

  void simplify_values(Case& what) {
    for (bool simpler = true; simpler;) {
      std::vector<Case> smaller;
      for (size_t i = 0; i < what.program.size(); ++i)
        for (const auto& [name, value] : what.program[i].values) {
          smaller.push_back(what);
          smaller.back().program[i].values.erase(name);
        }
      simpler = take_first(what, smaller);
    }
  }

 private:
  static Case without(Case what, size_t begin, size_t length) {
    const auto first = what.program.begin() + static_cast<std::ptrdiff_t>(begin);
    what.program.erase(first, first + static_cast<std::ptrdiff_t>(std::min(length, what.program.size() - begin)));
    return what;
  }
  std::vector<bool> ask(const std::vector<Case>& cases) {
    if (cases.empty() || rounds_-- <= 0) return std::vector<bool>(cases.size(), false);
    return fails_(cases);
  }
  bool take_first(Case& what, std::vector<Case> smaller) {
    std::erase_if(smaller, [](const Case& one) { return !possible(one); });
    const auto failing = ask(smaller);
    const auto first = std::find(failing.begin(), failing.end(), true);
    if (first == failing.end()) return false;
    what = smaller[static_cast<size_t>(first - failing.begin())];
    return true;
  }

  const Fails& fails_;
  int64_t rounds_;
};

}  // namespace

Case shrink(Case what, const Fails& fails, int64_t rounds) {
  Shrinking shrinking(fails, rounds);
  for (Case before; before != what;) {
    before = what;
    shrinking.drop_operations(what);
    shrinking.simplify_settings(what);
    shrinking.simplify_values(what);
  }
  return what;
}

}  // namespace equivalence
