#pragma once

#include "accelerate/utils/ops.hpp"

namespace accelerate {

/// Items [begin, end) of one of `parts` contiguous parts, whose sizes differ by at most one (the first parts are the
/// larger ones), and how many to repeat so that all are as long. Source: conformance split_between_processes.json.
struct Share {
  int64_t begin = 0, end = 0, padding = 0;

  static Share of(int64_t items, int64_t parts, int64_t part) {
    const int64_t each = items / parts, extra = items % parts;
    const int64_t begin = part * each + std::min(part, extra), size = each + (part < extra ? 1 : 0);
    return {.begin = begin, .end = begin + size, .padding = each + (extra > 0 ? 1 : 0) - size};
  }
};

/// This rank's part of a list, of a tensor's rows, or of a map of such (all of one length). With `apply_padding` the
/// last item of all is repeated where a part is shorter than the longest.
template <class T>
T split_between_processes(const T& inputs, int64_t num_processes, int64_t process_index, bool apply_padding) {
  if constexpr (nested::TensorLike<T>) {
    const int64_t rows = ops::batch_size(inputs);
    const Share share = Share::of(rows, num_processes, process_index);
    const T part = ops::slice(inputs, share.begin, share.end);
    if (!apply_padding || share.padding == 0 || rows == 0) return part;
    std::vector<at::Tensor> pieces{part};
    pieces.insert(pieces.end(), static_cast<size_t>(share.padding), ops::slice(inputs, rows - 1, rows));
    return ops::concatenate(pieces, 0);
  } else if constexpr (nested::Mapping<T>) {
    const auto length = [](const auto& value) {
      if constexpr (nested::TensorLike<std::remove_cvref_t<decltype(value)>>) return ops::batch_size(value);
      else return static_cast<int64_t>(value.size());
    };
    T parts;
    for (const auto& [key, value] : inputs) {
      if (length(value) != length(inputs.begin()->second))
        throw ShapeError("split_between_processes: found entries of " + std::to_string(length(inputs.begin()->second)) +
                         " and " + std::to_string(length(value)) +
                         " items, expected every entry of the map to have the same number");
      parts.emplace(key, split_between_processes(value, num_processes, process_index, apply_padding));
    }
    return parts;
  } else {
    static_assert(nested::detail::is_instance<T, std::vector>,
                  "split_between_processes takes a std::vector, a tensor, or a map of these");
    const Share share = Share::of(static_cast<int64_t>(inputs.size()), num_processes, process_index);
    T part(inputs.begin() + share.begin, inputs.begin() + share.end);
    if (apply_padding && !inputs.empty()) part.insert(part.end(), static_cast<size_t>(share.padding), inputs.back());
    return part;
  }
}
template <class T> T split_between_processes(const T& inputs, int64_t num_processes, int64_t process_index) {
  return split_between_processes(inputs, num_processes, process_index, false);
}

}  // namespace accelerate
