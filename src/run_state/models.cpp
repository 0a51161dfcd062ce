#include "run_state/models.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <set>
#include <unordered_map>

#include "accelerate/checkpoint.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "checkpoint/model_state.hpp"
#include "checkpoint/weight_files.hpp"
#include "checkpoint/zero_checkpoint.hpp"
#include "comm/agreement.hpp"
#include "formats/expected_files.hpp"
#include "formats/tensor_source.hpp"
#include "formats/torch_archive.hpp"
#include "observe/trace.hpp"
#include "parallel/deepspeed_files.hpp"
#include "parallel/layer.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/member.hpp"
#include "run_state/distributed_items.hpp"
#include "run_state/own_pieces.hpp"
#include "run_state/whole_stream.hpp"
#include "run_state/zero_files.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

WholeStream::Wanted wanted_weight(const parallel::Held& holding) { return wanted(holding, "", holding.value); }

/// The tensors in shards among a model's, by the module's tensor.
std::unordered_map<const at::TensorImpl*, const parallel::Held*> pieces_among(
    const std::vector<parallel::Held>& holdings) {
  std::unordered_map<const at::TensorImpl*, const parallel::Held*> result;
  for (const auto& holding : holdings)
    if (holding.in_pieces()) result.emplace(holding.tensor.unsafeGetTensorImpl(), &holding);
  return result;
}

/// Weights in few bits are frozen: checkpoints leave them to the files that the model was quantized from.
bool is_left_out(const at::Tensor& tensor) { return residency::encoded_weight(tensor) != nullptr; }

std::vector<parallel::Held> saved_holdings(const detail::PreparedModel& model) {
  auto holdings = holdings_of(model);
  std::erase_if(holdings, [](const parallel::Held& holding) { return is_left_out(holding.tensor); });
  return holdings;
}

/// Codes that are sharded are whole on all ranks meanwhile: whoever wants the values of a weight in few bits decodes
/// it, and in files for one process that is rank 0 alone. Collective.
class WholeCodes {
 public:
  explicit WholeCodes(const ModelRef& model) {
    for (const auto& [name, tensor] : model.parameters())
      if (const auto* weight = residency::encoded_weight(tensor)) residency::pin_codes(*weight, pins_);
  }

 private:
  residency::Pins pins_;
};

void write_tensors(const std::filesystem::path& file, const std::map<std::string, at::Tensor>& tensors,
                   bool safe_serialization) {
  if (safe_serialization) save_safetensors(file, tensors, {{"format", "pt"}});
  else checkpointing::save_object(checkpointing::to_dict(tensors), file);
}

void save_own_model(const std::vector<parallel::Held>& holdings, const std::filesystem::path& file) {
  std::map<std::string, at::Tensor> own;
  for (const auto& holding : holdings) own[holding.names.front()] = readable(holding.value);
  comm::on_all_ranks_or_throw<CheckpointError>(
      [&] { checkpointing::save_object(own_pieces(holdings, checkpointing::to_dict(own)), file); });
}

/// An archive that is written as parts become whole, every name of tied weights in it.
void save_full_model(const std::vector<parallel::Held>& holdings, const std::filesystem::path& file) {
  std::vector<WholeStream::Wanted> weights;
  for (const auto& holding : holdings)
    if (holding.in_pieces()) weights.push_back(wanted_weight(holding));
  WholeStream stream(part_by_part(std::move(weights)));
  write_in_step(stream, comm::rank() == 0, [&] {
    formats::TorchPickle pickle;
    pickle.empty_dict(), pickle.mark();
    for (const auto& holding : holdings)
      for (const auto& name : holding.names) {
        pickle.text(name);
        if (!holding.in_pieces()) pickle.value(holding.tensor.detach());
        else
          pickle.tensor(holding.value.scalar_type(), holding.whole.sizes().vec(), false,
                        [&stream, &holding] { return stream.get(holding.tensor); });
      }
    pickle.set_items_to_mark();
    write_archive(file, std::move(pickle));
  });
}

/// The file of plain training, which is written at once: tied weights once, under their first name.
void save_plain_model(const ModelRef& model, const std::vector<parallel::Held>& holdings, const StateFile& file,
                      const Writers& writers) {
  WholeStream::Stage weights;
  for (const auto& holding : holdings)
    if (holding.in_pieces()) weights.push_back(wanted_weight(holding));
  std::vector<WholeStream::Stage> stages;
  if (!weights.empty()) stages.push_back(std::move(weights));
  WholeStream stream(std::move(stages), {.everywhere = writers.several, .copies = true});
  const auto pieces = pieces_among(holdings);
  write_in_step(stream, writers.here, [&] {
    auto tensors = checkpointing::state_dict(model, [&](const at::Tensor& tensor) {
      return pieces.contains(tensor.unsafeGetTensorImpl()) ? stream.get(tensor)
             : is_left_out(tensor)                         ? at::Tensor()
                                                           : tensor.detach().cpu();
    });
    std::erase_if(tensors, [](const auto& item) { return !item.second.defined(); });
    write_tensors(file.path, tensors, file.form == StateForm::safetensors);
  });
}

/// Tensor by tensor, in the order of `sources`.
void write_sources(const std::filesystem::path& file, std::vector<formats::TensorSource> sources,
                   bool safe_serialization) {
  if (safe_serialization) return formats::write_safetensors(file, std::move(sources), {{"format", "pt"}});
  formats::TorchPickle pickle;
  pickle.empty_dict(), pickle.mark();
  for (auto& source : sources) {
    pickle.text(source.name);
    pickle.tensor(source.dtype, source.sizes, /*requires_grad=*/false, std::move(source.read));
  }
  pickle.set_items_to_mark();
  write_archive(file, std::move(pickle), "save_model");
}

checkpointing::StoredTensors zero_weights(const detail::PreparedModel& model, const std::filesystem::path& folder,
                                          bool masters) {
  const auto sizes = sizes_by_name(model);
  return checkpointing::ZeroCheckpoint::opened(folder)->weights(
      {.masters = masters && (!model.deepspeed || model.deepspeed->load_from_fp32_weights), .sizes = &sizes});
}

/// Takes out what the model does not have. @return the names of which the model has more, and which may miss. Rank 0
/// warns of both.
std::set<std::string> leave_the_rest(const detail::PreparedModel& model, checkpointing::StoredTensors& stored,
                                     const std::filesystem::path& file) {
  std::set<std::string> ours, missing, unexpected;
  for (const auto& [name, tensor] : model.model.state()) ours.insert(name);
  for (const auto& [name, tensor] : stored)
    if (!ours.contains(name)) unexpected.insert(name);
  for (const auto& name : unexpected) stored.erase(name);
  for (const auto& holding : saved_holdings(model))
    if (std::none_of(holding.names.begin(), holding.names.end(),
                     [&](const std::string& name) { return stored.contains(name); }))
      missing.insert(holding.names.begin(), holding.names.end());
  const auto list = [](const std::set<std::string>& names) {
    return names.empty() ? "none" : fmt::format("{} ('{}')", names.size(), fmt::join(names, "', '"));
  };
  if (comm::rank() == 0 && !(missing.empty() && unexpected.empty()))
    logs::warn("accelerate.run_state",
               "load_state: strict = false leaves weights of '{}' and of the model be: the file does not have {}, the "
               "model does not have {}",
               file.string(), list(missing), list(unexpected));
  return missing;
}

}  // namespace

void save_model(const detail::PreparedModel& model, const StateFile& file, const Writers& writers) {
  const auto holdings = saved_holdings(model);
  switch (file.form) {
    case StateForm::safetensors:
    case StateForm::archive:
      return save_plain_model(model.model, holdings, file, writers);
    case StateForm::full:
      return save_full_model(holdings, file.path);
    case StateForm::sharded:
      return DistributedItems(StateDict{{"model", distributed_state(model)}}).write(file.path);
    case StateForm::local:
      return save_own_model(holdings, file.path);
    case StateForm::deepspeed:  // with its optimizers: save_zero()
      throw InternalError("saving a model: DeepSpeed's files were asked for, which are not of a model alone");
  }
}

int64_t saved_bytes(const detail::PreparedModel& model) {
  int64_t bytes = 0;
  for (const auto& holding : saved_holdings(model))
    bytes += holding.whole.numel() *
             static_cast<int64_t>(std::min(holding.value.element_size(), holding.tensor.element_size()));
  return bytes;
}

void save_tensors(const std::map<std::string, at::Tensor>& tensors, const StateFile& file) {
  write_tensors(file.path, tensors, file.form == StateForm::safetensors);
}

StagedModel::StagedModel(const detail::PreparedModel& model, const StateFile& file, bool strict, bool masters)
    : engine_(model.engine.get()), filling_(file.path.filename().string()) {
  if (engine_)
    for (const auto& layer : engine_->layers()) layer->expect_all_states_here("loading a checkpoint");
  if (file.form == StateForm::local) {
    if (!strict)
      raise<ConfigError>(
          "load_state: strict = false was given for '{}', expected a checkpoint of named tensors: these are this "
          "rank's pieces, which fit the same run only. Save with state_dict_type FULL_STATE_DICT or SHARDED_STATE_DICT",
          file.path.string());
    stage_own_pieces(saved_holdings(model), file.path);
  } else {
    auto stored = file.form == StateForm::safetensors ? checkpointing::open_safetensors(file.path)
                  : file.form == StateForm::sharded   ? checkpointing::open_distributed(file.path)
                  : file.form == StateForm::deepspeed ? zero_weights(model, file.path, masters)
                                                      : checkpointing::open_archive(file.path);
    stage(model, stored, strict ? std::set<std::string>() : leave_the_rest(model, stored, file.path));
  }
}

StagedModel::StagedModel(const detail::PreparedModel& model, const checkpointing::StoredTensors& stored,
                         const std::set<std::string>& may_miss)
    : engine_(model.engine.get()), filling_("a state dict") {
  stage(model, stored, may_miss);
}

void StagedModel::stage(const detail::PreparedModel& model, const checkpointing::StoredTensors& stored,
                        const std::set<std::string>& may_miss) {
  std::map<std::string, at::Tensor> sizes;
  const auto note = [&](const std::string& name, at::IntArrayRef size) {
    sizes.try_emplace(name, at::empty(size, at::TensorOptions().device(at::kMeta)));
  };
  const auto holdings = holdings_of(model);
  // Files have whole tensors where modules compute with a part.
  std::map<std::string, const parallel::Held*> parts;
  for (const auto& holding : holdings)
    for (const auto& name : holding.names)
      if (holding.tensor.sizes() != holding.whole.sizes()) parts.emplace(name, &holding);
  for (const auto& [name, tensor] : stored) {
    const auto part = parts.find(name);
    const bool fits = part != parts.end() && part->second->whole.sizes() == at::IntArrayRef(tensor.sizes);
    note(name, fits ? part->second->tensor.sizes() : at::IntArrayRef(tensor.sizes));
  }
  for (const auto& [name, tensor] : model.model.state())
    if (may_miss.contains(name) || is_left_out(tensor)) note(name, tensor.sizes());
  checkpointing::check_state_dict(model.model, sizes);
  for (const auto& holding : holdings) {
    for (const auto& name : holding.names) {
      const auto found = stored.find(name);
      if (found == stored.end()) continue;
      const std::string what = "tensor '" + name + "'";
      if (const auto target = holding.value.detach(); residency::encoded_weight(target))
        in_few_bits_.emplace_back(target, formats::naming_damage(what, [&] {
                                    return holding.in_pieces() ? read_piece(found->second, holding)
                                                               : found->second.read_whole();
                                  }));
      else filling_.add(what, found->second, holding, target);
      break;
    }
  }
}

void StagedModel::stage_own_pieces(const std::vector<parallel::Held>& holdings, const std::filesystem::path& file) {
  const OwnShards own(holdings, file);
  const auto& state = own.state();
  const auto fail = [&](const std::string& what) {
    raise<CheckpointError>("load '{}': {}; the model has changed since it was saved", file.string(), what);
  };
  if (!state.isGenericDict()) fail("found " + state.tagKind() + " at 'state', expected a dict of tensors");
  const auto pieces = state.toGenericDict();
  for (const auto& holding : holdings) {
    const auto& name = holding.names.front();
    const auto target = holding.value.detach();
    const auto found = pieces.find(name);
    if (found == pieces.end() || !found->value().isTensor()) fail(fmt::format("found no tensor '{}'", name));
    const auto value = found->value().toTensor();
    if (value.sizes() != target.sizes())
      fail(fmt::format("found '{}' of size {}, expected {}", name, formats::to_string(value.sizes().vec()),
                       formats::to_string(target.sizes().vec())));
    filling_.add("tensor '" + name + "'", own.stored(value), whole_on_all_ranks({}, target), target);
  }
  if (pieces.size() != holdings.size())
    fail(fmt::format("found {} tensors, expected {}", pieces.size(), holdings.size()));
}

void StagedModel::agree() const {
  at::NoGradGuard no_grad;
  for (const auto& [target, value] : in_few_bits_)
    if (!at::equal(target, value.to(target.options())))
      raise<CheckpointError>(
          "load: '{}' is kept in few bits and frozen, and the checkpoint has other values for it; expected those with "
          "which it was saved. Load the model from the same files, in the same encoding. Nothing was changed",
          residency::Member::of(target)->name());
}

void StagedModel::apply() const {
  if (engine_) engine_->before_step();
  std::exception_ptr failure;
  try {
    comm::on_all_ranks_or_throw<CheckpointError>([this] { filling_.run(); });
  } catch (const CommError&) {
    throw;
  } catch (...) {
    failure = std::current_exception();
  }
  if (engine_) engine_->after_step();  // which peers wait for, too
  if (failure) std::rethrow_exception(failure);
}

StateDict distributed_state(const detail::PreparedModel& model) {
  StateDict state;
  for (const auto& holding : saved_holdings(model))
    for (const auto& name : holding.names)
      state.emplace(name, holding.in_pieces() ? Value(sharded(holding, holding.value, model.engine))
                                              : Value(holding.tensor.detach()));
  return state;
}

std::map<std::string, at::Tensor> whole_state(const detail::PreparedModel& model, const StateDictConfig& config) {
  const WholeCodes codes(model.model);
  const auto holdings = holdings_of(model);
  WholeStream::Stage weights;
  for (const auto& holding : holdings)
    if (holding.in_pieces()) weights.push_back(wanted_weight(holding));
  const bool everywhere = !config.rank0_only.value_or(true);
  WholeStream stream({std::move(weights)},
                     {.everywhere = everywhere, .copies = true, .on_host = config.offload_to_cpu});
  const auto pieces = pieces_among(holdings);
  std::map<std::string, at::Tensor> state;
  std::unordered_map<const at::TensorImpl*, at::Tensor> values;  // names of one tensor share one
  if (everywhere || comm::rank() == 0)
    for (const auto& [name, tensor] : model.model.state()) {
      at::Tensor& value = values[tensor.unsafeGetTensorImpl()];
      if (!value.defined()) {
        value = pieces.contains(tensor.unsafeGetTensorImpl()) ? stream.get(tensor) : tensor.detach();
        // A stand-in for codes would ask all ranks for them whenever it is read.
        if (is_left_out(tensor)) value = value.clone();
        if (config.offload_to_cpu) value = value.cpu();
      }
      state.emplace(name, value);
    }
  stream.finish();
  return state;
}

void save_weights(const detail::PreparedModel& model, const std::filesystem::path& folder, int64_t max_shard_bytes,
                  bool safe_serialization) {
  const WholeCodes codes(model.model);
  const auto holdings = holdings_of(model);
  const auto pieces = pieces_among(holdings);
  // Every tensor once, under its first name, in the order of the module's state.
  std::map<std::string, at::Tensor> tensors;
  std::vector<checkpointing::WeightSize> weights;
  std::set<const at::TensorImpl*> seen;
  for (const auto& [name, tensor] : model.model.state()) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const auto piece = pieces.find(tensor.unsafeGetTensorImpl());
    const auto bytes = (piece == pieces.end() ? tensor : piece->second->value).element_size();
    tensors.emplace(name, tensor);
    weights.push_back({name, tensor.numel() * static_cast<int64_t>(bytes)});
  }
  // Parts become whole one after the other, in the order in which the files have their tensors.
  std::optional<WholeStream> stream;
  std::vector<WholeStream::Wanted> wanted;
  std::vector<std::vector<formats::TensorSource>> files;
  for (const auto& names : checkpointing::split_weights(weights, max_shard_bytes)) {
    auto& sources = files.emplace_back();
    for (const auto& name : names) {
      const auto& tensor = tensors.at(name);
      const auto piece = pieces.find(tensor.unsafeGetTensorImpl());
      if (piece == pieces.end())
        sources.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), [tensor] { return tensor.detach(); }});
      else
        sources.push_back({name, piece->second->value.scalar_type(), piece->second->whole.sizes().vec(),
                           [&stream, tensor] { return stream->get(tensor); }});
    }
    if (safe_serialization) formats::sort_for_safetensors(sources);
    else std::sort(sources.begin(), sources.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    for (const auto& source : sources)
      if (const auto piece = pieces.find(tensors.at(source.name).unsafeGetTensorImpl()); piece != pieces.end())
        wanted.push_back(wanted_weight(*piece->second));
  }
  stream.emplace(part_by_part(std::move(wanted)));
  write_in_step(*stream, comm::rank() == 0, [&] {
    auto sources = files.begin();
    checkpointing::write_weight_files(folder, weights, max_shard_bytes, safe_serialization,
                                      [&](const std::filesystem::path& file, const std::vector<std::string>& names) {
                                        std::map<std::string, at::Tensor> whole;
                                        for (const auto& name : names)
                                          if (const auto& tensor = tensors.at(name);
                                              !pieces.contains(tensor.unsafeGetTensorImpl()))
                                            whole.emplace(name, tensor);
                                        formats::expect_none_shared(whole, file.string());
                                        write_sources(file, std::move(*sources++), safe_serialization);
                                      });
  });
}

}  // namespace accelerate::run_state
