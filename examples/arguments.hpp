#pragma once

/// Command-line flags for the examples: `Arguments args(argc, argv); auto epochs = args.get("--epochs", 3);` then
/// `args.check();` Values are `--name value` or `--name=value`; a flag without a value is on by being there.

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace accelerate_examples {

class Arguments {
 public:
  Arguments(int argc, char** argv) : program_(argv[0]), given_(argv + 1, argv + argc), used_(given_.size(), false) {}

  /// The value of `name` as a T (a number or text; a string literal as default means text), else `fallback`.
  template <class T> auto get(const std::string& name, const T& fallback) {
    if constexpr (std::is_convertible_v<const T&, std::string>) return find(name, std::string(fallback));
    else return find(name, fallback);
  }

  bool flag(const std::string& name) {
    known_ += "\n  " + name;
    bool found = false;
    for (size_t i = 0; i < given_.size(); ++i)
      if (given_[i] == name) found = used_[i] = true;
    return found;
  }

  /// After the last get(): --help prints the flags with their defaults; anything unknown ends the program with a list
  /// of what there is.
  void check() {
    for (size_t i = 0; i < given_.size(); ++i) {
      if (used_[i]) continue;
      if (given_[i] == "--help" || given_[i] == "-h") {
        std::cout << "usage: " << program_ << " [flags]" << known_ << "\n";
        std::exit(0);
      }
      fail("does not know '" + given_[i] + "'; its flags are:" + known_);
    }
  }

 private:
  template <class T> T find(const std::string& name, T value) {
    std::ostringstream text;
    text << "\n  " << name << " (" << value << ")";
    known_ += text.str();
    for (size_t i = 0; i < given_.size(); ++i) {
      if (given_[i].starts_with(name + "=")) {
        value = parse<T>(name, given_[i].substr(name.size() + 1));
      } else if (given_[i] == name) {
        if (i + 1 == given_.size()) fail("got " + name + " without a value");
        value = parse<T>(name, given_[i + 1]);
        used_[i + 1] = true;
      } else {
        continue;
      }
      used_[i] = true;
    }
    return value;
  }

  template <class T> T parse(const std::string& name, const std::string& text) const {
    if constexpr (std::is_same_v<T, std::string>) {
      return text;
    } else {
      T value{};
      std::istringstream in(text);
      if (!(in >> value) || in.peek() != std::char_traits<char>::eof())
        fail("got '" + text + "' for " + name + ", expected a number");
      return value;
    }
  }

  [[noreturn]] void fail(const std::string& message) const {
    std::cerr << program_ << " " << message << "\n";
    std::exit(2);
  }

  std::string program_, known_;
  std::vector<std::string> given_;
  std::vector<bool> used_;
};

}  // namespace accelerate_examples
