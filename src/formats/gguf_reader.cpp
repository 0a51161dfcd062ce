#include <algorithm>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "accelerate/formats/gguf.hpp"
#include "formats/gguf_config.hpp"
#include "formats/gguf_header.hpp"
#include "formats/gguf_names.hpp"
#include "formats/mapped_file.hpp"
#include "memory/huge_pages.hpp"
#include "utils/raise.hpp"

namespace accelerate {

struct GgufFile::Content {
  explicit Content(const std::filesystem::path& file)
      : path(file),
        map(file),
        header(formats::parse_gguf_header(bytes(), file.string(), formats::GgufLists::short_ones)) {
    check_gguf_data(header, map.size(), file.string());
    give_pages_back(map.data(), map.size());  // of the vocabulary, which nobody has asked for
    for (auto& [name, source] : hugging_face_tensors(header, file.string())) {
      const auto& stored = header.tensors[source.tensor];
      names.push_back(name);
      GgufTensorInfo info{.encoding = stored.encoding->name,
                          .shape = source.shape,
                          .stored_bytes = numel(source.shape) / stored.encoding->block * stored.encoding->block_bytes,
                          .transposed = source.transposed};
      tensors.emplace(std::move(name), std::pair(std::move(info), std::move(source)));
    }
  }

  std::string_view bytes() const { return {map.data(), static_cast<size_t>(map.size())}; }

  /// A holder of weights keeps the file open, and needs no vocabulary: those are some megabytes, which come when they
  /// are asked for.
  const GgufMetadata& whole_metadata() const {
    std::call_once(metadata_once, [this] { metadata = formats::parse_gguf_header(bytes(), path.string()).metadata; });
    return metadata;
  }

  static int64_t numel(const std::vector<int64_t>& shape) {
    int64_t product = 1;
    for (const auto size : shape) product *= size;
    return product;
  }

  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("GGUF file '{}': {}", path.string(), fmt::format(what, std::forward<Args>(args)...));
  }

  const std::pair<GgufTensorInfo, formats::GgufSource>& find(const std::string& name) const {
    if (const auto found = tensors.find(name); found != tensors.end()) return found->second;
    fail("it has no tensor '{}'; it has {} others{}.", name, names.size(),
         names.empty() ? "" : fmt::format(", such as '{}'", names.front()));
  }

  std::filesystem::path path;
  formats::MappedFile map;
  formats::GgufHeader header;  ///< without long lists
  mutable std::once_flag metadata_once;
  mutable GgufMetadata metadata;  ///< with them
  std::vector<std::string> names;
  std::unordered_map<std::string, std::pair<GgufTensorInfo, formats::GgufSource>> tensors;
};

/// Wherever a model is being made: init_empty_weights() and init_on_device() are about tensors without a device.
const auto kHere = at::TensorOptions(at::kCPU).dtype(at::kFloat);

GgufFile::GgufFile(const std::filesystem::path& path) : content_(std::make_shared<const Content>(path)) {}

const std::filesystem::path& GgufFile::path() const { return content_->path; }
const GgufMetadata& GgufFile::metadata() const { return content_->whole_metadata(); }
const std::vector<std::string>& GgufFile::names() const { return content_->names; }
bool GgufFile::contains(const std::string& name) const { return content_->tensors.contains(name); }
const GgufTensorInfo& GgufFile::info(const std::string& name) const { return content_->find(name).first; }

std::string GgufFile::config_json() const {
  constexpr const char* kFactors = "rope_freqs.weight";
  at::Tensor factors;
  if (contains(kFactors)) read(kFactors, factors = at::empty(info(kFactors).shape, kHere));
  return gguf_config_json(content_->header, path().string(),
                          factors.defined() ? factors.const_data_ptr<float>() : nullptr);
}

void GgufFile::read(const std::string& name, const at::Tensor& rows, int64_t first_row) const {
  const auto& [info, source] = content_->find(name);
  const auto& stored = content_->header.tensors[source.tensor];
  const auto& encoding = *stored.encoding;
  if (!encoding.decode)
    content_->fail(
        "tensor '{}' is stored as {}, which is not supported. Convert the file with llama-quantize, to Q8_0 for "
        "instance.",
        name, encoding.name);
  const int64_t row = info.shape.empty() ? 1 : info.shape.back(), all = row == 0 ? 0 : Content::numel(info.shape) / row,
                count = row == 0 ? 0 : rows.numel() / row;
  if (!rows.device().is_cpu() || !rows.is_contiguous() || !rows.is_floating_point() || rows.element_size() == 1 ||
      (row == 0 ? rows.numel() != 0 : rows.numel() % row != 0) || first_row < 0 || first_row > all - count) {
    raise<ShapeError>(
        "GgufFile::read: rows of shape {}, {} on {} from row {} don't fit tensor '{}' with {} rows of {}. Expected "
        "contiguous fp32, fp16, bf16 or fp64 on the CPU.",
        rows.sizes(), c10::toString(rows.scalar_type()), rows.device().str(), first_row, name, all, row);
  }
  if (rows.numel() == 0) return;
  if (source.transposed) {  // whole, then turned: only small files of old models are
    const auto whole = at::empty(stored.shape, kHere);
    encoding.decode(reinterpret_cast<const unsigned char*>(content_->map.data() + stored.begin),
                    stored.bytes / encoding.block_bytes, whole.mutable_data_ptr<float>());
    rows.detach().view({count, row}).copy_(whole.t().narrow(0, first_row, count));
    return;
  }
  // A bias that belongs to rotary rows is one row of many elements here, and many rows of one element there.
  const int64_t stored_row = source.rotary_heads > 0 && stored.shape.size() == 1 ? 1 : stored.row(),
                stored_rows = rows.numel() / stored_row, first = source.first_row + first_row * (row / stored_row);
  if (stored_row == 1 && encoding.block > 1)
    content_->fail("tensor '{}' is a bias in blocks ({}), whose elements can't be put in order.", name, encoding.name);
  const int64_t blocks = stored_row / encoding.block, row_bytes = blocks * encoding.block_bytes;
  const int64_t half =
      source.rotary_heads > 0 ? Content::numel(stored.shape) / stored_row / source.rotary_heads / 2 : 0;
  // Row (head, part, i) of Hugging Face's is row (head, i, part) of the file's.
  const auto place = [&](int64_t r) {
    return half == 0 ? r : r / (2 * half) * (2 * half) + r % half * 2 + r / half % 2;
  };
  const auto* bytes = reinterpret_cast<const unsigned char*>(content_->map.data() + stored.begin);
  constexpr int64_t kPart = 1 << 15;  // elements that are converted at a time
  const auto decode = [&](int64_t from, int64_t to, float* out) {
    if (half == 0) return encoding.decode(bytes + (first + from) * row_bytes, (to - from) * blocks, out);
    for (int64_t r = from; r < to; ++r, out += stored_row)
      encoding.decode(bytes + place(first + r) * row_bytes, blocks, out);
  };
  if (rows.scalar_type() == at::kFloat) return decode(0, stored_rows, rows.mutable_data_ptr<float>());
  const auto flat = rows.detach().view({-1});  // a parameter is filled, which autograd need not know
  const int64_t step = std::max<int64_t>(kPart / stored_row, 1);
  const auto part = at::empty({std::min(step, stored_rows) * stored_row}, kHere);
  for (int64_t r = 0; r < stored_rows; r += step) {
    const int64_t until = std::min(stored_rows, r + step), elements = (until - r) * stored_row;
    decode(r, until, part.mutable_data_ptr<float>());
    flat.narrow(0, r * stored_row, elements).copy_(part.narrow(0, 0, elements));
  }
}

at::Tensor GgufFile::stored_rows(const std::string& name) const {
  const auto& [info, source] = content_->find(name);
  const auto& stored = content_->header.tensors[source.tensor];
  const int64_t row = source.transposed ? stored.row() : info.shape.empty() ? 1 : info.shape.back();
  if (row == 0 || row != stored.row() || row % stored.encoding->block != 0) return {};
  const int64_t rows = Content::numel(info.shape) / row, row_bytes = stored.row_bytes();
  auto* begin = reinterpret_cast<uint8_t*>(content_->map.data()) + stored.begin + source.first_row * row_bytes;
  const at::Tensor mapped = at::from_blob(
      begin, {rows, row_bytes}, [content = content_](void*) {}, at::TensorOptions().dtype(at::kByte));
  if (source.rotary_heads == 0) return mapped;
  // Row (head, part, i) of Hugging Face's is row (head, i, part) of the file's.
  return mapped.view({source.rotary_heads, rows / source.rotary_heads / 2, 2, row_bytes})
      .transpose(1, 2)
      .reshape({rows, row_bytes});
}

}  // namespace accelerate
