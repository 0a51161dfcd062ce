#include "accelerate/bigmodel/loading.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "accelerate/bigmodel.hpp"
#include "accelerate/config.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/model/submodule.hpp"
#include "bigmodel/loading_plan.hpp"
#include "bigmodel/replace.hpp"
#include "codes/bitsandbytes.hpp"
#include "formats/index_file.hpp"
#include "formats/torch_dtypes.hpp"
#include "formats/weight_names.hpp"
#include "input/read_file.hpp"
#include "memory/huge_pages.hpp"
#include "residency/member.hpp"
#include "residency/residency.hpp"
#include "utils/log.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using bigmodel::LoadTarget;
using bigmodel::OpenCheckpoint;
using checkpointing::StoredTensors;

bool is_safetensors(const fs::path& file) { return file.extension() == ".safetensors"; }

/// StoredTensor::read of what can be had as a whole only.
auto part_of(std::function<at::Tensor()> whole) {
  return [whole = std::move(whole)](const formats::DcpBox& box, const at::Tensor& destination) {
    at::Tensor part = whole();
    for (int64_t dim = 0; dim < part.dim(); ++dim)
      part = part.narrow(dim, box.offsets[static_cast<size_t>(dim)], box.sizes[static_cast<size_t>(dim)]);
    destination.copy_(part);
  };
}

/// Weights are decoded when they are read, into any floating-point dtype; names and layouts are Hugging Face's.
StoredTensors open_gguf(const fs::path& path) {
  StoredTensors tensors;
  const GgufFile file(path);
  for (const auto& name : file.names()) {
    if (name == "rope_freqs.weight") continue;  // no weight: part of the configuration
    const auto& info = file.info(name);
    const auto whole = [file, name = name, shape = info.shape] {
      at::Tensor values = at::empty(shape, at::TensorOptions().dtype(at::kFloat));
      file.read(name, values);
      return values;
    };
    tensors[name] = {
        .dtype = at::kFloat,
        .sizes = info.shape,
        .bytes =
            checkpointing::StoredBytes{.file = path,
                                       .begin = 0,
                                       .bytes = info.stored_bytes,
                                       .decode = [file, name = name](const at::Tensor& to) { file.read(name, to); }},
        .read = part_of(whole),
        .read_whole = whole};
  }
  return tensors;
}

/// Finds the codes that a file of blocks has as they are.
void find_gguf_codes(const fs::path& path, OpenCheckpoint& checkpoint) {
  const GgufFile file(path);
  for (const auto& name : file.names()) {
    const auto encoding = codes::encoding_named(file.info(name).encoding);
    if (!encoding) continue;
    auto shape = file.info(name).shape;
    const bool transposed = file.info(name).transposed;
    if (transposed) std::swap(shape[0], shape[1]);
    checkpoint.codes[name] = {
        .read =
            [file, name = name, encoding = *encoding, shape](at::ScalarType dtype) {
              return codes::Codes{.encoding = encoding, .shape = shape, .dtype = dtype, .data = file.stored_rows(name)};
            },
        .transposed = transposed};
  }
}

/// Weights that bitsandbytes' modules saved take the place of their parts.
void join_bitsandbytes(OpenCheckpoint& checkpoint) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : checkpoint.tensors) names.push_back(name);
  for (const auto& weight : codes::find_bitsandbytes_weights(names)) {
    const auto stored = checkpoint.tensors.find(weight.weight);
    if (stored == checkpoint.tensors.end())
      raise<CheckpointError>(
          "checkpoint: it has '{}' and no '{}', to which that belongs. Files are of different models",
          weight.parts.front(), weight.weight);
    std::map<std::string, std::function<at::Tensor()>> parts{{weight.weight, stored->second.read_whole}};
    for (const auto& part : weight.parts) {
      parts.emplace(part, checkpoint.tensors.at(part).read_whole);
      checkpoint.tensors.erase(part);
    }
    auto read = [weight, parts](at::ScalarType dtype) {
      return codes::read_bitsandbytes(
          weight, [&](const std::string& name) { return parts.at(name)(); }, dtype);
    };
    auto whole = [read] { return codes::decode(read(at::kHalf)); };
    auto& tensor = stored->second;
    const auto form = read(at::kHalf);  // damage shows before anything is loaded
    tensor.sizes = form.shape;
    tensor.dtype = form.dtype;
    tensor.bytes =
        checkpointing::StoredBytes{.file = tensor.bytes ? tensor.bytes->file : fs::path(),
                                   .begin = 0,
                                   .bytes = form.bytes(),
                                   .decode = [read](const at::Tensor& to) {
                                     if (to.scalar_type() == at::kDouble)
                                       return void(to.copy_(codes::decode(read(at::kFloat), at::kFloat).view(-1)));
                                     codes::decode_into(read(at::kHalf), to);
                                   }};
    tensor.read_whole = whole;
    tensor.read = part_of(whole);
    checkpoint.codes[weight.weight] = {.read = std::move(read)};
  }
}

/// bitsandbytes does not know how a layer stores its weight: its codes are always those of [outputs, inputs].
void turn_bitsandbytes(OpenCheckpoint& checkpoint, const std::string& name) {
  const auto found = checkpoint.codes.find(name);
  if (found == checkpoint.codes.end()) return;
  auto& tensor = checkpoint.tensors.at(name);
  if (found->second.transposed || tensor.sizes.size() != 2) return;
  found->second.transposed = true;
  std::swap(tensor.sizes[0], tensor.sizes[1]);
  const auto whole = [turned = std::move(tensor.read_whole)] { return turned().t().contiguous(); };
  tensor.bytes->decode = [decode = std::move(tensor.bytes->decode), sizes = tensor.sizes](const at::Tensor& to) {
    const at::Tensor turned = at::empty({sizes[1], sizes[0]}, to.options());
    decode(turned.view({-1}));
    to.view(sizes).copy_(turned.t());
  };
  tensor.read_whole = whole;
  tensor.read = part_of(whole);
}

StoredTensors open_file(const fs::path& file) {
  if (file.extension() == ".gguf") return open_gguf(file);
  return is_safetensors(file) ? checkpointing::open_safetensors(file) : checkpointing::open_archive(file);
}

OpenCheckpoint open_index(const fs::path& index) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("checkpoint index '{}': {}", index.string(), fmt::format(what, std::forward<Args>(args)...));
  };
  std::map<std::string, std::vector<std::string>> names_in;
  for (const auto& [name, file] : formats::read_index(index)) names_in[file].push_back(name);
  OpenCheckpoint checkpoint;
  checkpoint.mapped = true;
  std::vector<std::string> missing;
  for (const auto& [file, names] : names_in)
    if (!is_there(index.parent_path() / file)) missing.push_back(file);
  if (!missing.empty())
    fail("files that it names are not there: {}. Copy or download all files into the folder of the index.",
         fmt::join(missing, ", "));
  for (const auto& [file, names] : names_in) {
    auto tensors = open_file(index.parent_path() / file);
    checkpoint.mapped = checkpoint.mapped && is_safetensors(file);
    for (const auto& name : names) {
      const auto found = tensors.find(name);
      if (found == tensors.end()) missing.push_back(fmt::format("{} (in {})", name, file));
      else checkpoint.tensors.insert(*found);
    }
  }
  if (!missing.empty())
    fail("tensors are not in the files where it says: {}. Index and files are of different checkpoints.",
         fmt::join(missing, ", "));
  return checkpoint;
}

OpenCheckpoint open_as_it_is(const fs::path& path) {
  if (path.extension() == ".json") return open_index(path);
  if (!is_folder(path)) return {.tensors = open_file(path), .mapped = is_safetensors(path), .codes = {}};
  // For a folder that has its weights twice: transformers' order.
  for (const char* name :
       {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"})
    if (is_there(path / name)) return open_as_it_is(path / name);
  std::vector<fs::path> indexes;
  for (const auto& entry : read_folder<CheckpointError>("checkpoint folder", path))
    if (formats::is_index_name(entry.path())) indexes.push_back(entry.path());
  if (indexes.size() == 1) return open_index(indexes.front());
  raise<CheckpointError>(
      "checkpoint folder '{}': it has neither model.safetensors nor pytorch_model.bin, and {} files *.index.json. "
      "Expected one of these; give the file itself if it has another name.",
      path.string(), indexes.size());
}

OpenCheckpoint open(const fs::path& path) {
  OpenCheckpoint checkpoint = open_as_it_is(path);
  if (path.extension() == ".gguf") find_gguf_codes(path, checkpoint);
  join_bitsandbytes(checkpoint);
  return checkpoint;
}

/// Opens a checkpoint as the model names and stores its weights.
OpenCheckpoint open_for(const ModelRef& model, const std::vector<LoadTarget>& targets, const fs::path& path) {
  OpenCheckpoint checkpoint = open(path);
  if (const auto* names = formats::weight_names_of_class(model.submodules().front().class_name)) {
    std::set<std::string> own;
    for (const auto& target : targets) own.insert(target.names.begin(), target.names.end());
    bigmodel::use_names(checkpoint, *names, own);
  }
  if (path.extension() == ".gguf") return checkpoint;  // whose names say how weights were stored
  for (const auto& target : targets)
    if (target.transposed)
      for (const auto& name : target.names) turn_bitsandbytes(checkpoint, name);
  return checkpoint;
}

std::string show(at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto* known = formats::find_torch_dtype(dtype);
  return fmt::format("{} {}", sizes, known ? known->name.substr(known->name.find('.') + 1) : c10::toString(dtype));
}

StateDictCheck compare(std::vector<LoadTarget>& targets, const StoredTensors& tensors) {
  StateDictCheck check;
  std::set<std::string> known;
  for (auto& target : targets) {
    known.insert(target.names.begin(), target.names.end());
    for (const auto& name : target.names)
      if (const auto found = tensors.find(name); !target.stored && found != tensors.end()) target.stored = &*found;
    if (!target.stored) {
      check.missing.push_back(target.names.front());
      continue;
    }
    const auto& [name, saved] = *target.stored;
    auto line = fmt::format("{}: {} in the checkpoint, {} in the model", name, show(saved.sizes, saved.dtype),
                            show(target.tensor.sizes(), target.tensor.scalar_type()));
    if ((saved.dtype == at::kChar || saved.dtype == at::kByte) && target.tensor.is_floating_point())
      line += ", as if it were codes whose scales and description are missing";
    if (at::IntArrayRef(saved.sizes) != target.tensor.sizes() ||
        c10::isFloatingType(saved.dtype) != target.tensor.is_floating_point())
      check.mismatched.push_back(line);
    else if (saved.dtype != target.tensor.scalar_type()) check.converted.push_back(line);
  }
  for (const auto& [name, saved] : tensors)
    if (!known.contains(name)) check.unexpected.push_back(name);
  return check;
}

at::ScalarType dtype_of(const LoadTarget& target, const LoadCheckpointOptions& options) {
  if (!options.dtype || !target.tensor.is_floating_point()) return target.tensor.scalar_type();
  if (*options.dtype != at::kHalf) return *options.dtype;
  for (const auto& name : target.names)
    for (const auto& module : options.keep_in_fp32_modules)
      if (("." + name + ".").find("." + module + ".") != std::string::npos) return at::kFloat;
  return at::kHalf;
}

std::string listed(const char* heading, const std::vector<std::string>& lines) {
  return lines.empty() ? "" : fmt::format("\n{}:\n  {}", heading, fmt::join(lines, "\n  "));
}

}  // namespace

std::string StateDictCheck::text() const {
  std::string text = listed("missing in the checkpoint", missing) + listed("not in the model", unexpected) +
                     listed("of another shape or kind", mismatched) + listed("converted", converted);
  return text.empty() ? text : text.substr(1);
}

StateDictCheck check_state_dict(const ModelRef& model, const fs::path& checkpoint) {
  auto targets = bigmodel::targets_of(model);
  return compare(targets, open_for(model, targets, checkpoint).tensors);
}

namespace bigmodel {

OpenCheckpoint open_checkpoint(const fs::path& path) { return open(path); }

void use_names(OpenCheckpoint& checkpoint, const formats::WeightNames& names, const std::set<std::string>& own) {
  const auto rename = [](auto& items, const std::string& from, const std::string& to) {
    auto item = items.extract(from);
    if (item.empty()) return false;
    item.key() = to;
    items.insert(std::move(item));
    return true;
  };
  for (const auto& name : own) {
    if (checkpoint.tensors.contains(name)) continue;
    for (const auto& other : formats::names_in_files(names, name))
      if (!own.contains(other) && rename(checkpoint.tensors, other, name)) {
        rename(checkpoint.codes, other, name);
        break;
      }
  }
  std::erase_if(checkpoint.tensors,
                [&](const auto& item) { return formats::is_worked_out(item.first) && !own.contains(item.first); });
}

std::vector<LoadTarget> targets_of(const ModelRef& model) {
  std::vector<LoadTarget> targets;
  std::unordered_map<const at::TensorImpl*, size_t> index;
  std::set<const at::TensorImpl*> buffers;
  for (const auto& [name, tensor] : model.buffers()) buffers.insert(tensor.unsafeGetTensorImpl());
  std::set<std::string> transposed;
  for (const auto& module : model.submodules())
    if (is_transposed_linear(module)) transposed.insert(module.path.empty() ? "weight" : module.path + ".weight");
  for (const auto& [name, tensor] : model.state()) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    const auto [found, is_new] = index.try_emplace(impl, targets.size());
    if (is_new)
      targets.push_back(
          {.names = {}, .tensor = tensor, .is_buffer = buffers.contains(impl), .dtype = tensor.scalar_type()});
    auto& target = targets[found->second];
    target.names.push_back(name);
    target.transposed = target.transposed || (transposed.contains(name) && tensor.dim() == 2);
  }
  return targets;
}

DeviceMap by_own_names(const ModelRef& model, DeviceMap device_map) {
  const auto* names = formats::weight_names_of_class(model.submodules().front().class_name);
  if (!names || !names->other_name) return device_map;
  const auto rename = [&](const std::string& own, std::string other) {
    if (own == other || device_map.contains(own)) return;
    auto item = device_map.extract(other);
    if (item.empty()) return;
    item.key() = own;
    device_map.insert(std::move(item));
  };
  constexpr std::string_view kWeight = ".weight";  // which the rules are about
  for (const auto& module : model.submodules()) {
    auto other = names->other_name(module.path + std::string(kWeight));
    other.resize(other.size() - kWeight.size());
    rename(module.path, std::move(other));
  }
  for (const auto& [name, tensor] : model.state()) rename(name, names->other_name(name));
  return device_map;
}

void place(const char* caller, const ModelRef& model, std::vector<LoadTarget>& targets, const DeviceMap& device_map) {
  std::set<std::string> known{""};
  for (const auto& module : model.submodules()) known.insert(module.path);
  for (const auto& target : targets) known.insert(target.names.begin(), target.names.end());
  std::string unknown, empty;
  for (const auto& [key, where] : device_map) {
    if (known.contains(key)) continue;
    const auto nearest = nearest_name(key, {known.begin(), known.end()});
    const auto text = fmt::format("\n  {}{}", key, nearest ? fmt::format(" (did you mean '{}'?)", *nearest) : "");
    // Python's maps name modules without tensors, too (dropout, a tied head), which need not be here. A module that is
    // to be elsewhere than its parent is another thing.
    const Place* holder = nullptr;  // of the names that it is in the last, which is the longest
    for (const auto& [other, there] : device_map)
      if (other.empty() || key.starts_with(other + ".")) holder = &there;
    (holder && *holder != where ? unknown : empty) += text;
  }
  // Buffers of modules that infer_auto_device_map() has split are where the model computes.
  Place computes("cpu");
  for (const auto& [key, where] : device_map)
    if (where.is_gpu() || where.is_mps()) computes = std::min(computes, where);
  std::string missing;
  for (auto& target : targets) {
    for (const auto& name : target.names)
      if (!target.place) target.place = place_of(device_map, name);
    if (!target.place && target.is_buffer) target.place = computes;
    if (!target.place) missing += "\n  " + target.names.front();
  }
  if (!missing.empty()) unknown += empty;  // which may be meant by them
  if (!unknown.empty())
    raise<ConfigError>("{}: the device map has keys that name no module or tensor of the model:{}", caller, unknown);
  if (!empty.empty())
    logs::warn("accelerate.bigmodel",
               "{}: the device map has keys that name no module or tensor of the model, which are passed over, since "
               "all weights have a place without them:{}",
               caller, empty);
  if (!missing.empty())
    raise<ConfigError>(
        "{}: the device map has no place for{}\nName them or the modules that they are in, or \"\" for all that is not "
        "named.",
        caller, missing);
}

at::Device device_of(const Place& place) {
  if (place.is_mps()) return at::kMPS;
  if (!place.is_gpu()) return at::kCPU;
  return {at::getAccelerator().value_or(at::kCUDA), static_cast<c10::DeviceIndex>(place.gpu())};
}

bool LoadPlan::on_disk(const LoadTarget& target) const {
  return target.place && target.place->is_disk() && (!target.is_buffer || options.offload_buffers);
}

LoadPlan plan_loading(const char* caller, const ModelRef& model, const fs::path& path,
                      const LoadCheckpointOptions& options) {
  LoadPlan plan{.path = path, .options = options, .checkpoint = {}, .targets = targets_of(model)};
  if (auto& map = plan.options.device_map) {
    map = by_own_names(model, *map);
    place(caller, model, plan.targets, *map);
  }
  plan.checkpoint = open_for(model, plan.targets, path);
  auto check = compare(plan.targets, plan.checkpoint.tensors);
  if (!options.strict) check.missing.clear(), check.unexpected.clear();
  if (!check.fits()) {
    check.converted.clear();
    raise<CheckpointError>("{}: '{}' does not fit the model. Nothing was loaded.\n{}{}", caller, path.string(),
                           check.text(),
                           check.mismatched.empty() ? "\nTo load what is in both, set strict = false."
                                                    : "\nIs it the checkpoint of another model or configuration?");
  }
  for (auto& target : plan.targets) target.dtype = dtype_of(target, options);
  return plan;
}

namespace {

/// Models that are sharded take values where their shards lie, each rank what it keeps. All ranks load the same files.
class ShardedTargets {
 public:
  explicit ShardedTargets(const LoadPlan& plan) {
    for (const auto& target : plan.targets) {
      const auto* member = residency::Member::of(target.tensor);
      if (!target.stored || !member || !member->unit().owner().change().begin) continue;
      auto& owner = member->unit().owner();
      if (std::find(owners_.begin(), owners_.end(), &owner) == owners_.end()) owners_.push_back(&owner);
    }
    for (auto* owner : owners_) owner->change().begin();
  }
  /// @return false: it is no such target
  bool take(const LoadTarget& target) const {
    const auto* member = residency::Member::of(target.tensor);
    if (!member || !member->unit().owner().change().begin) return false;
    member->unit().owner().assign(*member, target.stored->second.read_whole());
    return true;
  }
  void finish() const {
    for (auto* owner : owners_) owner->change().end();
  }

 private:
  std::vector<residency::Residency*> owners_;
};

/// It has bytes, as many as it will have and where it will have them.
bool is_in_place(const at::Tensor& target, const at::Tensor& value) {
  return !target.is_meta() && !is_deferred(target) && target.scalar_type() == value.scalar_type() &&
         target.device() == value.device();
}

}  // namespace

void load(const LoadPlan& plan, const std::function<bool(const LoadTarget&)>& leave_alone) {
  const c10::NoGradGuard no_grad;
  const ShardedTargets sharded(plan);
  const auto& folder = plan.options.offload_folder;
  OffloadIndex offloaded;
  if (!folder.empty()) {
    std::error_code error;
    fs::create_directories(folder, error);
    if (error)
      raise<CheckpointError>("load_checkpoint_in_model: can't create the folder '{}': {}.", folder.string(),
                             error.message());
  }
  for (const auto& planned : plan.targets) {
    if (!planned.stored || leave_alone(planned) || sharded.take(planned)) continue;
    at::Tensor target = planned.tensor;
    auto value = planned.stored->second.read_whole();
    // Another holder of the tensor, an engine that averages its gradient for example, goes on having it.
    if (!planned.place && is_in_place(target, value) && planned.dtype == value.scalar_type()) {
      target.copy_(value);
      if (plan.checkpoint.mapped) give_pages_back(value.mutable_data_ptr(), static_cast<int64_t>(value.nbytes()));
      continue;
    }
    if (plan.on_disk(planned)) {
      if (!plan.checkpoint.mapped || value.scalar_type() != planned.dtype) {
        const auto& name = planned.names.front();
        offload_weight(value.to(planned.dtype), name, folder, &offloaded);
        value = load_offloaded_weight(folder / (name + ".dat"), offloaded.back().second);
      }
    } else {
      const auto device = planned.place      ? device_of(*planned.place)
                          : target.is_meta() ? at::Device(at::kCPU)
                                             : target.device();
      // A weight without memory of its own needs no copy: what is written to a mapped one later stays in this process.
      const at::Tensor stored = value;
      value = value.to(at::TensorOptions().dtype(planned.dtype).device(device), /*non_blocking=*/false,
                       /*copy=*/plan.checkpoint.mapped && !target.is_meta());
      if (plan.checkpoint.mapped && !value.is_same(stored))  // or the file would be in this process beside its copy
        give_pages_back(stored.mutable_data_ptr(), static_cast<int64_t>(stored.nbytes()));
    }
    replace_values(target, value);
  }
  sharded.finish();
  save_offload_index(offloaded, folder);
}

}  // namespace bigmodel

void load_checkpoint_in_model(const ModelRef& model, const fs::path& path, const LoadCheckpointOptions& options) {
  const auto plan = bigmodel::plan_loading("load_checkpoint_in_model", model, path, options);
  for (const auto& target : plan.targets)
    if (target.stored && plan.on_disk(target) && options.offload_folder.empty() &&
        (!plan.checkpoint.mapped || target.stored->second.dtype != target.dtype))
      raise<CheckpointError>(
          "load_checkpoint_in_model: '{}' is to be on disk, and can't be used where it lies in '{}', because {}. Give "
          "offload_folder, a folder with room for such weights; load_checkpoint_and_dispatch converts at each use "
          "instead.",
          target.stored->first, path.string(),
          plan.checkpoint.mapped ? "it is converted to another dtype" : "only safetensors files are mapped");
  bigmodel::load(plan, [](const LoadTarget&) { return false; });
}

}  // namespace accelerate
