#include "checkpoint/saved_state.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <unordered_map>

#include "accelerate/formats/safetensors.hpp"
#include "checkpoint/archive.hpp"
#include "formats/dcp.hpp"
#include "formats/input_file.hpp"
#include "formats/pt2_weights.hpp"
#include "formats/safetensors_dtypes.hpp"
#include "formats/torch_archive.hpp"
#include "formats/torch_dtypes.hpp"
#include "utils/raise.hpp"

namespace accelerate::checkpointing {
namespace {

using Dict = c10::impl::GenericDict;
using formats::DcpBox;

/// A number beside the sharded tensors, as Python has it in some versions: the count of steps.
StoredTensor constant(const at::Tensor& value) {
  return {.dtype = value.scalar_type(),
          .sizes = value.sizes().vec(),
          .bytes = std::nullopt,
          .read = [value](const DcpBox&, const at::Tensor& destination) { destination.copy_(value); },
          .read_whole = [value] { return value; }};
}
std::optional<StoredTensor> constant(const c10::IValue& value) {
  if (!value.isInt() && !value.isDouble()) return std::nullopt;
  return constant(at::empty({}, at::TensorOptions().dtype(at::kDouble)).fill_(value.toScalar()));
}

std::string key_text(const c10::IValue& key) {
  return key.isString() ? key.toStringRef() : key.isInt() ? std::to_string(key.toInt()) : std::string();
}

}  // namespace

StoredTensor stored_in(const std::shared_ptr<const formats::DcpCheckpoint>& checkpoint,
                       const formats::DcpEntry& entry) {
  const auto& info = std::get<formats::DcpTensorInfo>(entry.content);
  return {
      .dtype = formats::scalar_type(info),
      .sizes = info.sizes,
      .bytes = std::nullopt,
      .read = [checkpoint, name = entry.name](
                  const DcpBox& box, const at::Tensor& destination) { checkpoint->read_chunk(name, box, destination); },
      .read_whole = [checkpoint, name = entry.name] { return checkpoint->read_full(name); },
      .find =
          [checkpoint, name = entry.name](const DcpBox& box) {
            auto found = checkpoint->find_chunk(name, box);
            found.read = [checkpoint, read = std::move(found.read)](const at::Tensor& destination) {
              read(destination);
            };
            return found;
          }};
}

std::vector<SliceBox> parts_of(const at::Tensor& like, int64_t begin, const at::Tensor& slice) {
  // Dimensions from the largest step in memory to the smallest.
  const auto dims = static_cast<size_t>(like.dim());
  std::vector<int64_t> order(dims), back(dims), sizes(dims);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  for (size_t i = 0; i < dims; ++i)
    back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i), sizes[i] = like.size(order[i]);
  std::vector<SliceBox> parts;
  int64_t at = 0;
  for (const auto& in_memory : formats::boxes_of_range(sizes, begin, begin + slice.numel())) {
    const int64_t count =
        std::accumulate(in_memory.sizes.begin(), in_memory.sizes.end(), int64_t{1}, std::multiplies<>());
    SliceBox part{{std::vector<int64_t>(dims), std::vector<int64_t>(dims)},
                  slice.narrow(0, at, count).view(in_memory.sizes).permute(back)};
    for (size_t i = 0; i < dims; ++i)
      part.box.offsets[static_cast<size_t>(order[i])] = in_memory.offsets[i],
      part.box.sizes[static_cast<size_t>(order[i])] = in_memory.sizes[i];
    parts.push_back(std::move(part));
    at += count;
  }
  return parts;
}

formats::FoundPart find_part(const StoredTensor& stored, const DcpBox& box) {
  if (stored.find) return stored.find(box);
  formats::FoundPart found{.read = [read = stored.read, box](const at::Tensor& to) { read(box, to); }};
  if (!stored.bytes) return found;
  int64_t first = 0;
  for (size_t dim = 0; dim < box.offsets.size(); ++dim) first = first * stored.sizes[dim] + box.offsets[dim];
  found.file = stored.bytes->file;
  found.begin = stored.bytes->begin + first * static_cast<int64_t>(c10::elementSize(stored.dtype));
  return found;
}

StoredTensors open_safetensors(const std::filesystem::path& path) {
  StoredTensors tensors;
  const SafetensorsFile file(path);
  // Whole tensors are mapped: their bytes come past whoever reads the file, and he checks them.
  const auto bytes = std::make_shared<const formats::InputFile>(path);
  for (const auto& name : file.names()) {
    const auto& info = file.info(name);
    const auto* dtype = formats::find_dtype(info.dtype);
    if (!dtype->torch || dtype->packed > 1) {  // no elements to count: the reader knows, or says why not
      const at::Tensor tensor = file.tensor(name);
      tensors[name] = {.dtype = tensor.scalar_type(),
                       .sizes = tensor.sizes().vec(),
                       .bytes = std::nullopt,
                       .read = {},
                       .read_whole = {}};
    } else {
      tensors[name] = {
          .dtype = *dtype->torch,
          .sizes = info.shape,
          .bytes =
              StoredBytes{
                  .file = path, .begin = file.data_begin() + info.begin, .bytes = info.end - info.begin, .decode = {}},
          .read = {},
          .read_whole = {}};
    }
    const int64_t begin = file.data_begin() + info.begin, end = file.data_begin() + info.end;
    tensors[name].read_whole = [file, name, bytes, begin, end] {
      bytes->check(begin, end - begin);
      return file.tensor(name);
    };
    // A part isn't: pages of the file would count as this process's memory.
    if (tensors[name].bytes) {
      const formats::SavedTensor saved{.dtype = *dtype->torch,
                                       .sizes = info.shape,
                                       .strides = row_major_strides(info.shape),
                                       .begin = begin,
                                       .storage_begin = begin,
                                       .storage_bytes = end - begin};
      tensors[name].read = [bytes, saved](const DcpBox& box, const at::Tensor& destination) {
        formats::read_part(*bytes, saved, box.offsets, destination);
      };
    } else {
      tensors[name].read = [whole = tensors[name].read_whole](const DcpBox& box, const at::Tensor& destination) {
        at::Tensor part = whole();
        for (int64_t dim = 0; dim < part.dim(); ++dim)
          part = part.narrow(dim, box.offsets[static_cast<size_t>(dim)], box.sizes[static_cast<size_t>(dim)]);
        destination.copy_(part);
      };
    }
  }
  return tensors;
}

namespace {

StoredTensors tensors_of(const Archive& archive) {
  StoredTensors tensors;
  for (const auto& entry : archive.dict(archive.value, "a dict of tensors")) {
    const auto name = formats::tensor_name(entry.key());
    if (!name)
      archive.fail("found a dict whose keys are of the kind {}, not names, expected tensors by their names",
                   entry.key().tagKind());
    if (!entry.value().isTensor())
      archive.fail("found {} under '{}', expected tensors by their names", entry.value().tagKind(),
                   name->substr(0, 200));
    if (!tensors.emplace(*name, archive.stored(entry.value().toTensor())).second)
      archive.fail("found the key {0} as a number and as the text '{0}', expected tensors by their names", *name);
  }
  return tensors;
}

}  // namespace

StoredTensors open_archive(const std::filesystem::path& file) { return tensors_of(Archive(file)); }

StoredTensors open_pt2(const std::filesystem::path& path) {
  const auto file = std::make_shared<formats::InputFile>(path);
  const auto source = "load '" + path.string() + "'";
  const formats::ZipArchive archive(file, 0, file->size(), source);
  if (!formats::is_pt2(archive))
    raise<CheckpointError>("{}: found another archive, expected a program of torch.export.save", source);
  const auto found = formats::read_pt2_weights(archive, source);
  if (!found.state_dict.empty())
    return tensors_of(Archive(file, archive.record(found.state_dict), path.string() + "', '" + found.state_dict));
  StoredTensors tensors;
  for (const auto& weight : found.weights) {
    const auto dtype = formats::find_torch_dtype("torch." + weight.dtype)->type;
    const auto begin = weight.bytes.begin + weight.first * static_cast<int64_t>(c10::elementSize(dtype));
    tensors[weight.name] = stored_in([file] { return file; }, path,
                                     formats::SavedTensor{.dtype = dtype,
                                                          .sizes = weight.sizes,
                                                          .strides = weight.strides,
                                                          .begin = weight.numel > 0 ? begin : weight.bytes.begin,
                                                          .storage_begin = weight.bytes.begin,
                                                          .storage_bytes = weight.bytes.size});
  }
  return tensors;
}

StoredTensors open_distributed(const std::filesystem::path& folder) {
  const auto checkpoint = std::make_shared<const formats::DcpCheckpoint>(folder);
  StoredTensors tensors;
  const std::string prefix = "model.";
  for (const auto& entry : checkpoint->entries())
    if (entry.name.starts_with(prefix) && std::holds_alternative<formats::DcpTensorInfo>(entry.content))
      tensors[entry.name.substr(prefix.size())] = stored_in(checkpoint, entry);
  if (tensors.empty())
    raise<CheckpointError>(
        "load '{}': found no tensors under the key 'model', expected the weights of a model; it may be the folder of "
        "an optimizer",
        folder.string());
  return tensors;
}

StoredOptimizer open_optimizer_archive(const std::filesystem::path& file) {
  const Archive archive(file);
  StoredOptimizer result;
  result.source = "load '" + file.string() + "'";
  const auto dict = archive.dict(archive.value, "the dict of an optimizer");
  if (!dict.contains("state") || !dict.contains("param_groups") || !dict.at("param_groups").isList())
    archive.fail("found a dict without 'state' and a list 'param_groups', expected the state of an optimizer");
  for (const c10::IValue& item : dict.at("param_groups").toListRef()) {
    StoredOptimizer::Group group{.options = Dict(c10::StringType::get(), c10::AnyType::get()), .parameters = {}};
    for (const auto& entry : archive.dict(item, "a parameter group")) {
      if (!entry.key().isString()) archive.fail("found a parameter group whose keys are not names");
      if (entry.key().toStringRef() != "params") {
        group.options.insert(entry.key(), entry.value());
        continue;
      }
      if (!entry.value().isList()) archive.fail("found {} at 'params', expected a list", entry.value().tagKind());
      for (const c10::IValue& key : entry.value().toListRef()) {
        result.by_name = result.by_name || key.isString();
        group.parameters.push_back(key_text(key));
      }
    }
    result.groups.push_back(std::move(group));
  }
  for (const auto& entry : archive.dict(dict.at("state"), "a dict at 'state'")) {
    auto& state = result.state[key_text(entry.key())];
    for (const auto& field : archive.dict(entry.value(), "the dict of a parameter's state")) {
      if (!field.key().isString()) archive.fail("found a parameter's state whose keys are not names");
      if (field.value().isTensor()) state[field.key().toStringRef()] = archive.stored(field.value().toTensor());
      else if (const auto number = constant(field.value())) state[field.key().toStringRef()] = *number;
    }
  }
  return result;
}

StoredOptimizer open_distributed_optimizer(const std::filesystem::path& folder) {
  const auto checkpoint = std::make_shared<const formats::DcpCheckpoint>(folder);
  StoredOptimizer result;
  result.source = "load '" + folder.string() + "'";
  result.by_name = true;
  for (const auto& entry : checkpoint->entries()) {
    const auto fail = [&](const std::string& what) {
      raise<CheckpointError>(
          "{}: the path of '{}' {}, expected optimizer.state.<parameter>.<tensor> or "
          "optimizer.param_groups.<number>.<option>",
          result.source, entry.name, what);
    };
    if (!entry.path || entry.path->size() != 4) {
      // An empty dict, of an optimizer that never stepped.
      if (entry.path && entry.path->size() <= 3 && std::holds_alternative<formats::DcpLocation>(entry.content))
        continue;
      fail("is missing or of another length");
    }
    const auto& path = *entry.path;
    const auto *top = std::get_if<std::string>(&path[0]), *kind = std::get_if<std::string>(&path[1]),
               *field = std::get_if<std::string>(&path[3]);
    if (!top || !kind || !field || *top != "optimizer") fail("leads elsewhere");
    if (*kind == "state") {
      const auto* parameter = std::get_if<std::string>(&path[2]);
      if (!parameter) fail("has a number in the place of a name");
      auto& state = result.state[*parameter];
      if (std::holds_alternative<formats::DcpTensorInfo>(entry.content)) state[*field] = stored_in(checkpoint, entry);
      else if (const auto number = constant(checkpoint->read_object(entry.name))) state[*field] = *number;
    } else {
      const auto* number = std::get_if<int64_t>(&path[2]);
      if (*kind != "param_groups" || !number || *number < 0 || *number > 100000) fail("leads elsewhere");
      while (result.groups.size() <= static_cast<size_t>(*number))
        result.groups.push_back({.options = Dict(c10::StringType::get(), c10::AnyType::get()), .parameters = {}});
      auto& group = result.groups[static_cast<size_t>(*number)];
      // A learning rate may be a tensor in Python.
      const c10::IValue value = std::holds_alternative<formats::DcpTensorInfo>(entry.content)
                                    ? c10::IValue(checkpoint->read_full(entry.name))
                                    : checkpoint->read_object(entry.name);
      if (*field != "params") group.options.insert(*field, value);
      else if (value.isList())
        for (const c10::IValue& key : value.toListRef()) group.parameters.push_back(key_text(key));
      else fail("is " + value.tagKind());
    }
  }
  if (result.groups.empty())
    raise<CheckpointError>(
        "{}: found no parameter groups under the key 'optimizer', expected the state of an optimizer; it may be the "
        "folder of a model",
        result.source);
  return result;
}

}  // namespace accelerate::checkpointing
