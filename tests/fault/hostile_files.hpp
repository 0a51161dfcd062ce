#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

/// Files that nobody means well with: each format that is read here, damaged by its structure (cut off at each field,
/// lengths wrong by one and by 2^63, overlaps, circles, depth, duplicates, encodings), and what else can lie under a
/// file's name: links, FIFOs, devices, folders, 64 GB without a byte.
namespace hostile {

enum class Reader {
  safetensors,
  index,    ///< of a checkpoint in several files
  archive,  ///< torch.save
  custom,   ///< a registered object: bytes of ours in an archive, with pickles of LibTorch's in them
  dcp,      ///< a distributed checkpoint's folder
  gguf,
  model_config,   ///< config.json
  model,          ///< a folder with all that a model needs to speak
  tokenizer,      ///< a folder
  wordpiece,      ///< a folder
  offload,        ///< a folder
  deepspeed,      ///< DeepSpeed's JSON
  launch_config,  ///< --config_file
  hostfile,       ///< --hostfile
};

struct File {
  enum class Kind { bytes, link, fifo, folder, sparse };
  std::string name;
  std::string bytes;  ///< or what a link points at
  Kind kind = Kind::bytes;
};

struct Case {
  Reader reader;
  std::string name;         ///< unique
  std::string target;       ///< what is opened, in the case's folder; empty for that itself
  std::vector<File> files;  ///< the first is the hostile one
};

/// More than 400, always the same.
std::vector<Case> cases();
/// Makes the files in `folder`, which is made. @return the path of the target
std::filesystem::path write(const Case& a_case, const std::filesystem::path& folder);
/// The size of the regular files, without the holes of sparse ones.
int64_t bytes_of(const Case& a_case);

}  // namespace hostile
