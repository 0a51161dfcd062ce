#pragma once

/// A model's files in few bits, made from its files tensor by tensor: no model is built, and neither weights nor codes
/// are in memory as a whole. `accelerate quantize` calls this.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

struct QuantizeFilesOptions {
  /// - "nf4", "fp4" or "int8" (bitsandbytes'): the weights of linear layers; the result is a Hugging Face folder.
  /// - "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k" or "q6_k" (GGUF's blocks): of all matrices; the result
  ///   is a .gguf file.
  std::string to = "nf4";
  /// Of nf4 and fp4: elements to a scale, a power of two from 32 to 4096; unset: 64, which bitsandbytes reads.
  std::optional<int64_t> block_size = std::nullopt;
  /// Of nf4 and fp4: scales in 8 bits.
  bool double_quantize = false;
  /// Modules that stay as they are, besides those of the default: names ("k_proj"), or dotted paths; of GGUF's blocks
  /// also names of tensors in the result, or what they begin with up to a dot ("blk.0"). Each names something.
  std::vector<std::string> skip_modules;
  /// Of nf4 and fp4, float32 (unset), float16 or bfloat16: what config.json says that products are computed in. Of a
  /// .gguf file, and then of int8, too: the dtype of decoded blocks that stay numbers.
  std::optional<at::ScalarType> compute_dtype = std::nullopt;
  /// Of int8: llm_int8_threshold in config.json; unset: 6. 0: no column of activations keeps its numbers.
  std::optional<double> threshold = std::nullopt;
  /// Of a folder: the most that a file of weights has ("5GB", "500MiB"). More goes to several files with an index, a
  /// weight and its scales to the same one. Unset: "50GB", transformers' default.
  std::optional<std::string> max_shard_size = std::nullopt;
  /// Fills in QuantizedTensor::error: everything is decoded once more.
  bool measure_errors = false;
  /// Replaces what is there: a file by a file, and a folder that has a quantization_config, and nothing that the new
  /// one will not have, by a folder.
  bool overwrite = false;
  /// Called before each tensor, and, for folders, before each one is copied into the file that is kept. May throw, to
  /// stop: then nothing is left.
  std::function<void(int64_t done, int64_t all)> on_progress;
};

struct QuantizedTensor {
  std::string name;  ///< as in the result: Hugging Face's in a folder, llama.cpp's in a .gguf file
  std::string from;  ///< "float32", "Q4_1" …
  std::string to;    ///< "nf4" …; as `from` for what stays, but see QuantizeFilesOptions::compute_dtype
  std::string kept;  ///< why it stays, or empty
  int64_t bytes_before = 0, bytes_after = 0;
  /// |decoded - original| / |original|, Frobenius norms; 0 where the original is 0. Unset for what stays, and without
  /// measure_errors.
  std::optional<double> error;
};

struct QuantizedFiles {
  std::vector<QuantizedTensor> tensors;
  int64_t bytes_before = 0, bytes_after = 0;  ///< of all tensors
  std::vector<std::string> notes;             ///< other facts for a reader, a sentence each
};

/// @param from  a Hugging Face folder with config.json (safetensors or torch.save's, with or without an index), or a
/// .gguf file. @param to  a folder or a .gguf file, which appears when it is whole; beside it there are temporary files
/// meanwhile, for folders twice as large as the result. Those of runs for the same `to` that were killed are removed.
/// - Names and shapes are those that config.json describes; but for GGUF's blocks of a .gguf file, whose model need not
///   be known. Tensors that every program works out by itself (masks, frequencies, positions) may be there besides. A
///   head that is a copy of the embeddings it is tied to is left out.
/// - Folders: layers are known from the architecture (describe_architecture()). Heads stay, as does what
///   transformers would leave out by itself; config.json gets a quantization_config that names them. Weights that are
///   stored as [inputs, outputs] (GPT-2's) have the codes of their transposes, as in transformers. Everything else in
///   the folder but weights is copied, files of up to 64 MiB each; of a .gguf file, tokenizer.json,
///   tokenizer_config.json, generation_config.json and chat_template.jinja are made of a byte-level BPE vocabulary.
///   int8 is encoded from fp16, as bitsandbytes does.
/// - GGUF's blocks of a .gguf file: metadata is kept, but for general.file_type and general.quantization_version. Of a
///   folder: names, order of rows and metadata as llama.cpp's converter has them, for model_type llama, mistral,
///   mixtral, qwen2 and gpt2, with the vocabulary of a byte-level BPE tokenizer.json. Rows that are no whole blocks of
///   256 get those of 32 that llama.cpp takes then: q5_0 for q4_k, q5_1 for q5_k, q8_0 for q6_k. Vectors, other rows
///   that are no whole blocks, and what llama.cpp reads as numbers stay (of a folder: vectors in fp32).
/// @throws ConfigError for options that can't be or have no effect on this encoding, an architecture without known
/// linear layers or without a place in .gguf files, a vocabulary that has none, a result that is there, and weights
/// that can't be encoded (NaN), by name; CheckpointError for damaged or missing files, tensors that are not those of
/// config.json, and weights that are in bitsandbytes' few bits already; ResourceError for a full disk
ACCELERATE_API QuantizedFiles quantize_files(const std::filesystem::path& from, const std::filesystem::path& to,
                                             const QuantizeFilesOptions& options = {});

/// All that quantize_files() checks before its work: reads headers, and of weights only a head that is to be a copy.
/// Writes nothing. @throws as quantize_files()
ACCELERATE_API void check_quantize_files(const std::filesystem::path& from, const std::filesystem::path& to,
                                         const QuantizeFilesOptions& options = {});

}  // namespace accelerate
