#include "formats/checkpoint_manifest.hpp"

#include <charconv>
#include <utility>

#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFormat = "accelerate checkpoint";
constexpr int64_t kVersion = 1;
constexpr size_t kDigits = 8;  ///< of a checksum
constexpr const char* kChecksums = "crc32c";

std::string hex(uint32_t sum) { return fmt::format("{:08x}", sum); }

std::optional<uint32_t> from_hex(std::string_view digits) {
  uint32_t sum = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), sum, 16);
  const bool whole = digits.size() == kDigits && error == std::errc() && end == digits.data() + digits.size();
  return whole && hex(sum) == digits ? std::optional(sum) : std::nullopt;
}

/// Below the folder, and written in one way only.
bool is_name_below(const std::string& name) {
  const fs::path path = fs::path(name).lexically_normal();
  return !name.empty() && name.find('\0') == std::string::npos && path.is_relative() && *path.begin() != ".." &&
         path.has_filename() && path != "." && path.generic_string() == name;
}

/// Of all but the checksum itself, in the one way in which values are written without spaces.
std::string checksum_of(const json& root) { return hex(crc32c::of(root.dump())); }

}  // namespace

std::string format_manifest(const CheckpointManifest& manifest) {
  json files = json::object();
  for (const auto& [name, sums] : manifest.files) {
    std::string all;
    for (const auto sum : sums.parts) all += hex(sum);
    files[name] = {{"bytes", sums.bytes}, {kChecksums, all}};
  }
  json root{{"format", kFormat},
            {"version", kVersion},
            {"written_by", {{"accelerate", manifest.accelerate}, {"libtorch", manifest.libtorch}}},
            {"world_size", manifest.world_size},
            {"layout", manifest.layout},
            {"step", manifest.step},
            {"iteration", manifest.iteration},
            {"part_bytes", manifest.part_bytes},
            {"files", std::move(files)}};
  try {
    root[kChecksums] = checksum_of(root);
    return root.dump(1) + "\n";
  } catch (const json::type_error&) {
    raise<CheckpointError>(
        "save_state: found a file whose name is not UTF-8 in the checkpoint, expected names that {} can list; a hook "
        "has written it. Give it another name",
        kManifestFile);
  }
}

std::optional<CheckpointManifest> parse_manifest(std::string_view text, const std::string& source) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>(
        "checkpoint manifest '{}': {}. Copy the checkpoint again; or remove this file, and nothing is checked", source,
        fmt::format(what, std::forward<Args>(args)...));
  };
  std::string problem;
  auto root = parse_json<json>(text, &problem, {.unique_keys = true});
  if (root.is_discarded()) fail("it {}", problem);
  const auto has = [&](const char* key) { return root.contains(key); };
  // One damaged key leaves the others.
  if (!root.is_object() || !(has("format") || has("files") || has(kChecksums))) return std::nullopt;
  const json sum = has(kChecksums) ? root[kChecksums] : json();
  root.erase(kChecksums);
  if (const auto expected = checksum_of(root); sum != expected)
    fail("it is damaged: its checksum is {}, and it says {}", expected, show_json(sum));
  const auto member = [&](const json& of, const char* key, json::value_t type) -> const json& {
    static const json none;
    const auto found = of.find(key);
    const auto& value = found == of.end() ? none : *found;
    const bool number = type == json::value_t::number_integer;
    if (number ? !whole_number(value) || *whole_number(value) < 0 : value.type() != type)
      fail("found {} at '{}', expected {}", show_json(value), key,
           number                          ? "a whole number, not negative"
           : type == json::value_t::string ? "a text"
                                           : "an object");
    return value;
  };
  const auto number = [&](const json& of, const char* key) {
    return *whole_number(member(of, key, json::value_t::number_integer));
  };
  const auto words = [&](const json& of, const char* key) {
    return member(of, key, json::value_t::string).get<std::string>();
  };
  if (const auto format = words(root, "format"); format != kFormat) fail("its format is '{}'", format.substr(0, 60));
  if (const auto version = number(root, "version"); version != kVersion)
    fail("it is of version {}, of which this program knows {}", version, kVersion);
  const auto& writer = member(root, "written_by", json::value_t::object);
  CheckpointManifest manifest{.part_bytes = number(root, "part_bytes"),
                              .world_size = number(root, "world_size"),
                              .layout = words(root, "layout"),
                              .step = number(root, "step"),
                              .iteration = number(root, "iteration"),
                              .accelerate = words(writer, "accelerate"),
                              .libtorch = words(writer, "libtorch")};
  if (constexpr int64_t kMostPartBytes = int64_t{1} << 30;
      manifest.part_bytes < 1 || manifest.part_bytes > kMostPartBytes)
    fail("its parts have {} bytes, expected 1 to {}", manifest.part_bytes, kMostPartBytes);
  for (const auto& [name, file] : member(root, "files", json::value_t::object).items()) {
    if (!is_name_below(name)) fail("'{}' is no path of a file in its folder", name.substr(0, 200));
    if (!file.is_object()) fail("found {} for '{}', expected an object", show_json(file), name.substr(0, 200));
    FileChecksums sums{.bytes = number(file, "bytes"), .parts = {}};
    const auto all = words(file, kChecksums);
    const auto parts = parts_of_bytes(sums.bytes, manifest.part_bytes);
    if (all.size() % kDigits != 0 || static_cast<int64_t>(all.size() / kDigits) != parts)
      fail("'{}' of {} bytes has {} digits of checksums, expected {} of each of {} parts", name.substr(0, 200),
           sums.bytes, all.size(), kDigits, parts);
    for (size_t at = 0; at < all.size(); at += kDigits) {
      const auto digits = std::string_view(all).substr(at, kDigits);
      const auto part = from_hex(digits);
      if (!part) fail("found the checksum '{}' for '{}'", show_json(json(std::string(digits))), name.substr(0, 200));
      sums.parts.push_back(*part);
    }
    manifest.files.emplace(name, std::move(sums));
  }
  return manifest;
}

std::optional<CheckpointManifest> read_manifest(const fs::path& folder) {
  const auto path = folder / kManifestFile;
  if (!is_there(path)) return std::nullopt;
  return parse_manifest(read_text<CheckpointError>("checkpoint manifest", path, kMostListBytes), path.string());
}

void forget_in_manifest(const fs::path& removed) {
  auto gone = fs::absolute(removed).lexically_normal();
  if (!gone.has_filename()) gone = gone.parent_path();  // "checkpoint/"
  const auto folder = gone.parent_path();
  auto manifest = read_manifest(folder);
  if (!manifest) return;
  const auto name = gone.filename().generic_string();
  const auto listed = std::erase_if(
      manifest->files, [&](const auto& file) { return file.first == name || file.first.starts_with(name + "/"); });
  if (listed == 0) return;
  AtomicFile file("checkpoint manifest", folder / kManifestFile);
  file.write(format_manifest(*manifest));
  file.finish();
}

}  // namespace accelerate::formats
