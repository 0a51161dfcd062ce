#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/zip_archive.hpp"

/// The weights in the files of torch.export.save (.pt2); the program in them is left alone. Needs no LibTorch.
namespace accelerate::formats {

/// A weight whose bytes are a record of the archive.
struct Pt2Weight {
  std::string name;                     ///< in files of several models behind the model's and a dot
  std::string dtype;                    ///< PyTorch's name without "torch."
  std::vector<int64_t> sizes, strides;  ///< as many strides as sizes, none negative
  int64_t first = 0;                    ///< element of the record
  int64_t last = -1;                    ///< the last one that it reaches, within the record; -1 without elements
  int64_t numel = 0;
  ZipArchive::Bytes bytes;  ///< of the record
};

struct Pt2Weights {
  std::vector<Pt2Weight> weights;
  /// Of versions before 2.9 instead: the record that is an archive of torch.save with a dict of tensors; else empty.
  std::string state_dict;
};

/// Whether an archive is one of these: torch.save's and TorchScript's are zips, too.
bool is_pt2(const ZipArchive& archive);
/// @param source  begins the messages. Source: torch 2.13, torch/export/pt2_archive and torch/_export/serde/schema.
/// @throws CheckpointError for what is damaged, and for tensors that only a pickle describes
Pt2Weights read_pt2_weights(const ZipArchive& archive, const std::string& source);

}  // namespace accelerate::formats
