#include "run_state/state_files.hpp"

#include <algorithm>

#include "accelerate/comm.hpp"
#include "checkpoint/zero_checkpoint.hpp"
#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {

namespace fs = std::filesystem;

std::string numbered(const std::string& stem, size_t index, const std::string& extension) {
  return stem + (index == 0 ? "" : "_" + std::to_string(index)) + extension;
}

namespace {
std::string rank_suffix() { return "_rank" + std::to_string(comm::rank()) + ".bin"; }
}  // namespace

fs::path deepspeed_folder(const fs::path& folder, size_t index, bool universal) {
  using Checkpoint = checkpointing::ZeroCheckpoint;
  const auto own = folder / numbered("pytorch_model", index, "");
  if (!universal && is_folder(own)) return own;
  if (const auto converted = folder / numbered("pytorch_model", index, "_universal"); is_folder(converted))
    return converted;
  if (index > 0) return own;
  // DeepSpeed's own save_checkpoint has other names for tags.
  const auto tag = universal ? Checkpoint::named_by(Checkpoint::kLatestUniversal, folder) : Checkpoint::latest(folder);
  if (!tag.empty()) return folder / tag;
  const auto latest = Checkpoint::latest(folder);  // which is not what is wanted, as who opens it says
  return is_folder(own) || latest.empty() ? own : folder / latest;
}

std::vector<StateFile> model_files(const fs::path& folder, size_t index, bool universal) {
  return {{StateForm::safetensors, folder / numbered("model", index, ".safetensors")},
          {StateForm::archive, folder / numbered("pytorch_model", index, ".bin")},
          {StateForm::sharded, folder / ("pytorch_model_fsdp_" + std::to_string(index))},
          {StateForm::full, folder / numbered("pytorch_model_fsdp", index, ".bin")},
          {StateForm::local, folder / numbered("pytorch_model_fsdp", index, rank_suffix())},
          {StateForm::deepspeed, deepspeed_folder(folder, index, universal)}};
}

std::vector<StateFile> optimizer_files(const fs::path& folder, size_t index) {
  return {{StateForm::archive, folder / numbered("optimizer", index, ".bin")},
          {StateForm::sharded, folder / ("optimizer_" + std::to_string(index))},
          {StateForm::local, folder / ("optimizer_" + std::to_string(index) + rank_suffix())}};
}

StateFile in_form(const std::vector<StateFile>& files, StateForm form) {
  const auto of = [&](StateForm wanted) {
    return std::find_if(files.begin(), files.end(), [&](const auto& file) { return file.form == wanted; });
  };
  const auto found = of(form);
  return found != files.end() ? *found : *of(StateForm::archive);
}

StateFile find_state(const std::vector<StateFile>& files, StateForm preferred, const std::string& what) {
  if (const auto file = in_form(files, preferred); fs::exists(file.path)) return file;
  std::vector<std::string> names;
  for (const auto& file : files) {
    if (fs::exists(file.path)) return file;
    names.push_back("'" + file.path.filename().string() + "'");
  }
  raise<CheckpointError>("load_state: found none of {} in '{}', expected one for {}", fmt::join(names, ", "),
                         files.front().path.parent_path().string(), what);
}

StateForm form_of(StateDictType type) {
  return type == StateDictType::full_state_dict      ? StateForm::full
         : type == StateDictType::sharded_state_dict ? StateForm::sharded
                                                     : StateForm::local;
}

}  // namespace accelerate::run_state
