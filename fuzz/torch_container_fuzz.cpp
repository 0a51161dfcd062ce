#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include <ATen/ops/empty.h>

#include "accelerate/utils/error.hpp"
#include "bigmodel/torch_file.hpp"
#include "checkpoint/python_generators.hpp"
#include "formats/torch_archive.hpp"
#include "stored_zip.hpp"

namespace {

using namespace accelerate;
using namespace accelerate::formats;

/// The values that a loader would read: within the file, as much as the tensor has elements.
at::Tensor read_within(const InputFile& file, const SavedTensor& saved) {
  const auto width = static_cast<int64_t>(c10::elementSize(saved.dtype));
  int64_t numel = 1, last = 0;
  for (size_t dim = 0; dim < saved.sizes.size(); ++dim) {
    if (saved.sizes[dim] == 0) numel = 0;
    if (saved.sizes[dim] < 0 || saved.strides.at(dim) < 0 ||
        (numel > 0 && __builtin_mul_overflow(numel, saved.sizes[dim], &numel)))
      std::abort();
    if (numel > 0) last += (saved.sizes[dim] - 1) * saved.strides[dim];
  }
  if (saved.begin < 0 || saved.begin > file.size() || numel * width > file.size()) std::abort();
  if (numel > 0 && (last + 1) * width > file.size() - saved.begin) std::abort();
  auto tensor = at::empty(saved.sizes, at::TensorOptions(saved.dtype));
  read_part(file, saved, std::vector<int64_t>(saved.sizes.size(), 0), tensor);
  return tensor;
}

void check(const ModuleTree& tree, int depth) {
  if (depth > bigmodel::FileTree::kDeepest + 1) std::abort();
  for (const auto& tensor : tree.parameters)
    for (const auto size : tensor.shape)
      if (size < 0) std::abort();
  for (const auto& child : tree.children) check(child, depth + 1);
}

}  // namespace

// Any bytes are a file of tensors that lie within it, or a CheckpointError, whether they are listed or loaded.
// A file of torch.save is taken as it is. Other inputs are the pickle in one, and the first byte says whether it is
// TorchScript's: changes seldom leave a zip intact.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  if (!bytes.starts_with("PK") && !bytes.starts_with("\x80\x02\x8a\x0a\x6c\xfc")) {
    std::vector<std::pair<std::string, std::string>> records = {
        {"m/data.pkl", bytes.substr(std::min<size_t>(1, size))}};
    for (const char* key : {"0", "1", "2", "3"})
      records.emplace_back(std::string("m/data/") + key, std::string(64, '\1'));
    if (bytes.starts_with("S")) records.emplace_back("m/code/m.py", "");
    bytes = support::stored_zip(records);
  }
  static const int memory = ::memfd_create("torch_container_fuzz", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(memory);
  if (memory < 0 || ::ftruncate(memory, 0) != 0 ||
      ::pwrite(memory, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    std::abort();
  try {
    bigmodel::FileTree tree("fuzz");
    bigmodel::add_torch_file(tree, path);
    check(tree.root(), 0);
  } catch (const CheckpointError&) {
  }
  for (const auto objects : {PickledObjects::refused, PickledObjects::numpy_numbers}) {
    try {
      const auto file = std::make_shared<InputFile>(path);
      const auto value = TorchArchive(file, 0, file->size(), "fuzz", objects).value([&](const SavedTensor& saved) {
        return read_within(*file, saved);
      });
      if (value.isGenericDict()) checkpointing::python_generators(value);
    } catch (const CheckpointError&) {
    }
  }
  return 0;
}
