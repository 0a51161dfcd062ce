#include "checkpoint/zero_checkpoint.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <numeric>
#include <set>
#include <utility>

#include "checkpoint/archive.hpp"
#include "input/read_file.hpp"
#include "input/regular_expression.hpp"
#include "utils/raise.hpp"

namespace accelerate::checkpointing {
namespace {

namespace fs = std::filesystem;
using Dict = c10::impl::GenericDict;
using formats::DcpBox;

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// Some neighbouring elements of a tensor in a file.
struct Segment {
  int64_t begin, numel;  ///< elements of the tensor
  std::shared_ptr<const formats::InputFile> file;
  int64_t byte;
  formats::SavedTensor saved;  ///< that they are of
};

/// Elements [from, from + to.numel()) of a tensor. @param to  1-D, contiguous, on the CPU, of the stored dtype
void read_elements(const std::vector<Segment>& segments, int64_t from, const at::Tensor& to) {
  const auto width = static_cast<int64_t>(to.element_size());
  for (const auto& segment : segments) {
    const int64_t begin = std::max(from, segment.begin);
    const int64_t end = std::min(from + to.numel(), segment.begin + segment.numel);
    if (begin >= end) continue;
    formats::check_header(*segment.file, segment.saved);
    segment.file->read(segment.byte + (begin - segment.begin) * width,
                       static_cast<char*>(to.mutable_data_ptr()) + (begin - from) * width, (end - begin) * width);
  }
}

/// A part of a tensor whose elements lie row by row.
/// @param first  the part's first element  @param to  any device, dtype and strides
void read_rows(const std::vector<Segment>& segments, at::ScalarType dtype, const std::vector<int64_t>& strides,
               int64_t first, const at::Tensor& to) {
  int64_t span = 1;
  for (size_t dim = 0; dim < strides.size(); ++dim) span += (to.size(static_cast<int64_t>(dim)) - 1) * strides[dim];
  if (to.is_cpu() && to.scalar_type() == dtype && to.is_contiguous() && span == to.numel())
    return read_elements(segments, first, to.view({-1}));
  const at::Tensor row = at::empty({span}, at::TensorOptions().dtype(dtype));
  read_elements(segments, first, row);
  to.copy_(row.as_strided(to.sizes(), strides));
}

/// A tensor that lies in several places.
StoredTensor joined(at::ScalarType dtype, const std::vector<int64_t>& sizes, std::vector<Segment> segments) {
  const auto shared = std::make_shared<const std::vector<Segment>>(std::move(segments));
  std::optional<StoredBytes> bytes;
  if (shared->size() == 1)
    bytes = StoredBytes{.file = shared->front().file->path(),
                        .begin = shared->front().byte,
                        .bytes = product(sizes) * static_cast<int64_t>(c10::elementSize(dtype)),
                        .decode = {}};
  return {.dtype = dtype,
          .sizes = sizes,
          .bytes = std::move(bytes),
          .read =
              [shared, dtype, strides = row_major_strides(sizes)](const DcpBox& box, const at::Tensor& destination) {
                if (destination.numel() == 0) return;
                at::NoGradGuard no_grad;
                int64_t first = 0;
                for (size_t dim = 0; dim < strides.size(); ++dim) first += box.offsets[dim] * strides[dim];
                read_rows(*shared, dtype, strides, first, destination.detach());
              },
          .read_whole =
              [shared, dtype, sizes] {
                const at::Tensor whole = at::empty(sizes, at::TensorOptions().dtype(dtype));
                read_elements(*shared, 0, whole.view(-1));
                return whole;
              }};
}

int64_t numel_of(const Archive& archive, const at::Tensor& stand_in) {
  const auto& saved = archive.saved(stand_in);
  if (saved.sizes.size() != 1 || (saved.sizes[0] > 1 && saved.strides[0] != 1))
    archive.fail("found a tensor of size {} in the place of a flat one", saved.sizes);
  return saved.sizes[0];
}

const c10::IValue& need(const Archive& archive, const Dict& dict, const char* key) {
  const auto found = dict.find(key);
  if (found == dict.end()) archive.fail("found no '{}', expected a file of DeepSpeed's save_checkpoint", key);
  return found->value();
}
Dict make_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }
c10::IValue value_or_none(const Dict& dict, const char* key) {
  const auto found = dict.find(key);
  return found == dict.end() ? c10::IValue() : found->value();
}
c10::ArrayRef<c10::IValue> list_of(const Archive& archive, const c10::IValue& value, const char* what) {
  if (value.isTuple()) return value.toTupleRef().elements();
  if (!value.isList()) archive.fail("found {} at '{}', expected a list", value.tagKind(), what);
  return value.toListRef();
}
int64_t integer_of(const Archive& archive, const c10::IValue& value, const char* what) {
  if (value.isInt()) return value.toInt();
  // An enum: the call of its class.
  if (value.isTuple() && value.toTupleRef().elements().size() == 1 && value.toTupleRef().elements()[0].isInt())
    return value.toTupleRef().elements()[0].toInt();
  archive.fail("found {} at '{}', expected a whole number", value.tagKind(), what);
}
std::vector<int64_t> sizes_of(const Archive& archive, const c10::IValue& value) {
  std::vector<int64_t> sizes;
  int64_t numel = 1;
  for (const auto& size : list_of(archive, value, "param_shapes")) {
    sizes.push_back(integer_of(archive, size, "param_shapes"));
    if (sizes.back() < 0 || __builtin_mul_overflow(numel, std::max<int64_t>(sizes.back(), 1), &numel))
      archive.fail("found the size {} of a parameter, expected one that memory can have", sizes);
  }
  return sizes;
}

/// Sizes that a parameter has where it goes, if somebody says so; else those it had.
const std::vector<int64_t>* sizes_for(const ZeroCheckpoint::Named& parameter, const Sizes* sizes) {
  if (sizes)
    if (const auto found = sizes->find(parameter.name); found != sizes->end()) return &found->second;
  return &parameter.sizes;
}

std::vector<fs::path> files_with(const fs::path& folder, const char* end) {
  std::vector<fs::path> files;
  for (const auto& entry : read_folder<CheckpointError>("load", folder))
    if (entry.path().filename().string().ends_with(end)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

/// The number behind "zero_pp_rank_"; unset for a file of another name.
std::optional<int64_t> rank_of(const fs::path& file) {
  static constexpr std::string_view kMark = "zero_pp_rank_";
  const auto name = file.filename().string();
  const auto at = name.find(kMark);
  if (at == std::string::npos || (at != 0 && name.compare(0, at, "bf16_") != 0)) return std::nullopt;
  size_t digits = at + kMark.size();
  int64_t rank = 0;
  const size_t first = digits;
  for (; digits < name.size() && name[digits] >= '0' && name[digits] <= '9' && digits - first < 8; ++digits)
    rank = rank * 10 + (name[digits] - '0');
  if (digits == first || name.compare(digits, 1, "_") != 0) return std::nullopt;
  return rank;
}

/// By rank, all from 0 on. @param expected  how many; unset: as many as there are
std::vector<std::shared_ptr<const Archive>> open_by_rank(const std::string& source, const std::vector<fs::path>& files,
                                                         std::optional<int64_t> expected) {
  std::map<int64_t, fs::path> by_rank;
  for (const auto& file : files)
    if (const auto rank = rank_of(file)) {
      const auto [found, fresh] = by_rank.emplace(*rank, file);
      if (!fresh)
        raise<CheckpointError>(
            "{}: found '{}' and '{}', two files of rank {}, expected one: they are of different saves", source,
            found->second.filename().string(), file.filename().string(), *rank);
    }
  const int64_t count = expected.value_or(by_rank.empty() ? 0 : by_rank.rbegin()->first + 1);
  std::vector<int64_t> missing;
  for (int64_t rank = 0; rank < std::min<int64_t>(count, 100000) && missing.size() < 8; ++rank)
    if (!by_rank.contains(rank)) missing.push_back(rank);
  if (!missing.empty() || static_cast<int64_t>(by_rank.size()) > count)
    raise<CheckpointError>(
        "{}: found {} files of ranks ({}), expected {}, one of each rank that saved{}; a file was not copied, a rank's "
        "save did not end, or an older save of more ranks lies in the folder",
        source, by_rank.size(), files.empty() ? "none" : files.front().filename().string() + ", …", count,
        missing.empty() ? "" : fmt::format(" (missing: rank {})", fmt::join(missing, ", ")));
  std::vector<std::shared_ptr<const Archive>> archives;
  for (const auto& [rank, file] : by_rank)
    archives.push_back(std::make_shared<const Archive>(file, formats::PickledObjects::as_data));
  return archives;
}

constexpr const char* kModelFile = "mp_rank_00_model_states.pt";
constexpr const char* kModelFiles = "_mp_rank_00_model_states.pt";
constexpr const char* kOptimizerFiles = "_mp_rank_00_optim_states.pt";

}  // namespace

bool ZeroCheckpoint::is_one(const fs::path& folder) {
  return is_there(folder / kModelFile) || is_there(folder / (std::string("zero_pp_rank_0") + kModelFiles));
}

std::string ZeroCheckpoint::named_by(const char* name, const fs::path& folder) {
  const auto file = folder / name;
  if (!is_there(file)) return {};
  std::string tag;
  if (const auto problem = read_file(file, 4096, tag); !problem.empty())
    raise<CheckpointError>("load '{}': {}", file.string(), problem);
  const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
  while (!tag.empty() && is_space(tag.back())) tag.pop_back();
  while (!tag.empty() && is_space(tag.front())) tag.erase(0, 1);
  if (!tag.empty()) check_inside("load", folder, folder / tag);
  return tag;
}

std::string ZeroCheckpoint::latest(const fs::path& folder) {
  const auto tag = named_by(kLatest, folder);
  return tag.empty() ? named_by(kLatestUniversal, folder) : tag;
}

fs::path ZeroCheckpoint::find(const fs::path& folder, const std::string& tag, bool universal) {
  const std::string chosen = !tag.empty() ? tag : universal ? named_by(kLatestUniversal, folder) : latest(folder);
  const char* const file = universal ? kLatestUniversal : kLatest;
  if (chosen.empty() && !is_one(folder))
    raise<CheckpointError>(
        "load '{}': found no file '{}', expected one that names the tag of the checkpoint; give the tag{}",
        folder.string(), file,
        universal ? ", or make a universal checkpoint: accelerate ds-to-universal FOLDER/TAG FOLDER/TAG_universal"
                  : "");
  if (!chosen.empty()) {
    check_inside("load", folder, folder / chosen);
    if (!is_folder(folder / chosen))
      raise<CheckpointError>(
          "load '{}': found no folder '{}', {}", folder.string(), chosen,
          tag.empty() ? fmt::format("which the file '{}' names; the checkpoint was moved or removed",
                                    universal || named_by(kLatest, folder).empty() ? kLatestUniversal : kLatest)
                      : "the tag that was asked for");
  }
  const auto found = chosen.empty() ? folder : folder / chosen;
  if (universal) need_universal(found);
  return found;
}

void ZeroCheckpoint::need_universal(const fs::path& folder) {
  if (UniversalFolder::is_one(folder)) return;
  raise<CheckpointError>(
      "load '{0}': found no folder '{1}' in it, expected a universal checkpoint, as checkpoint.load_universal of the "
      "DeepSpeed configuration says. Make one: accelerate ds-to-universal '{0}' '{0}_universal'; or take the key out: "
      "checkpoints load here on any number of ranks and at any stage as they are",
      folder.string(), UniversalFolder::kFolder);
}

namespace {
thread_local OpenedOnce* opened_once = nullptr;
}  // namespace

OpenedOnce::OpenedOnce() : outer_(std::exchange(opened_once, this)) {}
OpenedOnce::~OpenedOnce() { opened_once = outer_; }

std::shared_ptr<const ZeroCheckpoint> ZeroCheckpoint::opened(const fs::path& folder) {
  if (!opened_once) return std::make_shared<const ZeroCheckpoint>(folder);
  auto& known = opened_once->opened_[folder];
  if (!known) known = std::make_shared<const ZeroCheckpoint>(folder);
  return known;
}

ZeroCheckpoint::ZeroCheckpoint(const fs::path& folder) : source_(fmt::format("load '{}'", folder.string())) {
  if (UniversalFolder::is_one(folder)) {
    universal_ = std::make_shared<const UniversalFolder>(folder);
    const auto stage = value_or_none(optimizer_state(), "zero_stage");
    stage_ = stage.isNone() ? 1 : integer_of(optimizer_file(), stage, "zero_stage");
    if (stage_ < 1 || stage_ > 3) optimizer_file().fail("found stage {}, expected 1, 2 or 3", stage_);
    open_model_files(folder);
    check_alike();
    list_parameters();
    return;
  }
  for (const auto& file : files_with(folder, ".pt")) {
    const auto name = file.filename().string();
    const char* of = name.starts_with("layer_") && name.find("expert") == std::string::npos        ? "pipeline"
                     : name.find("expert_") != std::string::npos || name.starts_with("expp_rank_") ? "expert"
                     : name.find("mp_rank_00_") == std::string::npos && name.find("mp_rank_") != std::string::npos
                         ? "tensor"
                         : nullptr;
    if (of)
      raise<CheckpointError>(
          "{}: found '{}', a file of {} parallelism, expected those of data parallelism alone (mp_rank_00); convert it "
          "with DeepSpeed's own tools",
          source_, name, of);
  }
  open_model_files(folder);
  open_optimizer_files(folder);
  check_alike();
  if (stage_ > 0) place_parameters();
}

void ZeroCheckpoint::open_model_files(const fs::path& folder) {
  if (universal_ && stage_ < 3) {
    // One of each rank of the tensor or pipeline parallelism that saved.
    for (const auto& file : files_with(folder, kModelFile + std::strlen("mp_rank_00")))
      if (file.filename().string().starts_with("mp_rank_"))
        models_.push_back(std::make_shared<const Archive>(file, formats::PickledObjects::as_data));
  } else if (!universal_ && is_there(folder / kModelFile)) {
    models_ = {std::make_shared<const Archive>(folder / kModelFile, formats::PickledObjects::as_data)};
  } else {
    stage_ = 3;
    models_ = open_by_rank(source_, files_with(folder, kModelFiles), std::nullopt);
  }
  if (models_.empty())
    raise<CheckpointError>(
        "{}: found neither {} nor zero_pp_rank_0{}, expected the files of DeepSpeed's save_checkpoint", source_,
        kModelFile, kModelFiles);
  const auto& first = *models_.front();
  const Dict state = model_state();
  ranks_ = integer_of(first, need(first, state, "dp_world_size"), "dp_world_size");
  if (ranks_ < 1 || ranks_ > 1'000'000) first.fail("found dp_world_size {}, expected a number of ranks", ranks_);
  if (stage_ == 3 && static_cast<int64_t>(models_.size()) != ranks_)
    models_ = open_by_rank(source_, files_with(folder, kModelFiles), ranks_);  // says what is missing
  if (need(first, state, "module").isNone() && !universal_)
    first.fail("found no weights under 'module', expected a checkpoint without pipeline parallelism");
}

void ZeroCheckpoint::open_optimizer_files(const fs::path& folder) {
  auto files = files_with(folder, kOptimizerFiles);
  const Dict state = model_state();
  // Stage 0 has its optimizer in the model's file, and no shapes.
  const bool sharded = !value_or_none(state, "param_shapes").isNone();
  if (!sharded) {
    if (!files.empty())
      raise<CheckpointError>(
          "{}: found '{}' beside {} of stage 0, which has no such files, expected files of one save: those of an older "
          "one lie in the folder",
          source_, files.front().filename().string(), kModelFile);
    return;
  }
  if (files.empty() && stage_ == 3)
    raise<CheckpointError>("{}: found no *{}, expected one of each of the {} ranks that saved", source_,
                           kOptimizerFiles, ranks_);
  optimizers_ = open_by_rank(source_, files, ranks_);
  const auto& rank0 = *optimizers_.front();
  const int64_t told = integer_of(rank0, need(rank0, optimizer_state(), "zero_stage"), "zero_stage");
  if (told < 1 || told > 3 || (told == 3) != (stage_ == 3))
    rank0.fail("found stage {}, beside the files of stage {}, expected those of one save", told,
               stage_ == 3 ? "3" : "1 or 2");
  stage_ = told;
}

ZeroCheckpoint::Dict ZeroCheckpoint::model_state(size_t rank) const {
  return models_[rank]->dict(models_[rank]->value, "the dict of DeepSpeed's save_checkpoint");
}
ZeroCheckpoint::Dict ZeroCheckpoint::optimizer_state(size_t rank) const {
  if (universal_) return optimizer_file().dict(optimizer_file().value, "what all parameters have in common");
  const auto& archive = *optimizers_[rank];
  return archive.dict(
      need(archive, archive.dict(archive.value, "the dict of DeepSpeed's save_checkpoint"), "optimizer_state_dict"),
      "the dict of an optimizer");
}

/// Files of one rank each that another save left there.
void ZeroCheckpoint::check_alike() const {
  for (size_t rank = 0; rank < optimizers_.size(); ++rank) {
    const auto& archive = *optimizers_[rank];
    const Dict state = optimizer_state(rank);
    if (const int64_t stage = integer_of(archive, need(archive, state, "zero_stage"), "zero_stage"); stage != stage_)
      archive.fail("found stage {}, rank 0's file says {}, expected files of one save", stage, stage_);
    const auto count = need(archive, state, "partition_count");
    int64_t most = 0;
    if (count.isList())
      for (const c10::IValue& one : count.toListRef())
        most = std::max(most, integer_of(archive, one, "partition_count"));
    else most = integer_of(archive, count, "partition_count");
    if (most != ranks_ && !(count.isList() && count.toListRef().empty()))  // which says nothing: no parameters
      archive.fail(
          "found the state of one of {} ranks, expected of one of {}, as '{}' says: they are of different saves", most,
          ranks_, models_.front()->name);
  }
  for (size_t rank = 1; rank < models_.size(); ++rank)
    for (const char* key : {"dp_world_size", "global_steps"}) {
      const auto &archive = *models_[rank], &rank0 = *models_.front();
      const int64_t here = integer_of(archive, need(archive, model_state(rank), key), key);
      if (const int64_t there = integer_of(rank0, need(rank0, model_state(), key), key); here != there)
        archive.fail("found {} = {}, rank 0's file says {}, expected files of one save", key, here, there);
    }
}

/// Lists the parameters of a universal checkpoint. Ranks of a pipeline list their own.
void ZeroCheckpoint::list_parameters() {
  std::set<std::string> seen;
  for (const auto& model : models_) {
    int64_t group = 0;
    const Dict state = model->dict(model->value, "the dict of DeepSpeed's save_checkpoint");
    for (const auto& shapes : list_of(*model, need(*model, state, "param_shapes"), "param_shapes")) {
      for (const auto& entry : model->dict(shapes, "the sizes of parameters by name")) {
        if (!entry.key().isString()) model->fail("found parameters whose keys are not names");
        Named parameter{.name = entry.key().toStringRef(), .sizes = sizes_of(*model, entry.value()), .group = group};
        parameter.numel = product(parameter.sizes);
        if (seen.insert(parameter.name).second) parameters_.push_back(std::move(parameter));
      }
      ++group;
    }
  }
  std::stable_sort(parameters_.begin(), parameters_.end(),
                   [](const Named& a, const Named& b) { return a.group < b.group; });
}

void ZeroCheckpoint::place_parameters() {
  const auto& first = *models_.front();
  const Dict optimizer = optimizer_state();
  const auto& rank0 = *optimizers_.front();
  const c10::IValue paddings = value_or_none(optimizer, "param_alignment_paddings");
  int64_t group = 0;
  for (const auto& shapes : list_of(first, need(first, model_state(), "param_shapes"), "param_shapes")) {
    int64_t offset = 0;
    size_t index = 0;
    std::vector<int64_t> gaps;
    if (!paddings.isNone()) {
      const auto of_groups = list_of(rank0, paddings, "param_alignment_paddings");
      if (static_cast<size_t>(group) < of_groups.size())
        for (const auto& gap : list_of(rank0, of_groups[static_cast<size_t>(group)], "param_alignment_paddings"))
          gaps.push_back(integer_of(rank0, gap, "param_alignment_paddings"));
    }
    for (const auto& entry : first.dict(shapes, "the sizes of parameters by name")) {
      if (!entry.key().isString()) first.fail("found parameters whose keys are not names");
      Named parameter{.name = entry.key().toStringRef(), .sizes = sizes_of(first, entry.value()), .group = group};
      parameter.numel = product(parameter.sizes);
      parameter.offset = offset;
      const int64_t gap = index < gaps.size() ? gaps[index] : 0;
      const int64_t taken = stage_ == 3 ? pieces_of(parameter.numel) : parameter.numel;
      if (gap < 0 || __builtin_add_overflow(offset, taken, &offset) || __builtin_add_overflow(offset, gap, &offset))
        first.fail("the sizes of parameters and the gaps between them, {} behind '{}', are none that memory can have",
                   gap, parameter.name);
      ++index;
      parameters_.push_back(std::move(parameter));
    }
    const auto masters = flat(group, "");
    if (!masters)
      rank0.fail("found no '{}' of group {}, of which '{}' has the sizes", masters_key(), group, first.name);
    // Stage 3 cuts each parameter, and ranks hold as many elements each; else the end may be padded, or not.
    int64_t available = 0;
    bool fits = true;
    for (const auto& slice : *masters) available += slice.numel, fits = fits && slice.numel == offset;
    if (stage_ < 3) fits = available >= offset && available - offset < 2 * ranks_;
    if (!fits)
      raise<CheckpointError>(
          "{}: found {} elements in '{}' of group {}, expected {} {} for the parameters that '{}' lists; files of "
          "different saves are in the folder",
          source_, available, masters_key(), group, offset, stage_ == 3 ? "of each rank" : "in all", first.name);
    ++group;
  }
}

c10::IValue ZeroCheckpoint::base_optimizer(size_t rank) const {
  if (universal_) return optimizer_state();
  return need(*optimizers_[rank], optimizer_state(rank), stage_ == 3 ? "optimizer_state_dict" : "base_optimizer_state");
}

std::optional<ZeroCheckpoint::Dict> ZeroCheckpoint::state_of(size_t rank, int64_t group) const {
  const auto& archive = *optimizers_[rank];
  const c10::IValue base = base_optimizer(rank);
  if (base.isList()) {  // "elastic" checkpoints have no dict around
    const auto all = base.toListRef();
    if (static_cast<size_t>(group) >= all.size()) return std::nullopt;
    return archive.dict(all[static_cast<size_t>(group)], "the state of a group");
  }
  const Dict all =
      archive.dict(need(archive, archive.dict(base, "the dict of an optimizer within"), "state"), "a dict at 'state'");
  const auto found = all.find(group);
  if (found == all.end()) return std::nullopt;
  return archive.dict(found->value(), "the state of a group");
}

std::vector<std::string> ZeroCheckpoint::kinds(int64_t group) const {
  std::set<std::string> names;
  for (const auto& parameter : parameters_)
    if (universal_ && parameter.group == group)
      for (auto& kind : universal_->kinds(parameter.name)) names.insert(std::move(kind));
  for (size_t rank = 0; rank < optimizers_.size(); ++rank) {
    if (const auto states = state_of(rank, group))
      for (const auto& field : *states)
        if (field.key().isString()) names.insert(field.key().toStringRef());
  }
  return {names.begin(), names.end()};
}

std::optional<ZeroCheckpoint::Flat> ZeroCheckpoint::flat(int64_t group, const std::string& kind) const {
  Flat result;
  for (size_t rank = 0; rank < optimizers_.size(); ++rank) {
    const auto& archive = *optimizers_[rank];
    const Dict optimizer = optimizer_state(rank);
    const auto masters = list_of(archive, need(archive, optimizer, masters_key()), masters_key());
    if (static_cast<size_t>(group) >= masters.size()) return std::nullopt;
    c10::IValue value = masters[static_cast<size_t>(group)];
    if (!value.isTensor()) archive.fail("found {} among '{}', expected tensors", value.tagKind(), masters_key());
    // The elements that are not padding. Masters come without padding, and states with it, but for elastic checkpoints.
    const int64_t lean = numel_of(archive, value.toTensor());
    if (!kind.empty()) {
      const auto states = state_of(rank, group);
      if (!states) return std::nullopt;
      value = value_or_none(*states, kind.c_str());
      if (!value.isTensor() || archive.saved(value.toTensor()).sizes.size() != 1) return std::nullopt;
      if (const int64_t there = numel_of(archive, value.toTensor()); there < lean)
        archive.fail("found {} elements of '{}' in group {}, expected {}, one for each of its parameters'", there, kind,
                     group, lean);
    }
    result.push_back({&archive, value.toTensor(), lean});
  }
  return result;
}

StoredTensor ZeroCheckpoint::part_of(const Flat& flat, const Named& parameter) const {
  std::vector<Segment> segments;
  at::ScalarType dtype = at::kFloat;
  const int64_t piece = stage_ == 3 ? pieces_of(parameter.numel) : 0;
  int64_t before = 0;  // elements of slices that were passed
  int64_t found = 0;
  for (size_t rank = 0; rank < flat.size(); ++rank) {
    const auto& slice = flat[rank];
    const auto& saved = slice.archive->saved(slice.stand_in);
    if (rank > 0 && saved.dtype != dtype)
      slice.archive->fail("found {} where rank 0 has {}, expected files of one save", c10::toString(saved.dtype),
                          c10::toString(dtype));
    dtype = saved.dtype;
    const auto width = static_cast<int64_t>(c10::elementSize(dtype));
    // Elements [begin, end) of the parameter, which lie from `at` on in the slice.
    int64_t begin = 0, end = 0, at = 0;
    if (stage_ == 3) {
      begin = static_cast<int64_t>(rank) * piece, end = std::min(parameter.numel, begin + piece), at = parameter.offset;
    } else {
      begin = std::max<int64_t>(0, before - parameter.offset);
      end = std::min(parameter.numel, before + slice.numel - parameter.offset);
      at = parameter.offset + begin - before;
      before += slice.numel;
    }
    if (begin < end) segments.push_back({begin, end - begin, slice.archive->file, saved.begin + at * width, saved});
    found += std::max<int64_t>(0, end - begin);
  }
  if (found != parameter.numel)
    raise<CheckpointError>("{}: found {} elements of '{}', expected {}; files of different saves are in the folder",
                           source_, found, parameter.name, parameter.numel);
  return joined(dtype, parameter.sizes, std::move(segments));
}

StoredTensors ZeroCheckpoint::weights(const Which& which) const {
  StoredTensors result;
  const auto& first = *models_.front();
  const Dict state = model_state();
  std::set<std::string> buffers;
  for (const auto& name : list_of(first, need(first, state, "buffer_names"), "buffer_names"))
    if (name.isString()) buffers.insert(name.toStringRef());
  const c10::IValue frozen_shapes = value_or_none(state, "frozen_param_shapes");
  std::set<std::string> is_frozen;
  if (frozen_shapes.isGenericDict())
    for (const auto& entry : frozen_shapes.toGenericDict())
      if (entry.key().isString()) is_frozen.insert(entry.key().toStringRef());
  const c10::IValue module = need(first, state, "module");
  for (const auto& entry : module.isNone() ? make_dict() : first.dict(module, "weights by name")) {
    if (!entry.key().isString() || !entry.value().isTensor())
      first.fail("found {} under 'module', expected tensors by their names", entry.value().tagKind());
    const auto& name = entry.key().toStringRef();
    if (stage_ == 3 && !buffers.contains(name)) continue;  // stands for a parameter that is in shards
    if (!which.frozen && is_frozen.contains(name)) continue;
    result[name] = first.stored(entry.value().toTensor());
  }
  if (stage_ == 3 && which.frozen)
    for (const auto& name : is_frozen) {
      Named parameter{.name = name, .sizes = sizes_of(first, frozen_shapes.toGenericDict().at(name))};
      parameter.numel = product(parameter.sizes);
      Flat pieces;
      for (size_t rank = 0; rank < models_.size(); ++rank) {
        const auto& archive = *models_[rank];
        const auto fragments =
            archive.dict(need(archive, model_state(rank), "frozen_param_fragments"), "pieces of frozen parameters");
        const auto found = fragments.find(name);
        const int64_t piece = pieces_of(parameter.numel);
        if (found == fragments.end() || !found->value().isTensor() ||
            numel_of(archive, found->value().toTensor()) < piece)
          archive.fail("found no piece of {} elements of the frozen '{}'", piece, name);
        pieces.push_back({&archive, found->value().toTensor(), piece});
      }
      result[name] = part_of(pieces, parameter);
    }
  int64_t group = -1;
  std::optional<Flat> masters;
  for (const auto& parameter : parameters_) {
    if (universal_) {
      result[parameter.name] =
          universal_->tensor(parameter.name, UniversalFolder::kMasters, sizes_for(parameter, which.sizes));
      continue;
    }
    if (!which.masters && stage_ < 3) break;
    if (parameter.group != group) masters = flat(group = parameter.group, "");
    result[parameter.name] = part_of(*masters, parameter);
  }
  if (stage_ == 0 && which.masters) add_masters_of_stage_0(result);
  const c10::IValue shared = value_or_none(state, "shared_params");
  if (shared.isGenericDict())
    for (const auto& entry : shared.toGenericDict())
      if (entry.key().isString() && entry.value().isString())
        if (const auto found = result.find(entry.value().toStringRef()); found != result.end())
          result[entry.key().toStringRef()] = found->second;
  return result;
}

void ZeroCheckpoint::add_masters_of_stage_0(StoredTensors& weights) const {
  const auto& first = *models_.front();
  const Dict state = model_state();
  const c10::IValue optimizer = value_or_none(state, "optimizer");
  if (!optimizer.isGenericDict()) return;
  const c10::IValue groups = value_or_none(optimizer.toGenericDict(), "fp32_groups");
  if (!groups.isList()) return;
  // Masters come in the order of the optimizer's parameters, without names: each is of the next weight of the model
  // that it rounds to. Frozen weights, buffers and second names of tied ones have none.
  std::vector<std::string> names;
  for (const auto& entry : first.dict(need(first, state, "module"), "weights by name"))
    names.push_back(entry.key().toStringRef());
  std::set<std::string> taken;
  for (const c10::IValue& group : groups.toListRef())
    for (const auto& item : list_of(first, group, "fp32_groups")) {
      if (!item.isTensor()) first.fail("found {} among 'fp32_groups', expected tensors", item.tagKind());
      const auto master = first.stored(item.toTensor());
      const at::Tensor values = master.read_whole();
      const auto fits = [&](const std::string& name) {
        const auto& weight = weights.at(name);
        return !taken.contains(name) && weight.sizes == master.sizes &&
               values.to(weight.dtype).equal(weight.read_whole());
      };
      const auto found = std::find_if(names.begin(), names.end(), fits);
      if (found == names.end())
        first.fail(
            "found a master of size {} in 'fp32_groups' that rounds to none of the weights, expected one for each "
            "trained weight",
            formats::to_string(master.sizes));
      taken.insert(*found);
      weights[*found] = master;
    }
}

namespace {

/// Options of a group, without its parameters.
Dict options_of(const Archive& archive, const c10::IValue& group) {
  Dict options(c10::StringType::get(), c10::AnyType::get());
  for (const auto& entry : archive.dict(group, "a parameter group"))
    if (entry.key().isString() && entry.key().toStringRef() != "params") options.insert(entry.key(), entry.value());
  return options;
}
StoredTensor steps(double count) {
  const at::Tensor value = at::empty({}, at::TensorOptions().dtype(at::kFloat)).fill_(count);
  return {.dtype = at::kFloat,
          .sizes = {},
          .bytes = std::nullopt,
          .read = [value](const DcpBox&, const at::Tensor& destination) { destination.copy_(value); },
          .read_whole = [value] { return value; }};
}
std::optional<double> number_of(const c10::IValue& value) {
  if (value.isInt() || value.isDouble()) return value.toScalar().toDouble();
  if (value.isTensor() && value.toTensor().numel() == 1) return value.toTensor().item<double>();
  return std::nullopt;
}
std::optional<double> number_of(const Archive& archive, const c10::IValue& value) {
  if (value.isInt() || value.isDouble()) return value.toScalar().toDouble();
  if (value.isTensor() && archive.saved(value.toTensor()).sizes.empty())
    return archive.stored(value.toTensor()).read_whole().item<double>();
  return std::nullopt;
}

}  // namespace

StoredOptimizer ZeroCheckpoint::optimizer_of_stage_0() const {
  const auto& archive = *models_.front();
  const c10::IValue given = value_or_none(model_state(), "optimizer");
  if (!given.isGenericDict())
    archive.fail("found no state of an optimizer, expected one: the checkpoint was saved without an optimizer");
  Dict dict = given.toGenericDict();
  if (const c10::IValue inner = value_or_none(dict, "optimizer_state_dict"); inner.isGenericDict())
    dict = inner.toGenericDict();  // in half precision, around it the scale and the masters
  StoredOptimizer result{.source = source_, .by_name = false, .groups = {}, .state = {}};
  for (const auto& group : list_of(archive, need(archive, dict, "param_groups"), "param_groups")) {
    StoredOptimizer::Group stored{.options = options_of(archive, group), .parameters = {}};
    for (const auto& key :
         list_of(archive, need(archive, archive.dict(group, "a parameter group"), "params"), "params"))
      stored.parameters.push_back(std::to_string(integer_of(archive, key, "params")));
    result.groups.push_back(std::move(stored));
  }
  for (const auto& entry : archive.dict(need(archive, dict, "state"), "a dict at 'state'"))
    for (const auto& field : archive.dict(entry.value(), "the dict of a parameter's state")) {
      if (!field.key().isString()) archive.fail("found a parameter's state whose keys are not names");
      auto& state = result.state[std::to_string(integer_of(archive, entry.key(), "state"))];
      if (field.value().isTensor()) state[field.key().toStringRef()] = archive.stored(field.value().toTensor());
      else if (const auto number = number_of(archive, field.value())) state[field.key().toStringRef()] = steps(*number);
    }
  return result;
}

ZeroCheckpoint::States ZeroCheckpoint::states_of(const Named& parameter,
                                                 const std::map<std::string, Flat>& flats) const {
  States result;
  for (const auto& [kind, vector] : flats) result[kind] = part_of(vector, parameter);
  return result;
}

ZeroCheckpoint::States ZeroCheckpoint::universal_states_of(const Named& parameter,
                                                           const std::vector<std::string>& kinds,
                                                           const Sizes* sizes) const {
  const c10::IValue step = universal_->step(parameter.name);
  States result;
  // One that never had a gradient has no states at all. Else a file that is missing is named.
  if (step.isNone() && universal_->kinds(parameter.name).empty()) return result;
  for (const auto& kind : kinds) result[kind] = universal_->tensor(parameter.name, kind, sizes_for(parameter, sizes));
  if (const auto count = number_of(step)) result["step"] = steps(*count);
  return result;
}

StoredOptimizer ZeroCheckpoint::optimizer(const Sizes* sizes) const {
  if (stage_ == 0) return optimizer_of_stage_0();
  const auto& archive = optimizer_file();
  const Dict optimizer = optimizer_state();
  StoredOptimizer result{.source = source_, .by_name = true, .groups = {}, .state = {}};
  const c10::IValue base = base_optimizer(0);
  int64_t groups = 0;
  for (const auto& parameter : parameters_) groups = std::max(groups, parameter.group + 1);
  std::map<int64_t, size_t> group_of;  ///< the optimizer's, of those that are flat together
  if (base.isGenericDict()) {
    for (const auto& group : list_of(archive, need(archive, base.toGenericDict(), "param_groups"), "param_groups")) {
      for (const auto& number :
           list_of(archive, need(archive, archive.dict(group, "a parameter group"), "params"), "params"))
        group_of[integer_of(archive, number, "params")] = result.groups.size();
      result.groups.push_back({.options = options_of(archive, group), .parameters = {}});
    }
  } else {
    for (int64_t group = 0; group < groups; ++group) {
      group_of[group] = result.groups.size();
      result.groups.push_back({.options = Dict(c10::StringType::get(), c10::AnyType::get()), .parameters = {}});
    }
  }
  // DeepSpeed counts a group's steps, this library each parameter's, which it keeps beside.
  std::optional<Dict> own_steps;
  if (const c10::IValue own = value_or_none(optimizer, "accelerate_steps"); own.isGenericDict())
    own_steps = own.toGenericDict();
  for (int64_t group = 0; group < groups; ++group) {
    if (!group_of.contains(group)) archive.fail("found no parameter group for group {} of '{}'", group, masters_key());
    auto& into = result.groups[group_of.at(group)];
    std::optional<double> count;
    if (const auto found = into.options.find("step"); found != into.options.end())  // of DeepSpeed's fused optimizers
      count = number_of(archive, found->value());
    const auto of_this = kinds(group);
    std::map<std::string, Flat> flats;
    for (const auto& kind : of_this) {
      if (kind == "step" || universal_) continue;
      if (auto found = flat(group, kind)) flats.emplace(kind, *std::move(found));
    }
    if (const auto own = number_of(step(group))) count = own;
    for (const auto& parameter : parameters_) {
      if (parameter.group != group) continue;
      into.parameters.push_back(parameter.name);
      std::optional<double> own = count;
      if (own_steps) {
        const auto found = own_steps->find(parameter.name);
        if (found == own_steps->end()) continue;  // it had no state
        own = found->value().isNone() ? std::nullopt : number_of(archive, found->value());
      }
      auto state = universal_ ? universal_states_of(parameter, of_this, sizes) : states_of(parameter, flats);
      // A universal one has a count beside each parameter, and the exact one with the others.
      if (own_steps) state.erase("step");
      if (own && !state.contains("step") && !(universal_ && state.empty())) state["step"] = steps(*own);
      if (!state.empty()) result.state.emplace(parameter.name, std::move(state));
    }
  }
  for (auto& group : result.groups) static_cast<void>(group.options.erase("step"));
  return result;
}

std::vector<fs::path> ZeroCheckpoint::model_files() const {
  std::vector<fs::path> files;
  for (const auto& model : models_) files.push_back(model->file->path());
  return files;
}
c10::IValue ZeroCheckpoint::model_value(const char* key) const {
  return models_.front()->read(value_or_none(model_state(), key));
}
c10::IValue ZeroCheckpoint::optimizer_value(const char* key) const {
  return optimizer_file().read(value_or_none(optimizer_state(), key));
}
c10::IValue ZeroCheckpoint::param_groups() const {
  const auto& archive = optimizer_file();
  return archive.read(
      need(archive, archive.dict(base_optimizer(0), "the dict of an optimizer within"), "param_groups"));
}
c10::IValue ZeroCheckpoint::step(int64_t group) const {
  const auto& archive = optimizer_file();
  if (universal_) {  // those of stage 3 have rank 0's states, whose counts are those of all
    const c10::IValue within = value_or_none(optimizer_state(), "optimizer_state_dict");
    const c10::IValue all = within.isGenericDict() ? value_or_none(within.toGenericDict(), "state") : c10::IValue();
    if (!all.isGenericDict()) return {};
    const auto states = all.toGenericDict();
    const auto found = states.find(group);
    if (found == states.end()) return {};
    return archive.read(value_or_none(archive.dict(found->value(), "the state of a group"), "step"));
  }
  const auto states = state_of(0, group);
  const c10::IValue count = states ? value_or_none(*states, "step") : c10::IValue();
  // A vector of this name is none.
  if (count.isTensor() && !archive.saved(count.toTensor()).sizes.empty()) return {};
  return archive.read(count);
}

int64_t ZeroCheckpoint::global_steps() const {
  return integer_of(*models_.front(), need(*models_.front(), model_state(), "global_steps"), "global_steps");
}
int64_t ZeroCheckpoint::skipped_steps() const {
  const c10::IValue count = value_or_none(model_state(), "skipped_steps");
  return count.isInt() ? count.toInt() : 0;
}
c10::IValue ZeroCheckpoint::lr_scheduler() const {
  return models_.front()->read(value_or_none(model_state(), "lr_scheduler"));
}
c10::IValue ZeroCheckpoint::loss_scaler() const {
  if (stage_ > 0) return value_or_none(optimizer_state(), "loss_scaler");
  const c10::IValue optimizer = value_or_none(model_state(), "optimizer");
  if (!optimizer.isGenericDict()) return {};
  const c10::IValue own = value_or_none(optimizer.toGenericDict(), "loss_scaler");
  if (own.isGenericDict()) return own;
  return value_or_none(optimizer.toGenericDict(), "cur_scale").isNone() ? c10::IValue() : optimizer;
}

bool ZeroCheckpoint::is_own_key(const std::string& key) {
  static const std::set<std::string> own = {"module",
                                            "buffer_names",
                                            "optimizer",
                                            "param_shapes",
                                            "frozen_param_shapes",
                                            "shared_params",
                                            "lr_scheduler",
                                            "data_sampler",
                                            "random_ltd",
                                            "frozen_param_fragments",
                                            "skipped_steps",
                                            "global_steps",
                                            "global_samples",
                                            "dp_world_size",
                                            "mp_world_size",
                                            "ds_config",
                                            "ds_version",
                                            "checkpoint_parallel_dimensions",
                                            "sparse_tensor_module_names"};
  return own.contains(key);
}

std::map<std::string, c10::IValue> ZeroCheckpoint::client_state() const {
  std::map<std::string, c10::IValue> result;
  for (const auto& entry : model_state())
    if (entry.key().isString() && !is_own_key(entry.key().toStringRef()))
      result.emplace(entry.key().toStringRef(), models_.front()->read(entry.value()));
  return result;
}

}  // namespace accelerate::checkpointing
