#include <ATen/core/ivalue.h>

#include "accelerate/utils/nested.hpp"
#include "utils/raise.hpp"

namespace accelerate::nested {

void visit_ivalue(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& child : value.toTupleRef().elements()) visit_ivalue(child, f);
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& child : value.toListRef()) visit_ivalue(child, f);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) visit_ivalue(entry.value(), f);
  }
}

c10::IValue map_ivalue(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f) {
  return combine_ivalues({&value}, [&](const std::vector<at::Tensor>& tensors) { return f(tensors.front()); });
}

c10::IValue combine_ivalues(const std::vector<const c10::IValue*>& values,
                            const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f) {
  const c10::IValue& first = *values.at(0);
  for (const auto* value : values)
    if (value->tagKind() != first.tagKind())
      raise<ShapeError>("combine_tensors: found {} and {} at the same place, expected equal structure in every value",
                        first.tagKind(), value->tagKind());
  const auto join = [&](auto&& pick) {
    std::vector<c10::IValue> children;
    for (const auto* value : values) children.push_back(pick(*value));
    std::vector<const c10::IValue*> pointers;
    for (const auto& child : children) pointers.push_back(&child);
    return combine_ivalues(pointers, f);
  };
  const auto equal_sizes = [&](auto&& size) {
    for (const auto* value : values)
      if (size(*value) != size(first))
        raise<ShapeError>(
            "combine_tensors: found containers of different sizes at the same place, expected equal structure in every "
            "value");
    return size(first);
  };
  if (first.isTensor()) {
    std::vector<at::Tensor> tensors;
    for (const auto* value : values) tensors.push_back(value->toTensor());
    return f(tensors);
  }
  if (first.isTuple()) {
    const size_t n = equal_sizes([](const c10::IValue& v) { return v.toTupleRef().elements().size(); });
    std::vector<c10::IValue> elements;
    for (size_t i = 0; i < n; ++i)
      elements.push_back(join([i](const c10::IValue& v) { return v.toTupleRef().elements()[i]; }));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (first.isList()) {
    const size_t n = equal_sizes([](const c10::IValue& v) { return v.toListRef().size(); });
    c10::impl::GenericList list(first.toList().elementType());
    for (size_t i = 0; i < n; ++i) list.push_back(join([i](const c10::IValue& v) { return v.toListRef()[i]; }));
    return list;
  }
  if (first.isGenericDict()) {
    const auto dict = first.toGenericDict();
    equal_sizes([](const c10::IValue& v) { return v.toGenericDict().size(); });
    c10::impl::GenericDict result(dict.keyType(), dict.valueType());
    for (const auto& entry : dict)
      result.insert(entry.key(), join([&](const c10::IValue& v) { return v.toGenericDict().at(entry.key()); }));
    return result;
  }
  return first;
}

namespace detail {

void throw_nothing_to_combine() { raise<ShapeError>("combine_tensors: got no values, expected at least one"); }

void throw_lengths_differ(size_t first, size_t other) {
  raise<ShapeError>(
      "combine_tensors: found sequences of {} and {} items at the same place, expected equal structure in every value",
      first, other);
}

void throw_key_missing() {
  raise<ShapeError>(
      "joining values: one has a key, or an element of a list, that another has not, expected the same in every value");
}

void throw_only_one_is_set() {
  raise<ShapeError>("joining values: an optional is set in one of them and empty in another");
}

}  // namespace detail
}  // namespace accelerate::nested
