#pragma once

#include <string>

namespace sagemaker {

/// The facts that decide on Hugging Face's training container for PyTorch.
struct ImageQuery {
  std::string region, instance_type;
  std::string transformers, pytorch, python;  ///< "4.17.0" or "4.17", "1.10.2" or "1.10", "py38"
};

/// The container's address in Amazon's registry. They exist for GPUs only. @throws ConfigError with what there is.
std::string training_image(const ImageQuery& query);

/// "p3" of ml.p3.2xlarge; "local" and "local_gpu" are families of their own. @throws ConfigError for what is no
/// instance type.
std::string instance_family(const std::string& instance_type);

/// The account of an image in Amazon's registry (ACCOUNT.dkr.ecr.REGION....), "" for one that is elsewhere.
std::string registry_account(const std::string& image);

}  // namespace sagemaker
