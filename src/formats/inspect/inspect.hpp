#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

/// What a checkpoint holds, whoever wrote it, told from headers: no tensor is read, but for checksums, and nothing in
/// the files is executed. Needs no LibTorch.
namespace accelerate::formats {

struct InspectedTensor {
  std::string name;   ///< the keys that lead to it, joined by dots
  std::string dtype;  ///< PyTorch's name; safetensors' where PyTorch has none, and of blocks of GGUF theirs: "Q4_K"
  std::vector<int64_t> shape;
  int64_t bytes = 0;   ///< of its elements, as they are stored
  std::string file;    ///< that holds it, from the part's folder; empty: the part is that file, or there are several
  int64_t pieces = 1;  ///< that it is saved in
};

/// A file, or files that belong together.
struct InspectedPart {
  std::string path;    ///< from what was asked for; empty: that itself
  std::string format;  ///< "safetensors", "distributed checkpoint", …
  int64_t files = 1, bytes = 0;
  std::vector<InspectedTensor> tensors;
  int64_t others = 0;         ///< values that are no tensors
  std::string unread;         ///< why tensors of a whole file are not listed; empty: they are
  int64_t checked_bytes = 0;  ///< that were compared with checksums of the format's own
};

struct Inspection {
  std::string format;  ///< of the whole: the only part's, or "checkpoint of save_state", "DeepSpeed checkpoint", …
  std::string layout;  ///< of a run's checkpoint; DeepSpeed's: "ZeRO stage 2"
  std::string written_by;
  std::optional<int64_t> step, iteration, ranks;
  int64_t files = 0, bytes = 0;  ///< of all parts
  std::vector<InspectedPart> parts;
  bool has_manifest = false;
  int64_t checked_bytes = 0;        ///< that were compared with checksums
  int64_t unchecked_bytes = 0;      ///< of parts, of which there are none; with `verify`
  std::vector<std::string> damage;  ///< a sentence each: files that are missing, of another size, or that contradict
                                    ///< themselves; and what checksums say
  std::vector<std::string> notes;   ///< other facts, a sentence each
};

struct InspectOptions {
  /// Reads all bytes and compares their checksums: of the manifest (CRC-32C) where there is one, else of torch's
  /// archives (CRC-32), also those within a distributed checkpoint. Other formats have none.
  bool verify = false;
};

/// @param path  a file, an index, or a folder, of any format that this library reads
/// @throws CheckpointError if there is no checkpoint; damage of one that is there is in the result
Inspection inspect(const std::filesystem::path& path, const InspectOptions& options = {});

}  // namespace accelerate::formats
