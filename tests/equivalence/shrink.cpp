#include "shrink.hpp"

#include <algorithm>

#include "layouts.hpp"

namespace equivalence {
namespace {

bool possible(const Case& what) {
  const auto& ranks = layout_named(what["layout"]).ranks;
  return std::find(ranks.begin(), ranks.end(), what.integer("ranks")) != ranks.end();
}

class Shrinking {
 public:
  Shrinking(const std::function<bool(const Case&)>& fails, int64_t attempts) : fails_(fails), left_(attempts) {}

  void drop_operations(Case& what) {
    for (size_t length = what.program.size() / 2; length > 0; length /= 2)
      for (size_t begin = 0; begin < what.program.size();) {
        Case smaller = what;
        const auto first = smaller.program.begin() + static_cast<std::ptrdiff_t>(begin);
        smaller.program.erase(first, first + static_cast<std::ptrdiff_t>(std::min(length, what.program.size() - begin)));
        if (!take(what, smaller)) begin += length;
      }
  }

  void simplify_settings(Case& what) {
    for (const auto& [name, values] : simpler_settings())
      for (const auto& value : values) {
        if (what[name] == value) break;
        Case smaller = what;
        smaller.settings[name] = value;
        if (take(what, smaller)) break;
      }
  }

  void simplify_values(Case& what) {
    for (size_t i = 0; i < what.program.size(); ++i) {
      const auto values = what.program[i].values;
      for (const auto& [name, value] : values) {
        Case smaller = what;
        smaller.program[i].values.erase(name);
        take(what, smaller);
      }
    }
  }

 private:
  bool take(Case& what, const Case& smaller) {
    if (left_ <= 0 || !possible(smaller) || smaller == what) return false;
    --left_;
    if (!fails_(smaller)) return false;
    what = smaller;
    return true;
  }

  const std::function<bool(const Case&)>& fails_;
  int64_t left_;
};

}  // namespace

Case shrink(Case what, const std::function<bool(const Case&)>& fails, int64_t attempts) {
  Shrinking shrinking(fails, attempts);
  for (Case before; before != what;) {
    before = what;
    shrinking.drop_operations(what);
    shrinking.simplify_settings(what);
    shrinking.simplify_values(what);
  }
  return what;
}

}  // namespace equivalence
