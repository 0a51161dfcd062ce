// Keyword handlers as dictionaries, the compiler's settings, Megatron-LM's arguments.
#include "accelerate/parallel/megatron_lm_plugin.hpp"
#include "accelerate/utils/kwargs_dict.hpp"
#include "environment.hpp"

namespace conformance::kwargs_megatron_cases {
namespace {

using namespace accelerate;

json rendered(const KwargsDict& dict) {
  json result = json::object();
  for (const auto& [name, value] : dict)
    std::visit([&result, &name](const auto& content) { result[name] = content; }, value);
  return result;
}

void run_handlers(const json& handlers, Report& report) {
  const auto equals = [&](const std::string& what, const json& expected, const json& found) {
    report.check(found == expected,
                 [&] { return what + ": expected " + expected.dump() + "\n    found " + found.dump(); });
  };
  for (const auto& [what, expected] : handlers.items()) {
    if (what == "GradScalerKwargs(init_scale=1024,growth_factor=2).to_kwargs") {
      equals(what, expected, rendered(to_kwargs(GradScalerKwargs{.init_scale = 1024, .growth_factor = 2})));
    } else if (what == "defaults") {
      for (const auto& [name, fields] : expected.items()) {
        json fields_here = fields;
        json found;
        if (name == "GradScalerKwargs") found = rendered(to_dict(GradScalerKwargs{}));
        else if (name == "DistributedDataParallelKwargs") found = rendered(to_dict(DistributedDataParallelKwargs{}));
        else if (name == "AutocastKwargs") found = rendered(to_dict(AutocastKwargs{}));
        else if (name == "ProfileKwargs")
          found = rendered(to_dict(ProfileKwargs{})), fields_here.erase("on_trace_ready");  // a Python function
        else throw std::runtime_error("no such handler in the runner: " + name);
        equals(name, fields_here, found);
      }
    } else if (what == "InitProcessGroupKwargs timeouts s") {
      for (const auto& [backend, seconds] : expected.items())
        equals(what + " " + backend, seconds,
               rendered(to_dict(InitProcessGroupKwargs{.backend = backend == "None" ? "" : backend}))["timeout"]);
    } else if (what == "InitProcessGroupKwargs() default backend") {
      report.differs(
          what,
          "the default backend is the one of the device that the process computes on; the reference has nccl in its "
          "dataclass and replaces it later");
    } else if (what == "TorchDynamoPlugin env") {
      for (const json& row : expected) {
        const Environment environment(row[0]);
        json fields = row[1];
        fields.erase("options");  // of a compiler in Python
        const json found = outcome([] { return rendered(to_dict(accelerate::resolve(TorchDynamoPlugin{}))); });
        equals(what + " " + row[0].dump(), row[1].contains("error") ? json() : fields, found);
      }
    } else {
      throw std::runtime_error("no such row in the runner: " + what);
    }
  }
}

void run(const json& file, Report& report) {
  run_handlers(file.at("handlers"), report);
  for (const json& row : file.at("megatron")) {
    const Environment environment(row[0]);
    const json found =
        outcome([] { return rendered(parallel::resolve(MegatronLMPlugin{}).megatron_lm_default_args()); });
    report.check(found == row[1], [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

const Registration registration("kwargs_megatron", {run}),
    more("kwargs_megatron_more", {run});  // made by generators/plugins.py

}  // namespace
}  // namespace conformance::kwargs_megatron_cases
