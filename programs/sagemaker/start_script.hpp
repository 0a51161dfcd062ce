#pragma once

#include <string>
#include <vector>

namespace sagemaker {

/// The container starts a Python script. This one starts a program that lies beside it: a process for each GPU of each
/// machine (one where there are none), with the variables by which they find each other, and with the container's
/// LibTorch. It ends with the code of the process that failed first.
std::string start_script(const std::string& program, const std::vector<std::string>& arguments);
inline constexpr const char* kStartScript = "accelerate_start.py";

}  // namespace sagemaker
