#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Tensors as lists of plain numbers, as Python's tolist() makes them: a number for a tensor without dimensions, else
/// lists in lists. Whole numbers become int64_t, booleans stay such, all floating dtypes become double; tensors of any
/// device are copied to the host, which waits for them.
/// @throws ShapeError for complex and quantised tensors.
ACCELERATE_API c10::IValue listify(const at::Tensor& tensor);
/// The same for every tensor in lists, tuples and dictionaries; all else stays.
ACCELERATE_API c10::IValue listify(const c10::IValue& value);
template <class T> c10::IValue listify(const std::vector<T>& values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& value : values) list.push_back(listify(value));
  return list;
}
template <class T> c10::IValue listify(const std::map<std::string, T>& values) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, value] : values) dict.insert(name, listify(value));
  return dict;
}

}  // namespace accelerate
