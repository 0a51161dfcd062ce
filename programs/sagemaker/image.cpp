#include "sagemaker/image.hpp"

#include <algorithm>
#include <cctype>
#include <vector>

#include "sagemaker/aws.hpp"
#include "utils/raise.hpp"

namespace sagemaker {
namespace {

using accelerate::ConfigError;

/// Hugging Face's training containers for PyTorch, as Amazon's documentation of its deep learning containers lists
/// them.
struct Container {
  const char *transformers, *pytorch, *python, *system;
};
constexpr Container kContainers[] = {
    {"4.4.2", "1.6.0", "py36", "cu110-ubuntu18.04"},   {"4.5.0", "1.6.0", "py36", "cu110-ubuntu18.04"},
    {"4.6.1", "1.6.0", "py36", "cu110-ubuntu18.04"},   {"4.6.1", "1.7.1", "py36", "cu110-ubuntu18.04"},
    {"4.6.1", "1.8.1", "py36", "cu111-ubuntu18.04"},   {"4.10.2", "1.8.1", "py36", "cu110-ubuntu18.04"},
    {"4.10.2", "1.9.0", "py38", "cu111-ubuntu20.04"},  {"4.11.0", "1.9.0", "py38", "cu111-ubuntu20.04"},
    {"4.12.3", "1.9.1", "py38", "cu111-ubuntu20.04"},  {"4.17.0", "1.10.2", "py38", "cu113-ubuntu20.04"},
    {"4.26.0", "1.13.1", "py39", "cu117-ubuntu20.04"}, {"4.28.1", "2.0.0", "py310", "cu118-ubuntu20.04"},
    {"4.36.0", "2.1.0", "py310", "cu121-ubuntu20.04"}, {"4.46.1", "2.3.0", "py311", "cu121-ubuntu20.04"},
    {"4.48.0", "2.3.0", "py311", "cu121-ubuntu20.04"}, {"4.49.0", "2.5.1", "py311", "cu124-ubuntu22.04"},
    {"4.55.0", "2.7.1", "py312", "cu128-ubuntu22.04"}, {"4.56.2", "2.8.0", "py312", "cu129-ubuntu22.04"},
};

/// The account whose registry holds them: one for most regions, one of its own for each region that came later.
constexpr const char* kCommonRegions[] = {"ap-northeast-1", "ap-northeast-2", "ap-south-1",   "ap-southeast-1",
                                          "ap-southeast-2", "ca-central-1",   "eu-central-1", "eu-north-1",
                                          "eu-west-1",      "eu-west-2",      "eu-west-3",    "sa-east-1",
                                          "us-east-1",      "us-east-2",      "us-west-1",    "us-west-2"};
constexpr const char* kCommonAccount = "763104351884";
constexpr std::pair<const char*, const char*> kOtherRegions[] = {
    {"af-south-1", "626614931356"},     {"ap-east-1", "871362719292"},      {"ap-northeast-3", "364406365360"},
    {"ap-south-2", "772153158452"},     {"ap-southeast-3", "907027046896"}, {"ap-southeast-4", "457447274322"},
    {"ca-west-1", "204538143572"},      {"cn-north-1", "727897471807"},     {"cn-northwest-1", "727897471807"},
    {"eu-central-2", "380420809688"},   {"eu-south-1", "692866216735"},     {"eu-south-2", "503227376785"},
    {"il-central-1", "780543022126"},   {"me-central-1", "914824155844"},   {"me-south-1", "217643126080"},
    {"us-gov-east-1", "446045086412"},  {"us-gov-west-1", "442386744353"},  {"us-iso-east-1", "886529160074"},
    {"us-isob-east-1", "094389454867"},
};

/// "4.17" means 4.17.0, of which there is one.
bool means(const std::string& given, const std::string& full) {
  return given == full || given == full.substr(0, full.rfind('.'));
}

std::string account_of(const std::string& region) {
  if (std::find(std::begin(kCommonRegions), std::end(kCommonRegions), region) != std::end(kCommonRegions))
    return kCommonAccount;
  for (const auto& [name, account] : kOtherRegions)
    if (region == name) return account;
  accelerate::raise<ConfigError>(
      "no container is known for the region '{}'. Is its name right (us-east-1, eu-west-1, ...)? Else give the config "
      "file an image_uri",
      region);
}

}  // namespace

std::string instance_family(const std::string& type) {
  if (type == "local" || type == "local_gpu") return type;
  const size_t dot = type.find('.', 3);
  if (type.rfind("ml.", 0) != 0 || dot == std::string::npos || dot == 3 || dot + 1 == type.size())
    accelerate::raise<ConfigError>(
        "ec2_instance_type is '{}', expected a type of SageMaker like ml.p3.2xlarge, or local or local_gpu for a "
        "container on this machine",
        type);
  return type.substr(3, dot - 3);
}

std::string training_image(const ImageQuery& query) {
  const std::string family = instance_family(query.instance_type);
  const bool has_gpu = family == "local_gpu" || (family != "local" && (family[0] == 'p' || family[0] == 'g'));
  if (!has_gpu)
    accelerate::raise<ConfigError>(
        "Hugging Face's training containers are for GPUs (ml.p..., ml.g..., local_gpu), and ec2_instance_type is '{}'. "
        "Choose one of those, or give the config file an image_uri",
        query.instance_type);
  std::string known;
  for (const auto& c : kContainers) {
    if (means(query.transformers, c.transformers) && means(query.pytorch, c.pytorch) && query.python == c.python)
      return account_of(query.region) + ".dkr.ecr." + query.region + "." + domain_of(query.region) +
             "/huggingface-pytorch-training:" + query.pytorch + "-transformers" + query.transformers + "-gpu-" +
             c.python + "-" + c.system;
    known += std::string(known.empty() ? "" : "; ") + c.transformers + ", " + c.pytorch + ", " + c.python;
  }
  accelerate::raise<ConfigError>(
      "there is no container with transformers_version {}, pytorch_version {} and py_version {}. Give the config file "
      "an image_uri, or one of these: {}",
      query.transformers, query.pytorch, query.python, known);
}

std::string registry_account(const std::string& image) {
  const size_t dot = image.find('.');
  const bool number =
      dot == 12 && std::all_of(image.begin(), image.begin() + 12, [](unsigned char c) { return std::isdigit(c); });
  return number && image.compare(dot, 9, ".dkr.ecr.") == 0 ? image.substr(0, dot) : "";
}

}  // namespace sagemaker
