#include <algorithm>

#include "formats/inspect/readers.hpp"
#include "input/read_file.hpp"

namespace accelerate::formats::inspecting {
namespace {

using Kind = PickleNode::Kind;

/// A walk through the values of a pickle, which may be in many places, or in themselves.
class TorchWalk {
 public:
  TorchWalk(const TorchContainer& container, InspectedPart& part)
      : container_(container), pickle_(container.pickle()), part_(part) {}

  void run() { visit(pickle_.root(), "", 0); }

 private:
  void visit(const PickleNode& node, const std::string& path, int depth) {
    constexpr int kDeepest = 100;
    constexpr int64_t kMostVisits = 4'000'000, kMostNameBytes = int64_t{512} << 20;
    name_bytes_ += static_cast<int64_t>(path.size());
    if (depth > kDeepest || ++visits_ > kMostVisits || name_bytes_ > kMostNameBytes)
      pickle_.fail(node.at, "it describes more values, or deeper ones, than any model has. The file is damaged.");
    switch (node.kind) {
      case Kind::dict:
        for (size_t i = 0; i + 1 < node.items.size(); i += 2) {
          const auto& key = pickle_[node.items[i]];
          const auto& value = pickle_[node.items[i + 1]];
          const auto step = key.kind == Kind::text      ? std::string(key.text)
                            : key.kind == Kind::integer ? std::to_string(key.integer)
                                                        : std::string("?");
          // A module that was saved whole keeps its tensors and children apart.
          const bool is_own = step == "_parameters" || step == "_buffers" || step == "_modules";
          visit(value, is_own ? path : joined(path, step), depth + 1);
        }
        return;
      case Kind::list:
      case Kind::tuple:
        for (size_t i = 0; i < node.items.size(); ++i)
          visit(pickle_[node.items[i]], joined(path, std::to_string(i)), depth + 1);
        return;
      case Kind::object:
        if (node.items.size() > 1) visit(pickle_[node.items[1]], path, depth + 1);
        return;
      case Kind::call:
        if (const auto tensor = tensor_of(node)) return add(node, path, *tensor);
        for (const auto argument : pickle_[node.items[1]].items) visit(pickle_[argument], path, depth + 1);
        return;
      case Kind::global:
      case Kind::persistent:
        return;
      default:
        ++part_.others;
    }
  }

  /// One of a kind that this library does not read is no damage.
  std::optional<PickledTensor> tensor_of(const PickleNode& node) {
    try {
      return container_.tensor_of(node);
    } catch (const CheckpointError& error) {
      part_.unread = error.what();
      return std::nullopt;
    }
  }

  void add(const PickleNode& node, const std::string& path, const PickledTensor& tensor) {
    const auto width = torch_element_bytes(tensor.dtype);
    int64_t bytes = 0;
    if (width == 0 || __builtin_mul_overflow(tensor.numel, width, &bytes))
      pickle_.fail(node.at, "'{}' has the dtype {} and the size {}, which no tensor has. The file is damaged.", path,
                   tensor.dtype, tensor.sizes);
    if (!container_.is_script()) {  // which leaves storages out on the meta device
      const auto stored = container_.storage(tensor.storage).size;
      if (tensor.last >= stored / width)
        pickle_.fail(node.at,
                     "'{}' of size {} and stride {} from element {} does not fit into the {} bytes of its storage. The "
                     "file is damaged.",
                     path, tensor.sizes, tensor.strides, tensor.first, stored);
    }
    part_.tensors.push_back({.name = path, .dtype = tensor.dtype, .shape = tensor.sizes, .bytes = bytes, .file = {}});
  }

  static std::string joined(const std::string& path, const std::string& step) {
    return path.empty() ? step : path + "." + step;
  }

  const TorchContainer& container_;
  const Pickle& pickle_;
  InspectedPart& part_;
  int64_t visits_ = 0, name_bytes_ = 0;
};

TorchContainer open_any(const std::filesystem::path& path) {
  const auto file = std::make_shared<const InputFile>(path);
  return TorchContainer(file, 0, file->size(), "'" + path.string() + "'", {"*"});
}

/// The numbers in the name of DeepSpeed's file of an optimizer: "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt".
std::optional<int64_t> zero_rank_of(const std::string& name) {
  constexpr std::string_view kMark = "zero_pp_rank_";
  const auto at = name.find(kMark);
  if (at == std::string::npos) return std::nullopt;
  int64_t rank = 0;
  size_t digit = at + kMark.size();
  const size_t first = digit;
  for (; digit < name.size() && name[digit] >= '0' && name[digit] <= '9' && digit - first < 8; ++digit)
    rank = rank * 10 + (name[digit] - '0');
  return digit == first ? std::nullopt : std::optional(rank);
}

}  // namespace

void add_torch_tensors(const TorchContainer& container, InspectedPart& part) { TorchWalk(container, part).run(); }

int64_t check_records(const ZipArchive& archive) {
  int64_t bytes = 0;
  for (const auto& [name, entry] : archive.entries())
    if (entry.stored && archive.check(name)) bytes += static_cast<int64_t>(entry.size);
  return bytes;
}

std::optional<int64_t> number_in(const std::filesystem::path& file, const std::vector<std::string>& keys) {
  const auto container = open_any(file);
  const auto* node = &container.pickle().root();
  for (const auto& key : keys) {
    if (node->kind != Kind::dict || !(node = container.pickle().find(*node, key))) return std::nullopt;
  }
  // Python's enums: the call of their class.
  if (node->kind == Kind::call && container.pickle()[node->items[1]].items.size() == 1)
    node = &container.pickle()[container.pickle()[node->items[1]].items.front()];
  if (node->kind == Kind::list && !node->items.empty()) node = &container.pickle()[node->items.front()];
  return node->kind == Kind::integer ? std::optional(node->integer) : std::nullopt;
}

std::optional<DeepSpeedFacts> deepspeed_facts(const std::filesystem::path& folder, const Complain& complain) {
  std::set<std::string> models, optimizers;
  for (const auto& entry : read_folder<CheckpointError>("folder", folder)) {
    const auto name = entry.path().filename().string();
    if (name.ends_with("_model_states.pt")) models.insert(name);
    if (name.ends_with("_optim_states.pt")) optimizers.insert(name);
  }
  if (models.empty()) return std::nullopt;
  DeepSpeedFacts facts;
  try {
    facts.step = number_in(folder / *models.begin(), {"global_steps"});
    facts.ranks = number_in(folder / *models.begin(), {"dp_world_size"});
    if (optimizers.empty()) return facts;
    const auto first = folder / *optimizers.begin();
    facts.stage = number_in(first, {"optimizer_state_dict", "zero_stage"});
    if (const auto count = number_in(first, {"optimizer_state_dict", "partition_count"}); count && !facts.ranks)
      facts.ranks = count;
  } catch (const CheckpointError&) {
    return facts;  // which the parts say
  }
  std::set<int64_t> there;
  for (const auto& name : optimizers)
    if (const auto rank = zero_rank_of(name)) there.insert(*rank);
  std::vector<int64_t> missing;
  constexpr size_t kMostNamed = 8;
  if (!there.empty())
    for (int64_t rank = 0; rank < std::min<int64_t>(facts.ranks.value_or(0), 100'000); ++rank)
      if (!there.contains(rank) && missing.size() < kMostNamed) missing.push_back(rank);
  if (!missing.empty())
    complain(fmt::format("the optimizer's files of ranks {} are missing, expected those of {} ranks",
                         fmt::join(missing, ", "), *facts.ranks));
  return facts;
}

void read_universal(const std::filesystem::path& folder, bool verify, InspectedPart& part, const Complain& complain) {
  part.format = "DeepSpeed universal parameters";
  part.files = 0;
  const auto add = [&](const std::filesystem::path& path, const std::string& name) {
    ++part.files;
    try {
      const auto file = std::make_shared<const InputFile>(path);
      part.bytes += file->size();
      const TorchContainer container(file, 0, file->size(), "'" + path.string() + "'", {"*"});
      InspectedPart one;
      add_torch_tensors(container, one);
      part.others += one.others;
      if (!one.unread.empty()) part.unread = one.unread;
      for (auto& tensor : one.tensors) {
        // "param" is the tensor, beside its marks.
        tensor.name = tensor.name.empty() || tensor.name == "param" ? name : name + "." + tensor.name;
        tensor.file = path.lexically_relative(folder).generic_string();
        part.tensors.push_back(std::move(tensor));
      }
      if (verify && container.zip()) part.checked_bytes += check_records(*container.zip());
    } catch (const CheckpointError& error) {
      complain(error.what());
    }
  };
  std::set<std::filesystem::path> entries;
  for (const auto& entry : read_folder<CheckpointError>("folder", folder)) entries.insert(entry.path());
  for (const auto& entry : entries) {
    const auto name = entry.filename().string();
    if (!is_folder(entry)) {
      if (entry.extension() == ".pt") add(entry, entry.stem().string());
      continue;
    }
    std::set<std::filesystem::path> files;
    for (const auto& file : read_folder<CheckpointError>("folder", entry))
      if (file.path().extension() == ".pt") files.insert(file.path());
    if (!files.contains(entry / "fp32.pt")) complain(fmt::format("'{}' has no fp32.pt", name));
    for (const auto& file : files) add(file, name + "." + file.stem().string());
  }
}

}  // namespace accelerate::formats::inspecting
