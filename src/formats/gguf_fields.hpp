#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "formats/gguf_header.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {

/// Fields of the metadata below the architecture's prefix.
class GgufFields {
 public:
  GgufFields(const GgufHeader& header, const std::string& file) : header_(header), file_(file) {
    if (const auto* name = header.metadata.find_as<std::string>("general.architecture")) architecture_ = *name;
  }

  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("GGUF file '{}': {}", file_, fmt::format(what, std::forward<Args>(args)...));
  }
  const std::string& architecture() const { return architecture_; }
  std::optional<int64_t> integer(const std::string& key) const {
    return header_.metadata.integer(architecture_ + "." + key);
  }
  std::optional<double> number(const std::string& key) const {
    return header_.metadata.number(architecture_ + "." + key);
  }
  const std::string* text(const std::string& key) const {
    return header_.metadata.find_as<std::string>(architecture_ + "." + key);
  }
  int64_t need_integer(const std::string& key) const {
    const auto value = integer(key);
    if (!value)
      fail("its metadata lacks the number '{}.{}', which the model needs. It holds no model, or is damaged.",
           architecture_, key);
    return *value;
  }
  double need_number(const std::string& key) const {
    const auto value = number(key);
    if (!value)
      fail("its metadata lacks the number '{}.{}', which the model needs. It holds no model, or is damaged.",
           architecture_, key);
    return *value;
  }
  int64_t heads() const { return need_integer("attention.head_count"); }
  int64_t key_value_heads() const { return integer("attention.head_count_kv").value_or(heads()); }

  const GgufTensor* tensor(const std::string& name) const {
    const auto found = std::find_if(header_.tensors.begin(), header_.tensors.end(),
                                    [&](const GgufTensor& t) { return t.name == name; });
    return found == header_.tensors.end() ? nullptr : &*found;
  }

 private:
  const GgufHeader& header_;
  const std::string& file_;
  std::string architecture_;
};

}  // namespace accelerate::formats
