#pragma once

#include <filesystem>

#include "bigmodel/file_tree.hpp"

namespace accelerate::bigmodel {

/// Adds what a file that torch.save or TorchScript wrote says about its tensors, none of which is read. A module that
/// is in several places is added in each, as PyTorch gives it a name for each.
/// @throws CheckpointError for another file, a damaged one, and one that holds something else.
void add_torch_file(FileTree& tree, const std::filesystem::path& path);

}  // namespace accelerate::bigmodel
