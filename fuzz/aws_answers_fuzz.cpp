#include <cstdlib>
#include <string>

#include "accelerate/utils/error.hpp"
#include "input/json.hpp"
#include "sagemaker/answers.hpp"
#include "sagemaker/profiles.hpp"
#include "scratch_folder.hpp"

// Any bytes are an answer of a service, or a file of profiles: what it says is found, or a ConfigError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sagemaker;
  static const ScratchFolder folder;
  const std::string text(reinterpret_cast<const char*>(data), size);
  complaint({.status = 400, .headers = {{"x-amzn-errortype", text}}, .body = text});
  for (const char* name : {"Code", "Arn", "Account"})
    if (xml_text(text, name).size() > text.size()) std::abort();
  try {
    if (credentials_in_json(text, "Token", "fuzz").secret.empty()) std::abort();
  } catch (const accelerate::ConfigError&) {
  }
  try {
    if (credentials_in_xml(text, "fuzz").token.empty()) std::abort();
  } catch (const accelerate::ConfigError&) {
  }
  const auto json = accelerate::parse_json<Json>(text);
  for (const auto& item : list_in(json, "events")) text_in(item, "message");
  time_text(field(json, "LastModifiedTime"));
  if (seconds_in(json, "TrainingTimeInSeconds").value_or(0) < 0) std::abort();
  folder.write("profiles", text);
  const auto path = (folder.path() / "profiles").string();
  try {
    const Profiles profiles({{"AWS_CONFIG_FILE", path}, {"AWS_SHARED_CREDENTIALS_FILE", path}});
    for (const auto& name : profiles.names())
      if (!profiles.find(name)) std::abort();
  } catch (const accelerate::ConfigError&) {
  }
  return 0;
}
