#include <ATen/ops/empty.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>

#include "accelerate/checkpoint.hpp"
#include "checkpoint/archive.hpp"
#include "formats/torch_archive.hpp"
#include "formats/zip_writer.hpp"
#include "observe/trace.hpp"
#include "snapshot/put_off.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::checkpointing {

namespace {

/// Tensors on the CPU without the rest of a storage that they view, lists without element types: those would be written
/// as calls of functions that only TorchScript's own reader knows.
/// @param later  where writing is put off: who holds tensors until then
c10::IValue plain(const c10::IValue& value, snapshot::Ledger* later) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return value;
    if (later) return later->hold(tensor, snapshot::Ledger::Order::as_it_is);
    const at::Tensor host = tensor.detach().cpu();
    return host.nbytes() == host.storage().nbytes() ? host : host.clone(at::MemoryFormat::Contiguous);
  }
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const c10::IValue& item : value.toListRef()) list.push_back(plain(item, later));
    return list;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> items;
    for (const c10::IValue& item : value.toTupleRef().elements()) items.push_back(plain(item, later));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (value.isGenericDict()) {
    const auto source = value.toGenericDict();
    c10::impl::GenericDict dict(source.keyType(), c10::AnyType::get());
    for (const auto& entry : source) dict.insert(entry.key(), plain(entry.value(), later));
    return dict;
  }
  return value;
}

void write_object(const c10::IValue& value, const std::filesystem::path& file) {
  trace::Span span(trace::SpanKind::checkpoint_write, file.filename().string());
  int64_t written = 0;
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* bytes, size_t size) { pickle.append(bytes, size); }, nullptr, nullptr,
                              nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();

  AtomicFile out("save", file);
  formats::ZipWriter archive([&](std::string_view bytes) {
    out.write(bytes);
    written += static_cast<int64_t>(bytes.size());
  });
  archive.record("data.pkl", pickle);
  for (size_t i = 0; i < pickler.tensorData().size(); ++i) {
    const auto& storage = pickler.tensorData()[i].storage();
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    archive.record("data/" + std::to_string(i), bytes, [&](const formats::ZipWriter::Write& take) {
      snapshot::bytes_at_mark(storage.data(), bytes, take);
    });
  }
  archive.finish();
  out.finish();
  span.set_bytes(written);
}

}  // namespace

void save_object(const c10::IValue& object, const std::filesystem::path& file) {
  if (auto* const later = snapshot::PutOff::here())
    later->files().writes.push_back([value = plain(object, later->ledger()), file] { write_object(value, file); });
  else write_object(plain(object, nullptr), file);
}

c10::IValue to_dict(const std::map<std::string, at::Tensor>& tensors) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  return dict;
}

c10::IValue bytes_as_object(const std::string& bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::TensorOptions().dtype(at::kByte));
  std::copy(bytes.begin(), bytes.end(), tensor.data_ptr<uint8_t>());
  return tensor;
}

std::string object_as_bytes(const c10::IValue& object) {
  if (!object.isTensor() || object.toTensor().scalar_type() != at::kByte || object.toTensor().dim() != 1)
    raise<CheckpointError>(
        "load: found {}, expected a one-dimensional uint8 tensor that holds an object; the file may belong to another "
        "registered object",
        object.tagKind());
  const at::Tensor tensor = object.toTensor().contiguous();
  return {reinterpret_cast<const char*>(tensor.data_ptr<uint8_t>()), static_cast<size_t>(tensor.numel())};
}

void read_object_bytes(const c10::IValue& object, const std::function<void(ArchiveReader&)>& read) {
  const auto bytes = object_as_bytes(object);
  ArchiveReader reader(bytes, [](std::string pickled) {
    const auto file = std::make_shared<formats::InputFile>("a value of a registered object", std::move(pickled));
    return formats::TorchArchive(file, 0, file->size(), "load " + file->path().string()).value();
  });
  try {
    read(reader);
  } catch (const CommError& error) {
    raise<CheckpointError>(
        "load: the bytes of a registered object are not what this program registers ({}). Register the same objects in "
        "the same order as the program that saved, or save again.",
        error.what());
  }
}

void check_can_be_read_again(const at::Tensor& tensor) {
  if (tensor.defined() && (tensor.layout() != at::kStrided || tensor.is_quantized()))
    raise<CheckpointError>(
        "save: a registered object has a tensor that is {}, which is not read back from files. Call {} on it.",
        tensor.is_quantized() ? "quantized" : "sparse", tensor.is_quantized() ? "dequantize()" : "to_dense()");
}

c10::IValue load_object(const std::filesystem::path& path) {
  return read_object(path, formats::PickledObjects::refused);
}

c10::IValue read_object(const std::filesystem::path& path, formats::PickledObjects objects) {
  const auto file = std::make_shared<formats::InputFile>(path);
  const trace::Span span(trace::SpanKind::checkpoint_read, path.filename().string(),
                         static_cast<int64_t>(file->size()));
  return formats::TorchArchive(file, 0, file->size(), "load '" + path.string() + "'", objects).value();
}

}  // namespace accelerate::checkpointing
