#pragma once

/// Receipts: what each setting of a run did. Made by Accelerator::receipts(), shown by `accelerate launch --receipts`.
/// docs/receipts.md tells how to read them. Needs no LibTorch.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

enum class ReceiptState {
  acted,          ///< without the setting the run would have done something else
  not_due,        ///< its occasion has not come: nothing was saved, no gradient overflowed
  without_effect  ///< it can't have done anything in this run
};
/// "acted", "not_due", "without_effect".
ACCELERATE_API const char* to_string(ReceiptState state);

/// Of one setting.
struct Receipt {
  std::string setting;   ///< as the program would write it: "dataloader_config.non_blocking"
  std::string value;     ///< that holds
  std::string source;    ///< "call", "flag --name", "file NAME", "variable NAME", or "default": nobody asked for it
  std::string expected;  ///< when it acts
  ReceiptState state = ReceiptState::not_due;
  std::string effect;  ///< its effect, with numbers; or the reason why it had none
  bool asked() const { return source != "default"; }
};

/// Of all settings, in the order of the table.
struct ACCELERATE_API Receipts {
  std::vector<Receipt> entries;

  /// The setting's receipt. @throws ConfigError when there is no such setting.
  const Receipt& operator[](std::string_view setting) const;
  /// Settings that were asked for and had no effect. `--receipts=strict` ends with exit code 65 if there are any.
  std::vector<Receipt> without_effect() const;
  /// A table of what was asked for, and one line about the rest.
  std::string text() const;
  /// All of them: {"receipts": [{"setting", "value", "source", "expected", "state", "effect"}], "without_effect": n}.
  std::string json() const;
  /// The receipts that json() wrote. @throws ConfigError for anything else.
  static Receipts from_json(const std::string& text);
};

}  // namespace accelerate
