#include "formats/torch_container.hpp"

#include <algorithm>
#include <span>

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
  for (const std::span<const TorchStorage> table : {std::span<const TorchStorage>(kTorchStorages), {kScriptStorages}})
    for (const auto& row : table)
      if (row.global == global) return &row;
  return nullptr;
}

// Zip, as PKWARE's APPNOTE describes it: sizes of its parts and their first bytes.
constexpr std::string_view kEnd = "PK\5\6", kEnd64 = "PK\6\6", kEnd64Locator = "PK\6\7", kDirectoryEntry = "PK\1\2",
                           kLocalHeader = "PK\3\4";
constexpr uint64_t kEndBytes = 22, kEnd64Bytes = 56, kEnd64LocatorBytes = 20, kEntryBytes = 46, kLocalBytes = 30,
                   kLongestComment = 65535;

// The stream of old: a pickled magic number, a pickled version, the machine's sizes, the object, the keys of its
// storages, and each of these.
constexpr std::string_view kStreamBegin("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.",
                                        21);

}  // namespace

TorchContainer::TorchContainer(std::shared_ptr<const InputFile> file, int64_t offset, int64_t length,
                               std::string source, std::vector<std::string_view> globals)
    : file_(std::move(file)),
      begin_(offset),
      length_(static_cast<uint64_t>(length)),
      source_(std::move(source)),
      globals_{kRebuild, kRebuildWithDtype, kRebuildOfOld, kRebuildParameter, kPickleOrderedDict, kUntypedStorage} {
  for (const auto& row : kTorchStorages) globals_.push_back(row.global);
  for (const auto& row : kScriptStorages) globals_.push_back(row.global);
  globals_.insert(globals_.end(), globals.begin(), globals.end());
  if (length_ >= kStreamBegin.size() && read(0, kStreamBegin.size()) == kStreamBegin) {
    read_stream();
    return;
  }
  read_directory();
  if (entries_.contains("byteorder")) {
    const auto place = record("byteorder");
    if (const auto order = read(static_cast<uint64_t>(place.begin - begin_),
                                std::min<uint64_t>(static_cast<uint64_t>(place.size), 20));
        order != "little")
      fail("its numbers are in '{}'-endian order, expected little-endian.", order);
  }
  if (is_script() && (globals.empty() || globals.back() != "*"))
    fail(
        "it is a TorchScript module, as torch.jit.save and C++'s torch::save write it, expected tensors. A model that "
        "torch::save wrote is read by torch::load(model, path), before prepare(); TorchScript's is loaded by "
        "torch::jit::load(), or save the state_dict() of the model in Python.");
  const auto place = record("data.pkl");
  bytes_ = read(static_cast<uint64_t>(place.begin - begin_), static_cast<uint64_t>(place.size));
  pickle_.emplace(bytes_, globals_, source_);
}

void TorchContainer::refuse_archive(const std::string& what) const {
  fail(
      "bytes {} to {} are not an intact archive of torch.save ({}). The file is damaged or of another save: copy it "
      "again, or save again.",
      begin_, static_cast<uint64_t>(begin_) + length_, what);
}

std::string TorchContainer::read(uint64_t begin, uint64_t size) const {
  if (size > Pickle::kMaxBytes)
    fail_archive("its pickle or its directory has {} bytes, expected at most {}", size, Pickle::kMaxBytes);
  if (begin > length_ || size > length_ - begin)
    fail_archive("byte {} to {} of {} were expected", begin, begin + size, length_);
  std::string bytes(size, '\0');
  file_->read(begin_ + static_cast<int64_t>(begin), bytes.data(), static_cast<int64_t>(size));
  return bytes;
}

void TorchContainer::read_directory() {
  const uint64_t tail_bytes = std::min(length_, kEndBytes + kLongestComment), tail_begin = length_ - tail_bytes;
  const auto tail = read(tail_begin, tail_bytes);
  const auto end = tail.rfind(kEnd);
  if (end == std::string::npos || tail.size() - end < kEndBytes)
    fail_archive("it has no directory of a zip at its end");
  uint64_t count = little<uint16_t>(tail, end + 10), size = little<uint32_t>(tail, end + 12),
           begin = little<uint32_t>(tail, end + 16);
  if (end >= kEnd64LocatorBytes && std::string_view(tail).substr(end - kEnd64LocatorBytes).starts_with(kEnd64Locator)) {
    const auto large = read(little<uint64_t>(tail, end - kEnd64LocatorBytes + 8), kEnd64Bytes);
    if (!large.starts_with(kEnd64)) fail_archive("the end of its directory is not where it says");
    count = little<uint64_t>(large, 32), size = little<uint64_t>(large, 40), begin = little<uint64_t>(large, 48);
  }
  const auto directory = read(begin, size);
  for (uint64_t at = 0; count > 0; --count) {
    const auto rest = std::string_view(directory).substr(at);
    if (rest.size() < kEntryBytes || !rest.starts_with(kDirectoryEntry))
      fail_archive("its directory ends before its last entry");
    const uint64_t name_bytes = little<uint16_t>(rest, 28), extra_bytes = little<uint16_t>(rest, 30),
                   all = kEntryBytes + name_bytes + extra_bytes + little<uint16_t>(rest, 32);
    if (rest.size() < all) fail_archive("its directory ends before its last entry");
    Entry entry{.header = little<uint32_t>(rest, 42),
                .size = little<uint32_t>(rest, 24),
                .stored = little<uint16_t>(rest, 10) == 0,
                .crc32 = little<uint32_t>(rest, 16)};
    // Numbers that don't fit are in an extra field, in this order.
    auto extra = rest.substr(kEntryBytes + name_bytes, extra_bytes);
    while (extra.size() >= 4) {
      const uint64_t field_bytes = std::min<uint64_t>(little<uint16_t>(extra, 2), extra.size() - 4);
      auto field = extra.substr(4, field_bytes);
      const auto take = [&](uint64_t& number) {
        if (field.size() < 8) fail_archive("a large record has no size");
        number = little<uint64_t>(field, 0), field.remove_prefix(8);
      };
      if (little<uint16_t>(extra, 0) == 1) {
        uint64_t compressed = little<uint32_t>(rest, 20);
        for (uint64_t* number : {&entry.size, &compressed, &entry.header})
          if (*number == 0xffffffff) take(*number);
      }
      extra.remove_prefix(4 + field_bytes);
    }
    const auto name = rest.substr(kEntryBytes, name_bytes);
    entries_.insert_or_assign(std::string(name.substr(name.find('/') + 1)), entry);
    at += all;
  }
}

TorchContainer::Bytes TorchContainer::record(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail_archive("it has no record '{}'", name);
  if (!found->second.stored) fail("the record '{}' is compressed, which torch.save never does.", name);
  const auto header = read(found->second.header, kLocalBytes);
  if (!header.starts_with(kLocalHeader)) fail_archive("the record '{}' is not where its directory says", name);
  const uint64_t data =
      found->second.header + kLocalBytes + little<uint16_t>(header, 26) + little<uint16_t>(header, 28);
  if (data > length_ || found->second.size > length_ - data)
    fail("the record '{}' reaches beyond its archive. The file is damaged.", name);
  const Bytes place{begin_ + static_cast<int64_t>(data), static_cast<int64_t>(found->second.size)};
  if (place.size > 0 && found->second.crc32 != 0 && file_->wants_records() &&
      !file_->expect_record(name, place.begin, place.size, found->second.crc32))
    fail_archive("the record '{}' lies in the place of another", name);
  return place;
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
  const auto code = entries_.lower_bound("code/");
  return code != entries_.end() && code->first.starts_with("code/");
}

TorchContainer::Bytes TorchContainer::storage(const std::string& key) const {
  if (!entries_.empty()) return record("data/" + key);
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
