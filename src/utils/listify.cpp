#include "accelerate/utils/listify.hpp"

#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// @param data  moves behind what has been read
template <class T> c10::IValue lists_of(const T*& data, at::IntArrayRef sizes) {
  if (sizes.empty()) return c10::IValue(*data++);
  c10::impl::GenericList list(c10::AnyType::get());
  for (int64_t i = 0; i < sizes.front(); ++i) list.push_back(lists_of(data, sizes.slice(1)));
  return list;
}

template <class T> c10::IValue listed(const at::Tensor& tensor, at::ScalarType dtype) {
  const auto plain = tensor.detach().to(at::kCPU, dtype).contiguous();
  const T* data = plain.const_data_ptr<T>();
  return lists_of(data, plain.sizes());
}

}  // namespace

c10::IValue listify(const at::Tensor& tensor) {
  if (tensor.is_complex() || tensor.is_quantized())
    raise<ShapeError>("listify: the tensor is of {}, expected real numbers; take torch::view_as_real() or dequantize()",
                      c10::toString(tensor.scalar_type()));
  if (tensor.scalar_type() == at::kBool) return listed<bool>(tensor, at::kBool);
  return tensor.is_floating_point() ? listed<double>(tensor, at::kDouble) : listed<int64_t>(tensor, at::kLong);
}

c10::IValue listify(const c10::IValue& value) {
  if (value.isTensor()) return listify(value.toTensor());
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(listify(element));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isTensorList() || value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const c10::IValue& element : value.toListRef()) list.push_back(listify(element));
    return list;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict result(dict.keyType(), c10::AnyType::get());
    for (const auto& entry : dict) result.insert(entry.key(), listify(entry.value()));
    return result;
  }
  return value;
}

}  // namespace accelerate
