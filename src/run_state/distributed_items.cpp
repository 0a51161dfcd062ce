#include "run_state/distributed_items.hpp"

#include <ATen/ops/empty.h>

#include "accelerate/comm.hpp"
#include "run_state/whole_stream.hpp"

namespace accelerate::run_state {
namespace {

bool writes_for_all() { return comm::rank() == 0; }

}  // namespace

std::string DistributedItems::name(const formats::DcpPath& path) {
  auto text = formats::dcp_name(path);
  paths_[text] = path;
  return text;
}

void DistributedItems::object(const formats::DcpPath& path, const c10::IValue& value) {
  const auto text = name(path);
  if (writes_for_all()) objects_.push_back({text, value});
}

void DistributedItems::whole(const formats::DcpPath& path, const at::Tensor& tensor) {
  const auto text = name(path);
  const auto sizes = tensor.sizes().vec();
  if (writes_for_all()) tensors_.push_back({text, sizes, formats::whole(sizes), tensor.detach()});
}

void DistributedItems::piece(const formats::DcpPath& path, const parallel::Holding& holding, const at::Tensor& values) {
  if (holding.tensor.numel() == 0)
    return whole(path, at::empty(holding.tensor.sizes(), values.options().requires_grad(false)));
  const auto text = name(path);
  if (!holding.primary) return;
  for (auto& part : boxes_of(holding, values.detach()))
    tensors_.push_back({text, holding.tensor.sizes().vec(), part.box, part.values});
}

void DistributedItems::write(const std::filesystem::path& folder) const {
  namespace fs = std::filesystem;
  const fs::path unfinished = folder.parent_path() / ("." + folder.filename().string() + ".unfinished"),
                 replaced = folder.parent_path() / ("." + folder.filename().string() + ".replaced");
  std::vector<formats::DcpRecord> records;
  on_all_ranks_or_throw([&] {
    if (writes_for_all()) formats::prepare_dcp_folder(unfinished);
  });
  on_all_ranks_or_throw([&] { records = formats::write_dcp_items(unfinished, comm::rank(), objects_, tensors_); });
  records = gather_object(records);
  on_all_ranks_or_throw([&] {
    if (!writes_for_all()) return;
    formats::write_dcp_metadata(unfinished, records, paths_);
    fs::remove_all(replaced);
    if (fs::exists(folder)) fs::rename(folder, replaced);
    fs::rename(unfinished, folder);
    fs::remove_all(replaced);
  });
}

}  // namespace accelerate::run_state
