#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "accelerate/utils/error.hpp"
#include "checkpoint/universal_folder.hpp"
#include "scratch_folder.hpp"
#include "stored_zip.hpp"

// Any bytes are a parameter's file in a universal checkpoint, or a CheckpointError: a tensor that has the sizes which
// it says, as a whole and in part, and a number of steps. The first byte chooses the sizes that are wanted; the rest is
// the pickle of an archive with four storages of 64 bytes.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  using checkpointing::UniversalFolder;
  static const ScratchFolder scratch;
  const auto archive = [](std::string_view pickle) {
    std::vector<std::pair<std::string, std::string>> records = {{"m/data.pkl", std::string(pickle)}};
    for (const char* key : {"0", "1", "2", "3"})
      records.emplace_back(std::string("m/data/") + key, std::string(64, '\1'));
    return support::stored_zip(records);
  };
  static const UniversalFolder folder = [&] {
    std::filesystem::create_directories(scratch.path() / "zero" / "p");
    scratch.write("zero/optimizer_state.pt", archive("\x80\x02}."));
    return UniversalFolder(scratch.path());
  }();
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto file = archive(bytes.substr(std::min<size_t>(1, size)));
  for (const char* name : {"zero/p/fp32.pt", "zero/p/step.pt"}) scratch.write(name, file);
  static const std::vector<int64_t> wanted[] = {{16}, {4, 4}, {8, 4}, {0}, {}};
  const auto choice = size == 0 ? 5 : data[0] % 6;
  try {
    const auto stored = folder.tensor("p", UniversalFolder::kMasters, choice < 5 ? &wanted[choice] : nullptr);
    int64_t numel = 1;
    for (const auto one : stored.sizes)
      if (one < 0 || __builtin_mul_overflow(numel, one, &numel)) std::abort();
    if (numel > (1 << 20)) return 0;  // views of few bytes
    const auto whole = stored.read_whole();
    if (whole.sizes() != at::IntArrayRef(stored.sizes)) std::abort();
    if (numel > 0 && !stored.sizes.empty()) {  // the last row
      formats::DcpBox box{.offsets = std::vector<int64_t>(stored.sizes.size(), 0), .sizes = stored.sizes};
      box.offsets[0] = stored.sizes[0] - 1, box.sizes[0] = 1;
      const at::Tensor part = at::empty(box.sizes, at::TensorOptions().dtype(stored.dtype));
      stored.read(box, part);
      if (std::memcmp(part.const_data_ptr(), whole.narrow(0, box.offsets[0], 1).contiguous().const_data_ptr(),
                      part.nbytes()) != 0)
        std::abort();
    }
  } catch (const CheckpointError&) {
  }
  try {
    const auto step = folder.step("p");
    if (!step.isNone() && !step.isInt() && !step.isDouble() && !step.isTensor()) std::abort();
  } catch (const CheckpointError&) {
  }
  return 0;
}
