#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "formats/gguf_header.hpp"
#include "formats/inspect/readers.hpp"
#include "formats/mapped_file.hpp"
#include "formats/pt2_weights.hpp"
#include "formats/safetensors_elements.hpp"
#include "formats/safetensors_header.hpp"
#include "input/read_file.hpp"

namespace accelerate::formats::inspecting {
namespace {

namespace fs = std::filesystem;

void read_safetensors(const fs::path& file, InspectedPart& part) {
  part.format = "safetensors";
  const auto header = read_safetensors_header(InputFile(file));
  for (const auto& name : header.names) {
    const auto& info = header.tensors.at(name);
    const auto* element = find_element(info.dtype);
    part.tensors.push_back({.name = name,
                            .dtype = element && !element->torch.empty() ? std::string(element->torch) : info.dtype,
                            .shape = info.shape,
                            .bytes = info.end - info.begin,
                            .file = {}});
  }
  part.others = static_cast<int64_t>(header.metadata.size());
}

void read_gguf(const fs::path& file, InspectedPart& part) {
  const MappedFile map(file);
  const auto header =
      parse_gguf_header({map.data(), static_cast<size_t>(map.size())}, file.string(), GgufLists::short_ones);
  check_gguf_data(header, map.size(), file.string());
  part.format = "GGUF";
  if (const auto architecture = header.metadata.find_as<std::string>("general.architecture"))
    part.format = fmt::format("GGUF ({})", *architecture);
  for (const auto& tensor : header.tensors)
    part.tensors.push_back({.name = tensor.name,
                            .dtype = tensor.encoding->name,
                            .shape = tensor.shape,
                            .bytes = tensor.bytes,
                            .file = {}});
  part.others = static_cast<int64_t>(header.entries.size());
}

void read_pt2(const std::shared_ptr<const InputFile>& file, const ZipArchive& archive, InspectedPart& part) {
  part.format = "torch.export program (.pt2)";
  const auto source = "'" + file->path().string() + "'";
  const auto found = read_pt2_weights(archive, source);
  for (const auto& weight : found.weights)
    part.tensors.push_back({.name = weight.name,
                            .dtype = weight.dtype,
                            .shape = weight.sizes,
                            .bytes = weight.numel * torch_element_bytes(weight.dtype),
                            .file = {}});
  if (found.state_dict.empty()) return;
  const auto place = archive.record(found.state_dict);
  add_torch_tensors(
      TorchContainer(file, place.begin, place.size, fmt::format("{}, '{}'", source, found.state_dict), {"*"}), part);
}

void read_torch(const fs::path& path, bool verify, InspectedPart& part) {
  part.format = "torch archive";
  const auto file = std::make_shared<const InputFile>(path);
  const auto source = "'" + path.string() + "'";
  std::optional<ZipArchive> archive;
  if (format_of(path) == "zip") archive.emplace(file, 0, file->size(), source);
  else part.format = "torch archive (before PyTorch 1.6)";
  if (archive && verify) part.checked_bytes += check_records(*archive);
  if (archive && is_pt2(*archive)) return read_pt2(file, *archive, part);
  std::optional<TorchContainer> container;
  try {
    container.emplace(file, 0, file->size(), source, std::vector<std::string_view>{"*"});
  } catch (const CheckpointError& error) {
    // Objects of some Python classes can't be read, and are no damage of the file.
    if (!archive || !archive->contains("data.pkl") || !archive->check("data.pkl")) throw;
    part.unread = error.what();
    return;
  }
  if (container->is_script()) part.format = "TorchScript";
  add_torch_tensors(*container, part);
}

}  // namespace

std::string format_of(const fs::path& path) {
  const InputFile file(path);
  std::array<char, 16> bytes{};
  const auto count = std::min<int64_t>(file.size(), bytes.size());
  file.read(0, bytes.data(), count);
  const std::string_view begin(bytes.data(), static_cast<size_t>(count));
  if (begin.starts_with("PK\3\4")) return "zip";
  if (begin.starts_with(std::string_view("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15)))
    return "torch";
  if (begin.starts_with("GGUF") || begin.starts_with("FUGG")) return "gguf";
  if (begin.size() > kLengthBytes && begin[kLengthBytes] == '{') return "safetensors";
  return "";
}

void read_file_part(const fs::path& file, const std::string& format, bool verify, InspectedPart& part) {
  if (format == "safetensors") read_safetensors(file, part);
  else if (format == "gguf") read_gguf(file, part);
  else read_torch(file, verify, part);
}

}  // namespace accelerate::formats::inspecting
