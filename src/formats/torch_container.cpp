#include "formats/torch_container.hpp"

#include <algorithm>

#include "accelerate/utils/error.hpp"

namespace accelerate::formats {
namespace {

using Kind = PickleNode::Kind;

constexpr std::string_view kRebuild = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kRebuildWithDtype = "torch._utils._rebuild_tensor_v3";
constexpr std::string_view kRebuildOfOld = "torch._utils._rebuild_tensor";  // until PyTorch 0.3
constexpr std::string_view kRebuildParameter = "torch._utils._rebuild_parameter";

template <class T> T little(std::string_view bytes, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
  return static_cast<T>(value);
}

std::string_view without_torch(std::string_view name) { return name.starts_with("torch.") ? name.substr(6) : name; }

const TorchStorage* find_storage(std::string_view global) {
  const TorchStorage* found = nullptr;
  for_each_torch_storage([&](const TorchStorage& row) {
    if (row.global == global) found = &row;
  });
  return found;
}

// The stream of old: a pickled magic number, a pickled version, the machine's sizes, the object, the keys of its
// storages, and each of these.
constexpr std::string_view kStreamBegin("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.",
                                        21);

}  // namespace

TorchContainer::TorchContainer(std::shared_ptr<const InputFile> file, int64_t offset, int64_t length,
                               std::string source, std::vector<std::string_view> globals, ZipArchive::Look look)
    : file_(std::move(file)),
      begin_(offset),
      length_(static_cast<uint64_t>(length)),
      source_(std::move(source)),
      globals_{kRebuild, kRebuildWithDtype, kRebuildOfOld, kRebuildParameter, kPickleOrderedDict, kUntypedStorage},
      look_(look) {
  for_each_torch_storage([&](const TorchStorage& row) { globals_.push_back(row.global); });
  globals_.insert(globals_.end(), globals.begin(), globals.end());
  if (length_ >= kStreamBegin.size() && read(0, kStreamBegin.size()) == kStreamBegin) {
    read_stream();
    return;
  }
  zip_.emplace(file_, begin_, length, source_, look_);
  if (zip_->contains("byteorder")) {
    constexpr uint64_t kLongest = 20;
    if (const auto order = zip_->text("byteorder", kLongest); order != "little")
      fail("its numbers are in '{}'-endian order, expected little-endian.", order);
  }
  if (is_script() && (globals.empty() || globals.back() != "*"))
    fail(
        "it is a TorchScript module, as torch.jit.save and C++'s torch::save write it, expected tensors. A model that "
        "torch::save wrote is read by torch::load(model, path), before prepare(); TorchScript's is loaded by "
        "torch::jit::load(), or save the state_dict() of the model in Python.");
  bytes_ = zip_->text("data.pkl", Pickle::kMaxBytes);
  pickle_.emplace(bytes_, globals_, source_);
}

std::string TorchContainer::read(uint64_t begin, uint64_t size) const {
  if (begin > length_ || size > length_ - begin)
    fail("byte {} to {} of {} were expected. The file is truncated: copy it again, or save again.", begin, begin + size,
         length_);
  std::string bytes(size, '\0');
  const int64_t at = begin_ + static_cast<int64_t>(begin), count = static_cast<int64_t>(size);
  if (look_ == ZipArchive::Look::peeks) file_->peek(at, bytes.data(), count);
  else file_->read(at, bytes.data(), count);
  return bytes;
}

void TorchContainer::read_stream() {
  // Limits of pickles before the numbers: room for some hundred thousand tensors.
  constexpr uint64_t kFirst = 1 << 20, kMost = 64 << 20;
  const std::vector<std::string_view> none;
  for (uint64_t size = std::min(length_, kFirst);; size = std::min({length_, 4 * size, kMost})) {
    bytes_ = read(0, size);
    auto rest = std::string_view(bytes_).substr(kStreamBegin.size());
    try {
      const Pickle machine(rest, none, source_);
      rest.remove_prefix(machine.size());
      if (const auto* order = machine.find(machine.root(), "little_endian");
          machine.root().kind != Kind::dict || !order || !order->integer)
        fail("its numbers are not in little-endian order.");
      pickle_.emplace(rest, globals_, source_);
      rest.remove_prefix(pickle_->size());
      const Pickle keys(rest, none, source_);
      rest.remove_prefix(keys.size());
      std::map<std::string, int64_t> element_bytes;
      for (uint32_t i = 0; i < pickle_->count(); ++i) {
        const auto& node = (*pickle_)[i];
        if (node.kind != Kind::persistent || (*pickle_)[node.items[0]].kind != Kind::tuple) continue;
        const auto& id = (*pickle_)[node.items[0]].items;
        if (id.size() < 3 || (*pickle_)[id[2]].kind != Kind::text) continue;
        const auto* row = find_storage((*pickle_)[id[1]].text);
        element_bytes[std::string((*pickle_)[id[2]].text)] = row ? row->bytes : 1;
      }
      auto at = static_cast<uint64_t>(bytes_.size() - rest.size());
      for (const auto key : keys.expect(keys.root(), Kind::list, "the list of storages").items) {
        const auto name = keys.text(keys[key], "the key of a storage");
        const auto numel = little<uint64_t>(read(at, 8), 0),
                   width = static_cast<uint64_t>(element_bytes.contains(name) ? element_bytes.at(name) : 0);
        if (width == 0) fail("its numbers have a storage '{}' that no tensor uses. The file is damaged.", name);
        at += 8;
        if (numel > (length_ - at) / width)
          fail(
              "the storage '{}' has {} elements of {} bytes where {} bytes are left. The file is truncated: copy it "
              "again, or save again.",
              name, numel, width, length_ - at);
        storages_[name] = {begin_ + static_cast<int64_t>(at), static_cast<int64_t>(numel * width)};
        at += numel * width;
      }
      return;
    } catch (const CheckpointError&) {
      if (size == length_ || size == kMost) throw;  // else its pickles are longer
    }
  }
}

bool TorchContainer::is_script() const {
  if (!zip_) return false;
  const auto code = zip_->entries().lower_bound("code/");
  return code != zip_->entries().end() && code->first.starts_with("code/");
}

ZipArchive::Bytes TorchContainer::storage(const std::string& key) const {
  if (zip_) return zip_->record("data/" + key, ZipArchive::Look::peeks);
  const auto found = storages_.find(key);
  if (found == storages_.end()) fail("it has no storage '{}'. The file is damaged.", key);
  return found->second;
}

std::vector<int64_t> TorchContainer::numbers(const PickleNode& node, const std::string& what) const {
  constexpr size_t kMostDimensions = 64;  // PyTorch's limit
  const auto& items = pickle_->expect(node, Kind::tuple, what).items;
  if (items.size() > kMostDimensions)
    pickle_->fail(node.at, "{} has {} entries, expected at most {}.", what, items.size(), kMostDimensions);
  std::vector<int64_t> result;
  for (const auto item : items) {
    result.push_back(pickle_->integer((*pickle_)[item], what));
    if (result.back() < 0) pickle_->fail(node.at, "{} has the negative entry {}.", what, result.back());
  }
  return result;
}

std::optional<PickledTensor> TorchContainer::tensor_of(const PickleNode& node) const {
  const Pickle& pickle = *pickle_;
  if (const auto* parts = pickle.call_of(node, kRebuildParameter); parts && !parts->empty()) {
    const auto& data = pickle[parts->front()];
    if (pickle.call_of(data, kRebuildParameter))
      pickle.fail(node.at, "a parameter consists of a parameter, expected a tensor.");
    return tensor_of(data);
  }
  const auto* with_dtype = pickle.call_of(node, kRebuildWithDtype);
  const auto* of_old = pickle.call_of(node, kRebuildOfOld);
  const auto* arguments = with_dtype ? with_dtype : of_old ? of_old : pickle.call_of(node, kRebuild);
  if (!arguments) return std::nullopt;
  if (const size_t least = with_dtype ? 7 : of_old ? 4 : 6; arguments->size() < least)
    pickle.fail(node.at, "a tensor is described by {} values, expected at least {}.", arguments->size(), least);
  const auto argument = [&](size_t i) -> const PickleNode& { return pickle[(*arguments)[i]]; };
  if (const size_t lazily = with_dtype ? 7 : 6; !of_old && arguments->size() > lazily)
    if (const auto& views = argument(lazily); views.kind != Kind::none && !views.items.empty())
      pickle.fail(node.at,
                  "a tensor is a negated or conjugated view, which PyTorch resolves when it computes, expected plain "
                  "numbers. Save it after resolve_neg() and resolve_conj().");
  const auto& handle = pickle.expect(argument(0), Kind::persistent, "the storage of a tensor");
  const auto& id = pickle.expect(pickle[handle.items[0]], Kind::tuple, "the description of a storage");
  // A sixth item is of the stream of old: a part of another storage, which nobody has had since PyTorch 0.4.
  const bool whole = id.items.size() == 5 || (id.items.size() == 6 && pickle[id.items[5]].kind == Kind::none);
  if (!whole || pickle.text(pickle[id.items[0]], "the kind of a storage") != "storage")
    pickle.fail(id.at, "the description of a storage is not of the form ('storage', type, key, device, size).");
  const auto& type = pickle.expect(pickle[id.items[1]], Kind::global, "the type of a storage");
  const auto* row = find_storage(type.text);
  if (!row && !with_dtype)
    pickle.fail(type.at, "found the storage type {}, expected that of a plain tensor.", type.text);
  PickledTensor tensor{
      .dtype =
          std::string(with_dtype ? without_torch(pickle.expect(argument(6), Kind::global, "the dtype of a tensor").text)
                                 : row->dtype),
      .sizes = numbers(argument(2), "the size of a tensor"),
      .strides = numbers(argument(3), "the stride of a tensor"),
      .numel = 1,
      .first = pickle.integer(argument(1), "the storage offset of a tensor"),
      .storage = pickle.text(pickle[id.items[2]], "the key of a storage")};
  bool fits = tensor.sizes.size() == tensor.strides.size() && tensor.first >= 0, empty = false;
  int64_t last = tensor.first;
  for (size_t dim = 0; fits && dim < tensor.sizes.size(); ++dim) {
    int64_t reach = 0;
    empty = empty || tensor.sizes[dim] == 0;
    if (!empty)
      fits = !__builtin_mul_overflow(tensor.numel, tensor.sizes[dim], &tensor.numel) &&
             !__builtin_mul_overflow(tensor.sizes[dim] - 1, tensor.strides[dim], &reach) &&
             !__builtin_add_overflow(last, reach, &last);
  }
  if (!fits)
    pickle.fail(node.at,
                "a tensor has size {}, stride {} and storage offset {}, which don't fit together. The file is damaged.",
                tensor.sizes, tensor.strides, tensor.first);
  if (empty) tensor.numel = 0;
  else tensor.last = last;
  return tensor;
}

}  // namespace accelerate::formats
