#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>

#include "accelerate/checkpoint.hpp"
#include "accelerate/error.hpp"
#include "utils/atomic_file.hpp"

namespace accelerate::checkpoint {

void save_object(const c10::IValue& object, const std::filesystem::path& file) {
  // A view would drag its whole storage along, and a device that the reader may lack is no place for a file.
  const c10::IValue plain = nested::map_tensors(object, [](const at::Tensor& tensor) {
    const at::Tensor host = tensor.detach().cpu();
    return host.nbytes() == host.storage().nbytes() ? host : host.clone(at::MemoryFormat::Contiguous);
  });
  const auto bytes = torch::jit::pickle_save(plain);
  AtomicFile out("save", file);
  out.write({bytes.data(), bytes.size()});
  out.finish();
}

c10::IValue to_dict(const std::map<std::string, at::Tensor>& tensors) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  return dict;
}

c10::IValue load_object(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in) throw CheckpointError("load '" + file.string() + "': the file can't be opened; check the checkpoint folder, the file may belong to an object that was not saved");
  std::vector<char> bytes(static_cast<size_t>(in.tellg()));
  in.seekg(0);
  if (!in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) throw CheckpointError("load '" + file.string() + "': reading it failed half-way");
  try {
    return torch::jit::pickle_load(bytes);
  } catch (const std::exception& error) {
    throw CheckpointError("load '" + file.string() + "': expected a torch archive of plain data (numbers, text, tensors, lists, dicts); it may be damaged, or hold objects of Python classes, which are "
                          "never executed here. (" + std::string(error.what()).substr(0, 300) + ")");
  }
}

}  // namespace accelerate::checkpoint
