#pragma once

/// A checkpoint's weights in another format, tensor by tensor: no model is built, and the weights are not in memory as
/// a whole. `accelerate convert` calls this.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

struct ConvertFilesOptions {
  /// The format of the result; unset: by the ending of its name (.safetensors, .bin, .pt and .pth, .gguf), and
  /// safetensors in a folder.
  /// - "safetensors" and "torch" (an archive of torch.save): a file with such an ending, else a folder as Hugging Face
  ///   has it: model.safetensors or pytorch_model.bin, or several with an index.
  /// - "gguf": a file, of a Hugging Face folder that quantize_files() could make one of; numbers stay numbers.
  /// - "dcp": the folder of a distributed checkpoint, with the weights under the key "model".
  std::optional<std::string> to = std::nullopt;
  /// Of tensors with floating-point elements: float32, float64, float16 or bfloat16; others stay. Unset: as they are;
  /// codes of GGUF become float32, and those of bitsandbytes what their weights had been.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// Of a folder: the most that a file has ("5GB", "500MiB"), unless one tensor has more. Unset: "50GB".
  std::optional<std::string> max_shard_size = std::nullopt;
  std::string tag;  ///< of DeepSpeed's folder of several checkpoints, instead of the latest one
  /// Replaces what is there: a file by a file, and a folder that has nothing but weights by a folder.
  bool overwrite = false;
  /// Called before each tensor. May throw, to stop.
  std::function<void(int64_t done, int64_t all)> on_progress;
};

struct ConvertedFiles {
  int64_t tensors = 0, bytes = 0;            ///< of the result
  std::vector<std::filesystem::path> files;  ///< of the result
  int64_t kept = 0;                          ///< files that an earlier run had made and this one did not write
  std::vector<std::string> notes;            ///< other facts for a reader, a sentence each
};

/// Converts weights; optimizers and what else a checkpoint has are left out.
///
/// A result appears when it is whole. The files of a folder are made in `.NAME.unfinished` beside it. When that ends
/// early, those that are whole stay there, and the same call goes on from them: as whole counts a file that got its
/// name, which it does when it is on the disk, and whose header lists the tensors that it is to have; as the same call
/// one with the same options and result for input files of the same names, sizes and times of change. Else it begins
/// anew. A folder "dcp" is made at once.
/// @param from  safetensors or torch.save's (a file, an index, or a Hugging Face folder), .gguf, torch.export's .pt2, a
/// distributed checkpoint or a run's folder with one of a model (FSDP), DeepSpeed's folder of any ZeRO stage, or the
/// folder of save_state
/// @throws ConfigError for options that can't be or have no effect, and for a result that is there; CheckpointError for
/// damaged or missing files, weights that are no flat list of tensors, and numbers beyond fp16, by name; ResourceError
/// for a full disk
ACCELERATE_API ConvertedFiles convert_files(const std::filesystem::path& from, const std::filesystem::path& to,
                                            const ConvertFilesOptions& options = {});

/// The folder in which convert_files() makes a folder, while it is not whole.
ACCELERATE_API std::filesystem::path unfinished_conversion(const std::filesystem::path& to);

}  // namespace accelerate
