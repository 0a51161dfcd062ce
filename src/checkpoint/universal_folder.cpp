#include "checkpoint/universal_folder.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "input/read_file.hpp"

namespace accelerate::checkpointing {
namespace {

namespace fs = std::filesystem;
using formats::DcpBox;

constexpr const char* kEnd = ".pt";

int64_t numel_in(const std::vector<int64_t>& sizes) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;  // of sizes that were checked
  return numel;
}

/// Rows of zeros behind those of the file.
StoredTensor with_rows(const StoredTensor& stored, const std::vector<int64_t>& sizes) {
  const int64_t rows = stored.sizes[0];
  return {.dtype = stored.dtype,
          .sizes = sizes,
          .bytes = std::nullopt,
          .read =
              [stored, rows](const DcpBox& box, const at::Tensor& destination) {
                at::NoGradGuard no_grad;
                const int64_t there = std::clamp<int64_t>(rows - box.offsets[0], 0, box.sizes[0]);
                destination.narrow(0, there, box.sizes[0] - there).zero_();
                if (there == 0) return;
                DcpBox part = box;
                part.sizes[0] = there;
                stored.read(part, destination.narrow(0, 0, there));
              },
          .read_whole =
              [stored, rows, sizes] {
                const at::Tensor whole = at::zeros(sizes, at::TensorOptions().dtype(stored.dtype));
                whole.narrow(0, 0, rows).copy_(stored.read_whole());
                return whole;
              }};
}

bool may_have_rows(const std::vector<int64_t>& found, const std::vector<int64_t>& wanted) {
  return !found.empty() && found.size() == wanted.size() && found[0] < wanted[0] &&
         std::equal(found.begin() + 1, found.end(), wanted.begin() + 1);
}

}  // namespace

bool UniversalFolder::is_one(const fs::path& folder) { return is_folder(folder / kFolder); }

UniversalFolder::UniversalFolder(const fs::path& folder)
    : folder_(folder / kFolder),
      common_(std::make_shared<const Archive>(folder_ / "optimizer_state.pt", formats::PickledObjects::as_data)) {}

fs::path UniversalFolder::folder_of(const std::string& parameter) const {
  check_inside("load", folder_, folder_ / parameter);
  return folder_ / parameter;
}

StoredTensor UniversalFolder::tensor(const std::string& parameter, const std::string& kind,
                                     const std::vector<int64_t>* sizes) const {
  const fs::path file = folder_of(parameter) / (kind + kEnd);
  const Archive archive(file, formats::PickledObjects::as_data);
  c10::IValue value = archive.value;
  bool vocabulary = false;
  if (value.isGenericDict()) {  // else the tensor itself, flat: of a conversion from stage 3
    const auto dict = value.toGenericDict();
    const auto marked = dict.find("vocab_tensor"), found = dict.find("param");
    vocabulary = marked != dict.end() && marked->value().isBool() && marked->value().toBool();
    if (found == dict.end()) archive.fail("found no 'param', expected a file of a universal checkpoint");
    value = found->value();
  }
  if (!value.isTensor()) archive.fail("found {}, expected a tensor, or one at 'param'", value.tagKind());
  formats::SavedTensor saved = archive.saved(value.toTensor());
  const auto open = [file] { return std::make_shared<const formats::InputFile>(file); };
  if (!sizes || saved.sizes == *sizes) return stored_in(open, file, saved);
  if (vocabulary && may_have_rows(saved.sizes, *sizes)) return with_rows(stored_in(open, file, saved), *sizes);
  if (has_no_gaps(saved) && numel_in(saved.sizes) == numel_in(*sizes)) {
    saved.sizes = *sizes;
    saved.strides = row_major_strides(*sizes);
  }
  return stored_in(open, file, saved);
}

std::vector<std::string> UniversalFolder::kinds(const std::string& parameter) const {
  std::vector<std::string> result;
  for (const auto& entry : read_folder<CheckpointError>("load", folder_of(parameter)))
    if (const auto kind = entry.path().stem().string();
        entry.path().extension() == kEnd && kind != kMasters && kind != kStep)
      result.push_back(kind);
  std::sort(result.begin(), result.end());
  return result;
}

c10::IValue UniversalFolder::step(const std::string& parameter) const {
  const fs::path file = folder_of(parameter) / (std::string(kStep) + kEnd);
  if (!is_there(file)) return {};
  const Archive archive(file, formats::PickledObjects::as_data);
  const auto& value = archive.value;
  const bool is_number =
      value.isInt() || value.isDouble() || (value.isTensor() && archive.saved(value.toTensor()).sizes.empty());
  if (!is_number) archive.fail("found {}, expected a number of steps", value.tagKind());
  return archive.read(value);
}

}  // namespace accelerate::checkpointing
