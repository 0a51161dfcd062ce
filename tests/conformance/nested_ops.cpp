// pad_input_tensors and find_batch_size. Inputs of the latter are Python renderings; they are read into TorchScript
// values.
#include <torch/torch.h>

#include <cctype>

#include "accelerate/utils/ops.hpp"
#include "runner.hpp"

namespace conformance::nested_ops_cases {
namespace {

/// Reads what Python's repr() prints for tensors, dictionaries, lists, tuples, strings and integers.
class ReprReader {
 public:
  explicit ReprReader(std::string text) : text_(std::move(text)) {}

  c10::IValue read() {
    skip_space();
    if (take("tensor(")) {
      const json numbers = read_numbers();
      expect(")");
      return tensor_of(numbers);
    }
    if (take("[")) {
      c10::impl::GenericList list(c10::AnyType::get());
      for (auto& item : items("]")) list.push_back(item);
      return list;
    }
    if (take("(")) return c10::ivalue::Tuple::create(items(")"));
    if (take("{")) {
      c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
      while (!take("}")) {
        const c10::IValue key = read();
        expect(":");
        dict.insert(key, read());
        take(",");
      }
      return dict;
    }
    if (take("'")) {
      const size_t end = text_.find('\'', at_);
      const std::string word = text_.substr(at_, end - at_);
      at_ = end + 1;
      return word;
    }
    if (std::isdigit(static_cast<unsigned char>(text_[at_]))) return read_numbers().get<int64_t>();
    return text_;  // a string that was printed without quotes
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool take(const std::string& token) {
    skip_space();
    if (text_.compare(at_, token.size(), token) != 0) return false;
    at_ += token.size();
    return true;
  }
  void expect(const std::string& token) {
    if (!take(token)) throw std::runtime_error("expected '" + token + "' at " + std::to_string(at_) + " of: " + text_);
  }
  std::vector<c10::IValue> items(const std::string& end) {
    std::vector<c10::IValue> all;
    while (!take(end)) {
      all.push_back(read());
      take(",");
    }
    return all;
  }
  json read_numbers() {
    if (take("[")) {
      json list = json::array();
      while (!take("]")) {
        list.push_back(read_numbers());
        take(",");
      }
      return list;
    }
    skip_space();
    size_t used = 0;
    const std::string rest = text_.substr(at_, 40);
    const double number = std::stod(rest, &used);
    const bool integer = rest.substr(0, used).find('.') == std::string::npos;
    at_ += used;
    return integer ? json(static_cast<int64_t>(number)) : json(number);
  }
  static torch::Tensor tensor_of(const json& numbers) {
    std::vector<int64_t> sizes;
    for (const json* level = &numbers; level->is_array(); level = &(*level)[0]) {
      sizes.push_back(static_cast<int64_t>(level->size()));
      if (level->empty()) break;
    }
    return torch::zeros(sizes);
  }

  std::string text_;
  size_t at_ = 0;
};

/// `expected`: a number, null, or {"error": ...}.
json outcome(const std::function<json()>& f) {
  json found;
  std::string what;
  if (throws_error([&] { found = f(); }, &what)) return {{"error", what}};
  return found;
}

bool same(const json& found, const json& expected) {
  return expected.is_object() ? found.contains("error") : found == expected;
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("pad_input_tensors")) {
    const int64_t rows = row[0];
    const auto padded = accelerate::pad_input_tensors(torch::ones({rows, 2}), rows, row[1].get<int64_t>());
    const bool right = json(padded.sizes().vec()) == row[2] && padded.slice(0, 0, rows).eq(1).all().item<bool>() &&
                       padded.slice(0, rows).eq(0).all().item<bool>();
    report.check(
        right, [&] { return "pad_input_tensors " + row.dump() + "\n    found " + json(padded.sizes().vec()).dump(); });
  }
  for (const json& row : file.at("find_batch_size")) {
    const c10::IValue value = ReprReader(row[0].get<std::string>()).read();
    const json found = outcome([&]() -> json { return accelerate::find_batch_size(value); });
    const json ignorant = outcome([&]() -> json {
      const auto size = accelerate::ignorant_find_batch_size(value);
      return size ? json(*size) : json();
    });
    if (row[1].is_object() && found.is_number()) {
      report.differs(
          row,
          "values that are no tensors are passed over when the batch size is looked for; the reference fails on the "
          "first of them");
      continue;
    }
    report.check(row, same(found, row[1]) && same(ignorant, row[2]), [&] {
      return "find_batch_size " + row.dump() + "\n    found " + found.dump() + " " + ignorant.dump();
    });
  }
}

const Registration registration("nested_ops", {run});

}  // namespace
}  // namespace conformance::nested_ops_cases
