#include "sagemaker/profiles.hpp"
#include "input/read_file.hpp"

#include <algorithm>
#include <cctype>
#include <sstream>

namespace sagemaker {
namespace {

namespace fs = std::filesystem;

std::string trimmed(const std::string& text) {
  const size_t from = text.find_first_not_of(" \t\r"), to = text.find_last_not_of(" \t\r");
  return from == std::string::npos ? "" : text.substr(from, to - from + 1);
}

fs::path place(const Environment& environment, const char* variable, const char* name) {
  const auto given = environment.find(variable), home = environment.find("HOME");
  const std::string root = home == environment.end() ? "" : home->second;
  if (given == environment.end() || given->second.empty()) return fs::path(root) / ".aws" / name;
  return given->second.rfind("~/", 0) == 0 ? fs::path(root) / given->second.substr(2) : fs::path(given->second);
}

}  // namespace

Profiles::Profiles(const Environment& environment)
    : config_(place(environment, "AWS_CONFIG_FILE", "config")),
      credentials_(place(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials")) {
  read(config_, true);
  read(credentials_, false);
}

void Profiles::read(const fs::path& file, bool is_config) {
  std::string whole;
  const auto problem = accelerate::read_file(file, accelerate::kMostSettingsBytes, whole);
  if (std::error_code ignored; !problem.empty() && fs::exists(file, ignored))
    accelerate::raise<accelerate::ConfigError>("{}: {}", file.string(), problem);
  std::istringstream in(whole);
  AwsProfile* profile = nullptr;
  bool started = false;
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const std::string text = trimmed(line);
    if (text.empty() || text.front() == '#' || text.front() == ';') continue;
    if (text.front() == '[' && text.find(']') != std::string::npos) {
      started = true;
      std::string name = trimmed(text.substr(1, text.find(']') - 1));
      profile = nullptr;
      if (is_config && name != "default") {
        if (name.rfind("profile", 0) != 0 || name.size() < 8 || !std::isspace(static_cast<unsigned char>(name[7])))
          continue;  // [sso-session x], [services x], [plugins]
        name = trimmed(name.substr(7));
        if (name.size() > 1 && (name.front() == '"' || name.front() == '\'') && name.back() == name.front())
          name = name.substr(1, name.size() - 2);
      }
      profile = &profiles_[name];
      profile->name = name;
      continue;
    }
    if (std::isspace(static_cast<unsigned char>(line.front())))
      continue;  // settings of a setting: s3 =\n  addressing_style = ...
    const size_t equals = text.find('=');
    // The line itself is not quoted: it may be a secret.
    if (equals == std::string::npos || !started)
      accelerate::raise<accelerate::ConfigError>(
          "AWS's file {}, line {}: neither [a section] nor a setting of one, name = value. Correct it, or name another "
          "file by {}",
          file.string(), number, is_config ? "AWS_CONFIG_FILE" : "AWS_SHARED_CREDENTIALS_FILE");
    if (!profile) continue;
    std::string key = trimmed(text.substr(0, equals)), value = trimmed(text.substr(equals + 1));
    std::transform(key.begin(), key.end(), key.begin(), [](unsigned char c) { return std::tolower(c); });
    if (const size_t comment = value.find(" #"); comment != std::string::npos)
      value = trimmed(value.substr(0, comment));
    profile->settings[key] = value;
  }
}

const AwsProfile* Profiles::find(const std::string& name) const {
  const auto found = profiles_.find(name);
  return found == profiles_.end() ? nullptr : &found->second;
}

std::vector<std::string> Profiles::names() const {
  std::vector<std::string> result;
  for (const auto& [name, profile] : profiles_) result.push_back(name);
  return result;
}

}  // namespace sagemaker
