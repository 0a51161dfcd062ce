#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint/saved_state.hpp"
#include "formats/input_file.hpp"
#include "formats/torch_archive.hpp"
#include "formats/zip_archive.hpp"
#include "utils/raise.hpp"

namespace accelerate::checkpointing {

inline std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  return strides;
}
/// Whether its elements lie one after the other, row major.
inline bool has_no_gaps(const formats::SavedTensor& saved) {
  int64_t next = 1;
  bool gaps = false;
  for (size_t dim = saved.sizes.size(); dim-- > 0; next *= saved.sizes[dim])
    gaps = gaps || (saved.sizes[dim] != 1 && saved.strides[dim] != next);
  return !gaps;
}

/// A tensor of a file. @param open  gives the InputFile, as a pointer, whenever some of it is read
template <class Open>
StoredTensor stored_in(const Open& open, const std::filesystem::path& path, const formats::SavedTensor& saved) {
  std::optional<StoredBytes> bytes;
  if (has_no_gaps(saved)) {
    bytes = StoredBytes{
        .file = path, .begin = saved.begin, .bytes = static_cast<int64_t>(c10::elementSize(saved.dtype)), .decode = {}};
    for (const int64_t size : saved.sizes) bytes->bytes *= size;
  }
  return {.dtype = saved.dtype,
          .sizes = saved.sizes,
          .bytes = std::move(bytes),
          .read = [open, saved](
                      const formats::DcpBox& box,
                      const at::Tensor& destination) { formats::read_part(*open(), saved, box.offsets, destination); },
          .read_whole =
              [open, saved] {
                at::Tensor whole = at::empty(saved.sizes, at::TensorOptions().dtype(saved.dtype));
                formats::read_part(*open(), saved, std::vector<int64_t>(saved.sizes.size(), 0), whole);
                return whole;
              }};
}

/// load_object(), with another treatment of Python's objects.
c10::IValue read_object(const std::filesystem::path& path, formats::PickledObjects objects);

/// A torch.save archive whose tensors are stand-ins without data until they are read.
struct Archive {
  explicit Archive(const std::filesystem::path& path,
                   formats::PickledObjects objects = formats::PickledObjects::refused)
      : Archive(std::make_shared<formats::InputFile>(path), std::nullopt, path.string(), objects) {}
  /// One that is a part of a file, or all of it. @param what  names it in messages
  Archive(std::shared_ptr<formats::InputFile> in, std::optional<formats::ZipArchive::Bytes> part, std::string what,
          formats::PickledObjects objects = formats::PickledObjects::refused)
      : file(std::move(in)), name(std::move(what)) {
    const auto place = part.value_or(formats::ZipArchive::Bytes{0, file->size()});
    value = formats::TorchArchive(file, place.begin, place.size, "load '" + name + "'", objects)
                .value([this](const formats::SavedTensor& saved) {
                  const at::Tensor stand_in =
                      at::empty(saved.sizes, at::TensorOptions().dtype(saved.dtype).device(at::kMeta));
                  places.emplace(stand_in.unsafeGetTensorImpl(), saved);
                  stand_ins.push_back(stand_in);
                  return stand_in;
                });
  }

  const formats::SavedTensor& saved(const at::Tensor& stand_in) const {
    return places.at(stand_in.unsafeGetTensorImpl());
  }
  StoredTensor stored(const at::Tensor& stand_in) const {
    return stored_in([file = file] { return file; }, file->path(), saved(stand_in));
  }
  /// A value with its tensors read.
  c10::IValue read(const c10::IValue& item) const {
    if (item.isTensor()) return stored(item.toTensor()).read_whole();
    if (item.isList()) {
      c10::impl::GenericList list(c10::AnyType::get());
      for (const c10::IValue& child : item.toListRef()) list.push_back(read(child));
      return list;
    }
    if (item.isTuple()) {
      std::vector<c10::IValue> items;
      for (const c10::IValue& child : item.toTupleRef().elements()) items.push_back(read(child));
      return c10::ivalue::Tuple::create(std::move(items));
    }
    if (!item.isGenericDict()) return item;
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& entry : item.toGenericDict()) dict.insert(entry.key(), read(entry.value()));
    return dict;
  }
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("load '{}': {}", name, fmt::format(what, std::forward<Args>(args)...));
  }
  c10::impl::GenericDict dict(const c10::IValue& item, const char* what) const {
    if (!item.isGenericDict()) fail("found {}, expected {}", item.tagKind(), what);
    return item.toGenericDict();
  }

  std::shared_ptr<formats::InputFile> file;
  std::string name;
  c10::IValue value;
  std::vector<at::Tensor> stand_ins;  ///< alive, so that no two have one address
  std::unordered_map<const at::TensorImpl*, formats::SavedTensor> places;
};

}  // namespace accelerate::checkpointing
