#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <ATen/core/ivalue.h>

/// Types that LibTorch's pickler (torch::pickle_save, torch::save) has and Python's does not: lists and dicts that know
/// the type of what is in them, complex numbers and devices. In a pickle each is a call of a function.
namespace accelerate::formats {

inline constexpr std::string_view kTypeTag = "torch.jit._pickle.restore_type_tag";  ///< list or dict, type
inline constexpr std::string_view kComplex = "builtins.complex";                    ///< real part, imaginary part
inline constexpr std::string_view kDevice = "torch.device";                         ///< name

/// Functions that take a list.
struct ScriptList {
  std::string_view function, type;
};
inline constexpr ScriptList kScriptLists[] = {
    {"torch.jit._pickle.build_intlist", "List[int]"},
    {"torch.jit._pickle.build_doublelist", "List[float]"},
    {"torch.jit._pickle.build_boollist", "List[bool]"},
    {"torch.jit._pickle.build_tensorlist", "List[Tensor]"},
};

/// Gives a list or a dict the type that `text` names, as in "Dict[str, List[int]]". LibTorch believes a type without
/// looking, so what is in the container is compared with it.
/// @return false, and nothing has changed, if it is another value or the text names no type that it can have
bool set_script_type(c10::IValue& value, std::string_view text);

/// "cpu", "cuda:1"; nothing for what names no device.
std::optional<c10::Device> parse_device(const std::string& text);

}  // namespace accelerate::formats
