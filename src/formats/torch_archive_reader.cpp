#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set.h>
#include <c10/core/GradMode.h>

#include "formats/dcp/box.hpp"
#include "formats/script_types.hpp"
#include "formats/torch_archive.hpp"
#include "formats/torch_dtypes.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

using Kind = PickleNode::Kind;

constexpr std::string_view kEncode = "_codecs.encode";                               // how protocol 2 writes bytes
constexpr std::string_view kWithAttributes = "torch._tensor._rebuild_from_type_v2";  // a tensor, and what hangs on it
constexpr int64_t kMostSharedBytes = int64_t{64} << 20;  // of a tensor whose elements share bytes: room for a mask

/// Beside those of tensors.
std::vector<std::string_view> globals_of_objects(PickledObjects objects) {
  std::vector<std::string_view> names{kTorchSize, kEncode, kTypeTag, kComplex, kDevice};
  for (const auto& list : kScriptLists) names.push_back(list.function);
  for (const auto& dtype : kTorchDtypes) names.push_back(dtype.name);
  if (objects == PickledObjects::numpy_numbers)
    names.insert(names.end(), {kNumpyArray, kOldNumpyArray, kNumpyDtype, "numpy.ndarray"});
  if (objects == PickledObjects::as_data) names.insert(names.end(), {kWithAttributes, "*"});
  return names;
}

}  // namespace

struct TorchArchive::Impl {
  Impl(std::shared_ptr<const InputFile> input, int64_t offset, int64_t archive_bytes, std::string source,
       PickledObjects how, bool peeks)
      : file(std::move(input)),
        length(archive_bytes),
        objects(how),
        container(file, offset, archive_bytes, std::move(source), globals_of_objects(how),
                  peeks ? ZipArchive::Look::peeks : ZipArchive::Look::checks),
        pickle(container.pickle()) {}

  std::optional<SavedTensor> tensor_of(const PickleNode& node) const {
    const auto pickled = container.tensor_of(node);
    if (!pickled) return std::nullopt;
    const auto* row = find_torch_dtype("torch." + pickled->dtype);
    if (!row) pickle.fail(node.at, "found the dtype {}, expected that of a plain tensor.", pickled->dtype);
    const auto bytes = container.storage(pickled->storage);
    SavedTensor saved{row->type, pickled->sizes, pickled->strides, 0, bytes.begin, bytes.size, bytes.header};
    // The last byte that it reaches must be there. Elements may share bytes, as those of an expanded tensor do (stride
    // 0), though not so many that a small file asks for any amount of memory.
    const auto width = static_cast<int64_t>(c10::elementSize(saved.dtype));
    if (pickled->last >= bytes.size / width)
      pickle.fail(node.at,
                  "a tensor of size {} and stride {} from element {} does not fit into the {} bytes of its storage.",
                  saved.sizes, saved.strides, pickled->first, bytes.size);
    if (pickled->numel > std::max(bytes.size, kMostSharedBytes) / width)
      pickle.fail(node.at,
                  "an expanded tensor of size {} and stride {} would take more than {} bytes, and has {} in the file. "
                  "Save it after contiguous().",
                  saved.sizes, saved.strides, kMostSharedBytes, bytes.size);
    saved.begin = pickled->numel > 0 ? bytes.begin + pickled->first * width : bytes.begin;
    return saved;
  }

  using ReadTensor = std::function<at::Tensor(const SavedTensor&)>;

  c10::IValue value(const PickleNode& node, int64_t depth, int64_t& budget, const ReadTensor& read_tensor) const {
    // A short pickle can describe a huge or endless value by using one list in many places.
    if (depth > kMaxDepth) pickle.fail(node.at, "values are nested deeper than {} levels.", kMaxDepth);
    const bool holds = node.kind == Kind::list || node.kind == Kind::tuple || node.kind == Kind::dict;
    if ((budget -= price(node)) < (holds ? static_cast<int64_t>(node.items.size()) : 0))  // each of which costs, too
      pickle.fail(node.at, "it describes more values than a file of its length can mean, at most {}.", most_values());
    switch (node.kind) {
      case Kind::none:
        return {};
      case Kind::boolean:
        return node.integer != 0;
      case Kind::integer:
        return node.integer;
      case Kind::real:
        return node.real;
      case Kind::text:
      case Kind::bytes:
        return std::string(node.text);
      case Kind::list: {
        c10::impl::GenericList list(c10::AnyType::get());
        list.reserve(node.items.size());
        for (const auto item : node.items) list.push_back(value(pickle[item], depth + 1, budget, read_tensor));
        return list;
      }
      case Kind::tuple: {
        std::vector<c10::IValue> items;
        for (const auto item : node.items) items.push_back(value(pickle[item], depth + 1, budget, read_tensor));
        return c10::ivalue::Tuple::create(std::move(items));
      }
      case Kind::dict:
        return dict(node, depth, budget, read_tensor);
      case Kind::call:
        return call(node, depth, budget, read_tensor);
      case Kind::object:
        if (objects == PickledObjects::refused) break;
        if (node.items.size() > 1) return value(pickle[node.items[1]], depth + 1, budget, read_tensor);
        return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
      case Kind::global:
        if (objects == PickledObjects::refused) break;
        return std::string(node.text);
      case Kind::persistent:
        break;
    }
    pickle.fail(node.at, "found {}, expected plain data.", to_string(node.kind));
  }

  c10::IValue dict(const PickleNode& node, int64_t depth, int64_t& budget, const ReadTensor& read_tensor) const {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (size_t i = 0; i + 1 < node.items.size(); i += 2) {
      const auto key = value(pickle[node.items[i]], depth + 1, budget, read_tensor);
      if (!key.isString() && !key.isInt() && !key.isDouble() && !key.isBool())
        pickle.fail(node.at, "a dict has a key that is {}, expected a string or a number.", key.tagKind());
      dict.insert_or_assign(key, value(pickle[node.items[i + 1]], depth + 1, budget, read_tensor));
    }
    return dict;
  }

  c10::IValue call(const PickleNode& node, int64_t depth, int64_t& budget, const ReadTensor& read_tensor) const {
    if (const auto saved = tensor_of(node)) return read_tensor(*saved);
    if (const auto* arguments = pickle.call_of(node, kTorchSize); arguments && arguments->size() == 1)
      return value(pickle[arguments->front()], depth + 1, budget, read_tensor);
    if (const auto* arguments = pickle.call_of(node, kEncode); arguments && arguments->size() == 2)
      return latin1(pickle.text(pickle[arguments->front()], "encoded bytes"), node);
    if (const auto* arguments = pickle.call_of(node, kTypeTag); arguments && arguments->size() == 2)
      return typed(value(pickle[arguments->front()], depth + 1, budget, read_tensor),
                   pickle.text(pickle[arguments->back()], "the type of a container"), node);
    for (const auto& list : kScriptLists)
      if (const auto* arguments = pickle.call_of(node, list.function); arguments && arguments->size() == 1)
        return typed(value(pickle[arguments->front()], depth + 1, budget, read_tensor), list.type, node);
    if (const auto* arguments = pickle.call_of(node, kComplex); arguments && arguments->size() == 2) {
      const auto part = [&](size_t i) {
        return pickle.expect(pickle[(*arguments)[i]], Kind::real, "a part of a complex number").real;
      };
      return c10::complex<double>(part(0), part(1));
    }
    if (const auto* arguments = pickle.call_of(node, kDevice); arguments && arguments->size() == 1) {
      const auto device = parse_device(pickle.text(pickle[arguments->front()], "a device"));
      if (device) return *device;
    }
    if (const auto* arguments = pickle.call_of(node, kWithAttributes); arguments && arguments->size() == 4)
      return call({.kind = Kind::call, .at = node.at, .items = {(*arguments)[0], (*arguments)[2]}}, depth + 1, budget,
                  read_tensor);
    if (objects == PickledObjects::numpy_numbers)
      if (const auto numbers = numpy_numbers(node, budget); !numbers.isNone()) return numbers;
    if (objects == PickledObjects::as_data && node.items.size() > 1)
      return value(pickle[node.items[1]], depth + 1, budget, read_tensor);
    pickle.fail(node.at, "found a call that makes no plain data.");
  }

  /// None for other calls.
  c10::IValue numpy_numbers(const PickleNode& node, int64_t& budget) const {
    if (!pickle.call_of(node, kNumpyArray) && !pickle.call_of(node, kOldNumpyArray)) return {};
    const auto state_of = [&](const PickleNode& made, size_t size) -> const std::vector<uint32_t>& {
      if (made.items.size() != 3) pickle.fail(node.at, "an array of numpy's has no contents. The file is damaged.");
      const auto& state = pickle.expect(pickle[made.items[2]], Kind::tuple, "the state of an array of numpy's").items;
      if (state.size() < size)
        pickle.fail(node.at, "the state of an array of numpy's has {} parts, expected {}.", state.size(), size);
      return state;
    };
    const auto& state = state_of(node, 5);  // version, shape, dtype, whether by columns, bytes
    const auto& dtype = pickle[state[2]];
    const auto* made = pickle.call_of(dtype, kNumpyDtype);
    if (!made || made->empty() || pickle.text(pickle[made->front()], "a dtype of numpy's") != "u4" ||
        pickle.text(pickle[state_of(dtype, 2)[1]], "the order of bytes") != "<")
      pickle.fail(node.at, "found an array of numpy's of another type than uint32.");
    const auto* encoded = pickle.call_of(pickle[state[4]], kEncode);
    if (!encoded || encoded->size() != 2)
      pickle.fail(node.at, "an array of numpy's has no bytes. The file is damaged.");
    const auto bytes = latin1(pickle.text(pickle[encoded->front()], "encoded bytes"), node);
    std::vector<c10::IValue> numbers(bytes.size() / sizeof(uint32_t));
    if ((budget -= static_cast<int64_t>(numbers.size())) < 0)
      pickle.fail(node.at, "it describes more values than a file of its length can mean, at most {}.", most_values());
    for (size_t i = 0; i < numbers.size(); ++i) {
      uint32_t number = 0;
      std::memcpy(&number, bytes.data() + i * sizeof(number), sizeof(number));
      numbers[i] = static_cast<int64_t>(number);
    }
    return c10::ivalue::Tuple::create(std::move(numbers));
  }

  c10::IValue typed(c10::IValue container, std::string_view type, const PickleNode& node) const {
    if (!set_script_type(container, type))
      pickle.fail(node.at, "found {} that is said to be '{}', which it is not. The file is damaged.",
                  container.tagKind(), type.substr(0, 100));
    return container;
  }

  /// Bytes that were written as the text of the same code points.
  std::string latin1(const std::string& text, const PickleNode& node) const {
    std::string bytes;
    for (size_t i = 0; i < text.size(); ++i) {
      const auto lead = static_cast<unsigned char>(text[i]);
      if (lead < 0x80) bytes += text[i];
      else if (lead == 0xc2 || lead == 0xc3)
        bytes += static_cast<char>(((lead & 3) << 6) | (static_cast<unsigned char>(text[++i]) & 0x3f));
      else pickle.fail(node.at, "encoded bytes contain a character above 255.");
    }
    return bytes;
  }

  static constexpr int64_t kMaxDepth = 100;
  /// A few bytes of the pickle can name a large value again and again: each time counts, by the memory that it takes,
  /// in numbers of 16 bytes.
  int64_t most_values() const { return 1'000'000 + static_cast<int64_t>(pickle.size()) / 2; }
  int64_t price(const PickleNode& node) const {
    switch (node.kind) {
      case Kind::list:
      case Kind::tuple:
        return 6;
      case Kind::dict:
        return 12 + static_cast<int64_t>(node.items.size());
      case Kind::text:
      case Kind::bytes:
        return 4 + static_cast<int64_t>(node.text.size()) / 16;
      case Kind::call:  // a tensor, without its elements, or a list's or a dict's type
        return pickle[node.items[0]].text.starts_with("torch.jit.") ? 2 : 32;
      default:
        return 1;
    }
  }

  std::shared_ptr<const InputFile> file;
  int64_t length;
  PickledObjects objects;
  TorchContainer container;
  const Pickle& pickle;
};

TorchArchive::TorchArchive(std::shared_ptr<const InputFile> file, int64_t offset, int64_t length, std::string source,
                           PickledObjects objects, bool peeks) {
  if (length == 0)
    raise<CheckpointError>("{}: it is empty, expected an archive of torch.save. Copy it again, or save again.", source);
  if (offset < 0 || length < 0 || length > file->size() || offset > file->size() - length)
    raise<CheckpointError>(
        "{}: its {} bytes from byte {} reach beyond the file, which has {}. The file is truncated or of another save: "
        "copy it again, or save again.",
        source, length, offset, file->size());
  impl_ = std::make_unique<Impl>(std::move(file), offset, length, std::move(source), objects, peeks);
}

TorchArchive::~TorchArchive() = default;

SavedTensor TorchArchive::tensor() const {
  if (auto saved = impl_->tensor_of(impl_->pickle.root())) return *std::move(saved);
  impl_->container.fail("it holds {}, expected a tensor.", to_string(impl_->pickle.root().kind));
}

c10::IValue TorchArchive::value() const {
  std::map<std::pair<int64_t, int64_t>, at::Tensor> storages;  // by their place: several names may be of one
  int64_t bytes = 0;
  return value([&](const SavedTensor& saved) {
    auto& storage = storages[{saved.storage_begin, saved.storage_bytes}];
    if (!storage.defined()) {
      if ((bytes += saved.storage_bytes) > impl_->length)
        impl_->container.fail("its tensors have more bytes than it has, {}: their storages overlap. It is damaged.",
                              impl_->length);
      storage = at::empty({saved.storage_bytes}, at::TensorOptions().dtype(at::kByte));
      check_header(*impl_->file, saved);
      impl_->file->read(saved.storage_begin, storage.mutable_data_ptr(), saved.storage_bytes);
    }
    const auto first = (saved.begin - saved.storage_begin) / static_cast<int64_t>(c10::elementSize(saved.dtype));
    return at::empty({0}, at::TensorOptions().dtype(saved.dtype))
        .set_(storage.storage(), first, saved.sizes, saved.strides);
  });
}

c10::IValue TorchArchive::value(const std::function<at::Tensor(const SavedTensor&)>& read) const {
  auto budget = impl_->most_values();
  return impl_->value(impl_->pickle.root(), 0, budget, read);
}

namespace {

/// Bytes from the first to the last element of a part.
int64_t span_of(at::IntArrayRef sizes, const std::vector<int64_t>& strides, int64_t width) {
  int64_t last = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) last += (sizes[dim] - 1) * strides[dim];
  return (last + 1) * width;
}

bool is_dense(at::IntArrayRef sizes, const std::vector<int64_t>& strides) {
  int64_t expected = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (sizes[dim] != 1 && strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

// Parts that don't lie in one piece are read with what is between, this much at a time, and others where they become
// numbers of another type, or of a device.
constexpr int64_t kSlabBytes = int64_t{4} << 20;

/// A type of the same size that every copy kernel knows.
at::ScalarType bits_of(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

/// The dimension along which elements lie farthest apart; -1: there is one element.
int64_t farthest(at::IntArrayRef sizes, const std::vector<int64_t>& strides) {
  int64_t along = -1;
  for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim)
    if (const auto d = static_cast<size_t>(dim);
        sizes[d] > 1 && (along < 0 || strides[d] > strides[static_cast<size_t>(along)]))
      along = dim;
  return along;
}

/// `begin` is the byte of the part's first element; `to` is on the CPU and has elements of the saved size.
void read_strided(const InputFile& file, int64_t begin, const std::vector<int64_t>& strides, const at::Tensor& to) {
  const auto width = static_cast<int64_t>(to.element_size());
  const auto span = span_of(to.sizes(), strides, width);
  if (to.is_contiguous() && is_dense(to.sizes(), strides)) return file.read(begin, to.mutable_data_ptr(), span);
  // Along the largest stride a slab is the smallest span.
  const int64_t along = farthest(to.sizes(), strides);
  if (span > kSlabBytes && along >= 0) {
    const auto step = strides[static_cast<size_t>(along)] * width;
    const auto count =
        step > 0 ? std::max<int64_t>(1, std::min(kSlabBytes / step, to.size(along) - 1)) : to.size(along) - 1;
    for (int64_t from = 0; from < to.size(along); from += count)
      read_strided(file, begin + from * step, strides, to.narrow(along, from, std::min(count, to.size(along) - from)));
    return;
  }
  auto buffer = at::empty({(span + width - 1) / width}, to.options().requires_grad(false));
  file.read(begin, buffer.mutable_data_ptr(), span);
  to.copy_(buffer.as_strided(to.sizes(), strides));
}

/// As read_strided(), with `to` of any dtype and device.
void read_converted(const InputFile& file, const SavedTensor& saved, int64_t begin, const at::Tensor& to) {
  if (to.is_cpu() && to.scalar_type() == saved.dtype)
    return read_strided(file, begin, saved.strides, to.view(bits_of(saved.dtype)));
  const auto width = static_cast<int64_t>(c10::elementSize(saved.dtype));
  const int64_t along = farthest(to.sizes(), saved.strides);
  if (to.numel() > kSlabBytes / width && along >= 0) {
    const int64_t size = to.size(along), step = saved.strides[static_cast<size_t>(along)] * width,
                  count = std::max<int64_t>(1, kSlabBytes / width / (to.numel() / size));
    for (int64_t from = 0; from < size; from += count)
      read_converted(file, saved, begin + from * step, to.narrow(along, from, std::min(count, size - from)));
    return;
  }
  const auto buffer = at::empty(to.sizes(), at::TensorOptions().dtype(saved.dtype));
  read_strided(file, begin, saved.strides, buffer.view(bits_of(saved.dtype)));
  to.copy_(buffer);
}

}  // namespace

void check_header(const InputFile& file, const SavedTensor& saved) {
  file.check(saved.storage_begin - saved.header_bytes, saved.header_bytes);
}

void read_part(const InputFile& file, const SavedTensor& saved, const std::vector<int64_t>& offsets,
               const at::Tensor& destination) {
  if (destination.numel() == 0) return;
  at::NoGradGuard no_grad;
  check_header(file, saved);
  auto begin = saved.begin;
  for (size_t dim = 0; dim < offsets.size(); ++dim)
    begin += offsets[dim] * saved.strides[dim] * static_cast<int64_t>(c10::elementSize(saved.dtype));
  read_converted(file, saved, begin, destination.detach());
}

}  // namespace accelerate::formats
