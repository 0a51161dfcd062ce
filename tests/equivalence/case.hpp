#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// One run of the fuzzer: a model, how it is trained, and a program of what real loops do.
namespace equivalence {

/// One line of a program: a verb and named values, `forward rows=3 data=7`.
struct Operation {
  std::string verb;
  std::map<std::string, std::string> values;

  std::string word(const std::string& name, const std::string& otherwise = "") const;
  double number(const std::string& name, double otherwise = 0) const;
  int64_t integer(const std::string& name, int64_t otherwise = 0) const;
  bool operator==(const Operation&) const = default;
};

/// Everything but the program is a setting; kSettings in case.cpp lists them with what they are when a file leaves them
/// out, which is the simplest there is.
struct Case {
  std::map<std::string, std::string> settings;
  std::vector<Operation> program;

  const std::string& operator[](const std::string& setting) const { return settings.at(setting); }
  int64_t integer(const std::string& setting) const { return std::stoll(settings.at(setting)); }
  bool operator==(const Case&) const = default;
};

/// With all settings at their simplest, and no program.
Case simplest();
/// A setting or an operation a line; '#' begins a comment. Both throw std::runtime_error that names the line.
Case parse(const std::string& text);
Case read(const std::string& file);
std::string to_text(const Case& what);

/// Setting by setting what is simpler, the simplest first: what shrinking tries.
const std::vector<std::pair<std::string, std::vector<std::string>>>& simpler_settings();

/// The wish for a draw. Empty: anything.
struct Wish {
  std::map<std::string, std::string> settings = {};  ///< these as they are
  bool plain = false;                                ///< nothing that is done to parameters or gradients by other names
};
Case draw(uint64_t seed, const Wish& wish = {});
/// The same program with SGD, a large rate and no clipping, all of which Adam and clipping would hide.
Case with_plain_sgd(Case what);

}  // namespace equivalence
