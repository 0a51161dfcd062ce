#include "accelerate/parallel/pipeline.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <set>
#include <unordered_set>

#include "accelerate/model/submodule.hpp"
#include "accelerate/utils/archive.hpp"
#include "comm/agreement.hpp"
#include "comm/group.hpp"
#include "parallel/codes/codes.hpp"
#include "parallel/pipeline/carrier.hpp"
#include "parallel/pipeline/plan.hpp"
#include "parallel/pipeline/stages.hpp"
#include "parallel/pipeline/stopwatch.hpp"
#include "parallel/verify_parameters.hpp"
#include "residency/deferred/plain.hpp"
#include "residency/deferred/storage.hpp"
#include "residency/deferred/tape.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/member.hpp"
#include "residency/meta_kernels.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

using pipeline::StagedParameter;
using pipeline::Stages;
namespace deferred = residency::deferred;

int64_t bytes_of(const at::Tensor& tensor) {
  const auto* weight = residency::encoded_weight(tensor);
  return weight ? weight->bytes() : tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

bool is_held(const at::Tensor& tensor) {
  const auto* weight = residency::encoded_weight(tensor);
  return weight ? weight->is_here() : !tensor.is_meta();
}

std::vector<StagedParameter> all_in_one_stage(const NamedTensors& parameters) {
  std::vector<StagedParameter> staged;
  for (const auto& [name, tensor] : parameters)
    staged.push_back({.name = name, .tensor = tensor, .stage = 0, .holders = {0}});
  return staged;
}

/// Parameters by their first use in a forward that works out sizes only.
std::vector<size_t> order_of_use(const NamedTensors& parameters, const std::function<void()>& example) {
  std::vector<size_t> touched;
  std::set<size_t> seen;
  Stages stages(all_in_one_stage(parameters), {.own = -1,
                                               .carrier = nullptr,
                                               .device = at::kCPU,
                                               .on_touch =
                                                   [&](size_t i) {
                                                     if (seen.insert(i).second) touched.push_back(i);
                                                   },
                                               .on_lack = {}});
  const residency::HandlerScope scope(residency::Link::place, stages);
  example();
  return touched;
}

void measure(std::vector<pipeline::StageLayer>& layers, const NamedTensors& parameters,
             const std::function<void()>& example) {
  for (const auto& [name, tensor] : parameters)
    if (deferred::owner_of(tensor) || tensor.is_meta())
      raise<ConfigError>(
          "prepare_pippy: balance is 'time', but parameter '{}' has no values yet on rank 0, which measures a "
          "forward; load the weights there first, or balance by bytes",
          name);
  example();  // the first forward also pays for memory and threads
  pipeline::Stopwatch watch(parameters);
  {
    const residency::HandlerScope scope(residency::Link::place, watch);
    example();
  }
  for (pipeline::StageLayer& layer : layers)
    for (const size_t i : layer.parameters) layer.milliseconds += watch.milliseconds[i];
}

/// The decision of rank 0.
struct StageDecision {
  std::vector<int64_t> stage_of;                  ///< by parameter
  std::vector<std::vector<int64_t>> holders;      ///< by parameter
  std::vector<std::vector<std::string>> modules;  ///< by stage
  std::vector<double> milliseconds;
  std::vector<std::string> split_points;
  ACCELERATE_FIELDS(stage_of, holders, modules, milliseconds, split_points)
};

StageDecision decide(const ModelRef& model, const PippyOptions& options, const NamedTensors& parameters, int64_t stages,
                     const std::function<void()>& example, bool may_measure) {
  std::vector<pipeline::StageLayer> layers = pipeline::layers_of(model, options, stages);
  if (example) pipeline::sort_by_use(layers, order_of_use(parameters, example));
  const bool automatic = options.split_points == std::vector<std::string>{"auto"};
  PipelineBalance balance = options.balance;
  if (automatic && balance == PipelineBalance::time) {
    if (!example)
      throw ConfigError(
          "prepare_pippy: balance is 'time' and no example inputs were given, expected some: a forward with them is "
          "measured");
    if (may_measure) measure(layers, parameters, example);
    else balance = PipelineBalance::bytes;  // to find errors; rank 0's plan counts
  }
  const auto begins = automatic ? pipeline::balanced(layers, balance, stages)
                                : pipeline::begins_at(layers, options.split_points, stages);
  StageDecision decision{.stage_of = std::vector<int64_t>(parameters.size()),
                         .holders = std::vector<std::vector<int64_t>>(parameters.size()),
                         .modules = std::vector<std::vector<std::string>>(static_cast<size_t>(stages)),
                         .milliseconds = std::vector<double>(static_cast<size_t>(stages)),
                         .split_points = {}};
  for (const size_t at : begins) decision.split_points.push_back(layers[at].path);
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto stage = static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), i) - begins.begin());
    decision.modules[stage].push_back(layers[i].path);
    decision.milliseconds[stage] += layers[i].milliseconds;
    for (const size_t parameter : layers[i].parameters)
      decision.stage_of[parameter] = static_cast<int64_t>(stage),
      decision.holders[parameter] = {static_cast<int64_t>(stage)};
  }
  if (!example) return decision;
  // Once more, to see which parameters other stages use too.
  std::vector<StagedParameter> staged;
  for (size_t i = 0; i < parameters.size(); ++i)
    staged.push_back({.name = parameters[i].first,
                      .tensor = parameters[i].second,
                      .stage = decision.stage_of[i],
                      .holders = decision.holders[i]});
  Stages dry(staged,
             {.own = -1, .carrier = nullptr, .device = at::kCPU, .on_touch = {}, .on_lack = [&](size_t i, int64_t to) {
                auto& holders = decision.holders[i];
                if (std::find(holders.begin(), holders.end(), to) == holders.end()) holders.push_back(to);
              }});
  const residency::HandlerScope scope(residency::Link::place, dry);
  example();
  return decision;
}

at::Storage without_bytes(const at::Tensor& tensor) {
  return at::empty({static_cast<int64_t>(tensor.storage().nbytes())},
                   at::TensorOptions().dtype(at::kByte).device(at::kMeta))
      .storage();
}

/// Gives a parameter what its rank needs of it: values on the device, or none.
void keep_or_empty(const at::Tensor& tensor, bool held, const at::Device& device) {
  if (auto* weight = residency::encoded_weight(tensor); weight && !held) residency::give_up(*weight);
  if (residency::Member::of(tensor)) return;  // its bytes come and go already
  const deferred::Plain plain;
  if (!held) {
    if (deferred::owner_of(tensor) || !tensor.is_meta()) deferred::adopt(tensor, without_bytes(tensor));
  } else if (const auto* owner = deferred::owner_of(tensor)) {
    deferred::adopt(tensor, owner->tape->materialize(owner->node, device));
  } else if (tensor.device() != device) {
    deferred::adopt(tensor, tensor.detach().to(device).storage());
  }
}

}  // namespace

struct Pipeline::Impl {
  ModelRef model;
  PippyOptions options;
  std::shared_ptr<comm::Group> group;
  int64_t stages = 1, own = 0;
  at::Device device = at::kCPU;
  std::optional<pipeline::GroupCarrier> carrier;
  std::vector<StagedParameter> parameters;
  std::optional<Stages> placement;
  PipelineReport report;
  std::vector<std::string> split_points;

  /// While true, an error is thrown on all ranks: nobody has to be told, and the group stays usable.
  bool agreed = false;

  void prepare(const std::function<void()>& example) {
    const NamedTensors named = model.parameters();
    agreed = named.empty();
    if (named.empty())
      throw ConfigError("prepare_pippy: the model has no parameters, expected some, which make the stages");
    agreed = true;
    verify_parameters(named);
    agree_on_codes(named);
    StageDecision decision;
    const auto failed = comm::failed_elsewhere(
        group.get(), [&] { decision = decide(model, options, named, stages, example, /*may_measure=*/own == 0); });
    if (failed) raise<ConfigError>("prepare_pippy: rank {} can't go on: {}", failed->rank, failed->reason);
    agreed = false;
    decision = from_bytes<StageDecision>(comm::broadcast_bytes(*group, to_bytes(decision), 0));
    for (size_t i = 0; i < named.size(); ++i) {
      const auto& holders = decision.holders[i];
      keep_or_empty(named[i].second, std::find(holders.begin(), holders.end(), own) != holders.end(), device);
      parameters.push_back(
          {.name = named[i].first, .tensor = named[i].second, .stage = decision.stage_of[i], .holders = holders});
    }
    for (const auto& [name, buffer] : model.buffers()) keep_or_empty(buffer, /*held=*/true, device);
    split_points = decision.split_points;
    for (int64_t stage = 0; stage < stages; ++stage) {
      const auto s = static_cast<size_t>(stage);
      PipelineStage entry{
          .modules = decision.modules[s], .parameter_bytes = 0, .milliseconds = decision.milliseconds[s]};
      for (const auto& parameter : parameters)
        if (parameter.stage == stage) entry.parameter_bytes += bytes_of(parameter.tensor);
      report.stages.push_back(std::move(entry));
    }
    carrier.emplace(group);
    placement.emplace(
        parameters, Stages::Options{.own = own, .carrier = &*carrier, .device = device, .on_touch = {}, .on_lack = {}});
  }
};

Pipeline::Pipeline(const ModelRef& model, const PippyOptions& options, const std::function<void()>& example)
    : impl_(new Impl{.model = model, .options = options}) {
  if (options.num_chunks < 0)
    raise<ConfigError>("prepare_pippy: num_chunks is {}, expected a positive number, or 0 for as many as processes",
                       options.num_chunks);
  if (comm::world_size() == 1) {  // also says so when the peers have not been joined
    impl_->report.stages.resize(1);
    for (const auto& module : model.submodules())
      if (!module.parameters.empty()) impl_->report.stages[0].modules.push_back(module.path);
    for (const auto& [name, tensor] : model.parameters()) impl_->report.stages[0].parameter_bytes += bytes_of(tensor);
    return;
  }
  impl_->group = comm::mesh().all();  // a stage on each
  impl_->stages = impl_->group->world_size();
  impl_->own = impl_->group->rank();
  impl_->device = impl_->group->device();
  meta_memory::install_kernels();
  const at::NoGradGuard no_grad;
  try {
    impl_->prepare(example);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    if (!impl_->agreed) impl_->group->announce_failure("prepare_pippy: " + text_of(error));
    throw;
  }
}

Pipeline::~Pipeline() = default;

PipelineReport Pipeline::report() const {
  PipelineReport report = impl_->report;
  for (const auto& named : {impl_->model.parameters(), impl_->model.buffers()})
    for (const auto& [name, tensor] : named) {
      report.model_bytes += bytes_of(tensor);
      if (is_held(tensor)) report.held_bytes += bytes_of(tensor);
    }
  return report;
}

const std::vector<std::string>& Pipeline::split_points() const { return impl_->split_points; }
int64_t Pipeline::num_stages() const { return impl_->stages; }

struct PipelineCall::Impl {
  Pipeline::Impl& pipeline;
  std::vector<at::Tensor> inputs;
  int64_t rows = 0, chunks = 1;
  int64_t begin = 0, length = 0;  ///< rows of the current part
  int64_t chunk = 0;
  size_t next = 0;  ///< input
  int64_t operators_before = 0, skipped_before = 0, everywhere_before = 0;
  std::vector<at::Tensor> staged;                            ///< keeps the addresses below from being used again
  std::unordered_set<const at::TensorImpl*> staged_results;  ///< parts and joined results that the last rank has
  int exceptions = std::uncaught_exceptions();
  bool finished = false;

  void mark(const at::Tensor& tensor) {
    staged.push_back(tensor);
    staged_results.insert(tensor.unsafeGetTensorImpl());
  }
  void enter_chunk() {
    begin = chunk * (rows / chunks) + std::min(chunk, rows % chunks);
    length = rows / chunks + (chunk < rows % chunks ? 1 : 0);
    next = 0;
  }
  int64_t last() const { return pipeline.stages - 1; }
};

PipelineCall::PipelineCall(Pipeline& pipeline, const std::vector<at::Tensor>& inputs)
    : impl_(new Impl{.pipeline = *pipeline.impl_, .inputs = {}}) {
  auto& p = impl_->pipeline;
  if (at::autocast::is_autocast_enabled(p.device.type()))
    comm::throw_alone<ConfigError>(
        *p.group,
        "pipeline: autocast is on, expected it off: tensors without values don't take part in it, so that ranks would "
        "disagree about dtypes. Convert the model instead (model->to(torch::kBFloat16))");
  impl_->inputs = from_bytes<std::vector<at::Tensor>>(
      comm::broadcast_bytes(*p.group, p.own == 0 ? to_bytes(inputs) : std::string(), 0));
  if (impl_->inputs.size() != inputs.size())
    comm::throw_alone<ConfigError>(
        *p.group, "pipeline: rank " + std::to_string(p.own) + " passed " + std::to_string(inputs.size()) +
                      " tensors to the forward, expected as many as rank 0, " + std::to_string(impl_->inputs.size()) +
                      "; tensors that this rank doesn't have may be undefined, but must be there");
  for (at::Tensor& input : impl_->inputs)
    if (input.defined()) input = input.to(p.device);
  const auto first = std::find_if(impl_->inputs.begin(), impl_->inputs.end(),
                                  [](const at::Tensor& input) { return input.defined() && input.dim() > 0; });
  if (first == impl_->inputs.end())
    throw ConfigError(
        "pipeline: found no tensor with rows among rank 0's arguments, expected at least one, whose rows are the "
        "batch");
  impl_->rows = first->size(0);
  impl_->chunks =
      std::clamp<int64_t>(p.options.num_chunks ? p.options.num_chunks : p.stages, 1, std::max<int64_t>(impl_->rows, 1));
  p.carrier->begin_call();
  impl_->operators_before = p.placement->operators(), impl_->skipped_before = p.placement->skipped(),
  impl_->everywhere_before = p.placement->everywhere();
  impl_->enter_chunk();
}

PipelineCall::~PipelineCall() {
  if (!impl_->finished && std::uncaught_exceptions() > impl_->exceptions) {
    impl_->pipeline.group->announce_failure("pipeline: its forward ended by an exception");
  }
}

int64_t PipelineCall::num_chunks() const { return impl_->chunks; }

at::Tensor PipelineCall::next_input() {
  if (impl_->next == impl_->inputs.size()) {  // the part before is through
    impl_->pipeline.carrier->end_part();
    impl_->pipeline.placement->prune();
    ++impl_->chunk;
    impl_->enter_chunk();
  }
  const at::Tensor& input = impl_->inputs[impl_->next++];
  const bool cut = input.defined() && input.dim() > 0 && input.size(0) == impl_->rows && impl_->chunks > 1;
  return cut ? input.narrow(0, impl_->begin, impl_->length) : input;
}

void PipelineCall::run(const std::function<void()>& forward) {
  try {
    const residency::HandlerScope scope(residency::Link::place, *impl_->pipeline.placement);
    forward();
  } catch (const CommError&) {
    impl_->finished = true;  // the thrower has told the others
    throw;
  } catch (const pipeline::AgreedError&) {
    impl_->finished = true;
    impl_->pipeline.carrier->wait();  // the others come to this operator too, and want what was sent before it
    throw;
  } catch (const std::exception& error) {
    impl_->finished = true;
    impl_->pipeline.group->announce_failure("pipeline: " + text_of(error));
    throw;
  }
}

at::Tensor PipelineCall::take(const at::Tensor& result) {
  auto& p = impl_->pipeline;
  if (!result.defined() || p.placement->stage_of(result) < 0) return result;
  const at::Tensor values = p.placement->bring(result, impl_->last(), "the result");
  // A real tensor of an earlier stage is of no use here: nobody shall take a part of the result for the whole.
  const at::Tensor mine = values.defined() ? values
                          : result.is_meta()
                              ? result
                              : at::empty_strided(result.sizes(), result.strides(), result.options().device(at::kMeta));
  impl_->mark(mine);
  return mine;
}

at::Tensor PipelineCall::join(const std::vector<at::Tensor>& parts) {
  if (parts.size() == 1 || !parts.front().defined()) return parts.front();
  if (parts.front().dim() == 0)
    raise<ShapeError>(
        "pipeline: the forward returns a number for each of {} parts of the batch, expected results with "
        "rows, which can be joined; reduce afterwards, or use num_chunks = 1",
        parts.size());
  const at::Tensor joined = at::cat(parts);
  if (impl_->staged_results.contains(parts.front().unsafeGetTensorImpl())) impl_->mark(joined);
  return joined;
}

void PipelineCall::finish() {
  auto& p = impl_->pipeline;
  p.carrier->end_call();
  p.placement->prune();
  impl_->finished = true;
  auto& report = p.report;
  report.operators = p.placement->operators() - impl_->operators_before;
  report.skipped = p.placement->skipped() - impl_->skipped_before;
  report.everywhere = p.placement->everywhere() - impl_->everywhere_before;
  report.tensors_sent = p.carrier->sent, report.tensors_received = p.carrier->received;
  report.bytes_sent = p.carrier->bytes_sent, report.bytes_received = p.carrier->bytes_received;
}

at::Tensor PipelineCall::deliver(const at::Tensor& joined) {
  auto& p = impl_->pipeline;
  if (!joined.defined() || !p.options.gather_output || !impl_->staged_results.contains(joined.unsafeGetTensorImpl()))
    return joined;
  return p.group->broadcast(joined.is_meta() ? at::empty(joined.sizes(), joined.options().device(p.device)) : joined,
                            impl_->last());
}

}  // namespace accelerate::parallel
