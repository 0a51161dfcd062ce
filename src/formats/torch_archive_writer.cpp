#include <algorithm>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include "formats/torch_archive.hpp"
#include "formats/torch_dtypes.hpp"
#include "formats/zip_writer.hpp"
#include "snapshot/ledger.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {

void TorchPickle::tensor(at::ScalarType dtype, const std::vector<int64_t>& sizes, bool requires_grad,
                         std::function<at::Tensor()> read) {
  const auto* row = find_torch_dtype(dtype);
  if (!row)
    raise<CheckpointError>(
        "writing a torch archive: found a tensor of dtype {}, which Python's files have no plain form for. Convert it.",
        c10::toString(dtype));
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t numel = 1;
  for (size_t dim = sizes.size(); dim-- > 0; numel *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = numel;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) numel = 0;
  const auto numbers = [&](const std::vector<int64_t>& values) {
    mark();
    for (const auto value : values) integer(value);
    tuple_of_mark();
  };

  const auto* typed = storage_of(*row);
  global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3"), mark();
  mark(), text("storage");
  if (typed) global("torch", std::string(typed->global.substr(typed->global.find('.') + 1)));
  else global("torch.storage", "UntypedStorage");
  text(std::to_string(storages_.size())), text("cpu");
  integer(typed ? numel : numel * static_cast<int64_t>(c10::elementSize(dtype)));
  tuple_of_mark(), persistent();
  integer(0), numbers(sizes), numbers(strides), boolean(requires_grad);
  global("collections", "OrderedDict"), empty_tuple(), reduce();  // backward hooks
  if (!typed) global("torch", std::string(row->name.substr(row->name.find('.') + 1)));
  tuple_of_mark(), reduce();
  storages_.push_back(std::move(read));
}

void TorchPickle::value(const c10::IValue& item) {
  if (item.isNone()) return none();
  if (item.isBool()) return boolean(item.toBool());
  if (item.isInt()) return integer(item.toInt());
  if (item.isDouble()) return real(item.toDouble());
  if (item.isString()) return text(item.toStringRef());
  if (item.isTensor() && item.toTensor().defined()) {
    const auto& source = item.toTensor();
    if (source.layout() != at::kStrided || source.is_meta())
      throw CheckpointError(
          "writing a torch archive: found a tensor that is sparse or has no data. Call to_dense() on it, or "
          "materialise it.");
    return tensor(source.scalar_type(), source.sizes().vec(), source.requires_grad(), [source] { return source; });
  }
  if (item.isList()) {
    empty_list(), mark();
    for (const c10::IValue& child : item.toListRef()) value(child);
    return append_to_mark();
  }
  if (item.isTuple()) {
    mark();
    for (const c10::IValue& child : item.toTupleRef().elements()) value(child);
    return tuple_of_mark();
  }
  if (item.isGenericDict()) {
    empty_dict(), mark();
    for (const auto& entry : item.toGenericDict()) value(entry.key()), value(entry.value());
    return set_items_to_mark();
  }
  raise<CheckpointError>(
      "writing a torch archive: found {}, expected numbers, strings, None, tensors, lists, tuples or dicts.",
      item.tagKind());
}

void TorchPickle::hold(snapshot::Ledger& ledger) {
  for (auto& read : storages_)
    read = [held = ledger.hold(std::exchange(read, nullptr)(), snapshot::Ledger::Order::row_major)] { return held; };
}

void write_torch_archive(TorchPickle&& pickle, const std::function<void(std::string_view)>& write) {
  ZipWriter archive(write);
  // The order and the small records are those of torch.save.
  archive.record("data.pkl", pickle.finish());
  archive.record(".format_version", "1");
  archive.record(".storage_alignment", "64");
  archive.record("byteorder", "little");
  for (size_t i = 0; i < pickle.storages_.size(); ++i) {
    const auto tensor =
        std::exchange(pickle.storages_[i], nullptr)().detach().cpu().resolve_conj().resolve_neg().contiguous();
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    archive.record("data/" + std::to_string(i), bytes, [&](const ZipWriter::Write& take) {
      snapshot::bytes_at_mark(tensor.const_data_ptr(), bytes, take);
    });
  }
  archive.finish();
}

}  // namespace accelerate::formats
