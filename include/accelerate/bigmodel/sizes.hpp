#pragma once

/// How large the parts of a model are, from a description of it that has names, shapes and dtypes but no tensors. Needs
/// no LibTorch.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A parameter or a buffer of a described module.
struct TensorSpec {
  std::string name;  ///< within its module
  std::vector<int64_t> shape;
  std::string dtype = "float32";  ///< PyTorch's name
  int64_t identity = 0;           ///< Equal for tensors that are one (tied weights); 0 for a tensor that nobody shares.
  bool persistent = true;         ///< For buffers: part of the state dict.
};

/// A module by its structure: what sizes and device maps are worked out from. Made by describe() from a LibTorch
/// module, by describe_architecture() from a config.json, or by hand.
struct ACCELERATE_API ModuleTree {
  std::string name;        ///< within its parent; "" for the root
  std::string class_name;  ///< as `no_split_module_classes` gives it
  std::vector<TensorSpec> parameters, buffers;
  std::vector<ModuleTree> children;

  int64_t numel() const;  ///< elements of all parameters, tied ones once
};

/// Makes `name` a second name of `other`, whose shape and dtype it takes, like assigning one parameter to another.
/// @throws ConfigError if the tree lacks one of these dotted names.
ACCELERATE_API void tie(ModuleTree& tree, const std::string& name, const std::string& other);

/// Bytes of one element. Eighths occur: as in the reference a bool counts as one bit, and there are "int4" and "int2".
/// Also "fp8"; a leading "torch." is ignored.
/// @throws ConfigError naming the nearest dtype.
ACCELERATE_API double dtype_byte_size(std::string_view dtype);

/// "5GB" and "5 GiB" are 5e9 and 5 * 2^30 bytes; also MB, MiB, KB, KiB, and bits with a small b ("16Gb" is 2e9 bytes).
/// @throws ConfigError for another unit, a missing unit and a negative number.
ACCELERATE_API int64_t convert_file_size_to_int(std::string_view size);

/// The largest unit that leaves a number of 1 or more, in steps of 1024, with two decimals at most: "1023 bytes", "1.5
/// KB", "413.18 MB".
ACCELERATE_API std::string convert_bytes(double bytes);

/// Bytes by dotted name, for every tensor (once: under the first of its names) and every module that holds one; "" is
/// all of it.
class ACCELERATE_API ModuleSizes {
 public:
  void add(const std::string& name, double bytes);
  /// 0 for a name that has nothing of its own, like the second name of a tied weight.
  double operator[](const std::string& name) const;
  /// In the order in which the tensors come: all parameters, then all buffers.
  const std::vector<std::pair<std::string, double>>& entries() const& { return entries_; }
  std::vector<std::pair<std::string, double>> entries() && { return std::move(entries_); }

 private:
  std::vector<std::pair<std::string, double>> entries_;
  std::unordered_map<std::string, size_t> index_;
};

struct SizeOptions {
  /// The dtype that weights are loaded in. It makes tensors smaller and never larger, and leaves integers and bools
  /// alone.
  std::optional<std::string> dtype;
  /// Dtypes of single tensors by their dotted name; these count as they are given.
  std::map<std::string, std::string> special_dtypes;
  bool buffers_only = false;
};

/// Non-persistent buffers count too.
ACCELERATE_API ModuleSizes compute_module_sizes(const ModuleTree& tree, const SizeOptions& options = {});

/// The groups of names that are one parameter, each sorted, in the order of their first appearance.
ACCELERATE_API std::vector<std::vector<std::string>> find_tied_parameters(const ModuleTree& tree);

struct LargestLayer {
  double bytes = 0;
  std::vector<std::string> names;  ///< all layers of that size
};

/// The largest layer: what has to be in one place at a time. A layer is a module without children, or of a class in
/// `no_split_module_classes`; tensors directly in the root are layers too.
ACCELERATE_API LargestLayer get_max_layer_size(const ModuleTree& tree, const ModuleSizes& sizes,
                                               const std::vector<std::string>& no_split_module_classes = {});

struct MaximumSizes {
  double total = 0;
  LargestLayer largest_layer;
};
ACCELERATE_API MaximumSizes calculate_maximum_sizes(const ModuleTree& tree,
                                                    const std::vector<std::string>& no_split_module_classes = {});

}  // namespace accelerate
