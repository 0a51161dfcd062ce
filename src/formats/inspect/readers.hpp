#pragma once

#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "formats/inspect/inspect.hpp"
#include "formats/torch_container.hpp"

/// The formats, one by one, for inspect().
namespace accelerate::formats::inspecting {

/// What a file is by its first bytes; "" for none that is known.
std::string format_of(const std::filesystem::path& file);
/// Fills in a part that is a file. @param format  of format_of() @param verify  compares the checksums that it has
/// @throws CheckpointError for damage
void read_file_part(const std::filesystem::path& file, const std::string& format, bool verify, InspectedPart& part);

/// The tensors of a torch archive, whatever they are kept in.
void add_torch_tensors(const TorchContainer& container, InspectedPart& part);
/// Compares what has checksums. @return bytes
int64_t check_records(const ZipArchive& archive);

/// Says what is wrong, a sentence.
using Complain = std::function<void(const std::string& what)>;

/// A folder with `.metadata`, or a layout in its place.
void read_distributed(const std::filesystem::path& folder, bool verify, InspectedPart& part, const Complain& complain);
/// A folder with index.json as offload_state_dict writes it. @return false if it is another index
bool read_offload_folder(const std::filesystem::path& index, InspectedPart& part, const Complain& complain);
/// An index and its shards. @param shards  gets the names of those
void read_index_part(const std::filesystem::path& index, bool verify, InspectedPart& part,
                     std::set<std::string>& shards, const Complain& complain);
/// The folder `zero` of DeepSpeed's universal checkpoint.
void read_universal(const std::filesystem::path& folder, bool verify, InspectedPart& part, const Complain& complain);

/// What DeepSpeed's files say of the run.
struct DeepSpeedFacts {
  std::optional<int64_t> step, ranks, stage;
};
/// @param folder  of a tag @return nothing for another folder
std::optional<DeepSpeedFacts> deepspeed_facts(const std::filesystem::path& folder, const Complain& complain);

/// The number at a key of the dict that a torch archive holds.
std::optional<int64_t> number_in(const std::filesystem::path& file, const std::vector<std::string>& keys);

}  // namespace accelerate::formats::inspecting
