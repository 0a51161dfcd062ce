#include "accelerate/accelerator/prepared.hpp"

#include "accelerate/accelerator/offload_states.hpp"
#include "accelerate/accelerator/tagged_checkpoint.hpp"
#include "accelerate/run_state/prepared_model.hpp"

namespace accelerate::detail {

parallel::Engines engines_of(const std::vector<std::shared_ptr<PreparedModel>>& models) {
  parallel::Engines engines;
  for (const auto& model : models) engines.push_back(model->engine);
  return engines;
}

void keep_owner(PreparedModel& model, std::shared_ptr<const void> owner) { model.owner = std::move(owner); }

std::filesystem::path PreparedHandle::save_checkpoint(const std::filesystem::path& save_dir,
                                                      std::optional<std::string> tag,
                                                      const ClientState& client_state) const {
  return save_checkpoint(save_dir, std::move(tag), client_state, {});
}
std::filesystem::path PreparedHandle::save_checkpoint(const std::filesystem::path& save_dir,
                                                      std::optional<std::string> tag, const ClientState& client_state,
                                                      const SaveTagOptions& options) const {
  return save_tag(*core_, save_dir, std::move(tag), client_state, options);
}

LoadedTag PreparedHandle::load_checkpoint(const std::filesystem::path& load_dir, std::optional<std::string> tag) const {
  return load_checkpoint(load_dir, std::move(tag), {});
}
LoadedTag PreparedHandle::load_checkpoint(const std::filesystem::path& load_dir, std::optional<std::string> tag,
                                          const LoadTagOptions& options) const {
  return load_tag(*core_, load_dir, std::move(tag), options);
}

void PreparedHandle::offload_states() const { offload_states(OffloadStatesOptions{}); }
void PreparedHandle::offload_states(const OffloadStatesOptions& options) const {
  detail::offload_states(*core_, options);
}
void PreparedHandle::reload_states(bool non_blocking) const { detail::reload_states(*core_, non_blocking); }

}  // namespace accelerate::detail
