#include "accelerator/model_summary.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/comm.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/residency/deferred.hpp"
#include "memory/file_mappings.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/unit.hpp"

namespace accelerate {
namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(c10::elementSize(tensor.scalar_type()));
}

/// The home of a residency's member.
const residency::Home* home_of(const at::Tensor& tensor) {
  const auto* const member = residency::Member::of(tensor);
  if (!member) return nullptr;
  for (const auto& part : member->unit().parts())
    for (const auto& other : part.members)
      if (other.get() == member) return part.home.get();
  return nullptr;
}

/// Fills in where the tensor is and what this rank keeps of it.
void find(TensorSummary& summary, const at::Tensor& tensor, const parallel::Held* holding, const FileMappings& files) {
  if (holding && holding->in_pieces()) {
    const at::Tensor& piece = holding->value;
    summary.dtype = piece.scalar_type();
    summary.bytes = summary.numel * static_cast<int64_t>(piece.element_size());
    summary.bytes_here = piece.is_meta() ? 0 : bytes_of(piece);
    summary.place = piece.is_cpu() && !tensor.is_cpu() ? "sharded, on the host" : "sharded";
    return;
  }
  summary.dtype = tensor.scalar_type();
  summary.bytes = summary.bytes_here = bytes_of(tensor);
  const auto* const home = home_of(tensor);
  if (const auto* weight = home ? home->encoded() : nullptr) {
    summary.place = fmt::format("{} codes", codes::name(weight->codes.encoding));
    summary.bytes = weight->bytes();
    summary.bytes_here = summary.bytes / weight->sharers;
    if (!weight->is_here()) summary.place += ", another stage", summary.bytes_here = 0;
    else if (weight->sharers > 1) summary.place += ", sharded";
    else if (!residency::Member::of(weight->codes.data) && files.hold(weight->codes.data.const_data_ptr()))
      summary.place += ", file", summary.bytes_here = 0;
    return;
  }
  const auto place = home ? home->place() : residency::BytesPlace::memory;
  if (place == residency::BytesPlace::host) summary.place = "host";
  else if (place == residency::BytesPlace::file) summary.place = "file", summary.bytes_here = 0;
  else if (is_deferred(tensor)) summary.place = "deferred", summary.bytes_here = 0;
  else if (tensor.is_cpu() && tensor.has_storage() && files.hold(tensor.storage().data()))
    summary.place = "file", summary.bytes_here = 0;
  else summary.place = tensor.device().str(), summary.bytes_here = tensor.is_meta() ? 0 : summary.bytes;
}

template <class T> void add_once(std::vector<T>& list, const T& value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

using Indices = std::unordered_map<const at::TensorImpl*, size_t>;

Indices summarize_tensors(const ModelRef& model, const parallel::Engine* engine, ModelSummary& summary) {
  std::unordered_map<const at::TensorImpl*, parallel::Held> holdings;
  if (engine)
    for (auto& holding : engine->pieces()) holdings.emplace(holding.tensor.unsafeGetTensorImpl(), std::move(holding));
  const FileMappings files;
  std::unordered_set<const at::TensorImpl*> parameters;
  for (const auto& [name, tensor] : model.parameters()) parameters.insert(tensor.unsafeGetTensorImpl());
  Indices indices;
  for (const auto& [name, tensor] : model.state()) {
    const auto* const identity = tensor.unsafeGetTensorImpl();
    const auto [known, fresh] = indices.try_emplace(identity, summary.tensors.size());
    if (!fresh) {
      add_once(summary.tensors[known->second].tied, name);
      continue;
    }
    const auto holding = holdings.find(identity);
    auto& one = summary.tensors.emplace_back();
    one.name = name;
    one.shape = tensor.sizes().vec();
    one.parameter = parameters.contains(identity);
    one.trainable = one.parameter && tensor.requires_grad();
    one.numel = tensor.numel();
    find(one, tensor, holding == holdings.end() ? nullptr : &holding->second, files);
  }
  return indices;
}

void add(ModuleSummary& module, const TensorSummary& tensor) {
  if (tensor.parameter) module.parameters += tensor.numel;
  if (tensor.trainable) module.trainable += tensor.numel;
  module.bytes += tensor.bytes;
  module.bytes_here += tensor.bytes_here;
  add_once(module.dtypes, tensor.dtype);
  add_once(module.places, tensor.place);
}

void summarize_modules(const ModelRef& model, const Indices& indices, ModelSummary& summary) {
  const auto tree = model.submodules();
  std::unordered_map<std::string, size_t> of_path;
  for (size_t i = 0; i < tree.size(); ++i) of_path.emplace(tree[i].path, i);
  std::vector<std::set<size_t>> within(tree.size());
  std::vector<std::vector<std::pair<std::string, size_t>>> own(tree.size());
  for (const auto& [name, tensor] : model.state()) {
    const auto dot = name.rfind('.');
    const auto place = of_path.find(dot == std::string::npos ? "" : name.substr(0, dot));
    if (place == of_path.end()) continue;
    const size_t index = indices.at(tensor.unsafeGetTensorImpl());
    own[place->second].emplace_back(dot == std::string::npos ? name : name.substr(dot + 1), index);
  }
  for (size_t i = tree.size(); i-- > 0;) {  // children come after their parents
    for (const auto& [name, index] : own[i]) within[i].insert(index);
    if (tree[i].parent >= 0) within[static_cast<size_t>(tree[i].parent)].insert(within[i].begin(), within[i].end());
  }
  std::unordered_set<const void*> known;
  std::vector<int64_t> depth(tree.size(), 0);
  for (size_t i = 0; i < tree.size(); ++i) {
    if (tree[i].parent >= 0) depth[i] = depth[static_cast<size_t>(tree[i].parent)] + 1;
    if (!known.insert(tree[i].identity).second) continue;
    auto& module = summary.modules.emplace_back();
    module.path = tree[i].path, module.class_name = tree[i].class_name, module.depth = depth[i];
    module.own = std::move(own[i]);
    for (const size_t index : within[i]) add(module, summary.tensors[index]);
  }
}

}  // namespace

ModelSummary summarize(const ModelRef& model, const parallel::Engine* engine) {
  ModelSummary summary;
  const auto indices = summarize_tensors(model, engine, summary);
  summarize_modules(model, indices, summary);
  std::map<std::string, int64_t> here;
  int64_t sharded = 0;
  for (const auto& tensor : summary.tensors) {
    here[tensor.place] += tensor.bytes_here;
    if (tensor.place.starts_with("sharded")) sharded += tensor.bytes;
  }
  summary.ranks = gather_object(std::vector{here});
  int64_t pieces = 0;  // on all ranks; with replicas the model several times
  for (const auto& rank : summary.ranks)
    for (const auto& [place, bytes] : rank)
      if (place.starts_with("sharded")) pieces += bytes;
  if (pieces > 0)
    summary.shards =
        std::max<int64_t>(std::llround(static_cast<double>(sharded) * static_cast<double>(summary.ranks.size()) /
                                       static_cast<double>(pieces)),
                          1);
  return summary;
}

}  // namespace accelerate
