#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

/// The files in which AWS's tools keep profiles.
namespace sagemaker {

using Environment = std::map<std::string, std::string>;

/// The variable's text, "" without it.
std::string variable_of(const Environment& environment, const std::string& name);

/// The settings of one profile: ~/.aws/config's, and above them ~/.aws/credentials'.
struct AwsProfile {
  std::string name;
  std::map<std::string, std::string> settings;
  std::string get(const std::string& key) const {
    const auto found = settings.find(key);
    return found == settings.end() ? "" : found->second;
  }
};

class Profiles {
 public:
  /// Reads AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE, else the files in ~/.aws; none need exist. @throws
  /// ConfigError for lines that are neither section nor setting.
  explicit Profiles(const Environment& environment);
  /// nullptr when neither file has it.
  const AwsProfile* find(const std::string& name) const;
  std::vector<std::string> names() const;
  const std::filesystem::path& config_file() const { return config_; }
  const std::filesystem::path& credentials_file() const { return credentials_; }

 private:
  void read(const std::filesystem::path& file, bool is_config);
  std::map<std::string, AwsProfile> profiles_;
  std::filesystem::path config_, credentials_;
};

}  // namespace sagemaker
