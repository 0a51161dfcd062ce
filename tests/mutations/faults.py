"""The faults that scripts/mutate.py compiles in, one for each option: where its effect is taken out, and which tests
have to notice.

A row is F(name, file, text, wrong, tests...):
  name   what fails to act, Struct::field first; rows of one name are one fault in several places
  text   stands in the file once, however it is broken into lines; what is between « and » is replaced
  wrong  what takes its place: an expression of the same type, or statements where a statement with its semicolon is
         replaced
  tests  "binary Suite.Case", each of which must fail; "conformance_tests FILE" for a file of cases
  each   an expression of C++, for families: there is a fault for each of its values, named name + value, and `of` lists
         those that are run
"""
import dataclasses


@dataclasses.dataclass
class Fault:
    name: str
    file: str
    text: str
    wrong: str
    tests: tuple
    each: str = ""
    of: tuple = ()


FAULTS = []


def F(name, file, text, wrong, *tests, **more):
    FAULTS.append(Fault(name, file, text, wrong, tests, **more))


# ---- the facade
file = "src/accelerator/accelerator.cpp"
t = "accelerator_tests AcceleratorTest."
r = "accelerator_tests AcceleratorRanks."
o = "options_tests OptionsOfTraining."
F("AcceleratorOptions::split_batches", file,
  "«if (options.split_batches) options.dataloader_config.split_batches = *options.split_batches;»", "",
  r + "SplitBatchesHasAShorthand")
F("AcceleratorOptions::device_placement of batches", file, ".put_on_device = «options.device_placement»", "true",
  t + "BatchesStayWhereTheyAreWithoutDevicePlacement")
F("AcceleratorOptions::device_placement of models", file, "if («placed») model.to(device());",
  "true", o + "ModelsStayWhereTheyAreWithoutDevicePlacement")
F("prepare device_placement of models", file, "placed = «device_placement.value_or(impl_->options.device_placement)»;",
  "impl_->options.device_placement", o + "EachObjectIsPlacedOrLeft")
F("prepare device_placement of batches", file, "«if (device_placement) options->put_on_device = *device_placement;»", "",
  o + "EachObjectIsPlacedOrLeft")
F("numbers that are logged reach the monitor", file, "if («is_monitored()») for (", "false",
  "monitor_cli_tests MonitorSteps.PreparedOptimizersReportThem")
F("an optimizer is saved once", file, "if («same != optimizers.end()») *same = optimizer;", "false",
  r + "WhatIsPreparedTwiceIsOneOfTheRun")
F("a model is saved once", file, "if («same != impl_->run.models.end()») *same = core;", "false",
  r + "WhatIsPreparedTwiceIsOneOfTheRun")
F("set_even_batches", file, "= impl_->loader_options.config.even_batches = «value»;", "even_batches()",
  r + "EvenBatchesAreSetForLoadersToCome")
F("AcceleratorOptions::mixed_precision", file, ".mixed_precision = «options.mixed_precision»",
  "std::optional<std::string>()", t + "Bf16RunsLinearLayersInBf16AndGivesFp32")
F("AcceleratorOptions::gradient_accumulation_steps", file, ".value_or(«options.gradient_accumulation_steps»)", "1",
  t + "ReferenceAccumulationExampleEndsAt204")
F("AcceleratorOptions::cpu", file, ".partial = {.cpu = «options.cpu»,", "std::optional<bool>()",
  o + "AnAcceleratorMayStayOnTheCpu")
F("AcceleratorOptions::dataloader_config", file, ".config = «options.dataloader_config»", "DataLoaderConfiguration{}",
  r + "SplitBatchesHasAShorthand")
F("AcceleratorOptions::rng_types", file, ".rng_types = «options.rng_types»", "std::vector<RNGType>{RNGType::generator}",
  r + "LoadersSynchroniseTheGeneratorsThatWereAskedFor")
F("AcceleratorOptions::log_with", file, "trackers.choose(«options.log_with», project.logging_dir);",
  "std::vector<TrackerChoice>()", t + "LogsGoToTheFolderForLogs")
F("AcceleratorOptions::project_dir", file, "project.project_dir = «options.project_dir»;", "std::filesystem::path()",
  t + "TensorBoardReadsOurEvents")
F("ProjectConfiguration::logging_dir", file, "if («project.logging_dir.empty()»)", "true",
  t + "LogsGoToTheFolderForLogs")
F("AcceleratorOptions::gradient_accumulation_plugin", file, "«return *options.gradient_accumulation_plugin;»",
  "return {};", "ddp_tests Ddp.TokenWeightedAverageIsTheMeanOverAllTokens")
F("AcceleratorOptions::fsdp_plugin", file, "{.fsdp = «options.fsdp_plugin.to_optional()»,",
  "std::optional<FullyShardedDataParallelPlugin>()", r + "ALaterAcceleratorShardsAsTheFirst")
F("AcceleratorOptions::deepspeed_plugin", file, ".deepspeed = «options.deepspeed_plugin»", "Given<DeepSpeedPlugin>()",
  "zero_tests Zero.EveryStageTrainsAsOneProcess")
F("AcceleratorOptions::deepspeed_plugins", file, ".deepspeed_plugins = «options.deepspeed_plugins»",
  "decltype(options.deepspeed_plugins)()", "zero_checkpoint_tests ZeroPlugins.SeveralByName")
F("AcceleratorOptions::megatron_lm_plugin", file, ".megatron_lm = «options.megatron_lm_plugin»",
  "Given<MegatronLMPlugin>()", "parallelism_tests MissingEngines.MegatronAndAxes")
F("AcceleratorOptions::parallelism_config", file, "requested_parallelism(«options.parallelism_config.to_optional()»)",
  "std::optional<ParallelismConfig>()", t + "LaterOnesSplitModelsAsTheFirst")
F("AcceleratorOptions::step_scheduler_with_optimizer", file,
  "«impl_->options.step_scheduler_with_optimizer», split_batches()", "true", r + "SchedulesFollowTheOptimizerOrNot")
F("AcceleratorOptions::kwargs_handlers DistributedDataParallelKwargs", file,
  "DistributedDataParallelKwargs>()) «ddp = *kwargs;»", "",
  "dry_run_tests DryRun.GradientsTravelInBucketsOfTheSizeAskedFor")
F("AcceleratorOptions::kwargs_handlers GradScalerKwargs", file, "GradScalerKwargs>()) «scaling = *kwargs;»", "",
  r + "Fp16OverflowOnOneRankSkipsTheStepOnAll")
F("AcceleratorOptions::kwargs_handlers InitProcessGroupKwargs", file,
  "InitProcessGroupKwargs>()) «process_group = *kwargs;»", "", r + "WhoAmIAndWhoGoesFirst")
F("AcceleratorOptions::kwargs_handlers AutocastKwargs", file, "AutocastKwargs>()) «autocast = *kwargs;»", "",
  t + "AutocastKwargsReachForwardsAndRegions")
F("GradScalerKwargs::enabled", file, "run.scaler = «std::make_shared<optim::GradScaler>(scaling)»;",
  "[this] { auto on = scaling; on.enabled = true; return std::make_shared<optim::GradScaler>(on); }()",
  o + "LossesAreNotScaledWhereTheScalerIsOff")

file = "src/accelerator/training.cpp"
F("GradientAccumulationPlugin::sync_with_dataloader", file, "if («gradients.sync_with_dataloader()» && at_end",
  "true", "conformance_tests grad_accumulation")
F("accumulation begins anew after a loader's end", file, "&& at_end) { «impl_->run.step = 0;»", "",
  "conformance_tests grad_accumulation")
F("GradientAccumulationPlugin::num_steps", file, "(impl_->run.step + 1) % «gradients.num_steps()» == 0", "int64_t{1}",
  t + "ReferenceAccumulationExampleEndsAt204")
F("GradientAccumulationPlugin::sync_each_batch", file, "use_distributed() && «gradients.sync_each_batch()»", "false",
  "ddp_tests Ddp.EqualsOneProcessAfterEveryStep")
F("BackwardOptions::retain_graph", file, "«how.retain_graph» || how.create_graph, how.create_graph",
  "false", o + "GraphsAreKeptOrMadeForGradients")
F("BackwardOptions::create_graph", file, "how.retain_graph || how.create_graph, «how.create_graph»",
  "false", o + "GraphsAreKeptOrMadeForGradients")

file = "src/accelerator/checkpointing.cpp"
c = "checkpoint_tests "
F("ProjectConfiguration::automatic_checkpoint_naming", file, "named = «project.automatic_checkpoint_naming»;", "false",
  c + "CheckpointTest.AutomaticNamesLimitAndNewest")
F("ProjectConfiguration::total_limit", file, "if («writes && named» && project.total_limit)", "false",
  c + "CheckpointTest.AutomaticNamesLimitAndNewest")
F("ProjectConfiguration::iteration", file,
  "named ? run_state::checkpoint_folder(all, «project.iteration») : output_dir", "int64_t{0}",
  c + "CheckpointTest.AutomaticNamesLimitAndNewest")
F("ProjectConfiguration::project_dir", file,
  'const fs::path all = «project.project_dir» / "checkpoints"; const bool writes', 'fs::path("elsewhere")',
  c + "CheckpointTest.AutomaticNamesLimitAndNewest")
F("ProjectConfiguration::save_on_each_node of what is in pieces", file, ".several = «project.save_on_each_node»",
  "false", "engines_tests Engines.SaveOnEachMachine")
F("ProjectConfiguration::save_on_each_node", "src/accelerator/accelerator_impl.hpp",
  "(«options.project_config.save_on_each_node» &&", "false", c + "CheckpointRanks.EachMachineCanWriteItsOwnCopy")
F("DataLoaderConfiguration::use_stateful_dataloader", file,
  ".loaders = «impl_->options.dataloader_config.use_stateful_dataloader», .num_steps", "false",
  c + "CheckpointTest.ResumedRunIsTheUninterruptedOneBitByBit")

# ---- state
file = "src/state/partial_state.cpp"
F("local_main_process_first", file, "return first_then_others(«is_local_main_process()»);", "!is_local_main_process()",
  r + "EachMachineHasAMainProcessThatGoesFirst")
F("PartialStateOptions::cpu", file,
  'fresh->cpu = «options.cpu.value_or(environment::flag("ACCELERATE_USE_CPU").value_or(false))»;',
  'environment::flag("ACCELERATE_USE_CPU").value_or(false)', o + "AStateMayPretendAndStayOnTheCpu")
F("InitProcessGroupKwargs::backend", file,
  "fresh->backend = «options.process_group.backend.empty() ? backend_for(fresh->device) : "
  "options.process_group.backend»;", "backend_for(fresh->device)", o + "TheProcessGroupIsTheOneThatWasAskedFor")
F("InitProcessGroupKwargs::timeout", file,
  '.timeout = «options.process_group.timeout.value_or(std::chrono::seconds(fresh->backend == "nccl" ? 600 : 1800))»',
  "std::chrono::milliseconds(60000)", "comm_tests Comm.TimeoutNamesWhoIsLateAndWhatItDidLast")
F("PartialStateOptions::pretence", file,
  "fresh->device = «pretence ? at::Device(at::kMeta) : choose_device(fresh->cpu, id.local_rank)»;",
  "choose_device(fresh->cpu, id.local_rank)", o + "AStateMayPretendAndStayOnTheCpu")
file = "src/state/accelerator_state.cpp"
F("AcceleratorStateOptions::partial", file, ": PartialState(«options.partial»)", "PartialStateOptions{}",
  o + "AStateMayPretendAndStayOnTheCpu")
F("AcceleratorStateOptions::mixed_precision", file,
  "precision = «options.mixed_precision ? precision_from_string(*options.mixed_precision) : launched»;", "launched",
  o + "AStateMayPretendAndStayOnTheCpu")
file = "src/state/gradient_state.cpp"
F("GradientAccumulationPlugin::average", file, "{ return «shared_->plugin.average»; }", "GradientAverage::steps",
  "ddp_tests Ddp.TokenWeightedAverageIsTheMeanOverAllTokens")
F("GradientAccumulationPlugin::adjust_scheduler", file, "{ return «shared_->plugin.adjust_scheduler»; }", "true",
  "optim_tests AcceleratedSchedulerTest.DoesNotCountWithoutAdjustScheduler")

# ---- precision
file = "src/precision/autocast.cpp"
F("AutocastKwargs::enabled", file, "const bool enabled = «kwargs.enabled» && dtype", "true",
  t + "AutocastKwargsReachForwardsAndRegions")
F("AutocastKwargs::enabled", "src/accelerator/accelerator.cpp", "«autocast.enabled && autocasts()» ? autocast_dtype",
  "true")
F("AutocastKwargs::enabled", "src/accelerator/training.cpp", "«how.enabled && impl_->autocasts()» ? autocast_dtype", "true")
F("AutocastKwargs::cache_enabled", file, "«kwargs.cache_enabled.value_or(previous_cache_enabled_)»",
  "previous_cache_enabled_", t + "AutocastKwargsReachForwardsAndRegions")

# ---- loaders
p = "data_tests PreparedDataLoader."
file = "src/data/prepared_loader.cpp"
F("DataLoaderConfiguration::non_blocking", file, "«settings.config.non_blocking»", "false",
  o + "CopiesToTheDeviceWaitOrNot")
F("DataLoaderConfiguration::split_batches", file, ".split_batches = «settings().config.split_batches», .even_batches",
  "false", r + "SplitBatchesHasAShorthand")
F("DataLoaderConfiguration::even_batches", file, ".even_batches = «even_batches()»", "true", p + "VaryingBatchSizes")
F("DataLoaderConfiguration::even_batches of streams", file, "if (self_sharding() && «settings().config.even_batches»)",
  "true", "data_dist_tests DataDist.StreamsShardThemselvesByDefaultAndReadOnlyTheirShare")
F("DataLoaderOptions::drop_last of dispatched batches", file, "DispatchFeed::Plan{.drop_last = «drop_last()»,", "false",
  "conformance_tests prepared_dataloader")
file = "src/data/prepared_settings.cpp"
F("PrepareDataLoaderOptions::put_on_device", file, "if («options.put_on_device») settings.device", "true",
  o + "BatchesArePutOnTheDeviceOrLeft")
F("PrepareDataLoaderOptions::device", file,
  "settings.device = «options.device ? *options.device : PartialState().device()»;", "PartialState().device()",
  o + "CopiesToTheDeviceWaitOrNot")
F("PrepareDataLoaderOptions::num_processes", file,
  "«options.num_processes ? *options.num_processes : comm::mesh().size(comm::kSamples)»;",
  "PartialState().num_processes()", p + "EmptyAndTinyDatasets")
F("PrepareDataLoaderOptions::process_index", file,
  "«options.process_index ? *options.process_index : comm::mesh().place(comm::kSamples)»;",
  "PartialState().process_index()", p + "CollatedStreamsAreSharedOutByRows")
F("PrepareDataLoaderOptions::config", file, "settings{.config = «options.config»,",
  "DataLoaderConfiguration{.dispatch_batches = false}", p + "VaryingBatchSizes")
F("PrepareDataLoaderOptions::rng_types", file, ".rng_types = «options.rng_types»",
  "std::vector<RNGType>{RNGType::generator}", r + "LoadersSynchroniseTheGeneratorsThatWereAskedFor")
F("DataLoaderConfiguration::dispatch_batches", file,
  "«options.config.dispatch_batches.value_or(options.put_on_device && core.is_stream() && !core.can_shard())»",
  "options.put_on_device && core.is_stream() && !core.can_shard()",
  "data_dist_tests DataDist.DispatchWithAnOwnSliceFunction")
F("DataLoaderConfiguration::use_seedable_sampler", file, "if («settings.config.use_seedable_sampler») {", "false",
  p + "SeedableSamplerFollowsTheEpoch")
F("DataLoaderConfiguration::data_seed", file, "random->data_size(), «settings.config.data_seed»,",
  "std::optional<int64_t>()", p + "SeedableSamplerFollowsTheEpoch")
d = "data_tests DataLoader."
file = "src/data/loader_core.cpp"
F("DataLoaderOptions::batch_size", file, "std::move(sampler), «options.batch_size», options.drop_last", "1",
  d + "VectorsInOrder")
F("DataLoaderOptions::drop_last", file, "std::move(sampler), options.batch_size, «options.drop_last»);", "false",
  p + "EmptyAndTinyDatasets")
F("DataLoaderOptions::shuffle", file, "if («options.shuffle») sampler = ", "false", d + "ShufflesAsPythonDoes")
F("DataLoaderOptions::generator", file, "{.generator = «options.generator»}", "std::optional<at::Generator>()",
  d + "ShufflesAsPythonDoes")
F("DataLoaderOptions::seed", file, "options.generator = seeded_generator(«*options.seed»);", "12345",
  d + "ShufflesAsPythonDoes")
F("DataLoaderOptions::num_workers", file, "if («options_.num_workers == 0») return nullptr;", "true",
  "data_tests Workers.ReadAtTheSameTime")
F("DataLoaderOptions::prefetch_factor", file, "options_.num_workers * «options_.prefetch_factor»", "int64_t{1000}",
  "data_tests Workers.ReadOnlySoFarAhead")
file = "src/data/sampler.cpp"
s = "data_tests RandomSampler."
F("RandomSamplerOptions::replacement", file, "*size(), «options_.replacement», generator", "false",
  s + "ReplacementAndNumSamples")
F("RandomSamplerOptions::generator", file, "generator_ = «options_.generator»;", "std::optional<at::Generator>()",
  s + "ReplacementAndNumSamples")
file = "src/data/batch_sampler_shard.cpp"
F("ShardOptions::split_batches", file, "if («options_.split_batches») return SplitCursor", "false",
  "conformance_tests batch_sampler_shard")
F("ShardOptions::even_batches", file, "if («!options_.even_batches») { if (mine_", "false",
  "conformance_tests batch_sampler_shard")
F("ShardOptions::num_processes", file, "const int64_t turn = count_++ % «options_.num_processes»;", "int64_t{1}",
  "conformance_tests batch_sampler_shard")
F("ShardOptions::process_index", file, "if (turn == «options_.process_index») mine_ = last_;", "int64_t{0}",
  "conformance_tests batch_sampler_shard")
file = "src/data/stream_source.cpp"
i = "conformance_tests iterable_dataset_shard"
F("IterableDatasetShardOptions::num_processes", file, "const int64_t ranks = «options.num_processes»;", "int64_t{1}", i)
F("IterableDatasetShardOptions::process_index", file, ".begin = share * «options.process_index»,", "int64_t{0}", i)
F("IterableDatasetShardOptions::drop_last", file, ".drop_last = «options.drop_last»}; }", "false", i)
F("IterableDatasetShardOptions::drop_last", file, ".complete = «!options.drop_last»,", "true")
file = "src/data/random.cpp"
F("SetSeedOptions::device_specific", file, "if («options.device_specific») seed += comm::rank();", "false",
  "data_dist_tests RandomDist.GeneratorsGetRankZerosState")
F("SetSeedOptions::deterministic", file, "if («options.deterministic») at::globalContext()", "false",
  "data_tests SetSeed.RepeatsAndRefusesAMissingGenerator")

# ---- optimizers and schedules
file = "src/optim/grad_scaler.cpp"
g = "optim_tests GradScalerTest."
rules, l = "src/optim/scale_rule.cpp", "deepspeed_optim_tests LossScale."
F("GradScalerKwargs::init_scale", rules, "scale_ = scale_on(device, «kwargs_.init_scale»);", "65536.0",
  r + "Fp16OverflowOnOneRankSkipsTheStepOnAll")
F("GradScalerKwargs::growth_factor", rules, "found_inf, «kwargs_.growth_factor», kwargs_.backoff_factor", "7.0",
  g + "SkipsOverflowShrinksAndGrows")
F("GradScalerKwargs::backoff_factor", rules, "found_inf, kwargs_.growth_factor, «kwargs_.backoff_factor»,", "0.125",
  g + "SkipsOverflowShrinksAndGrows")
F("GradScalerKwargs::growth_interval", rules, "kwargs_.backoff_factor, «kwargs_.growth_interval»);", "2000",
  g + "SkipsOverflowShrinksAndGrows")
F("gradients that wait follow the scale", file, "if (state.optimizer && state.scaled && «state.stage == Stage::ready»)",
  "false", g + "GradientsThatWaitFollowTheScale")
F("what was unscaled and not stepped is scaled again", file, "if («state.stage == Stage::unscaled») { multiply", "false",
  g + "GradientsThatWaitFollowTheScale")
F("the scale changes once for all optimizers", file,
  "«pending_ = pending_.defined() ? at::maximum(pending_, found_inf) : found_inf;»",
  "change_scale([&] { rule_->update(found_inf); });", g + "OneOptimizersOverflowIsNotTheOthersStep",
  l + "StepsOfOneRoundCountOnce")
F("an overflow at the smallest scale is said by its step", file, "«rule_->check(found_inf);»", "",
  l + "AnOverflowAtTheSmallestScaleIsAnErrorThatChangesNothing")
F("set_fp16_gradients", file, "check_and_unscale(optimizer, state, inverse, «fp16_gradients_», widening_);", "false",
  l + "Fp16GradientsAreTakenWhereTheyAreAllowed")
F("set_widening", file, "if («widens») widen_gradient(param);", "false", l + "WideningDividesInTheParametersType")
F("a scale of 1 asks for no particular step", file, "if («rule_->scales()») check_for_foreign_steps(state);", "true",
  l + "AFixedScaleStaysAndLooksForOverflows")
loss_cases = "conformance_tests deepspeed_loss_scaler"
F("DynamicLossScale min_scale", rules, "std::max(value() / kFactor, «settings_.min_scale»)", "0.0",
  l + "HalvesNoFurtherThanTheSmallest")
F("DynamicLossScale window", rules, "stable % «settings_.window» == 0;", "int64_t{1000}", loss_cases)
F("DynamicLossScale hysteresis", rules, "if («left_ > 1») --left_;", "false", loss_cases, l + "StepsOfOneRoundCountOnce")
F("DynamicLossScale consecutive_hysteresis", rules, "grows || «settings_.consecutive_hysteresis») left_", "false", loss_cases)
F("the first good step after an overflow does not count", rules, "stable = «updates_ - last_overflow_ - 1»;",
  "updates_ - last_overflow_", loss_cases)
F("the loss scale stays a number of fp32", rules, "if (grows && «value() * kFactor <= std::numeric_limits<float>::max()»)",
  "true", l + "GrowsNoFurtherThanItsTypeReaches")
F("a resumed loss scale knows its overflows", rules, "last_overflow_ = «last_overflow»;", "int64_t{-1}",
  l + "StatesResumeAnywhere")
F("a resumed loss scale is on its device", rules, "value_ = value; if («tensor_.defined()») tensor_.fill_(value);", "false",
  l + "StatesResumeAnywhere")
F("states of another rule are refused", rules, "if («state.boolean(\"dynamic\") != is_dynamic()») state.fail(", "false",
  l + "StatesAreReadStrictly")
F("the old optimizer's step is named", file, "«check_for_foreign_steps(state);»", "", g + "TheOldOptimizersStepIsNamed")
kernels, k = "src/optim/kernels/", "step_kernels_tests StepKernels."
F("halves below their smallest normal number", kernels + "step_bodies.hpp",
  "«std::bit_cast<float>(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal)»",
  "std::bit_cast<float>(magnitude)", k + "ConvertAsLibTorchDoes")
F("ties of numbers of 16 bits go to even", kernels + "step_bodies.hpp", "const uint32_t rounded = («bits + 0x7fff + (bits >> 16 & 1)») >> 16;",
  "bits + 0x8000", k + "ConvertAsLibTorchDoes")
F("a thread begins where its part of a stretch does", kernels + "step.cpp", "from = «std::max<int64_t>(begin - before, 0)»;",
  "0", k + "GiveTheSameBitsHoweverTensorsAreCut")
F("blocks that are converted go on where the last one ended", kernels + "step.cpp",
  "const int64_t count = «std::min(at_once, last - from)»;", "std::min(at_once, last - from) / 2 * 2",
  k + "GiveTheSameBitsHoweverTensorsAreCut")
F("converted states are written back", kernels + "step.cpp", "if («low_ && writes_») loops().narrow", "low_ && writes_ && count_ < 0",
  k + "RoundOnce")
F("divided gradients stay divided", kernels + "step.cpp", "if («divisor != 1») loops_of<T>().divide(", "false",
  k + "DivideGradientsAndLeaveThemDivided")
F("Adagrad's steps count", "src/optim/kernels/step.cpp", "(1 + «static_cast<double>(rule.step - 1)» * rule.lr_decay)", "0.0",
  "optim_tests OptimTest.FusedStepEqualsPlainStepWithinRounding")
F("Adagrad's groups that came later", "src/optim/optimizer.cpp", "if («place != nullptr») continue;", "true",
  "optim_tests OptimTest.AdagradStepsOnGroupsThatCameLater")
F("Adam makes up for the first steps", "src/optim/kernels/step.cpp", "rule.bias_correction ? «std::sqrt(1 - std::pow(rule.beta2, number))» : 1;", "1.0",
  "optim_tests OptimTest.FusedStepEqualsPlainStepWithinRounding")
F("AcceleratedOptimizerOptions::fused", "src/optim/optimizer.cpp", "if («options.fused.value_or(true)») impl_->fused",
  "true", "optim_tests OptimTest.FallsBackWhereTheKernelsCannot")
F("searching optimizers see the mean loss", "src/optim/optimizer.cpp",
  "comm::world_size() == 1 || «optim::steps_on_pieces(optimizer)») return closure;", "true",
  "ddp_habits_tests DdpHabits.LbfgsEvaluatesEquallyOftenOnAllRanks")
own = "deepspeed_optim_tests OwnOptimizers."
F("Lion's directions are of its mean", kernels + "step_bodies.hpp", "const T mean = «rates.keep[0] * m + rates.add[0] * g»;", "m",
  own + "LionIsItsFormula")
F("Lion leaves what has no direction", kernels + "step_bodies.hpp", "mean > 0 ? T(1) : «mean < 0» ? T(-1) : mean;",
  "!(mean > 0)", own + "LionLeavesWhatHasNoDirection")
F("LionOptions::weight_decay", kernels + "step.cpp", "return {.shrink = static_cast<T>(«1 - rule.lr * rule.weight_decay»), .keep = {static_cast<T>(rule.beta1), static_cast<T>(rule.beta2)}, .add = {static_cast<T>(1 - rule.beta1), static_cast<T>(1 - rule.beta2)}, .lr =",
  "1.0", own + "LionIsItsFormula")
file = "src/optim/fused_step.cpp"
F("LionOptions::lr", file, "return {«options.lr()», beta1, beta2, options.weight_decay()};", "1e-3", own + "LionIsItsFormula")
F("LionOptions::betas", file, "return {options.lr(), «beta1», beta2, options.weight_decay()};", "0.9", own + "LionIsItsFormula")
F("DeepSpeedAdamOptions::bias_correction", file, "bucket.step, «options.bias_correction()»};", "true",
  own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::adam_w_mode", file, "«options.adam_w_mode()», bucket.step, options.bias_correction()", "true",
  own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::weight_decay", file, "«options.weight_decay()», options.adam_w_mode()", "0.0",
  own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::eps", file, "«options.eps()», options.weight_decay(), options.adam_w_mode()", "1e-8",
  own + "DeepSpeedAdamIsItsFormula")
file = "src/optim/own_step.hpp"
F("DeepSpeedAdamOptions::lr", file, "-«rule.lr» / correction1", "1e-3", own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::betas", file, "m.value.mul_(«rule.beta1»)", "0.9", own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::fp32_optimizer_states", "src/optim/describe_own.hpp", "return «o.fp32_optimizer_states()» && (type", "true",
  own + "DeepSpeedAdamHasStatesAsExactAsAsked")
F("states that are read are as exact as those that are made", "src/optim/optimizer_state.cpp",
  "dtype(«type»)).copy_(saved);", "parameter.scalar_type()",
  own + "DeepSpeedAdamHasStatesAsExactAsAsked")
file = "src/optim/lamb.cpp"
lamb = own + "LambIsItsFormula"
F("LambOptions::lr", file, "? «o.lr()» * std::sqrt(1", "1e-3", lamb)
F("LambOptions::betas", file, "m.value.mul_(beta1).add_(g.value, 1 - «beta1»)", "0.5", lamb)
F("LambOptions::eps", file, ": v.value.sqrt().add_(«o.eps()»);", "1e-8", lamb)
F("LambOptions::eps_inside_sqrt", file, "divisor = «o.eps_inside_sqrt()» ?", "false", lamb)
F("LambOptions::weight_decay", file, ".add_(p.value, «o.weight_decay()»);", "0.0", lamb)
F("LambOptions::bias_correction", file, "rate = «o.bias_correction()» ?", "true", lamb)
F("LambOptions::max_coeff", file, "clamp_(o.min_coeff(), «o.max_coeff()»);", "10.0", lamb)
F("LambOptions::min_coeff", file, "clamp_(«o.min_coeff()», o.max_coeff());", "0.01", lamb)
F("a norm of zero has no ratio", file, "at::where(«(length == 0).logical_or_(of_update == 0)»,", "of_update == 0", lamb)
file = "src/optim/muon.cpp"
muon = own + "MuonIsItsFormulaOnMatricesOfAnyShape"
F("MuonOptions::lr", file, "parameter.value.sub_(update, «o.lr()» * std::sqrt", "0.02", muon)
F("MuonOptions::weight_decay", file, "parameter.value.mul_(1 - o.lr() * «o.weight_decay()»); parameter.value.sub_", "0.0", muon)
F("MuonOptions::momentum", file, "momentum.value.lerp_(gradient, 1 - «o.momentum()»);", "0.95", muon)
F("MuonOptions::ns_method", file, "orthogonalized(matrix, «o.ns_method()»)", 'std::string("gram")', muon)
F("MuonOptions::use_muon", file, "if («o.use_muon()») { const Wide momentum", "o.use_muon() && o.lr() < 0", muon)
F("MuonOptions::betas", file, "first.value.lerp_(g, 1 - «beta1»);", "0.9", own + "MuonStepsByAdamOnTheRest")
F("MuonOptions::eps", file, "sqrt_().add_(«o.eps()»);", "1e-10", own + "MuonStepsByAdamOnTheRest")
F("MuonOptions::adam_w_mode", file, "const auto g = «o.adam_w_mode()» ? gradient", "true", own + "MuonStepsByAdamOnTheRest")
F("Newton-Schulz begins anew once", file, "if («i == kRestart») {", "false", muon)
F("Muon's outer layers are Adam's", file, "(«parameter.dim() >= 2 && !outer» ? of_muon", "parameter.dim() >= 2",
  own + "MuonsGroupsAreMatricesAndTheRest")
F("groups of own optimizers inherit", "src/optim/describe_own.hpp", "if («inherits») {", "false",
  own + "GroupsHaveOptionsOfTheirOwn")
F("groups of Muon are all their own", file, "defaults(), /*inherits=*/«false»);", "true", own + "GroupsHaveOptionsOfTheirOwn")
file = "src/optim/accelerated_scheduler.cpp"
F("schedules of split batches step once", file, "if («self.split_batches») return step_once();",
  "false", "optim_ranks_tests OptimRanks.SchedulesStepOncePerProcess")
e = "optim_tests Scheduler.EveryScheduleGivesPythonsRates"
cycles = o + "CyclesHaveTheirFactorsAndMomentums"
file = "src/optim/one_cycle.cpp"
F("OneCycleOptions::max_lr", file, "max_lrs_.push_back(«options.max_lr[options.max_lr.size() == 1 ? 0 : i]»);",
  "0.0123", e)
F("OneCycleOptions::pct_start", file, "«options.pct_start» * static_cast<double>(total_steps_)", "0.3", e)
F("OneCycleOptions::anneal_strategy", file, "if («options_.anneal_strategy == AnnealStrategy::linear») return", "false",
  e)
F("OneCycleOptions::three_phase", file, "if («options.three_phase») phases_", "false", e)
F("OneCycleOptions::cycle_momentum", file, "if («options_.cycle_momentum») set_momentum(groups[i].options(), anneal",
  "false", cycles)
F("OneCycleOptions::base_momentum", file, "options_.max_momentum : «options_.base_momentum»;", "0.85", cycles)
F("OneCycleOptions::max_momentum", file, "return max ? «options_.max_momentum» :", "0.95", cycles)
F("OneCycleOptions::div_factor", file, "max_lrs_[i] / «options.div_factor»;", "25.0", cycles)
F("OneCycleOptions::final_div_factor", file, "base_lrs_[i] / «options_.final_div_factor»", "1e4", cycles)
file = "src/optim/cyclic_schedules.cpp"
F("WarmRestartsOptions::T_0", file, "length_ = «options_.T_0»;", "int64_t{1}",
  "optim_tests Scheduler.StateHasPythonsKeysAndResumesAnywhere")
F("WarmRestartsOptions::T_0", file, "length_(«options.T_0»)", "int64_t{1}", e)
F("WarmRestartsOptions::T_mult", file, "length_ *= «options_.T_mult»;", "int64_t{1}", e)
F("WarmRestartsOptions::eta_min", file, "lr = «options_.eta_min» + (lr - options_.eta_min)", "0.0", e)
F("CyclicOptions::base_lr", file, 'one_per_group("base_lr", «options.base_lr»)', "std::vector<double>{0.0123}", e)
F("CyclicOptions::max_lr", file, 'one_per_group("max_lr", «options.max_lr»)', "std::vector<double>{0.123}", e)
F("CyclicOptions::step_size_up", file, "const int64_t up = «options.step_size_up»,", "int64_t{2000}", e)
F("CyclicOptions::step_size_down", file, "down = «options.step_size_down.value_or(up)»;", "up", e)
F("CyclicOptions::mode", file, "switch («options_.mode») {", "CyclicMode::triangular", e)
F("CyclicOptions::gamma", file, "std::pow(«options_.gamma», x)", "1.0", e)
F("CyclicOptions::scale_fn", file, "«if (options_.scale_fn) return options_.scale_fn(x);»", "", e)
F("CyclicOptions::scale_mode", file, "«options_.scale_mode == ScaleMode::cycle» ? cycle : static_cast", "true", e)
F("CyclicOptions::cycle_momentum", file,
  "if («options_.cycle_momentum») set_momentum(groups[i].options(), max_momentums_[i] - ", "false", cycles)
F("CyclicOptions::base_momentum", file, 'one_per_group("base_momentum", «options.base_momentum»)',
  "std::vector<double>{0.8}", cycles)
F("CyclicOptions::max_momentum", file, 'one_per_group("max_momentum", «options.max_momentum»)',
  "std::vector<double>{0.9}", cycles)
file = "src/optim/deepspeed_schedules.cpp"
cases, d = "conformance_tests deepspeed_schedules", "deepspeed_optim_tests DeepSpeedSchedules."
F("WarmupLROptions::warmup_min_lr", file, 'one_per_group("warmup_min_lr", «options.warmup_min_lr»)', "PerGroup(0.0123)", cases)
F("WarmupLROptions::warmup_max_lr", file, 'one_per_group("warmup_max_lr", «*options.warmup_max_lr»)', "PerGroup(0.0123)",
  cases)
F("WarmupLROptions::warmup_num_steps", file, "warmup_(name, «options.warmup_num_steps», options.warmup_type, options.as_of_version), first",
  "int64_t{1000}", cases)
F("WarmupLROptions::warmup_type", file, "is_log_(«type == \"log\"»)", "true", cases)
F("WarmupLROptions::last_batch_iteration", file, "resumed_at_ = «last_batch_iteration + 1»;", "int64_t{0}", cases,
  d + "GoOnAfterLastBatchIteration")
F("WarmupLROptions::as_of_version", file, "first_group_only_(«is_before(options.as_of_version, {0, 19, 4})»)", "false",
  d + "OlderVersionsActAsTheyDid")
F("WarmupDecayLROptions::total_num_steps", file, "steps_in_all(name(), «options.total_num_steps», warmup())) {}",
  "std::optional<int64_t>(100)", cases)
F("WarmupDecayLROptions::warmup_min_lr", file, ".warmup_min_lr = «options.warmup_min_lr»", "PerGroup(0.0123)", cases)
F("WarmupDecayLROptions::warmup_max_lr", file, ".warmup_max_lr = «options.warmup_max_lr»", "PerGroup(0.0123)", cases)
F("WarmupDecayLROptions::warmup_num_steps", file, ".warmup_num_steps = «options.warmup_num_steps»", "int64_t{1000}", cases)
F("WarmupDecayLROptions::warmup_type", file, ".warmup_type = «options.warmup_type»", 'std::string("log")', cases)
F("WarmupDecayLROptions::last_batch_iteration", file, ".last_batch_iteration = «options.last_batch_iteration»",
  "int64_t{-1}", d + "GoOnAfterLastBatchIteration")
F("WarmupDecayLROptions::as_of_version", file, ".as_of_version = «options.as_of_version»", "std::string()",
  d + "OlderVersionsActAsTheyDid")
F("WarmupCosineLROptions::total_num_steps", file, "steps_in_all(name(), «options.total_num_steps», warmup_)) {}",
  "std::optional<int64_t>(100)", cases)
F("WarmupCosineLROptions::warmup_min_ratio", file, "return «options_.warmup_min_ratio» + warmup_.share(step)", "0.0", cases)
F("WarmupCosineLROptions::warmup_num_steps", file, "warmup_(name(), «options.warmup_num_steps», options.warmup_type",
  "int64_t{1000}", cases)
F("WarmupCosineLROptions::cos_min_ratio", file, "std::max(0.0, «options_.cos_min_ratio» + ", "0.0001", cases)
F("WarmupCosineLROptions::warmup_type", file, "warmup_(name(), options.warmup_num_steps, «options.warmup_type»,",
  'std::string("log")', cases)
F("WarmupCosineLROptions::last_batch_iteration", file, '"warmup_cosine_lr", «options.last_batch_iteration»', "int64_t{-1}",
  d + "GoOnAfterLastBatchIteration")
F("WarmupCosineLROptions::as_of_version", file, "rises_again_(«is_before(options.as_of_version, {0, 19, 4})»)", "false",
  d + "OlderVersionsActAsTheyDid")
F("DeepSpeedOneCycleOptions::cycle_min_lr", file, 'checked("cycle_min_lr", «options.cycle_min_lr»)', "PerGroup(0.0123)", cases)
F("DeepSpeedOneCycleOptions::cycle_max_lr", file, 'checked("cycle_max_lr", «options.cycle_max_lr»)', "PerGroup(0.0123)", cases)
F("DeepSpeedOneCycleOptions::decay_lr_rate", file, "factor = decay(«options_.decay_lr_rate»);", "0.0", cases)
F("DeepSpeedOneCycleOptions::cycle_first_step_size", file, "return «options_.cycle_first_step_size»;", "2000.0", cases)
F("DeepSpeedOneCycleOptions::cycle_second_step_size", file,
  "second_(«options.cycle_second_step_size.value_or(options.cycle_first_step_size)»)", "options.cycle_first_step_size", cases)
F("DeepSpeedOneCycleOptions::cycle_first_stair_count", file, "stairs_[0] = «options.cycle_first_stair_count»,",
  "int64_t{0}", cases)
F("DeepSpeedOneCycleOptions::cycle_second_stair_count", file,
  "stairs_[1] = «options.cycle_second_stair_count.value_or(stairs_[0])»;", "stairs_[0]", cases)
F("DeepSpeedOneCycleOptions::decay_step_size", file, "+ 1) / «options_.decay_step_size»);", "1.0", cases)
F("DeepSpeedOneCycleOptions::cycle_momentum", file, "if («options_.cycle_momentum») for (size_t i = 0; i < groups.size(); ++i) set_betas",
  "true", d + "MoveBetasOrLeaveThem")
F("DeepSpeedOneCycleOptions::cycle_min_mom", file, 'checked("cycle_min_mom", «options.cycle_min_mom»)', "PerGroup(0.8)", cases)
F("DeepSpeedOneCycleOptions::cycle_max_mom", file, 'checked("cycle_max_mom", «options.cycle_max_mom»)', "PerGroup(0.9)", cases)
F("DeepSpeedOneCycleOptions::decay_mom_rate", file, "most * decay(«options_.decay_mom_rate»);", "0.0",
  d + "MoveBetasOrLeaveThem")
F("DeepSpeedOneCycleOptions::last_batch_iteration", file, '"deepspeed_one_cycle", «options.last_batch_iteration»',
  "int64_t{-1}", d + "GoOnAfterLastBatchIteration")
F("DeepSpeedOneCycleOptions::as_of_version", file, "if («is_before(options.as_of_version, {0, 19, 4})») stairs_[0]", "false",
  d + "OlderVersionsActAsTheyDid")
F("DeepSpeedOneCycleOptions::as_of_version and lists", file,
  "value.is_list() && «is_before(options_.as_of_version, {0, 19, 6})»", "false", d + "OlderVersionsActAsTheyDid")
F("LRRangeTestOptions::lr_range_test_min_lr", file, '"lr_range_test_min_lr", «options.lr_range_test_min_lr»',
  "PerGroup(1e-3)", cases)
F("LRRangeTestOptions::lr_range_test_step_size", file, "static_cast<double>(«options_.lr_range_test_step_size»);",
  "int64_t{2000}", cases)
F("LRRangeTestOptions::lr_range_test_step_rate", file, "1 + «options_.lr_range_test_step_rate» *", "1.0", cases)
F("LRRangeTestOptions::lr_range_test_staircase", file, "«options_.lr_range_test_staircase» ? std::floor(passed) : passed",
  "false", cases)
F("LRRangeTestOptions::last_batch_iteration", file, '"lr_range_test", «options.last_batch_iteration»', "int64_t{-1}",
  d + "GoOnAfterLastBatchIteration")
F("stairs are of whole steps", file, "return «std::floor(position) / stairs»;",
  "std::floor((rises ? within / top : (within - 1) / (top - 1)) * stairs) / stairs",
  d + "StairsReachTheTop")
F("DeepSpeed's schedules say the rate of a state that is read", file, "step_count_ = last_epoch_ + 1; «last_lrs_ = rates();»",
  "", d + "StatesAreAnIndexAndResumeAnywhere")
F("an unknown warmup_type is refused", file, "if («is_log_ || type == \"linear\"») return;", "true",
  d + "UnknownWarmupTypesAreRefusedWithTheNearest", cases)
file = "src/optim/chained_schedules.cpp"
F("LinearOptions::start_factor", file, "return lr * «options_.start_factor»;", "1.0 / 3", e)
F("LinearOptions::start_factor", file, "last_epoch_ == 0 ? «start» : 1.0 +", "1.0 / 3", e)
F("LinearOptions::end_factor", file, "? start : 1.0 + («end» - start)", "1.0", e)
F("LinearOptions::total_iters", file, "if (last_epoch_ > «total») return current_lrs();", "int64_t{5}", e)
file = "src/optim/lambda_schedules.cpp"
F("PolynomialDecayOptions::lr_end", file, "return «options.lr_end» / lr_init;", "1e-7", e)
F("PolynomialDecayOptions::power", file, "std::pow(remaining, «options.power»)", "1.0", e)
file = "src/optim/reduce_lr_on_plateau.cpp"
plateau = o + "PlateausHaveTheirBarAndTheirLeastStep"
F("ReduceLROnPlateauOptions::factor", file, "lrs[i] * «options_.factor»,", "0.1", e)
F("ReduceLROnPlateauOptions::patience", file, "num_bad_epochs_ > «options_.patience»", "int64_t{10}", e)
F("ReduceLROnPlateauOptions::min_lr", file, "options_.factor, «options_.min_lr.at(i)»)", "0.0", e)
F("ReduceLROnPlateauOptions::eps", file, "if (lrs[i] - reduced > «options_.eps»)", "1e-8", plateau)
F("ReduceLROnPlateauOptions::cooldown", file, "cooldown_counter_ = «options_.cooldown»;", "int64_t{0}", e)

# ---- data parallelism
file = "src/parallel/averaging/averaging.cpp"
q = "ddp_tests Ddp.EqualsOneProcessAfterEveryStep"
F("DistributedDataParallelKwargs::broadcast_buffers", file, "if («ddp.kwargs.broadcast_buffers») ddp.sync_buffers",
  "true", "ddp_tests Ddp.BuffersAndBucketsAreAsAskedFor")
F("DistributedDataParallelKwargs::bucket_cap_mb", file, "const int64_t cap = «kwargs.bucket_cap_mb» * kMiB;", "25",
  "dry_run_tests DryRun.GradientsTravelInBucketsOfTheSizeAskedFor")
F("DistributedDataParallelKwargs::find_unused_parameters", file,
  "sparse, cap, «kwargs.find_unused_parameters», kwargs.gradient", "false", q)
F("DistributedDataParallelKwargs::gradient_as_bucket_view", file,
  "kwargs.find_unused_parameters, «kwargs.gradient_as_bucket_view», names", "false",
  "ddp_tests Ddp.BuffersAndBucketsAreAsAskedFor")
F("DistributedDataParallelKwargs::static_graph", file,
  "if («kwargs.static_graph» && !std::exchange(graph_is_static, true))", "false", q)
F("DistributedDataParallelKwargs::comm_hook", "src/parallel/gradient_hook.cpp",
  "return wire_hook(std::move(group), wire_of(«kwargs.comm_hook»));", "DDPCommunicationHookType::no", q)
hooks = "communication_hooks_tests CommunicationHooks."
parity = hooks + "AverageAsPyTorchsDo"
refused = "communication_hooks_tests CommunicationHookSettings.WhatCanNotWorkIsRefusedByName"
file = "src/parallel/gradient_hook.cpp"
F("DistributedDataParallelKwargs::comm_wrapper", file, "wire_of(«kwargs.comm_wrapper»));",
  "DDPCommunicationHookType::no", parity)
F("DistributedDataParallelKwargs::communication_hook", file, "if («kwargs.communication_hook») return std::make_shared",
  "CommunicationHook()", hooks + "UsersHooksAverage")
F("DistributedDataParallelKwargs::comm_state_option", file, "power_sgd_hook(std::move(group), «kwargs.comm_state_option»,",
  "PowerSGDOptions{}", parity)
F("DistributedDataParallelKwargs::dim", file, "if («kwargs.dim != 0»)", "false", refused)
F("DistributedDataParallelKwargs::check_reduction", file, "if («kwargs.check_reduction»)", "false", refused)
F("a communication hook's state in checkpoints", "src/run_state/state_parts.cpp",
  "«save_own_states(run, folder);»", "", hooks + "AResumedRunIsTheUninterruptedOneBitByBit")
file = "src/parallel/power_sgd.cpp"
F("PowerSGDOptions::matrix_approximation_rank", file, "std::min({n, m, «options_.matrix_approximation_rank»})",
  "int64_t{1}", parity)
F("PowerSGDOptions::start_powerSGD_iter", file, "if (iteration_ < «options_.start_powerSGD_iter»)", "int64_t{1000}",
  parity)
F("PowerSGDOptions::min_compression_rate", file, "static_cast<double>(narrow) * «options_.min_compression_rate»", "2.0",
  parity)
F("PowerSGDOptions::use_error_feedback", file,
  "if («options_.use_error_feedback») { if (const auto error = errors_.find(b.index)", "true", parity)
F("PowerSGDOptions::use_error_feedback", file, "if («options_.use_error_feedback») { // One overflow, which", "true", parity)
F("PowerSGDOptions::warm_start", file, "const bool fresh = «!options_.warm_start» || !rights.defined();", "false",
  parity)
F("PowerSGDOptions::warm_start", file, "if («!options_.warm_start») rights_.erase(b.index);", "false", parity)
F("PowerSGDOptions::orthogonalization_epsilon", file, "batched_ ? 0 : «options_.orthogonalization_epsilon»", "0.0",
  parity)
F("PowerSGD drops what an overflow left", file, "at::where(«error.isfinite().all()», error", "error == error",
  hooks + "PowerSgdGoesOnAfterOverflowsAndZeros")
F("PowerSGD goes on after zeros", file, "if («!fresh») revive(batch.right);", "false",
  hooks + "PowerSgdGoesOnAfterOverflowsAndZeros")
F("PowerSGDOptions::random_seed", file, "random_(«options.random_seed»)", "0", parity)
F("PowerSGDOptions::batch_tensors_with_same_shape", file,
  "if («options_.batch_tensors_with_same_shape» && matrices.size() > 1)", "false",
  hooks + "MatricesOfOneShapeAreMultipliedAtOnce")
F("PowerSGDOptions::compression_stats_logging_frequency", file,
  "iteration_ + «*options_.compression_stats_logging_frequency»;", "1000",
  hooks + "StatisticsAreWrittenAsOftenAsAskedFor")
file = "src/accelerator/local_sgd.cpp"
apart = "communication_hooks_tests LocalSgd.EqualsTheSameWrittenOut"
F("LocalSGDOptions::local_sgd_steps", file, "impl_->num_steps % «impl_->options.local_sgd_steps» == 0", "int64_t{100}",
  apart)
F("LocalSGDOptions::enabled", file, "if («!options.enabled» || accelerator.num_processes() == 1) return;", "false",
  "communication_hooks_tests LocalSgd.OffItChangesNothing")
F("LocalSGDOptions::outer_optimizer", file, "if («options.outer_optimizer && !made») outer_step(", "false", apart)
F("OuterOptimizer::lr", file, "velocity[i], «outer.lr»);", "0.7", apart)
F("OuterOptimizer::momentum", file, "velocity[i].mul_(«outer.momentum»)", "0.9", apart)
F("OuterOptimizer::nesterov", file, "common[i].sub_(«outer.nesterov» ?", "true", apart)
F("LocalSGD averages at its end", file, "«impl_->average(/*at_end=*/true);»", "", apart)
F("InitProcessGroupKwargs::init_method", "src/state/partial_state.cpp",
  "«meet_at(options.process_group.init_method, id);»", "",
  "communication_hooks_tests CommunicationHookSettings.InitMethodSaysWhereRanksMeet")

# ---- sharding
f = "fsdp_features_tests FsdpOptions."
file = "src/parallel/fsdp/translate.cpp"
F("FullyShardedDataParallelPlugin::limit_all_gathers", file, "const bool limited = «plugin.limit_all_gathers»;", "true",
  f + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("FullyShardedDataParallelPlugin::forward_prefetch", file, "ahead(«plugin.forward_prefetch.value_or(false)» ? 2 : 1)",
  "false", f + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("FullyShardedDataParallelPlugin::backward_prefetch BACKWARD_PRE", file,
  "= «prefetch == BackwardPrefetch::backward_pre» ? ahead(1) : 0;", "false",
  f + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("FullyShardedDataParallelPlugin::backward_prefetch BACKWARD_POST", file,
  "settings.prefetch_after_unit = «prefetch == BackwardPrefetch::backward_post»;", "false",
  f + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("FullyShardedDataParallelPlugin::sync_module_states", file, "|| «plugin.sync_module_states.value_or(false)» ||",
  "false", f + "RanksStartWithRankZerosParametersAndBuffers")
F("FullyShardedDataParallelPlugin::cpu_ram_efficient_loading", file,
  "settings.from_rank0 = «settings.ignored_from_rank0» ||", "false",
  f + "RanksStartWithRankZerosParametersAndBuffers")
F("FullyShardedDataParallelPlugin::cpu_ram_efficient_loading of ignored modules", file,
  "settings.ignored_from_rank0 = «plugin.cpu_ram_efficient_loading.value_or(false)»;", "false",
  f + "RanksStartWithRankZerosParametersAndBuffers")
F("FullyShardedDataParallelPlugin::param_init_fn", file, "settings.initialise = «plugin.param_init_fn»;", "nullptr",
  f + "NoShardObeysTheOtherOptions")
F("FullyShardedDataParallelPlugin::mixed_precision_policy", file, "if («!plugin.mixed_precision_policy») return;", "true",
  f + "NoShardObeysTheOtherOptions")
F("MixedPrecision::reduce_dtype", file, "settings.reduce_dtype = «precision.reduce_dtype»;",
  "std::optional<at::ScalarType>()", f + "GradientsKeepTheLowPrecisionInWhichTheyTravelled")
F("MixedPrecision::keep_low_precision_grads", file,
  "if («precision.keep_low_precision_grads») settings.kept_gradients", "false",
  f + "GradientsKeepTheLowPrecisionInWhichTheyTravelled")
F("MixedPrecision::output_dtype", file, "settings.output_dtype = «precision.output_dtype»;",
  "std::optional<at::ScalarType>()", f + "MixedPrecisionPolicies")
F("MixedPrecision::cast_forward_inputs", file, "? «precision.cast_forward_inputs.value_or(true)» :", "true",
  f + "MixedPrecisionPolicies")
F("MixedPrecision::cast_root_forward_inputs", file, ": «precision.cast_root_forward_inputs»)", "true",
  f + "MixedPrecisionPolicies")
F("FullyShardedDataParallelPlugin::activation_checkpointing", "src/parallel/fsdp/choose.cpp",
  "if (!plugin || «!plugin->activation_checkpointing.value_or(false)») return nullptr;", "true",
  "fsdp_checkpointing_tests FsdpCheckpointing.KeepsLess")
F("recomputing needs units", file, "if («plugin.activation_checkpointing.value_or(false)» && std::all_of", "false",
  "fsdp_checkpointing_tests FsdpCheckpointing.NeedsUnits")
F("FullyShardedDataParallelPlugin::activation_checkpointing_offload", "src/parallel/fsdp/choose.cpp",
  "{.offload = «plugin->activation_checkpointing_offload.value_or(false)»}", "false",
  "fsdp_checkpointing_tests FsdpCheckpointing.TrainsBitByBitAsWithout")
F("FullyShardedDataParallelPlugin::cpu_offload", file,
  "const auto offload = «plugin.cpu_offload.value_or(CPUOffload())»;", "CPUOffload()",
  f + "OffloadedShardsLieOnTheHost")
F("FullyShardedDataParallelPlugin::dp_shard_size", file, "const int64_t size = «shards ? *shards : all / *replicas»;",
  "all / replicas.value_or(1)", "fsdp_hybrid_tests FsdpHybrid.NumbersThatDoNotFitAreRefused")
F("FullyShardedDataParallelPlugin::dp_replicate_size", file,
  "const int64_t count = «replicas ? *replicas : all / size»;", "all / size",
  "fsdp_hybrid_tests FsdpHybrid.NumbersThatDoNotFitAreRefused")
file = "src/parallel/sharding/sharding.cpp"
F("FullyShardedDataParallelPlugin::sync_module_states of buffers", file,
  "if («group && settings.from_rank0») value = of_rank0(value);", "false",
  f + "RanksStartWithRankZerosParametersAndBuffers")
F("MixedPrecision::param_dtype", file, "part.compute_dtype = «converts» ?", "false", f + "NoShardObeysTheOtherOptions")
F("MixedPrecision::buffer_dtype", file, "if (dtype && «value.is_floating_point()» && !stays", "false",
  f + "MixedPrecisionPolicies")
file = "src/parallel/sharding/shard_store.cpp"
F("CPUOffload::offload_params", file, ": any(«settings.offload» && !device.is_cpu()", "false",
  f + "OffloadedShardsLieOnTheHost")
F("zero_optimization.offload_optimizer.ratio", file,
  "«(1 - share) * static_cast<double>(all)»", "0", "zero_tests Zero.AShareOfTheMastersStaysOnTheDevice")
w = "fsdp_whole_tests FsdpWhole."
F("others meet rank 0 where it summons alone", "src/residency/summon.cpp", "«unit.owner().look_at_homes(unit);»  // as rank 0",
  "", w + "SummonedWritesActAndAreLostWhenAskedTo")
F("ranks that share memory read together", "src/parallel/sharding/sharding.cpp",
  "if («read.insert(&unit).second») store->meet(", "false", w + "OneRankThatReadsAloneIsNamed")
F("other parts of a model, where ranks share memory", "src/parallel/sharding/sharding.cpp",
  "if (computes) return «store->use(unit)»;", "void()", "fsdp_features_tests FsdpFeatures.RanksThatUseOtherHeadsOrLeaveABackwardOutAreNamed")
F("backwards left out, where ranks share memory", "src/parallel/sharding/sharding.cpp",
  "if («self.settings.forward.evict_after_use») self.store->reshard(", "false",
  "fsdp_features_tests FsdpFeatures.RanksThatUseOtherHeadsOrLeaveABackwardOutAreNamed")
file = "src/parallel/sharding/collective_reducer.cpp"
F("FSDP's average in half precision, on any number of ranks", file,
  "return {.within = «static_cast<double>(world)»};", "static_cast<double>(world / 2 * 2)",
  w + "HalfPrecisionIsAveragedOnAnyNumberOfRanks")
F("weights that drift apart are named soon", "src/parallel/drift.cpp",
  "|| («averages <= 256» && (averages", "false",
  "ddp_habits_tests DdpHabits.WeightsThatDriftApartAreNamed*")
F("DistributedDataParallelKwargs::compare_parameters_every", "src/parallel/drift.cpp",
  "return averages % «every_» == 0", "500",
  "ddp_habits_tests DdpHabits.WeightsThatDriftApartAreNamedAfterSomeTime")
F("replicas that drift apart are named", "src/parallel/sharding/sharding.cpp",
  "self.drift = «DriftCheck(self.groups.replicate, self.settings.compare_parameters_every)»;", "DriftCheck()",
  "fsdp_hybrid_tests FsdpHybrid.PiecesOfReplicasThatDriftApartAreNamed")
F("writes of ranks that differ are named", "src/parallel/drift.cpp",
  "if («one.at(kBits) != two.at(kBits)» &&", "false", w + "WritesThatDifferBetweenRanksAreNamed")
F("writes of ranks that differ are named, where ranks share memory", "src/residency/touch.cpp",
  "|| («unit.owner().has_scribe()» && !member->is_slice());", "false", w + "WritesThatDifferBetweenRanksAreNamed")
F("ranks in different collectives end at once", "src/comm/watchdog.cpp",
  "if («looks % kLooks == 0») compare(seen);", "false", "comm_tests Comm.RanksInDifferentCollectivesEndAtOnce")
F("what a rank said as it failed stays", "src/comm/watchdog.cpp", "if («told_all») return;", "false",
  "comm_tests Comm.WhatARankSaidAsItFailedStays")
F("who is late is waited for", "src/comm/faults.cpp", "|| «my->history == its->history») continue;", "false",
  "comm_tests Comm.WhoIsLateIsWaitedFor")
F("FindBatchSizeOptions::all_ranks", "src/accelerator/live_runs.cpp",
  "here = «group->all_gather(failed, \"find_executable_batch_size\").any().item<bool>()»;",
  "here", "failed_attempt_tests FailedAttempt.OfOneRankIsOneOfAll")
F("a failed attempt leaves no place in the group", "src/accelerator/live_runs.cpp", "«run->step = 0;»", "",
  "failed_attempt_tests FailedAttempt.LeavesNothingOfItsGroup")
F("a failed attempt leaves no gradients", "src/accelerator/live_runs.cpp", "«optimizer.zero_grad();»", "",
  "failed_attempt_tests FailedAttempt.LeavesNothingOfItsGroup")
F("trained ignored modules are named", "src/parallel/sharding/sharding.cpp", "return «impl_->find(parameter) != nullptr»;",
  "true", w + "TrainedIgnoredModulesAreNamed")
F("launch: options behind the program are remarked on", "src/launch/job/job.cpp",
  "«remark_on_swapped_options(job);»", "", "launch_tests LaunchOptions.OursBehindTheProgramAreRemarked")
F("launch: settings of no compiler are remarked on", "src/launch/job/remarks.cpp",
  "if («in_small_letters(text(\"dynamo_backend\")) == \"no\"»)", "false",
  "launch_tests LaunchOptions.SettingsOfACompilerThatNobodyNamedAreRemarked")
F("a rank of PMIx is one of several", "src/launch/job/settings.cpp", "!place_ && «rank && *rank > 0»)", "false",
  "launch_tests LaunchEnvironment.ARankOfUnknownManyIsNamed")
F("a write or two is no step of the old optimizer", "src/optim/grad_scaler.cpp", "if («state.moves < kMoves» && !ruined) return;",
  "!moved", "optim_tests GradScalerTest.TheOldOptimizersStepIsNamed")
F("a step of the old optimizer that ruins parameters is named", "src/optim/grad_scaler.cpp",
  "if (state.moves < kMoves && «!ruined») return;", "true", "optim_tests GradScalerTest.TheOldOptimizersStepIsNamed")
file = "src/parallel/sharding/whole_gradients.cpp"
F("grad() of sharded parameters", file, "if («!part.trained» || part.members.front().tensor.is_meta()) continue;", "true",
  w + "GradientsAreWholeBetweenBackwardAndStep")
F("grad() of sharded parameters, cleared", file,
  "if (was.shows != Shows::nothing) «member.shard.mutable_grad().reset();»", ";",
  w + "GradientsAreWholeBetweenBackwardAndStep")
F("grad() of sharded parameters, written to", file,
  "member.shard.mutable_grad().copy_(«values.narrow(0, member.begin, member.shard.numel())»);", "member.shard.grad()",
  w + "GradientsAreWholeBetweenBackwardAndStep")
F("grad() of sharded parameters, kept by the program", file, "dtype == dtype && «!is_held(part)») return;", "true",
  w + "AGradientThatIsOverSaysSo")
file = "src/residency/residency.cpp"
F("writes to bytes that ranks share, by operators", file, "if (writes) «make_private(unit);»", ";",
  w + "WritesToParametersActOnce")
F("writes to bytes that ranks share, around operators", file, "«make_private(unit, /*of_ours_too=*/!writeback);»", ";",
  w + "SummonedWritesActAndAreLostWhenAskedTo")
F("writes to what homes keep", file,
  "«part.home->take(member.offset(), values.defined() ? values : slice);»", ";",
  w + "WritesToParametersActOnce", w + "WritesReachMastersInTheirPrecision")
F("writes in the precision of masters", file, "«part.home->refine(member.offset(), values);»", ";",
  w + "WritesReachMastersInTheirPrecision")
F("writes to this rank's pieces, seen by others", file, "«unit.pieces_written_ = !writes_together();»", ";",
  w + "OptimizersFromBeforeAndAfterPrepareAct")
file = "src/bigmodel/loading.cpp"
F("load_checkpoint_in_model of sharded models", file,
  "«member->unit().owner().assign(*member, target.stored->second.read_whole());»", ";",
  w + "WeightsOfAFileAreLoadedIntoThePreparedModel")
file = "src/optim/optimizer_state.cpp"
F("ElementWise", file, "«if (type == *known) return true;»\n  return dynamic_cast", "static_cast<void>(known);",
  w + "LibTorchsSaveOfAnOptimizerInPiecesIsRefused")
file = "src/comm/shared_memory.cpp"
F("meetings from different places", file, "if («same») return heard;", "true", w + "OneRankThatGathersAloneIsNamed")
F("waits from which nobody returns", file, "if («!all_wait» || places != places_) {", "true",
  w + "RanksThatPartWaysAreNamed")
file = "src/parallel/fsdp/wrap_policy.cpp"
F("FullyShardedDataParallelPlugin::ignored_modules", file, "if («!plugin_.ignored_modules») return;", "true",
  f + "NoShardObeysTheOtherOptions")
F("FullyShardedDataParallelPlugin::auto_wrap_policy", file, "switch («std::get<AutoWrapPolicy>(policy)») {",
  "AutoWrapPolicy::no_wrap", f + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("FullyShardedDataParallelPlugin::transformer_cls_names_to_wrap", file,
  "«plugin_.transformer_cls_names_to_wrap.value_or(std::vector<std::string>{})»", "std::vector<std::string>{}",
  f + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("FullyShardedDataParallelPlugin::min_num_params", file, "const int64_t least = «plugin_.min_num_params.value_or(0)»;",
  "int64_t{0}", "fsdp_plugin_tests FsdpWrap.BertIsWrappedAsPyTorchAndTheReferenceDo")
F("MixedPrecision::module_classes_to_ignore", file,
  "«precision->module_classes_to_ignore.value_or(precision->param_dtype ? batch_norm_classes() "
  ": std::vector<std::string>{})»", "std::vector<std::string>{}",
  "fsdp_plugin_tests FsdpWrap.BatchNormsComputeInFullPrecisionOfTheirOwn")
file = "src/parallel/fsdp/plugin.cpp"
F("FullyShardedDataParallelPlugin::fsdp_version", file, "const int64_t version = «*plugin.fsdp_version»;", "int64_t{1}",
  "conformance_tests fsdp_plugin")
F("FullyShardedDataParallelPlugin::sharding_strategy", file,
  "if (!reshard) return «resolved.sharding_strategy.value()»;", "ShardingStrategy::full_shard",
  f + "NoShardObeysTheOtherOptions")
F("FullyShardedDataParallelPlugin::reshard_after_forward", file, "const bool keeps = «whether && !*whether»;", "false",
  "fsdp_plugin_tests FsdpPlugin.TheStrategyThatResults")
file = "src/parallel/fsdp/choose.cpp"
u = f + "StateDictConfigsSayWhoGetsWholeStates"
F("FullyShardedDataParallelPlugin::state_dict_type", file,
  "return «plugin_.state_dict_type == StateDictType::full_state_dict» ? *config", "true", u)
F("FullyShardedDataParallelPlugin::state_dict_config", file, "of_whole_state(«plugin_.state_dict_config»)",
  "std::optional<StateDictConfig>(StateDictConfig{.rank0_only = true})", u)
F("FullyShardedDataParallelPlugin::optim_state_dict_config", file, "of_whole_state(«plugin_.optim_state_dict_config»)",
  "std::optional<StateDictConfig>(StateDictConfig{.rank0_only = true})", u)
F("StateDictConfig::rank0_only", "src/run_state/models.cpp",
  "const bool everywhere = «!config.rank0_only.value_or(true)»;", "false", u)
F("StateDictConfig::rank0_only of optimizers", "src/run_state/optimizers.cpp",
  "in_pieces.empty() || «!config.rank0_only.value_or(true)»;", "false", u)
F("StateDictConfig::offload_to_cpu", "src/run_state/models.cpp", ".copies = true, .on_host = «config.offload_to_cpu»}",
  "false", f + "StatesThatAreNotOffloadedStayOnTheDevice")
F("StateDictConfig::offload_to_cpu", "src/run_state/models.cpp", "if («config.offload_to_cpu») value = value.cpu();",
  "false")

# ---- distributed checkpoints of the user's own dict
file = "src/accelerator/distributed_checkpoint.cpp"
d = "distributed_checkpoint_tests DistributedCheckpoint."
F("LoadOptions::allow_partial_load", file, "{.allow_partial = «options.allow_partial_load»}", "false",
  d + "WhatDoesNotFitChangesNothing")
d += "OptionsOfStateDicts"
F("StateDictOptions::full_state_dict", file, "if («!options.full_state_dict») state = run_state", "true", d)
F("StateDictOptions::cpu_offload", file, ".rank0_only = «options.cpu_offload»}", "false", d)
F("StateDictOptions::cpu_offload of optimizers", file,
  "if («options.full_state_dict && options.cpu_offload && comm::rank() != 0») return {};", "false", d)
F("StateDictOptions::ignore_frozen_params", file, "if («options.ignore_frozen_params») for", "false", d)
F("StateDictOptions::ignore_frozen_params when it is set", file,
  "may_miss = «options.ignore_frozen_params» ? frozen_names", "false", d)
F("StateDictOptions::strict", file, "if («!options.strict») {", "false", d)
F("StateDictOptions::strict of optimizers", file, "if («options.strict» && !there", "true", d)
F("StateDictOptions::broadcast_from_rank0", file, "if («options.broadcast_from_rank0») {", "false", d)
F("StateDictOptions::flatten_optimizer_state_dict", file, "if («options.flatten_optimizer_state_dict») state", "false",
  d)

# ---- residency
file = "src/residency/chain.cpp"
a = "residency_tests Chain."
F("each handler of a link is asked", file, "entry = «rest»;", "nullptr", a + "ALinkHasAListOfWhichEachIsAsked")
F("a handler that several hold is asked once", file, "if («known != all.end()») return ++known->holders", "false",
  a + "ALinkHasAListOfWhichEachIsAsked")
F("own operators don't come by earlier links", file, "ask(call, nullptr, nullptr, «0»);",
  "(of_thread.asked = kAllLinks, size_t{0})", a + "OwnOperatorsComeByTheLaterLinksOnly")
F("plain tensors have no gradients in any mode", file, "modes.set_grad_mode(«false»), modes.set_inf", "grad_",
  a + "ComputeSaysWhichLayersAreOn")
F("what runs again has the scopes of its first run alone", file,
  "std::exchange(of_thread.lists, «std::array<ChainEntry*, kLinks>{}»)", "of_thread.lists",
  a + "WhatRunsAgainInBackwardDoesNotComeByScopesOfAnotherForward")
a = "activations_tests Checkpoint."
file = "src/residency/activations/checkpoint.cpp"
F("CheckpointOptions::preserve_rng_state", file, "ReplayState(«options.preserve_rng_state»)", "true",
  a + "RepeatsRandomNumbersAndPutsTheGeneratorBack")
F("checkpoint repeats numbers of the model's own generators", file,
  "if (own_generators) «state_->listening.emplace(recipe->state);»", "", a + "RepeatsTheModelsOwnRandomNumbers")
F("units repeat numbers of the model's own generators", "src/residency/activations/operator_tape.cpp",
  "if (record.random) «generators.set(*record.random);»", "", "fsdp_checkpointing_tests FsdpCheckpointing.TrainsBitByBitAsWithout")
F("CheckpointOptions::early_stop", file, "early_stop_(«options.early_stop»)", "true",
  a + "StopsOnceTheLastSavedTensorIsThere")
F("CheckpointOptions::determinism_check", file, 'compare_(«options.determinism_check == "default"»)', "true",
  a + "NamesWhatDiffersInTheSecondRun")
file = "src/residency/activations/offload.cpp"
F("ActivationOffloadOptions::min_bytes", file, "tensor.element_size() < «options_.min_bytes» ||", "int64_t{0}",
  "activations_tests ActivationOffloadTest.ParametersTheirViewsAndSmallTensorsStay")
F("ActivationOffloadOptions::prefetch_bytes", file, "bytes < «options_.prefetch_bytes»;", "int64_t{0}",
  "activations_tests ActivationOffloadTest.MemoryFallsAndIsFetchedAheadInBackward")
F("SummonOptions::writeback", "src/residency/summon.cpp", "RawAccess(«options.writeback» ?", "true",
  "residency_tests ResidencySummon.MakesAllPresentAndWritesBackWhenAsked")
F("SummonOptions::rank0_only", "src/residency/summon.cpp",
  "const bool keeps = «!options.rank0_only || comm::rank() == 0»;", "true",
  "fsdp_state_tests FsdpState.UnwrappedUnderSummon")
F("InitEmptyWeightsOptions::include_buffers", "src/residency/deferred/materialize.cpp",
  "impl->include_buffers = «options.include_buffers»;", "true", "deferred_tests DeferredScope.*")

# ---- models of any size
b = "options_tests OptionsOfDispatch."
w = "bigmodel_tests Dispatch."
sources = "src/bigmodel/weight_sources.cpp"
budget = "src/bigmodel/budget.cpp"
file = "src/bigmodel/dispatch.cpp"
F("DispatchOptions::main_device", file, "main_of(placed.map, «options.main_device»),", "std::optional<at::Device>()",
  w + "OnTheMetaDeviceOffloadingIsADryRun")
F("DispatchOptions::state_dict", sources, "take_over(caller, placed.weights, «options.state_dict»);",
  "std::map<std::string, at::Tensor>()", w + "ValuesMayComeFromAStateDict")
F("DispatchOptions::offload_index", sources, "std::optional<OffloadIndex> index = «options.offload_index»;",
  "std::optional<OffloadIndex>()", b + "AnIndexMayReplaceTheFoldersOwn")
F("DispatchOptions::offload_dir", sources, "index = load_offload_index(«options.offload_dir»);",
  'std::filesystem::path("elsewhere")', w + "AModelInMemoryMovesToDiskAndIsReadFromThereAgain")
F("DispatchOptions::skip_keys", file, ".skip_keys = «options.skip_keys»,", "std::vector<std::string>()",
  b + "InputsComeToTheModelButForThoseThatAreNamed")
F("DispatchOptions::preload_module_classes", file, ".whole_classes = «options.preload_module_classes»,",
  "std::vector<std::string>()", b + "ClassesAreFetchedWhole")
F("DispatchOptions::force_hooks", file, ".force_hooks = «options.force_hooks»,", "false",
  b + "InputsComeToTheModelButForThoseThatAreNamed")
F("OffloadAllOptions::preload_module_classes", file, ".preload_module_classes = «options.preload_module_classes»,",
  "std::vector<std::string>()", b + "ClassesAreFetchedWhole")
F("OffloadAllOptions::execution_device", file,
  "{.main_device = «options.execution_device.value_or(bigmodel::accelerator_or_host())»,",
  "bigmodel::accelerator_or_host()",
  w + "OnTheMetaDeviceOffloadingIsADryRun")
F("LoadAndDispatchOptions::max_memory", sources, ".max_memory = «options.max_memory», .no_split_module_classes",
  "std::optional<MaxMemory>()", w + "StrategiesPlaceByMemory")
F("LoadAndDispatchOptions::device_map", sources, "if («!options.device_map») {", "true",
  w + "AModelOnDiskComputesAlikeWithinItsBudget")
F("LoadAndDispatchOptions::full_state_dict", sources, "if («!options.full_state_dict»)", "false",
  w + "MapsAndBudgetsAreCheckedBeforeAnythingIsLoaded")
F("LoadAndDispatchOptions::broadcast_from_rank0", sources, "if («options.broadcast_from_rank0»)", "false",
  w + "MapsAndBudgetsAreCheckedBeforeAnythingIsLoaded")
F("OffloadOptions::readers", file, "std::max<int64_t>(«settings_.offload.readers», 1)", "int64_t{2}",
  b + "SeveralThreadsRead")
F("OffloadOptions::always_read", budget, "= «!settings_.offload.always_read» && all_fit", "true",
  w + "AModelInMemoryMovesToDiskAndIsReadFromThereAgain")
F("OffloadOptions::budget_bytes", budget,
  "«if (settings_.offload.budget_bytes) return *settings_.offload.budget_bytes;» if (settings_.max_memory) if "
  "(const auto given = memory_of(*settings_.max_memory, device))", "", w + "AModelOnDiskComputesAlikeWithinItsBudget")
q = "quantize_tests Quantize"
F("LoadAndDispatchOptions::keep_codes", file, "«options.keep_codes» ? &codes_as_they_are : nullptr", "false",
  q + "Files.GgufBlocksStayAsTheyAre")
F("LoadAndDispatchOptions::exact_products", file, "if («options.exact_products && !options.keep_codes»)", "false",
  q + "Files.GgufBlocksStayAsTheyAre")
file = "src/bigmodel/quantize.cpp"
F("BnbQuantizationConfig::load_in_8bit", file, "if («config.load_in_8bit») return {.encoding", "false",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::load_in_4bit", "src/bigmodel/quantization_config.cpp", "«load_in_8bit == load_in_4bit»", "!load_in_8bit",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::llm_int8_threshold", file, "config.load_in_8bit ? «config.llm_int8_threshold» : 0", "0.0",
  q + "Int8.IsBitsandbytesLayerWithOutliersAndWithout")
F("BnbQuantizationConfig::bnb_4bit_quant_type", file, "«config.bnb_4bit_quant_type == \"nf4\"» ?", "false",
  q + "Operators.ComputeOnCodesWhereTheyCanAndDecodeWhereNot")
F("BnbQuantizationConfig::bnb_4bit_use_double_quant", file, ".double_quantize = «config.bnb_4bit_use_double_quant»",
  "false", q + "Config.ScalesBlocksAndStorageAreAsTheySay")
F("BnbQuantizationConfig::bnb_4bit_blocksize", file, ".block_size = «config.bnb_4bit_blocksize»", "64",
  q + "Config.ScalesBlocksAndStorageAreAsTheySay")
F("BnbQuantizationConfig::bnb_4bit_quant_storage", file,
  "quantized_state_dict(model, «config.bnb_4bit_quant_storage»)", "at::kByte",
  q + "Config.ScalesBlocksAndStorageAreAsTheySay")
F("BnbQuantizationConfig::bnb_4bit_compute_dtype", file,
  "config.load_in_4bit ? std::optional(«config.bnb_4bit_compute_dtype») : std::nullopt", "at::kFloat",
  q + "Config.ComputesInTheDtypeThatItSays")
F("BnbQuantizationConfig::torch_dtype", "include/accelerate/bigmodel/quantize.hpp",
  "return «torch_dtype.value_or(load_in_8bit ? at::kHalf : bnb_4bit_compute_dtype)»;",
  "(load_in_8bit ? at::kHalf : bnb_4bit_compute_dtype)", q + "Config.ComputesInTheDtypeThatItSays")
F("BnbQuantizationConfig::skip_modules", file,
  "«config.skip_modules ? *config.skip_modules : get_keys_to_not_convert(model)»", "get_keys_to_not_convert(model)",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::keep_in_fp32_modules", file,
  "if (std::ranges::find(names, name) == names.end()) «names.push_back(name);»", "",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::exact_products", file, ".exact = «config.exact_products»", "false",
  q + "Operators.AskTheRegistryUnlessProductsAreToBeExact")
F("between weights and description of a saved model none is believed", file,
  "«put_description({{\"quant_method\", bigmodel::kUnfinished}, {\"before\", std::move(before)}});»", "",
  q + "Files.AKilledSaveLeavesWhatIsWholeOrIsRefused")
F("folders of other quantization methods are refused", file,
  "if («!weights_location.empty() && is_there(weights_location / \"config.json\")»)", "false",
  q + "Files.OfOtherMethodsAreRefusedByTheirNames")
F("damaged int8 codes show before anything is loaded", "src/bigmodel/loading.cpp",
  "const auto form = «read(at::kHalf)»;",
  "(weight.encoding == codes::Encoding::int8_rowwise ? codes::Codes{.shape = tensor.sizes, .dtype = at::kHalf} : "
  "read(at::kHalf))", q + "Files.DamagedInEightBitsAreRefusedByNameAndNothingIsLoaded")
F("LoadAndQuantizeOptions::device_map", file, ".device_map = «options.device_map.value_or(everything)»",
  "decltype(options.device_map)(everything)", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::offload_folder", file, ".offload_folder = «options.offload_folder»};",
  "fs::path()", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::max_memory", file,
  ".device_map = options.device_map.value_or(everything), .max_memory = «options.max_memory»",
  "std::optional<MaxMemory>()", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::strict", file, ".strict = «options.strict»", "true",
  q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::no_split_module_classes", file,
  ".no_split_module_classes = «options.no_split_module_classes», .offload_folder = options.offload_folder, .dtype",
  "std::vector<std::string>()", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::offload", file, ".strict = options.strict, .offload = «options.offload»}", "OffloadOptions{}",
  q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("EncodeOptions::encoding", "src/codes/encode.cpp", "Codes codes{.encoding = «options.encoding»,", "Encoding::nf4",
  "codes_tests Codes.AreAsNearAsTheirNumberOfBitsAllows")
F("codes of the K family: several ranges are tried", "src/codes/k_blocks.cpp",
  "low + span / Last * «ranges.offset(i)»", "0.0F", "codes_tests CodesOfTheKFamily.AreNearerThanThoseOfGgml")
F("EncodeOptions::block_size", "src/codes/encode.cpp", "codes.block_size = «options.block_size»;", "64",
  "codes_tests Codes.AreAsNearAsTheirNumberOfBitsAllows")
F("EncodeOptions::double_quantize", "src/codes/encode.cpp",
  "«if (options.double_quantize) double_quantize(codes);»", "",
  "codes_tests Codes.WhosePartsDoNotFitAreRefusedByName")
file = "src/bigmodel/quantize_to_folder.cpp"
q = "quantize_files_tests QuantizeFiles."
F("QuantizeFilesOptions::to", file, ".bnb_4bit_quant_type = «options_.to»;", "\"nf4\"", q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::block_size", file, ".block_size = «block_size()»,", "64",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::double_quantize", file, ".double_quantize = «options_.double_quantize»}", "false",
  q + "BitsandbytesTransformersAndGgufReadThem")
F("QuantizeFilesOptions::skip_modules", file, "if (!never && !is_among(module, «options_.skip_modules»)) return",
  "std::vector<std::string>()",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::compute_dtype", file, ".bnb_4bit_compute_dtype = «options_.compute_dtype.value_or(at::kFloat)»", "at::kFloat",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::threshold", file, "config.llm_int8_threshold = «options_.threshold.value_or(6.0)»;", "6.0",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::max_shard_size", file, "parse_size(«options_.max_shard_size.value_or(\"50GB\")»);", "\"50GB\"",
  q + "LargeFoldersAreInShardsWithAnIndex")
F("an index names the parts of weights", "src/checkpoint/save_model.cpp",
  "if (const auto found = parts.find(weight); «found == parts.end()») sorted", "true",
  q + "LargeFoldersAreInShardsWithAnIndex")
F("transposed layers of a folder have the codes of their transposes", file,
  "if («transposed») original = original.t().contiguous();", "false", q + "BitsandbytesTransformersAndGgufReadThem")
F("a head that shares the embeddings is named among what stays", "src/bigmodel/quantize_outline.cpp",
  "class_name.ends_with(\"ForCausalLM\") || «class_name.ends_with(\"LMHeadModel\")»", "false",
  q + "BitsandbytesTransformersAndGgufReadThem")
F("the vocabulary of a .gguf file is written", file, "«for (const auto& [name, text] : files) write_file(folder / name, text);»",
  "", q + "AFolderBecomesAFileOfBlocksAndAFolderAgain")
file = "src/bigmodel/quantize_to_gguf.cpp"
F("QuantizeFilesOptions::skip_modules of blocks", file, "why_kept(tensor, is_skipped(tensor.name, «options.skip_modules»));",
  "std::vector<std::string>()",
  q + "BlocksOfAFile")
F("QuantizeFilesOptions::skip_modules of blocks of a folder", file,
  "|| «std::ranges::any_of(target.parts, skipped)»", "false", q + "AFolderBecomesAFileOfBlocksAndAFolderAgain")
F("QuantizeFilesOptions::measure_errors", file, "if («options.measure_errors») result.tensors[i].error", "false",
  q + "BlocksOfAFile")
F("QuantizeFilesOptions::on_progress", file, "if («options.on_progress») options.on_progress(static_cast",
  "std::function<void(int64_t, int64_t)>()",
  q + "WhatCantBeIsNamedAndLeavesNothing")
F("rows of rotary projections are in llama.cpp's order", file, "if («target.rotary_heads == 0») return values;", "true",
  q + "AFolderBecomesAFileOfBlocksAndAFolderAgain")
F("what a .gguf file has no place for is said", file,
  "«std::ranges::move(model.notes, std::back_inserter(result.notes));»", "",
  q + "WhatAFileOfBlocksCanNotSayIsRefusedByName")
F("rows that are no blocks of 256 become blocks of 32", file,
  "if («row % codes::gguf_encoding(wanted).block == 0») return wanted;", "true", q + "BlocksOfTheKFamily")
F("QuantizeFilesOptions::overwrite", "src/bigmodel/quantize_files.cpp", "if («!overwrite») raise", "false",
  q + "BlocksOfAFile")
F("codes of transposed weights are products of their rows", "src/residency/encoded.cpp",
  "return «weight.transposed» ? tensor.t().is_contiguous()", "false",
  "quantize_tests QuantizeOperators.LayersThatStoreTheirTransposeHaveItsCodes")
F("weights in bitsandbytes' few bits on disk are read where they lie", "src/bigmodel/loading.cpp",
  ".bytes = «form.bytes()»,", "int64_t{0}",
  "quantize_tests QuantizeOperators.LayersThatStoreTheirTransposeHaveItsCodes")
F("codes of transposed weights are turned when they are loaded decoded", "src/bigmodel/loading.cpp",
  "«for (const auto& name : target.names) turn_bitsandbytes(checkpoint, name);»", "{}",
  "quantize_tests QuantizeOperators.LayersThatStoreTheirTransposeHaveItsCodes")
F("llama-bpe begins with a token where a .gguf file does not say", "src/models/tokenizer/files.cpp",
  "asks_for(\"tokenizer.ggml.add_bos_token\", «cuts->adds_bos»)", "false",
  "tokenizer_tests Tokenizer.OfAGgufFileBeginsWithATokenWhereItsKindDoes")
g = "gguf_tests Gguf"
F("a factor of rotary frequencies without a type is a linear one", "src/formats/gguf_config.cpp",
  "type = named ? *named : «\"linear\"»;", "\"none\"", g + "Models.FrequenciesAreStretchedHoweverAFileSaysIt")
F("rope.scale_linear of 2023 is a factor", "src/formats/gguf_config.cpp",
  "«if (!factor) factor = fields.number(\"rope.scale_linear\");»", "",
  g + "Models.FrequenciesAreStretchedHoweverAFileSaysIt")
F("keys of a .gguf file that are not known are refused", "src/formats/gguf_keys.cpp", "if («!known») fields.fail(",
  "false", g + ".KeysThatCouldChangeResultsAreKnownOrRefusedByName")
F("keys of a .gguf file have values that a model here has", "src/formats/gguf_keys.cpp",
  "if («known->use == has_to_be» && !is_harmless", "false", g + ".KeysThatCouldChangeResultsAreKnownOrRefusedByName")
F("numbers per layer of a .gguf file are the same or refused", "src/formats/gguf_fields.hpp",
  "if («list.empty() || std::ranges::find_if(list, [&](T one) { return one != list[0]; }) != list.end()»)", "false",
  g + ".KeysThatCouldChangeResultsAreKnownOrRefusedByName")
F("a number for all layers may be a list", "src/formats/gguf_fields.hpp",
  "«if (const auto* list = header_.metadata.find_as<std::vector<int64_t>>(full)) return same_in_all(full, *list);»", "",
  g + "Models.WhatChangesNothingIsReadOver")
F("a part of a split .gguf file is no model", "src/formats/gguf_header.cpp", "«parts > 1») reader.fail(", "false",
  g + ".SaysWhatIsWrongWithAFile")
F("tensors of a .gguf file have bytes of their own", "src/formats/gguf_header.cpp",
  "«tensor.begin < before.begin + before.bytes»", "false", g + ".SaysWhatIsWrongWithAFile")
F("what a .gguf file divides by is above 0", "src/formats/gguf_fields.hpp",
  "if (value && «!(*value > 0 && std::isfinite(*value))»)", "false", g + ".NumbersThatDivideAreAboveZero")
F("a .gguf file has rows for its tokens", "src/formats/gguf_config.cpp", "if (has_tokens && «tokens->elements > rows»)",
  "false", g + ".TokensHaveRowsAndMergesTwoParts")
F("merges of a .gguf file have two parts", "src/formats/gguf_vocabulary.cpp",
  "for (const auto& merge : merges) if («!is_merge(merge)») fail(", "false", g + ".TokensHaveRowsAndMergesTwoParts")
F("whole numbers of a .gguf file stay", "src/bigmodel/quantize_to_gguf.cpp",
  'if (tensor.kept.empty() && «is_of_whole_numbers(*stored.encoding)») tensor.kept', "false",
  "quantize_files_tests QuantizeFiles.WholeNumbersStay")
F("an index has one file for a tensor", "src/formats/index_file.cpp", "{.unique_keys = «true»}", "false",
  "bigmodel_tests LoadCheckpoint.AnIndexWithTwoFilesForATensorIsRefused")
F("big-endian .gguf files are named", "src/formats/gguf_header.cpp",
  "if (const auto turned = __builtin_bswap32(header.version); «turned >= kOldest && turned <= kNewest») fail_turned();",
  "false", g + ".TheBigEndianVariantIsNamed")
file = "src/formats/tokenizer_settings.cpp"
around = "tokenizer_tests TokenizerParity.FilesAroundAVocabularySayWhatTheyDoInTransformers"
F("added_tokens.json adds tokens", file,
  "«if (const auto added = folder_ / \"added_tokens.json\"; is_there(added)) read_added(read_object(added), added);»", "", around)
F("added_tokens_decoder adds tokens", file, "«read_decoder(config_[\"added_tokens_decoder\"]);»", "", around)
F("special_tokens_map.json wins", file, "if (const auto map = folder_ / \"special_tokens_map.json\"; «is_there(map)»)",
  "false", around)
F("a class fills in special tokens", file, "if («content») named_.try_emplace(name, text_token(content));",
  "static_cast<const char*>(nullptr)", around)
F("the class of some models goes by their type", file, "if (of_model != std::end(kClassesOfModels) && "
  "(«name.empty() || of_model->wins»))", "name.empty()", around)
F("add_bos_token begins a text", file, "result_.add_bos = «flag(\"add_bos_token\")»;", "false", around)
F("add_eos_token ends a text", file, "result_.add_eos = «flag(\"add_eos_token\")»;", "false", around)
F("additional_special_tokens are tokens", file, "«for (const auto& one : *list_) add(one);»", "", around)
against = "tokenizer_tests Tokenizer.FilesAroundAVocabularySayWhatTransformersMadeOfThem"
F("padding of tokenizer.json names pad_token", file,
  "«named_.try_emplace(\"pad_token\", text_token(padding->at(\"pad_token\").get<std::string>()));»", "", against)
F("tokens of a name are special", file, "one.special = «one.special || of_names.contains(one.content)»;", "one.special",
  against.replace("Tokenizer.FilesAroundAVocabularySayWhatTransformersMadeOfThem", "TokenizerParity.FilesAroundAVocabularyAtRandom"))
F("Qwen2Tokenizer adds its special tokens plainly", file, "if («known && known->plain_specials»)", "false", against)
F("names of tokenizer_config.json win over those of the map", file,
  "for (const auto* own : {&own_, «&own_of_config_»})", "&own_", against)
F("objects of tokenizer_config.json make no added token special", file,
  "if («!one.of_an_object») special.insert(one.token.content);", "true",
  "tokenizer_tests TokenizerParity.FilesAroundAVocabularyAtRandom")
F("lists of special tokens are joined", file, "if («!list_ || value.is_null()») list_.emplace();", "true", against)
F("the flags of the last time count", file, "«before = token;»", "", against)
F("classes take no added tokens of tokenizer.json", "src/models/tokenizer/files.cpp",
  "if («!known»)  // else transformers adds", "true", against)
F("GPTNeoXTokenizer takes no post_processor of tokenizer.json", "src/models/tokenizer/files.cpp",
  "if («around != Around::of_tokenizer_json») parts.prefix.clear()", "false", against)
F("RobertaTokenizer begins a text with cls_token", "src/models/tokenizer/files.cpp", "«parts.prefix = {*cls};»", "", against)
F("RobertaTokenizer ends a text with sep_token", "src/models/tokenizer/files.cpp", "«parts.suffix = {*sep};»", "", against)
F("normalized tokens are looked for behind the others", "src/models/tokenizer/tokenizer.cpp",
  "(«token.normalized» ? normalized_added : raw_added)", "token.normalized && !parts.normalizers.empty()", against)
F("added tokens are decoded as spelt bytes", "src/models/tokenizer/tokenizer.cpp",
  "return «parts.decodes_added» ? bytes_of_token(token)", "false", around)
F("ids beside a vocabulary are the next ones", file, "if («said != id»)", "false",
  "tokenizer_tests Tokenizer.FilesAroundAVocabularyThatCantBeFollowedAreNamed")
F("add_prefix_space acts beside a tokenizer.json", "src/models/tokenizer/files.cpp",
  "set_prefix_space(root[\"pre_tokenizer\"], «settings.add_prefix_space»)", "false", around)
F("added tokens that are single words are not within one", "src/models/tokenizer/tokenizer.cpp",
  "if («(*found)->single_word» &&", "false", around)
F("special tokens may be split", "src/models/tokenizer/tokenizer.cpp",
  "if (sought->content.empty() || «(token.special && parts.split_special_tokens)») continue;", "false", around)
names = "zoo_tests ZooReference.NamesOfOtherFilesAreKnownHoweverTheyAreLoaded"
F("names in files are with and without that of the body", "src/formats/weight_names.cpp",
  "all.push_back(«name.starts_with(base) ? name.substr(base.size()) : names.base_prefix + name»);", "name", names)
F("GPT-NeoX's head has two names in files", "src/formats/weight_names.cpp",
  "return name == \"embed_out.weight\" ? «\"lm_head.weight\"»", "\"embed_out.weight\"", names)
F("merging says that adapters alone are no model", "src/checkpoint/merge_fsdp_weights.cpp",
  "if («without.empty()») return;", "true", "dcp_tests MergeFsdpWeights.SaysThatAdaptersAloneAreNoModel")
F("adapters of GPT-NeoX's head have transformers 5's name in files", "src/adapters/lora.cpp",
  "return «is_neox ? renamed(name, kOurHead, kTheirHead) : name»;", "name",
  "adapters_tests AdaptersOfPeftsFiles.HaveWhatTheySayAndGoBack")
F("adapters' configs name GPT-NeoX's head as files do", "src/adapters/lora.cpp",
  "return «is_other» ? renamed(config", "false", "adapters_tests AdaptersOfPeftsFiles.HaveWhatTheySayAndGoBack")
alone = "commands_tests Commands.OptionsOfSeveralMachinesAreRemarkedOnWithOne"
F("c10d with one machine is remarked on", "src/launch/job/job.cpp",
  "if («c10d && s.source(\"rdzv_backend\") == ValueSource::flag»)", "false", alone)
F("main_process_ip with one process is remarked on", "src/launch/job/job.cpp",
  "if («job.world_size == 1 && s.source(\"main_process_ip\") == ValueSource::flag»)", "false", alone)
theirs = "zoo_tests Zoo.DeviceMapsHaveTheNamesOfTransformers5"
F("maps by other names dispatch models", "src/bigmodel/weight_sources.cpp", "{.map = «by_own_names(model, device_map)»,",
  "device_map", theirs)
F("maps by other names load and dispatch models", "src/bigmodel/weight_sources.cpp",
  "map = «by_own_names(model, std::get<DeviceMap>(*options.device_map))»;", "std::get<DeviceMap>(*options.device_map)",
  theirs)
F("maps by other names load models", "src/bigmodel/loading.cpp", "map = «by_own_names(model, *map)»;", "*map", theirs)
F("negated views in torch's files are named", "src/formats/torch_container.cpp",
  "«views.kind != Kind::none && !views.items.empty()»)", "false",
  "bigmodel_tests TorchFiles.WhatTheyDoNotHoldIsNamed")
F("weights are loaded by the names that files have", "src/bigmodel/loading.cpp",
  "«bigmodel::use_names(checkpoint, *names, own);»", "", names)
F("folders are quantized by the names that files have", "src/bigmodel/quantize_outline.cpp",
  "«bigmodel::use_names(checkpoint, *names, own);»", "", names)
parts = "tokenizer_tests TokenizerParity.PartsOfTokenizerJsonAreThoseOfThePackage"
F("Split with invert", "src/models/tokenizer/tokenizer.cpp", "is_match = «found != step.invert»", "found", parts)
F("Split merges matches with what is before them", "src/models/tokenizer/tokenizer.cpp",
  "if («is_match && !before && joins»)", "false", parts)
F("Split merges matches with what is behind them", "src/models/tokenizer/tokenizer.cpp", "if («waits && !is_match»)",
  "false", parts)
F("bytes without a token are unk_token", "src/models/tokenizer/bpe.cpp", "id = «known >= 0 ? known : unk_»;", "known",
  parts)
F("fuse_unk", "src/models/tokenizer/bpe.cpp", "known < 0 && after_unk && «fuse_unk_»;", "false", parts)
F("Replace", "src/models/tokenizer/tokenizer.cpp", "replaced += «is_match ? content : piece»;", "piece", parts)
F("RobertaProcessing begins a text", "src/models/tokenizer/files.cpp",
  "if (i == 0) «pieces[i].insert(pieces[i].begin(), cls);»", "", parts)
F("RobertaProcessing behind a template", "src/models/tokenizer/files.cpp",
  "else if («type_of(part) == \"RobertaProcessing\"») pieces[i].insert", "false", parts)
F("templates of what others have put around a text", "src/models/tokenizer/files.cpp",
  "part.at(«pieces.size() == 1 ? \"single\" : \"pair\"»)", "\"single\"", parts)
F("Replace with a pattern of places between characters is refused", "src/models/tokenizer/files.cpp",
  "if («replacement.pattern.can_be_empty() && !replacement.content.empty()»)", "false",
  "tokenizer_tests Tokenizer.NamesWhatItCantDo")
F("matches without characters cut", "src/models/tokenizer/pattern.cpp", "if («!again» && end >= begin", "end > begin", parts)
F("patterns are of lines", "src/models/tokenizer/pattern.cpp", "translated(expression), «PCRE2_MULTILINE»", "0U", parts)
F("added tokens of the vocabulary still merge", "src/models/tokenizer/tokenizer.cpp",
  "is_added[id] && «!of_vocabulary.contains(id)»;", "true", parts)
F("special tokens of the map by the old name", "src/formats/tokenizer_settings.cpp",
  "«old_list_ = said_list(name, value, file);»", "",
  "tokenizer_tests TokenizerParity.FilesAroundAVocabularySayWhatTheyDoInTransformers")
F("normalized added tokens are looked for as they are normalised", "src/models/tokenizer/tokenizer.cpp",
  "normal.content = «normalize(token.content, parts.normalizers)»;", "token.content", parts)
F("ByteLevel behind ByteLevel is refused", "src/models/tokenizer/files.cpp", "if («cuts_bytes_») unsupported(\"behind",
  "false", "tokenizer_tests Tokenizer.NamesWhatItCantDo")
F("cuts behind ByteLevel are of spelt bytes", "src/models/tokenizer/files.cpp", "step.spelt = «cuts_bytes_»;", "false", parts)
F("the kind of a vocabulary that is a list", "src/models/tokenizer/files.cpp", "«is_list ? \"Unigram\" : \"BPE\"»",
  "\"BPE\"", "tokenizer_tests Tokenizer.NamesWhatItCantDo")
beside = "wordpiece_tests WordPiece.FilesBesideTheVocabularyNameAndAddTokens"
F("special_tokens_map.json names a WordPiece tokenizer's tokens", "src/models/wordpiece.cpp", "*token = «found->second»;",
  "*token", beside)
F("tokens added to a WordPiece vocabulary", "src/models/wordpiece.cpp",
  "«if (id == std::ssize(vocabulary)) vocabulary.push_back(token.content);»", "", beside)
F("WordPiece vocabularies of tokenizer.json", "src/models/wordpiece.cpp", "const bool of_json = «is_there(json_path)»;",
  "false", beside)
other_ids = "wordpiece_tests WordPiece.WhatWouldGiveOtherIdsIsRefusedByName"
F("classes that cut text otherwise are no WordPiece tokenizers", "src/formats/tokenizer_settings.cpp",
  "if («name.empty() ? !is_one_of(kBertModels, model_type) : !is_one_of(kBertClasses, name)»)", "false", other_ids)
F("added tokens that are sought in cleaned text are refused", "src/models/wordpiece.cpp",
  "if («!token.special || token.is_normalized() || once_normalized || token.single_word»)", "false", other_ids)
F("an id beyond the vocabulary has no text", "src/models/tokenizer/tokenizer.cpp",
  "if («id < tokenizer_.vocab_size()» && !(skip", "true", "tokenizer_tests Tokenizer.StreamsWholeCharacters")
files = "bigmodel_tests TorchFiles."
F("expanded tensors of torch's files", "src/formats/torch_archive_reader.cpp",
  "if (pickled->numel > «std::max(bytes.size, kMostSharedBytes)» / width)", "bytes.size",
  files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("files of Python 2 count from 1", "src/formats/pickle_reader.cpp", "«if (memo_.empty() && slot == 1) first_slot_ = 1;»",
  "", files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("an OrderedDict of Python 2", "src/formats/pickle_reader.cpp",
  "«items.insert(items.end(), entry.begin(), entry.end());»", "", files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("a list that is named again and again takes no memory", "src/formats/pickle_reader.cpp",
  "if («(copied_ += items.size()) > bytes_.size()») fail(", "false", "dcp_tests DcpDamage.PicklesThatAreNoMetadata")
F("tensors of PyTorch 0.3", "src/formats/torch_container.cpp",
  "const auto* of_old = «pickle.call_of(node, kRebuildOfOld)»;", "nullptr",
  files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("pointers of Git LFS are named", "src/input/read_file.cpp",
  "return «begin.starts_with(\"version https://git-lfs.github.com/spec/\")»", "false",
  "bigmodel_tests GitLfs.PointersInThePlaceOfFilesAreNamed")
peft = "adapters_tests AdaptersOfPeftsFiles.HaveWhatTheySayAndGoBack"
trained = "adapters_tests AdaptersOwnValues.AreTrainedBesideThemAndSaved"
F("LoraConfig::modules_to_save", "src/adapters/lora.cpp", "if («detail::is_saved(saved, path)») return true;", "false",
  trained)
F("LoraConfig::bias", "src/adapters/lora.cpp", "if («config.bias == \"none\"» || (name != \"bias\"", "true", trained)
F("LoraConfig::trainable_token_indices", "src/adapters/own_values.cpp", "else «own.parameter.index_copy_(0, indices_of(own), "
  "value.to(own.parameter.options().requires_grad(false)))»;", "own.parameter", peft)
F("values of the model itself that an adapter's file has", "src/adapters/lora.cpp", "«detail::put(*values, value);»", "",
  peft)
F("heads that classify are saved whole", "src/adapters/lora_config.cpp",
  "if («config.task_type == \"SEQ_CLS\" || config.task_type == \"TOKEN_CLS\"»)", "false", trained)
F("adapters that are off give the model's values back", "src/adapters/lora.cpp",
  "«for (const auto& own : own_) own->set_enabled(enabled);»", "", peft)
F("adapter_model.bin", "src/adapters/adapter_file.cpp", "const bool is_old = «!is_there(adapter.file) && is_there(old)»;",
  "false", peft)
F("eva and orthogonal leave the base as it is", "src/adapters/lora_config.cpp",
  "&& «init != \"eva\" && init != \"orthogonal\"»)", "true", peft)
file = "src/models/perplexity.cpp"
F("PerplexityOptions::window", file, "window = «options.window»,", "512", "quantize_files_tests Perplexity.OfAModelThatKnows")
F("PerplexityOptions::stride", file, "stride = «options.stride == 0 ? window : options.stride»", "window",
  "quantize_files_tests Perplexity.OfAModelThatKnows")
F("PerplexityOptions::on_window", file, "«if (options.on_window) options.on_window(scored);»", "",
  "quantize_files_tests Perplexity.OfAModelThatKnows")
file = "src/bigmodel/loading.cpp"
l = "bigmodel_tests LoadCheckpoint."
F("LoadCheckpointOptions::dtype", file,
  "if («!options.dtype || !target.tensor.is_floating_point()») return target.tensor.scalar_type();", "true",
  l + "ConvertsAndKeepsWhatWasAskedFor")
F("LoadCheckpointOptions::keep_in_fp32_modules", file, "for (const auto& module : «options.keep_in_fp32_modules»)",
  "std::vector<std::string>()", l + "ConvertsAndKeepsWhatWasAskedFor")
F("LoadCheckpointOptions::strict", file, "if («!options.strict») check.missing.clear()", "false",
  l + "NotStrictLoadsWhatIsInBoth")
F("LoadCheckpointOptions::device_map", file,
  "«place(caller, model, plan.targets, *map);»", "",
  l + "BadMapsAndFoldersAreErrors")
F("OffloadedWeightsLoaderOptions::save_folder", "src/bigmodel/offload.cpp",
  "options.index = load_offload_index(«options.save_folder»);", 'std::filesystem::path("elsewhere")',
  "bigmodel_tests OffloadFolder.WhatIsInMemoryGoesFirst")

# ---- launch
n = "launch_tests LaunchFunction."
file = "src/launch/function.cpp"
F("FunctionLaunchOptions::max_restarts", file, "if («attempt >= options.max_restarts»)",
  "attempt + 1 >= options.max_restarts", n + "Restarts")
F("FunctionLaunchOptions::mixed_precision", file, '{"ACCELERATE_MIXED_PRECISION", «o.mixed_precision»}',
  'std::string("no")', n + "RunsCopiesWithTheirRanks")
F("FunctionLaunchOptions::cpu", file, '{"ACCELERATE_USE_CPU", «o.cpu» ?', "false", n + "RunsCopiesWithTheirRanks")
F("FunctionLaunchOptions::num_processes", file, "for (int64_t i = 0; i < «o.num_processes»; ++i) { Pipe", "int64_t{1}",
  n + "RunsCopiesWithTheirRanks")
F("FunctionLaunchOptions::num_nodes", file, "std::to_string(o.num_processes * «o.num_nodes»)", "int64_t{1}",
  n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::node_rank", file, "const int64_t rank = «o.node_rank» * o.num_processes", "int64_t{0}",
  n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::master_addr", file, '{"MASTER_ADDR", «o.master_addr»}', 'std::string("127.0.0.1")',
  n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::use_port", file, "«options.use_port.value_or(0) > 0 ? *options.use_port : choose_port()»",
  "choose_port()", n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::rdzv_endpoint", file, "if («o.rdzv_endpoint.empty()») return o;", "true",
  n + "AnEndpointIsShortForAddressAndPort")
F("FunctionLaunchOptions::rdzv_id", file, '{"TORCHELASTIC_RUN_ID", «o.rdzv_id»}', 'std::string("none")',
  n + "AnEndpointIsShortForAddressAndPort")
F("FunctionLaunchOptions::monitor_interval", file, "clock_(«o.monitor_interval», ", "std::chrono::milliseconds(100)",
  n + "OthersMayFailByThemselvesFirst")
F("FunctionLaunchOptions::rdzv_backend", file, "require(«o.rdzv_backend == \"static\"»,", "true", n + "ImpossibleOptions")
F("FunctionLaunchOptions::rdzv_conf", file, "require(«o.rdzv_conf.empty()»,", "true", n + "ImpossibleOptions")
F("FunctionLaunchOptions::log_line_prefix_template", file, "require(«o.log_line_prefix_template.empty()»,", "true",
  n + "ImpossibleOptions")
F("set_numa_affinity", file, "if («::sched_setaffinity(0, sizeof(cpus), &cpus) != 0»)", "false",
  n + "NumaAffinityBindsProcessesToSharesOfTheCores")
request = ("module", "no_python", "num_processes", "num_machines", "machine_rank", "main_process_port", "cpu",
           "gradient_accumulation_steps", "num_cpu_threads_per_process", "debug", "quiet", "redirects", "tee",
           "max_restarts", "role", "monitor_interval", "grace_seconds", "dry_run")
file = "src/launch/request.cpp"
F("LaunchOptions::", file, "«if (value) given.emplace_back(name, flag_text(*value));»", "",
  "launch_tests LaunchOptions.FieldsAreShortForSettings", each="name", of=request)
F("LaunchOptions::", file, "«if (!value.empty()) given.emplace_back(name, flag_text(value));»", "",
  "launch_tests LaunchOptions.FieldsAreShortForSettings", each="name",
  of=("main_process_ip", "mixed_precision", "log_dir"))
F("LaunchOptions::settings", file, "«given.insert(given.end(), o.settings.begin(), o.settings.end());»", "",
  "launch_tests LaunchOptions.FieldsAreShortForSettings")
file = "src/launch/job/environment.cpp"

# ---- maps of devices, sizes
file = "src/bigmodel/infer_device_map.cpp"
m = "conformance_tests infer_auto_device_map"
F("DeviceMapOptions::dtype", file, "sizes_(compute_module_sizes(tree, {.dtype = «options.dtype»,",
  "std::optional<std::string>()", m)
F("DeviceMapOptions::special_dtypes", file,
  "sizes_(compute_module_sizes(tree, {.dtype = options.dtype, .special_dtypes = «options.special_dtypes»}))",
  "std::map<std::string, std::string>()", "conformance_tests device_map_more")
F("DeviceMapOptions::max_memory", file,
  "const MaxMemory max_memory = «options.max_memory ? *options.max_memory : get_max_memory()»;", "get_max_memory()", m)
file = "src/bigmodel/device_map.cpp"
y = "conformance_tests balanced_memory"
F("BalancedMemoryOptions::max_memory", file,
  "MaxMemory memory = «options.max_memory ? *options.max_memory : get_max_memory()»;", "get_max_memory()", y)
F("BalancedMemoryOptions::low_zero", file, "const bool low_zero = «options.low_zero» &&", "false", y)
F("BalancedMemoryOptions::dtype", file, "compute_module_sizes(tree, {.dtype = «options.dtype»,",
  "std::optional<std::string>()", y)
F("BalancedMemoryOptions::no_split_module_classes", file,
  "largest_unsplittable(tree, sizes, «options.no_split_module_classes»)", "std::vector<std::string>()", y)
file = "src/bigmodel/sizes.cpp"
z = "conformance_tests module_sizes"
F("SizeOptions::dtype", file, "= «options.dtype ? std::optional(dtype_byte_size(*options.dtype)) : std::nullopt»;",
  "std::optional<double>()", z)
F("SizeOptions::buffers_only", file, "if («options.buffers_only» && kind", "false", z)

# ---- pipelines
file = "src/parallel/pipeline/pipeline.cpp"
k = "pipeline_tests Pipeline."
F("PippyOptions::split_points", file,
  'const bool automatic = «options.split_points == std::vector<std::string>{"auto"}»;', "true",
  k + "NamedSplitPointsAndOtherNumbersOfParts")
F("PippyOptions::num_chunks", file, "«p.options.num_chunks ? p.options.num_chunks : p.stages»", "p.stages",
  k + "NamedSplitPointsAndOtherNumbersOfParts")
F("PippyOptions::gather_output", file, "|| «!p.options.gather_output» ||", "false",
  k + "NestedArgumentsAndResultsOfAllStages")
F("PippyOptions::balance", file, "PipelineBalance balance = «options.balance»;", "PipelineBalance::bytes",
  k + "BalancedByMeasuredTime")

# ---- memory by purpose, and torch.compile
d = "debugging_tests LogMemory"
file = "src/accelerator/memory_snapshot.cpp"
F("memory() counts a storage once", file, "return «seen_.insert(storage).second» ?", "true",
  d + ".SaysWhatModelsAndOptimizersHold")
F("memory() counts pieces", file, "f(Kind::parameter, «holding.value», true)", "holding.whole", d + "Ranks.BucketsOfGradientsAndShards")
F("memory() counts buckets", "src/parallel/averaging/averaging.cpp", "if («!kwargs.gradient_as_bucket_view») bucket_bytes.add", "true",
  d + "Ranks.BucketsOfGradientsAndShards")
F("memory() counts offloaded files", "src/residency/homes/file.cpp",
  "for (const Extent& extent : extents) held_.add(«extent.bytes»);", "0", d + ".SaysWhatIsOffloadedToFiles")
k = "parallelism_tests MissingEngines."
F("AcceleratorOptions::dynamo_backend", "src/accelerator/missing_compiler.cpp",
  "value_or({.backend = «options.dynamo_backend»})", "std::optional<std::string>()",
  k + "ACompilerIsRefusedWithWhatRunsCompiledModels")
F("AcceleratorOptions::dynamo_plugin", "src/accelerator/missing_compiler.cpp",
  "plugin = resolve(«options.dynamo_plugin».value_or(", "Given<TorchDynamoPlugin>()", k + "SettingsOfACompilerThatDoesNotCompileAreKept")
F("TorchDynamoPlugin::disable", "src/accelerator/missing_compiler.cpp", "|| «plugin.disable») return plugin;", "false",
  k + "SettingsOfACompilerThatDoesNotCompileAreKept")
F("torch.compile is refused", "src/accelerator/missing_compiler.cpp", 'if («*plugin.backend == "no"» ||', "true",
  k + "ACompilerIsRefusedWithWhatRunsCompiledModels")

# ---- recorded models
k = "cuda_graph_tests CudaGraph."
file = "src/model/graphed_call.cpp"
F("CudaGraphModel copies inputs", file, "«inputs_[i].copy_(inputs[i], /*non_blocking=*/true);»", "",
  k + "RepeatsWithEachCallsInputsAndGivesResultsOfTheirOwn")
F("CudaGraphModel has inputs of its own", file, "inputs_.push_back(«at::empty_like(inputs[i]).copy_(inputs[i])»)", "inputs[i]",
  k + "RepeatsWithEachCallsInputsAndGivesResultsOfTheirOwn")
F("CudaGraphModel repeats", file, "«recording_->replay();»", "", k + "RepeatsWithEachCallsInputsAndGivesResultsOfTheirOwn",
  k + "WeightsMayChangeInPlace")
F("CudaGraphModel refuses other inputs", file, "«check_inputs(inputs);» check_model(inputs);", "", k + "InputsOfAnotherKindAreRefused")
F("CudaGraphModel refuses training mode", file, "if («part.module->is_training()»)", "false", k + "TrainingModeIsRefused")
F("CudaGraphModel refuses gradients", file, "const bool gradients = «c10::GradMode::is_enabled()»;", "false",
  k + "GradientsAreRefusedWhereTheyWouldBeWanted")
F("CudaGraphModel sees moved weights", file, "comes_and_goes(tensor) || «tensor.const_data_ptr() != data»", "false",
  k + "WeightsElsewhereAreRefused")
F("CudaGraphModel refuses residency's members", file, "if («comes_and_goes(tensor)») raise", "false", k + "WeightsThatComeAndGoAreRefused")
F("CudaGraphModel makes ordinary tensors", file, "ordinary_tensors(«false»);", "c10::InferenceMode::is_enabled()",
  k + "ScopesOfInferenceAndAutocastEndWithoutIt")
F("CudaGraphModel leaves autocast's cache out", file, "at::autocast::set_autocast_cache_enabled(«false»);", "true",
  k + "RepeatsWithEachCallsInputsAndGivesResultsOfTheirOwn")
F("CudaGraphModel is refused without CUDA", "src/model/cuda_graph.cpp", "if («!kCudaRecorder») raise", "false",
  k + "WithoutCudaOneIsToldWhatToUse")

F("gloo's thread gives way to who holds a connection", "src/utils/gloo_gives_way.hpp", "if («is_gloos») ::nanosleep(", "false",
  "utils_tests GlooGivesWay.ItsThreadSleepsWhereAConnectionIsLocked")

# ---- progress, dry runs
F("ProgressBarOptions::min_interval", "src/utils/progress.cpp", "now - drawn < «options.min_interval»",
  "std::chrono::milliseconds(100)", o + "BarsAreDrawnAsOftenAsIsAskedForAndCountInTheirUnit")
F("ProgressBarOptions::unit", "src/utils/progress.cpp", "rate_text(rate, «options.unit»)", 'std::string("it")',
  o + "BarsAreDrawnAsOftenAsIsAskedForAndCountInTheirUnit")
F("ProgressBarOptions::description", "src/utils/progress.cpp",
  'head = «options.description.empty() ? "" : options.description + ": "»;', "std::string()",
  "utils_tests Progress.OneLineAtTheEndWhereThereIsNoTerminal")
F("ProgressBarOptions::total", "src/utils/progress.cpp",
  '«if (options.total) tail += "/" + std::to_string(*options.total);»', "",
  "utils_tests Progress.OneLineAtTheEndWhereThereIsNoTerminal")
F("ProgressBarOptions::delay", "src/utils/progress.cpp", "now() - begin < «options.delay»;",
  "std::chrono::milliseconds(0)",
  "utils_tests Progress.OneLineAtTheEndWhereThereIsNoTerminal")
F("ProgressBarOptions::enabled", "src/utils/progress.cpp",
  '«impl_->options.enabled.value_or(environment::integer({"LOCAL_RANK"}).value_or(0) == 0)»', "true",
  "utils_tests Progress.OneLineAtTheEndWhereThereIsNoTerminal")
F("DryRunOptions::num_processes", "src/accelerator/dry_run.cpp", ".num_processes = «options.num_processes», .traffic",
  "int64_t{1}", "dry_run_tests AgainstZero.FullShard")

# ---- settings of the launcher, as ranks find them
F("launch --", "src/launch/job/environment.cpp", "if («option.form == config::Form::none» || !option.section", "true",
  "conformance_tests cli_launch_env", each="option.name",
  of=("fsdp_version", "fsdp_sharding_strategy", "fsdp_auto_wrap_policy", "fsdp_offload_params", "fsdp_state_dict_type",
      "dynamo_mode", "megatron_lm_tp_degree", "zero_stage", "offload_optimizer_device",
      "parallelism_config_dp_replicate_size"))
F("launch --gradient_accumulation_steps", "src/launch/job/environment.cpp",
  'if (const auto steps = settings.integer("gradient_accumulation_steps")) '
  '«env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = std::to_string(*steps);» if (launcher == Launcher::deepspeed)', "",
  "launch_tests LaunchEnvironment.AccumulationStepsArePassedOn")
F("launch --mixed_precision", "src/launch/job/environment.cpp",
  'Variables env{{"ACCELERATE_MIXED_PRECISION", «precision»}};', 'std::string("no")',
  "conformance_tests cli_launch_env")
F("launch --debug", "src/launch/job/environment.cpp",
  'if (precision == "fp8") add_fp8(env, settings); if («settings.on("debug")»)', "false",
  "conformance_tests cli_launch_env")
F("launch --num_cpu_threads_per_process", "src/launch/job/settings.cpp", "threads_ = «*given»;", "int64_t{1}",
  "conformance_tests cli_launch_env")
F("launch --max_restarts", "src/launch/job/job.cpp", 'job.max_restarts = «s["max_restarts"].get<int64_t>()»;',
  "int64_t{0}", "launch_tests LaunchOptions.FieldsAreShortForSettings")
F("launch --grace_seconds", "src/launch/job/job.cpp", 'job.grace = read_seconds(s, «"grace_seconds"»);',
  '"monitor_interval"', "launch_tests LaunchOptions.FieldsAreShortForSettings")
F("launch --monitor_interval", "src/launch/job/job.cpp",
  'job.monitor_interval = read_seconds(s, «"monitor_interval"»);', '"grace_seconds"',
  "launch_tests LaunchOptions.FieldsAreShortForSettings")
file = "src/config/config.cpp"
tpu = "plugins_tests TpuFields.ComeFromTheFile"
F("TpuConfig::name", file, 'text_of(config[«"tpu_name"»]);', '"tpu_zone"', tpu)
F("TpuConfig::zone", file, 'text_of(config[«"tpu_zone"»]);', '"tpu_name"', tpu)
F("TpuConfig::command_file", file, 'text_of(config[«"command_file"»]);', '"tpu_name"', tpu)
F("TpuConfig::commands", file, 'if («config["commands"].is_array()»)', "false", tpu)

# ---- generation
file = "src/models/generation/beam_search.cpp"
parity = "generate_tests GenerateParity.GreedyAndBeamsOfLlamaGpt2AndT5"
F("GenerationConfig::early_stopping never", file,
  "= «config.early_stopping == EarlyStopping::never» && config.length_penalty", "false", parity)
F("GenerationConfig::early_stopping", file, "(all_full && «config.early_stopping == EarlyStopping::yes»)", "false",
  parity)
F("GenerationConfig::early_stopping", file,
  "!row.improvable || («config.early_stopping == EarlyStopping::yes» && full(row))", "false", parity)
F("GenerationConfig::length_penalty", file, "static_cast<double>(length), «config.length_penalty»", "1.0", parity)
F("GenerationConfig::num_beams", "src/models/generation/generate.cpp", "if («config.num_beams > 1») {", "false", parity)
file = "src/models/generation/logits.cpp"
scores = "generate_tests GenerateParity.ScoresAreProcessedAlike"
F("GenerationConfig::repetition_penalty", file, "if («config.repetition_penalty != 1»)", "false", scores)
F("GenerationConfig::min_new_tokens", file, "if (new_tokens < «config.min_new_tokens»)", "int64_t{0}",
  "generate_tests Generate.GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::temperature", file, "if («config.temperature != 1»)", "false", scores)
F("GenerationConfig::top_k", file, "if («config.top_k > 0»)", "false", scores)
F("GenerationConfig::top_p", file, "if («config.top_p < 1»)", "false", scores)

x = "generate_tests Generate."
file = "src/models/generation/generate.cpp"
F("GenerationConfig::do_sample", file, "auto chosen = «config.do_sample» ?", "false", x + "DrawsFromTheDistribution")
F("GenerationConfig::eos_token_id", file, "if («!config.eos_token_id.empty()») ended |=", "false",
  x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::pad_token_id", file,
  "padding = «config.pad_token_id.value_or(config.eos_token_id.empty() ? 0 : config.eos_token_id.front())»;",
  "int64_t{1}", x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::max_new_tokens", file, "prompt + «*config.max_new_tokens» :", "int64_t{1}",
  x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::max_length", file, ": «*config.max_length»;", "prompt + 1", x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::stop_strings", "src/models/generation/stop_strings.cpp", "strings_(«config.stop_strings»)",
  "decltype(config.stop_strings)()", x + "StopStringsEndRowsWithTheirToken")
F("GenerateOptions::attention_mask", file, "without_padding(input_ids, «options.attention_mask»)", "at::Tensor()",
  x + "PaddingIsNoRepetition")
F("GenerateOptions::generator", file, "/*replacement=*/false, «options.generator»)", "std::optional<at::Generator>()",
  x + "ASeedGivesTheSameTokens")
F("GenerateOptions::on_tokens", file, "if («options.on_tokens && !options.on_tokens(chosen)») break;", "false",
  x + "CallbackSeesTokensAndCanStop")
F("GenerateOptions::tokenizer", file, "stops(config, «options.tokenizer»);", "decltype(options.tokenizer)()",
  x + "StopStringsEndRowsWithTheirToken")
F("GenerateOptions::on_layer", file, "max_length, «options.on_layer»);", "std::function<void(int64_t)>()",
  "generate_tests Generate.ShowsHowFarTheReadingIs")
F("GenerateOptions::max_positions", file,
  "«if (options.max_positions) check_context(prompt, max_length, *options.max_positions);»", "",
  x + "TheEndOfTheContextIsAnError")

# ---- WordPiece
file = "src/models/wordpiece.cpp"
words = "options_tests OptionsOfModels.WordPiece"
F("WordPieceOptions::unk_token", file, "unk = ids.at(«options.unk_token»);", 'std::string("[UNK]")', words)
F("WordPieceOptions::cls_token", file, "cls = ids.at(«options.cls_token»);", 'std::string("[CLS]")', words)
F("WordPieceOptions::sep_token", file, "sep = ids.at(«options.sep_token»);", 'std::string("[SEP]")', words)
F("WordPieceOptions::pad_token", file, "pad = ids.at(«options.pad_token»);", 'std::string("[PAD]")', words)
F("WordPieceOptions::mask_token", file, "options.pad_token, «options.mask_token»};", "options.pad_token", words)
F("WordPieceOptions::additional_special_tokens", file,
  "«named.insert(named.end(), options.additional_special_tokens.begin(), options.additional_special_tokens.end());»", "", words)
F("WordPieceOptions::clean_up_tokenization_spaces", file, "if («options().clean_up_tokenization_spaces»)", "false", words)
F("WordPieceOptions::max_input_chars_per_word", file, "code_points(word) > «options.max_input_chars_per_word»",
  "int64_t{100}", words)
F("WordPieceOptions::tokenize_chinese_chars", file,
  "value_or(options.do_lower_case), «options.tokenize_chinese_chars»}", "true", words)
F("WordPieceOptions::do_lower_case", file, "{«options.do_lower_case», options.strip_accents.value_or", "true",
  "wordpiece_tests WordPiece.CasedModelsKeepCaseAndAccents")
F("WordPieceOptions::strip_accents", file, "«options.strip_accents.value_or(options.do_lower_case)», options.tokenize",
  "options.do_lower_case", "wordpiece_tests WordPiece.CasedModelsKeepCaseAndAccents")
F("WordPieceOptions::model_max_length", file, "how.max_length.value_or(«options.model_max_length»);", "int64_t{512}",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("EncodeOptions::truncation", file, "if («how.truncation») {", "false",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("EncodeOptions::padding", file, "if («how.padding == Padding::max_length» &&", "false",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("EncodeOptions::add_special_tokens", file, "if («how.add_special_tokens») ids.push_back(cls);", "true",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")

# ---- models' configurations, as far as single places read them
file = "src/models/gpt2.cpp"
gpt2 = "options_tests OptionsOfModels.Gpt2"
F("GPT2Config::attn_pdrop", file, ".attention_dropout = «config.attn_pdrop»,", "0.0", gpt2)
F("GPT2Config::embd_pdrop", file, "wpe_(positions), «config_.embd_pdrop», is_training()", "0.0", gpt2)
F("GPT2Config::resid_pdrop", "src/models/decoder.cpp", "return «dropped(attention_->forward(x, context))»;",
  "attention_->forward(x, context)", gpt2)
F("GPT2Config::resid_pdrop", "src/models/decoder.cpp", "return «dropped»(mlp_ ? mlp_->forward(x)", "Tensor", gpt2)
F("GPT2Config::activation_function", file, "find_activation(«config.activation_function»)", 'std::string("gelu_new")',
  gpt2)
F("GPT2Config::scale_attn_weights", file, "«config.scale_attn_weights» ? 1 / std::sqrt", "true", gpt2)
F("GPT2Config::scale_attn_by_inverse_layer_idx", file,
  ".divides_scores_by_layer = «config.scale_attn_by_inverse_layer_idx»,", "false", gpt2)
file = "src/models/llama.cpp"
llama = "options_tests OptionsOfModels.Llama"
F("LlamaConfig::attention_dropout", file, "is_training() ? «config_.attention_dropout» : 0.0", "0.0", llama)
F("LlamaConfig::attention_bias", file, "all, config_.hidden_size, «config_.attention_bias»)", "false", llama)
F("LlamaConfig::qkv_bias", file, "const bool bias = config_.attention_bias || «config_.qkv_bias»;", "false", llama)
F("LlamaConfig::mlp_bias", file,
  '"up_proj", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, «config_.mlp_bias»)', "false",
  llama)
F("LlamaConfig::num_local_experts", file, "if («config_.num_local_experts») { experts_", "0", llama)
file = "src/models/bert.cpp"
bert = "options_tests OptionsOfModels.Bert"
F("BertConfig::attention_probs_dropout_prob", file, "is_training() ? «config_.attention_probs_dropout_prob» : 0.0",
  "0.0", bert)
F("BertConfig::classifier_dropout", file, "pooled, «config_.classifier_dropout.value_or(config_.hidden_dropout_prob)»,",
  "config_.hidden_dropout_prob", bert)
F("BertConfig::type_vocab_size", file, "make_embedding(«config_.type_vocab_size», config_.hidden_size)", "int64_t{2}",
  bert)

# ---- models of any size, the rest
file = "src/bigmodel/dispatch.cpp"
F("DispatchOptions::offload_buffers", file, ".main = main, .offload_buffers = «options.offload_buffers»,", "false",
  b + "BuffersTravelWhereTheyAreOffloaded")
F("OffloadAllOptions::offload_buffers", file,
  ".offload_index = std::nullopt, .offload_buffers = «options.offload_buffers»,", "false",
  b + "BuffersTravelWhereTheyAreOffloaded")
F("OffloadAllOptions::state_dict", file, ".state_dict = «options.state_dict»,", "decltype(options.state_dict)()",
  w + "ValuesMayComeFromAStateDict")
F("LoadAndDispatchOptions::dtype", sources, "loading{.device_map = std::nullopt, .dtype = «options.dtype»,",
  "std::optional<at::ScalarType>()", b + "CheckpointsAreConvertedAndNeedNotFit")
F("LoadAndDispatchOptions::keep_in_fp32_modules", sources, ".keep_in_fp32_modules = «options.keep_in_fp32_modules»,",
  "std::vector<std::string>()", b + "CheckpointsAreConvertedAndNeedNotFit")
F("LoadAndDispatchOptions::strict", sources, ".strict = «options.strict»}", "true",
  b + "CheckpointsAreConvertedAndNeedNotFit")
F("LoadAndDispatchOptions::offload_folder", sources,
  "if (!tensor.bytes || («converted && !options_.offload_folder.empty()»)) {", "false",
  w + "OtherDtypesAreConvertedAtEachUseOrOnceInAFolder")
F("LoadAndDispatchOptions::no_split_module_classes", sources,
  "map_options{.max_memory = options.max_memory, .no_split_module_classes = «options.no_split_module_classes»,",
  "std::vector<std::string>()", b + "ClassesThatMustNotBeSplitStayWholeInMapsAndWhenTheyAreFetched")
F("LoadAndDispatchOptions::no_split_module_classes of what is fetched", file,
  "«settings.whole_classes.insert(settings.whole_classes.end(), options.no_split_module_classes.begin(), "
  "options.no_split_module_classes.end());»", "",
  b + "ClassesThatMustNotBeSplitStayWholeInMapsAndWhenTheyAreFetched")
F("OffloadOptions::prefetch", file,
  "«settings_.offload.prefetch.value_or(std::clamp<int64_t>(bytes / 4 / largest, 1, 8))»",
  "std::clamp<int64_t>(bytes / 4 / largest, 1, 8)", b + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("OffloadOptions::scratch", file, ".scratch = «settings_.offload.scratch»,", "std::filesystem::path()",
  b + "ChangesGoToTheScratchFolder")
F("OffloadedWeightsLoaderOptions::state_dict", "src/bigmodel/offload.cpp",
  "content->in_memory = «std::move(options.state_dict)»;", "decltype(options.state_dict)()",
  "bigmodel_tests OffloadFolder.WhatIsInMemoryGoesFirst")
F("SizeOptions::special_dtypes", "src/bigmodel/sizes.cpp",
  "if (const auto special = options.special_dtypes.find(name); «special != options.special_dtypes.end()»)", "false",
  "bigmodel_tests Describe.HasNamesClassesShapesAndDtypesOfAModule")
F("DeviceMapOptions::clean_result", "src/bigmodel/infer_device_map.cpp", "return «options_.clean_result» ?", "true",
  "conformance_tests infer_auto_device_map")
F("DeviceMapOptions::fallback_allocation", "src/bigmodel/infer_device_map.cpp", "&& «options_.fallback_allocation» &&",
  "false", "conformance_tests device_map_more")

# ---- schedules and padding, the rest
file = "src/optim/reduce_lr_on_plateau.cpp"
F("ReduceLROnPlateauOptions::maximize", file, "return «options_.maximize» ? metric > bar", "false", e)
F("ReduceLROnPlateauOptions::threshold", file, "options_.maximize ? «options_.threshold» : -options_.threshold;",
  "1e-4", plateau)
F("ReduceLROnPlateauOptions::threshold", file, "options_.maximize ? options_.threshold : «-options_.threshold»;",
  "-1e-4", plateau)
F("ReduceLROnPlateauOptions::absolute_threshold", file, "= «options_.absolute_threshold» ? best_ + margin", "false",
  plateau)
file = "src/optim/one_cycle.cpp"
F("OneCycleOptions::total_steps", file, "options.total_steps ? «*options.total_steps» :", "int64_t{17}", e)
F("OneCycleOptions::epochs", file, ": «*options.epochs» *", "int64_t{5}",
  "optim_tests AcceleratedSchedulerTest.OneCycleNeverPassesItsEnd")
F("OneCycleOptions::steps_per_epoch", file, "*options.epochs * «*options.steps_per_epoch»;", "int64_t{7}",
  "optim_tests AcceleratedSchedulerTest.OneCycleNeverPassesItsEnd")
file = "src/utils/ops.cpp"
pad = "comm_tests Comm.PadAcrossProcesses"
F("PadOptions::dim", file, "pad_to(const at::Tensor& tensor, int64_t size, const PadOptions& options) { "
  "const int64_t dim = «options.dim < 0 ? options.dim + tensor.dim() : options.dim»;", "int64_t{0}", pad)
F("PadOptions::pad_index", file, "at::full(sizes, «options.pad_index», tensor.options());", "0", pad)
F("PadOptions::pad_first", file, "narrow(dim, «options.pad_first» ? missing", "false", pad)

F("EncodeOptions::max_length", "src/models/wordpiece.cpp", "limit = «how.max_length».value_or(",
  "std::optional<int64_t>()", "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("OffloadedWeightsLoaderOptions::index", "src/bigmodel/offload.cpp", "for (auto& [name, weight] : «*options.index») {",
  "OffloadIndex()", "bigmodel_tests OffloadFolder.WhatIsInMemoryGoesFirst")
F("LoadCheckpointOptions::offload_buffers", "src/bigmodel/loading.cpp",
  "(!target.is_buffer || «options.offload_buffers»);", "false",
  "bigmodel_tests LoadCheckpoint.PartsOnDiskLieInTheFileAndComputeAlike")
F("LoadCheckpointOptions::offload_folder", "src/bigmodel/loading.cpp",
  "const auto& folder = «plan.options.offload_folder»;", 'std::filesystem::path("elsewhere")',
  "bigmodel_tests LoadCheckpoint.ConvertsAndKeepsWhatWasAskedFor")
F("PippyOptions::no_split_module_classes", "src/parallel/pipeline/plan.cpp",
  "const auto& classes = «options.no_split_module_classes»;", "std::vector<std::string>()",
  "pipeline_tests Pipeline.WrongSplitPointsAreNamed")
F("DryRunOptions::process_index", "src/accelerator/dry_run.cpp",
  ".process_index = «options.process_index», .num_processes = options.num_processes, .traffic", "int64_t{0}",
  "dry_run_tests DryRun.AllRanksHaveTheSameToDo")
F("MaterializeOptions::device", "src/residency/deferred/materialize.cpp",
  "if («options.device && options.device->is_meta()») return", "false",
  "deferred_tests DeferredIdentity.OnTheMetaDeviceNothingIsDrawn")
file = "src/residency/activations/offload.cpp"
F("ActivationOffloadOptions::directory", file, "if («!options.directory && !residency::current_accelerator()») return;",
  "!residency::current_accelerator()", "activations_tests ActivationOffloadTest.MemoryFallsAndIsFetchedAheadInBackward")
F("ActivationOffloadOptions::keep", file, "return «options_.keep && options_.keep(tensor)»;", "false",
  "activations_tests ActivationOffloadTest.ParametersTheirViewsAndSmallTensorsStay")
F("ActivationOffloadOptions::max_pending_bytes", file,
  "make_disk_home(*options.directory, «options.max_pending_bytes»)", "std::numeric_limits<int64_t>::max()",
  "activations_tests ActivationOffloadTest.ForwardWaitsForTheDiskWhereTooMuchIsPending")

# ---- merging
file = "src/checkpoint/merge_fsdp_weights.cpp"
merge = "fsdp_state_tests FsdpState.SaveModelAndMerge"
F("MergeFsdpWeightsOptions::safe_serialization", file, "if («options_.safe_serialization») write_safetensors", "true",
  merge)
F("MergeFsdpWeightsOptions::max_shard_size", file, "max_bytes = «options_.max_shard_size» ?",
  "std::optional<std::string>()", merge)
F("MergeFsdpWeightsOptions::remove_checkpoint_dir", file,
  "if («options.remove_checkpoint_dir») { fs::remove_all(folder);", "false", merge)

# ---- what functions of the facade are given, and what they promise
file = "src/accelerator/clip.cpp"
h = "ddp_habits_tests DdpHabits."
clip = t + "ClippingEqualsLibTorch"
F("clip_grad_norm_ norm_type", file, "parallel::norm_of(gradients, engines, «norm_type», device);", "2.0", clip)
F("clip_grad_norm_ max_norm", file, "gradients.scale((«max_norm» / (total + 1e-6)).clamp_max(1.0));", "0.07", clip)
F("clip_grad_norm_ lengthens nothing", file, "(total + 1e-6)).clamp_max(«1.0»));", "1e9", clip)
F("clipping unscales", file, "settle(engines, synchronising); «each_scaled(parameters, engines, unscale);» return parallel", "",
  t + "ClippingSeesUnscaledGradients")
F("clipping unscales those that hold what is clipped", file, "if (run->scaler && «holds_any(optimizer, stepped)»)", "true",
  h + "AGanClipsInFp16")
F("a second Accelerator clips what the first one trains", file,
  "const auto runs = «live_runs()»;", "std::vector<run_state::RunState*>()", h + "ASecondAcceleratorSeesWhatTheFirstTrains")
F("clip_grad_value_ clip_value", file, "gradient.clamp_(-«clip_value», clip_value);", "1e4", clip)
F("clip_grad_value_ of pieces", "src/parallel/gradients.cpp", "«residency::by_turns(pieces, /*changes=*/true, use);»", "",
  "engines_tests Engines.ClipTheNormOfTheWhole")
F("clipping waits for what was not averaged yet", file, "if (synchronising) «engine->settle_gradients();»", "",
  c + "CheckpointRanks.WhatTheLastMicroStepLeavesOutIsAveragedAlsoInAResumedRun")
file = "src/accelerator/join.cpp"
F("ranks that ended early take optimizers' states", file, "if (group.rank() != source) «optimizer.load_state_dict(state[0]);»", "",
  h + "RanksThatEndedEarlyGoOnAsTheOthers")
F("ranks that ended early take schedules", file, "if (!ours) «schedule.load_state_dict(rest[next]);»", "",
  h + "RanksThatEndedEarlyGoOnAsTheOthers")
F("ranks that ended early take the loss scale", file, "    «run.scaler->load_state_dict(rest[next++]);»",
  "next++;", h + "RanksThatEndedEarlyAreNotAskedForOverflows")
F("ranks that ended early count as the others", file, "«run.step = rest[next].toInt();»", "",
  h + "DataThatEndsWithinAGroupIsNamedOnAllRanks")
F("ranks without data are not asked for overflows", file, "«scaler->set_agreement(false);»", "",
  h + "RanksThatEndedEarlyAreNotAskedForOverflows")
F("ranks without data have no tokens", file, "if («tokens && averages») items_of_all_ranks", "false",
  h + "RanksThatEndedEarlyHaveNoTokens")
joined = "ddp_tests Ddp.JoinWithUnevenBatchesOfALoader"
F("join_uneven_inputs even_batches", file, "overridden += loader->override_even_batches(«even_batches»);",
  "std::optional<bool>(true)", joined)
F("join_uneven_inputs puts even_batches back", file, "«loader->override_even_batches(std::nullopt);»", "", joined)
file = "src/accelerator/belonging.cpp"
F("layers that come later are named", file, "if («model->engine->averages(parameter)») trained.insert", "true",
  h + "ALayerThatComesLaterIsNamedInEachStep")
F("fp16 that nobody unscales is named", file, "«gradients_are_scaled_for_nobody» &&", "false",
  t + "Fp16WithoutAPreparedOptimizerIsNamed")
file = "src/accelerator/training.cpp"
F("backward divides by the steps of a group", file,
  "run_backward(loss, «1.0 / static_cast<double>(gradient_accumulation_steps())», options);", "1.0",
  t + "ReferenceAccumulationExampleEndsAt204")
F("backward num_items", file, "impl_->run.num_items += «static_cast<double>(num_items)»;", "1.0",
  "ddp_tests Ddp.TokenWeightedAverageIsTheMeanOverAllTokens")
F("optimizer_step_was_skipped", file, "if («optimizer.step_was_skipped()») return true;", "false",
  r + "Fp16OverflowOnOneRankSkipsTheStepOnAll")
F("no_sync", file, "return with_sync(models, «false»);", "true",
  "ddp_tests Ddp.ForwardsWithoutSyncThenOneBackwardThatSyncs")
file = "src/accelerator/accelerator.cpp"
F("prepare_model evaluation_mode", file, "chosen.make(model, device(), «evaluation_mode»);", "false",
  "ddp_tests Ddp.FrozenModelAndEvaluationNeedNoGroup")
F("schedules follow the optimizer that they drive", file,
  "if («&optimizer.optimizer() == &scheduler.optimizer()») followed", "false",
  t + "SchedulesFollowTheOptimizerThatTheyDrive")
F("check_trigger forgets", file, "«impl_->trigger = false;»", "", r + "WhoAmIAndWhoGoesFirst")
F("free_memory", file, "«impl_->run.clear();»", "", t + "PrepareKeepsTheOrderAndWhatItDoesNotKnow")
F("log step", file, "return record_of_values(std::move(values), «step»);", "std::nullopt",
  t + "TensorBoardReadsOurEvents")

# ---- trackers
t = "trackers_tests Trackers."
q = "trackers_tests TrackerQueue."
b = "trackers_tests TensorBoard."
file = "src/trackers/tracker_set.cpp"
F("init_trackers config", file, "if («!run.config.empty()») send(", "false",
  t + "NamesAndObjectsMixAndArgumentsReachTheirs")
F("init_trackers init_kwargs", file, "TrackerValues{} : «given->second»", "TrackerValues{}",
  t + "OnesOfYourOwnHaveNamesAndAllAreThoseThatWork")
F("log log_kwargs", file, "TrackerValues{} : «kwargs->second»", "TrackerValues{}",
  t + "NamesAndObjectsMixAndArgumentsReachTheirs")
F("log_with all", file, "for (const auto& name : «available_trackers()»)", "std::vector<std::string>()",
  t + "AllIsWhatIsAvailableOnce")
F("GeneralTracker::main_process_only", file, "if («tracker->main_process_only()» &&", "true",
  "trackers_tests TrackerRanks.OpenOnTheMainProcessUnlessTheySayOtherwise")
F("get_tracker unwrap flushes", file, "«tracker->flush();»", "", t + "NamesAndObjectsMixAndArgumentsReachTheirs")
file = "src/trackers/registry.cpp"
F("TrackerClass::available", file, "return «!tracker_class(name).available()»;", "false",
  t + "OnesOfYourOwnHaveNamesAndAllAreThoseThatWork")
F("TrackerClass::requires_logging_directory", "src/trackers/json_lines.cpp", ".requires_logging_directory = «true»",
  "false", t + "WhatIsWrongIsSaidAtOnce")
F("ACCELERATE_TRACKER_TIMEOUT", "src/trackers/tracker_timeout.cpp",
  "«environment::number(kVariable)».value_or(60)", "std::optional<double>(2)",
  q + "OneThatDoesNotEndIsLeftBehindAndLosesNothing")
file = "src/trackers/tracker_queue.cpp"
F("TrackerQueue::Limits::records", file, "«shared_->entries.size() >= shared_->limits.records»", "false",
  q + "OneThatHangsHoldsNobodyAndWhatHasNoRoomGoesToAFile")
F("TrackerQueue flushes", file, "lock.unlock(); «shared.flush();» lock.lock(); shared.flushed = written;", "",
  q + "WhatIsLoggedIsFlushedWithoutBeingAsked")
F("TrackerQueue flushes", file, "++written; «if (Clock::now() - shared.last_flush <= shared.limits.delay) continue;»", "continue;")
F("TrackerQueue keeps what is not flushed", file, "if (taken) «shared.unflushed.push_back(entry);»", "",
  q + "WhatIsNotFlushedIsNotTaken")
F("TrackerQueue times", file, "«tracker->set_time(entry.record->time);»", "", q + "TimesAreThoseOfTheLogging")
F("TrackerQueue lets go of a tracker that hangs", file, "«if (shared.abandoned) return;» shared.bytes", "",
  q + "OneThatDoesNotEndIsLeftBehindAndLosesNothing")
F("TrackerQueue::Limits::bytes", file, "«shared_->bytes > 0» &&", "false", q + "BytesAreBoundedToo")
x = "external_trackers_tests "
F("PythonTracker init_kwargs", "src/trackers/python_tracker.cpp", "to_json(«impl_->setup.init_kwargs»)", "TrackerValues{}",
  x + "PythonTracker.GivesTheSdkWhatWasLogged")
F("PythonTracker log_kwargs", "src/trackers/python_tracker.cpp",
  '{"values", to_json(values)}, {"step", step_of(step)}, {"options", to_json(«log_kwargs»)}', "TrackerValues{}",
  x + "PythonTracker.GivesTheSdkWhatWasLogged")
F("DvcliveFiles dir", "src/trackers/dvclive_files.cpp", "folder_ = «folder.get<std::string>()»;", '"dvclive"',
  x + "DvcliveTest.BeginsAnewOrGoesOn")
F("log_images copies", "src/trackers/record.cpp", "tensor.scalar_type(), false, «true»)", "false",
  t + "ImagesAndTheirKinGoToThoseThatTakeThem")
F("records that a tracker refuses", "src/trackers/spill_file.cpp", "«if (entry && queue_) queue_->push(*entry);»", "",
  q + "ARecordThatIsNotTakenGoesToTheFileAndTheOthersGoOn")
file = "src/trackers/tensorboard.cpp"
F("tensorboard init_kwargs filename_suffix", file, ".filename_suffix = «kwargs.text(\"filename_suffix\")»",
  "std::string()", b + "InitKwargsReachTheFile")
F("tensorboard init_kwargs purge_step", file, ".purge_step = «kwargs.whole(\"purge_step\")»",
  "std::optional<int64_t>()", b + "InitKwargsReachTheFile")
F("tensorboard init_kwargs flush_secs", file, "«kwargs.number(\"flush_secs\").value_or(0)»", "0.0",
  b + "InitKwargsReachTheFile")
F("tensorboard log_kwargs new_style", file, "«kwargs.truth(\"new_style\", false)»", "false",
  b + "ItsEventsAreThoseOfTorch")
F("tensorboard log_kwargs double_precision", file, "«kwargs.truth(\"double_precision\", false)»", "false",
  b + "ItsEventsAreThoseOfTorch")
F("tensorboard log_kwargs walltime", file, "return «kwargs.number(\"walltime\").value_or(time())»;", "time()", b + "ItsEventsAreThoseOfTorch")
F("tensorboard log_kwargs max_bins", file, "summaries::histogram(histogram_name, values, «most»)", "std::nullopt",
  b + "ItsEventsAreThoseOfTorch")
F("tensorboard log_kwargs dataformats", file, "images_as_nhwc(tag, image, «log_kwargs»)", "TrackerValues{}",
  b + "ItsEventsAreThoseOfTorch")
file = "src/accelerator/accelerator.cpp"
t = "accelerator_tests AcceleratorTest."
file = "src/accelerator/checkpointing.cpp"
F("LoadStateOptions::strict", file, "how.strict = «options.strict»;", "true",
  c + "CheckpointRanks.NotStrictLoadsWhatBothHave")
F("save_state safe_serialization", file, "form_of_state(*impl_->engine, «safe_serialization»);", "true",
  c + "CheckpointTest.ResumedRunIsTheUninterruptedOneBitByBit")
F("save_model max_shard_size", file, "const int64_t bytes = «checkpointing::parse_size(max_shard_size)»;",
  "int64_t{1} << 40", c + "CheckpointTest.SaveModelHasTheReferencesLayout")
F("save_model safe_serialization", file, "checkpointing::save_model(model, folder, bytes, «safe_serialization»);",
  "true", c + "CheckpointTest.SaveModelHasTheReferencesLayout")
F("register_load_state_pre_hook", file, "for (const auto& hook : impl_->load_hooks) «hook(how.models, folder);»", "",
  c + "CheckpointTest.HooksChangeWhatIsSavedAndLoaded")
F("load_state goes on counting", file, "project.iteration = («input_dir.empty()» ?", "false",
  c + "CheckpointTest.ACheckpointThatLacksSomethingIsPassedOverByName")
file = "src/run_state/state_parts.cpp"
resumed = c + "CheckpointTest.ResumedRunIsTheUninterruptedOneBitByBit"
for what, statement in (("optimizers", "staged.take.push_back(to_be_taken(run.optimizers[i], "
                         "read_optimizer(run.optimizers[i], run.models, file)));"),
                        ("schedules", "staged.take.push_back(to_be_taken(run.schedulers[i], "
                         "load_object(file)));"),
                        ("loaders", "staged.take.push_back( to_be_taken(*run.loaders[i], "
                         "data::DataLoaderState::from_ivalue(load_object(loader_file(folder, i)))));"),
                        ("the scaler", "staged.take.push_back(to_be_taken(*run.scaler, "
                         "load_object(scaler_file(folder))));"),
                        ("the user's objects", "staged.take.push_back(to_be_taken(run.customs[i], "
                         "load_object(custom_file(folder, i))));"),
                        ("random numbers", "run.step = checkpointing::load_random_states(state, device);"),
                        ("models", "model.apply();")):
    F(f"load_state takes up {what}", file, f"«{statement}»", "", resumed)
F("load_state takes up a group of steps", file, "«staged->apply(run, run.step % num_steps)»;", "void()",
  resumed)
file = "src/comm/collectives.cpp"
everything = "comm_tests Comm.EveryOperationOnEveryDtype"
F("reduce scale", file, "return «scale == 1.0» ? result : result * scale;", "true", everything)
F("reduce reduction", file, "world->all_reduce_(result, «reduction»);", "Reduction::sum", everything)
F("maxima keep NaN", "src/comm/group_collectives.cpp",
  "const bool may_be_nan = «reduction == Reduction::max && tensor.is_floating_point()»;", "false",
  "comm_tests Comm.AMaximumWithNaNIsNaN")
F("reduce reduction mean", file, "if («reduction == Reduction::mean») result = result /", "false", everything)
F("broadcast from_process", file, "return world->broadcast(tensor, «from_process»);", "int64_t{0}", everything)
file = "src/data/prepared_loader.cpp"
metrics = "data_dist_tests DataDist.MetricsGetEachSampleOnceWhateverMakesTheBatches"
F("gather_for_metrics drops what is repeated", file, "return «seen.samples % *total»;", "int64_t{0}", metrics)
F("gather_for_metrics drops whole batches that are repeated", file,
  "return «seen.batches % per_step == 0 ? 0 : seen.samples_of_step»;", "int64_t{0}", metrics)
orders = "data_dist_tests DataDist.OrdersThatDifferAreAnErrorOnAllRanks"
F("ranks compare as a pass begins", file, "auto pass = «agrees_on_starts()» ? start_together(plan)", "false", orders)
F("a rank that fails as a pass begins tells the others", file, "«mine.failed = std::current_exception();»", "throw;",
  "data_dist_tests DataDist.AnOrderThatCannotBeDrawnOnOneRankIsAnErrorOnAll")
F("a loop that another one replaced says so", file, "«replaced_ = active_;»", "", p + "NestedLoopsAndBreakLeaveNoLoaderActive")
numbers = "data_tests NumbersOfDataSets."
F("numbers of data sets follow the epoch", file, "*plan.seed = «seed_of_epoch().value_or(*plan.seed)»; //",
  "*plan.seed", numbers + "FollowTheEpochWhereTheOrderDoes")
F("ranks' data sets draw different numbers", file, "seed_of_rank(*plan.seed, «settings().process_index»);",
  "int64_t{0}", "data_dist_tests DataDist.AResumedPassDrawsTheSameNumbersForItsSamples")
F("ranks' streams draw alike", file, "if («!core_->is_stream()») *plan.seed = seed_of_rank", "true",
  "data_dist_tests DataDist.StreamsThatShuffleThemselvesAreSharedOutWhole")
F("ranks take the seed of a pass from rank 0", file, "*plan.seed = «agree_on_start(mine)»;",
  "(agree_on_start(mine), mine.seed)", "data_dist_tests DataDist.AResumedPassDrawsTheSameNumbersForItsSamples")
file = "src/data/agreed_start.cpp"
F("ranks compare their orders", file, "if («other.count != first.count || other.hash != first.hash»)", "false", orders)
F("ranks compare the sizes of their data", file, "if («other.dataset_size != first.dataset_size»)", "false", orders)
file = "src/data/watched_sampler.cpp"
F("comparing orders takes no sample away", file, "if («!ahead.empty()») {", "false",
  "data_dist_tests DataDist.ComparingOrdersMovesNothing")
file = "src/data/prepared_settings.cpp"
F("samplers of one rank are refused", file, "if («ranks > 1 && core.batches() && core.batches()->sharded()»)", "false",
  "data_dist_tests DataDist.SamplersOfOneRankAreRefusedByName")
file = "src/data/own_numbers.cpp"
F("data sets draw numbers of their own", file, "if («current && on_cpu»)", "false",
  numbers + "AreTheSameWithAnyNumberOfWorkers", numbers + "LeaveThoseOfTheProgramAlone",
  numbers + "AreTheSameAfterSkippedBatches")
F("operators that are handed the default generator draw own numbers, too", file,
  "|| «generator.toGenerator() == at::detail::getDefaultCPUGenerator()»)", "false",
  numbers + "LeaveThoseOfTheProgramAlone")
F("each step of a pass has its own numbers", file, "seeded_generator(mixed(pass_seed_, «step_»));", "int64_t{0}",
  numbers + "DifferFromBatchToBatch")
file = "src/data/loader_core.cpp"
F("skipped steps of streams have their numbers", file, "«numbers.select(skipped);»", "",
  numbers + "AreTheSameAfterSkippedBatches")
F("a stream that another pass reads says so", file, "if («*pass != *latest») throw_pass_is_over", "false",
  "data_tests DataLoader.NestedPassesOverWhatHasOnePositionAreAnError")
file = "src/data/prepared_loader.cpp"
F("skip_first_batches num_batches", file, "slice_, skip() + «num_batches»);", "int64_t{0}",
  p + "SkipFirstBatchesKeepsRemainderAndEpoch")
F("skip_first_batches keeps the epoch", file, "«copy->set_iteration(iteration());»", "",
  p + "SkipFirstBatchesKeepsRemainderAndEpoch")
F("loaders' batch samplers learn the epoch", file, "«if (batches()) batches()->set_epoch(epoch);»", "",
  p + "SeedableSamplerFollowsTheEpoch")

# ---- what nobody asks for and everybody relies on
file = "src/optim/optimizer.cpp"
waits = "optim_tests OptimTest.DoesNothingWhileGradientsAccumulate"
F("step waits for the end of a group", file, "if («!self.gradients.sync_gradients()») return {};", "false", waits)
F("zero_grad waits for the end of a group", file, "if («!impl_->gradients.sync_gradients()») return;", "false", waits)
F("zero_grad set_to_none", file, "if («set_to_none») { parameter.mutable_grad().reset();", "true", waits)
F("tied weights are stepped once", file, "«keep_each_parameter_once(*optimizer);»", "",
  "optim_tests OptimTest.TiedWeightsAreSteppedOnce")
F("the scale follows what it finds", file, "«self.scaler->update(optimizer);»", "",
  r + "Fp16OverflowOnOneRankSkipsTheStepOnAll")
file = "src/optim/accelerated_scheduler.cpp"
F("schedules wait where a step was skipped", file, "{ return «optimizer.step_was_skipped()»; })) return;", "false",
  t + "SchedulesFollowTheOptimizerThatTheyDrive")
F("schedules wait for the end of a group", file, "if («!self.gradients.sync_gradients()») {", "false",
  "optim_tests AcceleratedSchedulerTest.WaitsWhileGradientsAccumulate")
F("schedules step for each process", file, "i < «num_processes»; ++i", "int64_t{1}",
  "optim_ranks_tests OptimRanks.SchedulesStepOncePerProcess")
F("schedules stop at their end", file, "if («!total || self.scheduler.step_count() <= *total») step_once();", "true",
  "optim_tests AcceleratedSchedulerTest.OneCycleNeverPassesItsEnd")
F("AcceleratedScheduler::step metric", file, "self.scheduler.step(«metric»); counts::add", "std::optional<double>(1.0)",
  "optim_tests AcceleratedSchedulerTest.PlateausSeeTheMetric")
F("a metric counts once", file, "if («metric.has_value()») return step_once();", "false",
  "optim_ranks_tests OptimRanks.AMetricCountsOnceAndIsTheMeanOfTheRanks")
F("ranks agree on a metric", file, "if (metric) metric = «agreed(*metric)»;", "*metric",
  "optim_ranks_tests OptimRanks.AMetricCountsOnceAndIsTheMeanOfTheRanks",
  "optim_ranks_tests OptimRanks.AMetricThatIsNaNOnOneRankIsNaNOnAll")
file = "src/data/loader_progress.cpp"
F("the remainder is known early", file, "remainder_ = «(*num_samples_ - samples_before_) % *total_batch_size()»;",
  "int64_t{-1}", p + "EndIsKnownWhileTheLastBatchIsHeld")
F("passes are counted", file, "«++iteration_;» yielded_ =", "", p + "SeedableSamplerFollowsTheEpoch")
F("the last batch is known as such", file, "if (!last) return; «end_ = true;»", "",
  p + "EndIsKnownWhileTheLastBatchIsHeld")
F("generators are synchronised before a pass", file,
  "if (!midway) «synchronize_rng_states(settings_.rng_types, generator_);»", "",
  r + "LoadersSynchroniseTheGeneratorsThatWereAskedFor")
F("a resumed pass has the sampler's numbers", file,
  "if (resumed && generator_) «restore_generator(*generator_, resumed->sampler_rng_state);»", "",
  "data_tests Resume.GivesExactlyTheBatchesThatWereNotSeen")
F("a resumed pass has the default generator's numbers", file,
  "if (midway) «restore_generator(default_generator, resumed->default_rng_state);»", "",
  "data_tests DataLoaderState.DefaultGeneratorGoesOnAfterResuming")
F("a resumed pass puts the default generator back", file,
  "if (midway) «restore_generator(default_generator, before);»", "",
  "data_tests DataLoaderState.DefaultGeneratorGoesOnAfterResuming")
file = "src/parallel/averaging/averaging.cpp"
F("DDP begins with rank 0's parameters", file, "«broadcast_in_place(*impl_->group, tensors_of(impl_->parameters), 0);»", "",
  "ddp_tests Ddp.EqualsOneProcessAfterEveryStep")
F("DDP begins with rank 0's buffers", file, "«broadcast_in_place(*impl_->group, tensors_of(impl_->buffers), 0);»", "",
  "ddp_tests Ddp.BuffersAndBucketsAreAsAskedFor")
F("what is averaged late is divided", file, "gradient.div(«group->world_size()»).contiguous();", "1",
  c + "CheckpointRanks.WhatTheLastMicroStepLeavesOutIsAveragedAlsoInAResumedRun")
F("autograd::grad within a join is named", file, "if (apart) return gradient;\n    if («joining»)", "false",
  h + "WhatAutogradGradGivesIsAveraged")
F("what a backward left out is named before the step", file,
  "if («impl_->reducer && impl_->reducer->unfinished()»)\n    impl_->group", "false", "ddp_tests Ddp.WhatCannotBeAveragedIsNamed")
F("what waits of frozen layers before a join", file, "«impl_->average_those_of_frozen();»  // a rank without data", "",
  h + "WhatWaitsOfFrozenLayersIsAveragedBeforeAJoin")
F("layers that are thawed are averaged", file, "if («same») return;", "true", h + "LayersAreThawedAndFrozenAfterPrepare")
F("data that ends within a group is named", file, "if («0 < averaging && averaging < training»)", "false",
  h + "DataThatEndsWithinAGroupIsNamedOnAllRanks")
F("joined ranks end with the last one's parameters", file,
  "«broadcast_in_place(*impl_->group, tensors_of(impl_->parameters), source);»", "", "ddp_tests Ddp.JoinUnevenInputs")
file = "src/parallel/gradients.cpp"
F("tied weights count once", file, "if («!seen.insert(parameter.unsafeGetTensorImpl()).second») continue;", "false",
  "accelerator_tests AcceleratorTest.TiedWeightsAreClippedOnce", h + "TokensOfModelsThatShareModulesCountOnce")
F("layers that are freed within LocalSGD are named", "src/accelerator/local_sgd.cpp",
  "if («!*trained_then++ && parameter.requires_grad()»)", "!*trained_then++ && false",
  "communication_hooks_tests LocalSgd.LayersThatAreFreedWithinItAreNamed")
F("two LocalSGDs have states of their own", "src/accelerator/local_sgd.cpp",
  ".name = «number == 0 ? \"LocalSGD\" : fmt::format(\"LocalSGD of model {}\", number)»,", "std::string(\"LocalSGD\")",
  "communication_hooks_tests LocalSgd.TwoComeBackFromOneCheckpoint")
F("norms count each element once", "src/parallel/held.cpp", "return «(mesh ? *mesh : comm::mesh()).place(comm::kAllAxes - cut - apart) == 0»;",
  "true", "fsdp_hybrid_tests FsdpHybrid.NormsCountEachElementOnce", "engines_tests Engines.ComposedLayers")
composed = "engines_tests Engines.ComposedLayers"
F("layers before the last widen, too", "src/parallel/engine.cpp",
  "if (whole.value.defined()) «whole.value = layer->widen(held.at(whole.parameter.unsafeGetTensorImpl()), whole.value);»", "",
  composed)
F("values go up through all layers after a step", "src/parallel/engine.cpp", "«(*layer)->after_step();»",
  "if (layer == layers_.rbegin()) (*layer)->after_step();", composed)
F("a layer is given what the one before has left", "src/parallel/engines.cpp",
  "if (layer->cuts()) «given = layer->held();»", "", composed)
plugged = "engines_tests Engines.PluginsOfLayers"
F("AcceleratorOptions::layer_plugins", "src/accelerator/accelerator.cpp", ".plugins = «options.layer_plugins»",
  "std::vector<std::any>()", plugged)
F("a second Accelerator has the first one's layer plugins", "src/accelerator/accelerator.cpp",
  "if (options.layer_plugins.empty()) «options.layer_plugins = first->layer_plugins;»", "", plugged)
F("plugins that no layer takes are refused", "src/parallel/engines.cpp", "if («!request.taken.contains(i)»)", "false", plugged)
F("layers have receipts", "src/accelerator/receipts.cpp", "«all.entries.push_back(std::move(receipt));»", "", plugged)
boxes = "engines_tests Engines.LayersOnBoxesThatModulesComputeWith"
F("gradients of parts that some ranks hold are not averaged over all", "src/parallel/engines.cpp",
  "if (chosen.get() == data_) «check_all_hold_alike(given);»", "", boxes)
F("sharding says where its box lies", "src/parallel/sharding/sharding.cpp", "«held.slice.corner = box->slice.corner;»", "",
  boxes)
F("sharding says over which axes its box is cut", "src/parallel/sharding/sharding.cpp", "«held.cut = held.cut | box->cut;»",
  "", boxes)
F("files have the whole of what modules have a part of", "src/run_state/models.cpp",
  "note(name, «fits» ? part->second->tensor.sizes()", "false", boxes)
F("whole steps on parts of parameters are refused", "src/run_state/run_state.cpp", "if («computes && whole && holding.slice.numel < holding.whole.numel()»)", "false",
  boxes)
F("replicas apart count their own pieces", file, "piece->counts(«apart ? comm::Axes{comm::Axis::dp_replicate} : comm::Axes{}»)",
  "comm::Axes{}", "communication_hooks_tests LocalSgd.ShardGroupsHaveNormsOfTheirOwn")
F("a stretch of a box lies in the box", "src/run_state/holdings.cpp", "part.box.offsets[dim] += «slice.corner[dim]»;", "0",
  "engines_tests Slices.LieInFilesWhereTheyLieInTensors")
F("own pieces are compared by their boxes", "src/run_state/own_pieces.cpp",
  "numbers.insert(numbers.end(), «slice.corner.begin()», slice.corner.end());", "slice.corner.end()",
  "engines_tests Engines.OwnPiecesOfOtherBoxes")
F("the largest of all pieces is the infinity norm", file, "largest ? «Reduction::max» : Reduction::sum, 1.0)",
  "Reduction::sum", "fsdp_features_tests FsdpFeatures.ClipsByTheNormOfTheWhole")
file = "src/run_state/checkpoint_folders.cpp"
F("load_state passes over what is not complete", file, "if («lacking.empty()») { if (!passed_over", "true",
  c + "CheckpointTest.ACheckpointThatLacksSomethingIsPassedOverByName")
F("used folders lose what is not saved again", file, "kind == CheckpointKind::run   ? «of_run»",
  "of_distributed", "communication_hooks_tests LocalSgd.ACheckpointAfterItHasNoneOfItsStates")
F("main_process_first", "src/state/partial_state.cpp", "return first_then_others(«is_main_process()»);",
  "!is_main_process()", r + "WhoAmIAndWhoGoesFirst")

# ---- profiler
file, p = "src/profiler/profile.cpp", "profiler_tests Profile."
F("ProfileKwargs::activities", file, "chosen_activities(«self.kwargs.activities»)", "std::nullopt",
  p + "RefusesWhatItCannotDo")
F("ProfileKwargs::schedule_option", file,
  "«if (self.kwargs.schedule_option) self.schedule = profiler::parse_schedule(*self.kwargs.schedule_option);»", "",
  p + "SchedulesRecordWhatPyTorchsRecord")
F("ProfileKwargs::on_trace_ready", file, "|| !now) && «kwargs.on_trace_ready»)", "std::function<void(Profile&)>()",
  p + "SchedulesRecordWhatPyTorchsRecord")
F("ProfileKwargs::record_shapes", file, "KINETO, «kwargs.record_shapes» || kwargs.with_flops", "true", p + "RecordsWhatIsAskedForAndNoMore")
F("ProfileKwargs::profile_memory", file, "kwargs.with_flops, «kwargs.profile_memory», kwargs", "true",
  p + "RecordsWhatIsAskedForAndNoMore")
F("ProfileKwargs::with_stack", file, "«kwargs.with_stack», kwargs.with_flops", "false", p + "StacksAndModulesOfTorchScript")
F("ProfileKwargs::with_flops", file, "kwargs.with_stack, «kwargs.with_flops», kwargs", "true",
  p + "RecordsWhatIsAskedForAndNoMore")
F("ProfileKwargs::with_modules", file, "kwargs.with_flops, «kwargs.with_modules»)", "false",
  p + "StacksAndModulesOfTorchScript")
s = "profiler_tests ProfileStacks."
F("with_stack and with_modules in C++", file, "if («kwargs.with_stack || kwargs.with_modules») native_stacks", "false",
  s + "OperatorsSayWhichFunctionsCalledThem")
F("stacks in traces", file,
  "«if (!impl_->call_sites.calls.empty()) profiler::add_call_sites(file, impl_->call_sites);»", "", s + "TracesHaveThem")
stacks = "src/profiler/native_stacks.cpp"
F("stacks only where they are asked for", stacks, "if («stacks_») site.stack", "true",
  s + "ModulesAreTheClassesWhoseForwardCalled")
F("modules in C++", stacks, "if («modules_» && !frame", "false", s + "ModulesAreTheClassesWhoseForwardCalled")
F("frames of LibTorch are left out", stacks, "if (!function || «tells_nothing(*function)») return", "false",
  s + "OperatorsSayWhichFunctionsCalledThem")
F("stacks of an earlier recording", stacks, "«all.calls.clear(); all.different.clear();»", "",
  s + "EachRecordingHasItsOwn")
F("backwards have modules", "src/profiler/events.cpp", "«events[i].module_hierarchy = site.modules;»", "",
  s + "ModulesAreTheClassesWhoseForwardCalled")
F("ProfileKwargs::output_trace_dir", file, "if («!self.kwargs.output_trace_dir» || !self.recording) return;", "true",
  p + "TheAcceleratorWritesTheTraceOfItsRank")
file, p = "src/profiler/memory_timeline.cpp", "profiler_tests MemoryTimeline."
F("ProfileProcess::storages", "src/profiler/profile.cpp", "if («kwargs.profile_memory && process.storages») storages", "false",
  p + "SaysWhatATrainingsMemoryIsFor")
F("gradients in memory timelines", file, "if («node && op->name_ == \"torch::autograd::AccumulateGrad\"» &&", "false",
  p + "SaysWhatATrainingsMemoryIsFor")
F("activations in memory timelines", file, "«follow_parameters();»\n    for", "", p + "IsPyTorchsOfTheSameOperators")
file, p = "src/profiler/table.cpp", "profiler_tests Profile.TablesArePyTorchsToTheLetter"
F("ProfileTableOptions::sort_by", file, "if («options.sort_by») {", "std::optional<std::string>()", p)
F("ProfileTableOptions::row_limit", file, "if (printed == «options.row_limit») break;", "100", p)
F("ProfileTableOptions::max_src_column_width", file, "static_cast<size_t>(«options.max_src_column_width»)", "75", p)
F("ProfileTableOptions::max_name_column_width", file, "name_text(row->key, «options.max_name_column_width»)", "55", p)
F("ProfileTableOptions::max_shapes_column_width", file, "static_cast<size_t>(«options.max_shapes_column_width»)", "80", p)
F("ProfileTableOptions::header", file, "if («options.header») text", "std::optional<std::string>()", p)
F("ProfileTableOptions::top_level_events_only", file, "if («options.top_level_events_only» && !row->top_level) continue;",
  "false", p)
F("ProfileTableOptions::time_unit", file, "return time_text(us, «options.time_unit»); };", "std::optional<std::string>()", p)
p = "profiled_ranks_tests ProfiledRanks."
file, s = "src/profiler/run_profile.cpp", p + "TheEnvironmentAsksForSomeSteps"
w = p + "TheEnvironmentSaysWhatIsRecorded"
F("ACCELERATE_PROFILE_DIR", file, "if («!asked()» || current", "true", p + "TheEnvironmentAsksForAll")
F("ACCELERATE_PROFILE_ACTIVE", file, ".schedule_option = «schedule()»,", "std::optional<std::map<std::string, int64_t>>()", s)
F("ACCELERATE_PROFILE_RECORD_SHAPES", file, ".record_shapes = «flag(\"ACCELERATE_PROFILE_RECORD_SHAPES\")»", "false", s)
F("ACCELERATE_PROFILE_MEMORY", file, ".profile_memory = «flag(\"ACCELERATE_PROFILE_MEMORY\")»", "false", s)
F("ACCELERATE_PROFILE_STACK", file, ".with_stack = «flag(\"ACCELERATE_PROFILE_STACK\")»", "false", w)
F("ACCELERATE_PROFILE_FLOPS", file, ".with_flops = «flag(\"ACCELERATE_PROFILE_FLOPS\")»", "false", w)
F("ACCELERATE_PROFILE_MODULES", file, ".with_modules = «flag(\"ACCELERATE_PROFILE_MODULES\")»", "false", w)
F("profiles of programs go first", "src/accelerator/accelerator.cpp", "«if (impl_->run_profile) impl_->run_profile->give_way();»",
  "", p + "AProgramsOwnProfileGoesFirst")
F("operators of other threads", "src/profiler/other_threads.cpp",
  "return «std::make_unique<RunningOperator>()»;", "nullptr",
  p + "OperatorsOfWorkersAreSeen")
F("offsets of clocks", "src/comm/clock_offset.cpp", ".offset_ns = theirs - «(asked + half)»", "0", p + "ClocksAreCompared")
F("bytes of batches in traces", "src/data/prepared_loader.cpp", "if («loaded && trace::recording()») span.set_bytes",
  "false", p + "DataCheckpointsAndSteps")
F("topics of spans", "src/observe/trace.cpp", "if («!innermost») return Label", "true", p + "ShardsAreGatheredAndGradientsReduced")
F("lanes of communication", "src/profiler/trace_file.cpp", "if («event.lane == trace::Lane::communication») {", "false",
  p + "ShardsAreGatheredAndGradientsReduced")
# ---- logging and debugging aids
file = "src/logging/logger.cpp"
l = "logging_tests Logging."
lr = "logging_tests LoggingRanks."
F("LogOptions::main_process_only", file, "if («!options.main_process_only || state.is_main_process()») say();", "true",
  lr + "OnlyTheMainProcessSpeaksUnlessAllShall")
F("LogOptions::in_order", file, "if («!options.in_order») {", "true", lr + "InOrderEachSpeaksAfterTheOneBefore")
F("warning_once", file, "if («is_new(name_, text)») warning", "true", l + "OnceIsOnceForEachLoggerAndText")
F("a level of get_logger is the root's", file, "«logs::set_level(\"\", log_level_from_string(*wanted));»", "",
  l + "ALevelOfGetLoggerIsTheRootsToo")
file = "src/utils/log.cpp"
F("levels of dotted names", file, "name = «dot == std::string_view::npos» ? std::string_view()", "true",
  l + "LevelsGoDownTheDottedNames")
F("ACCELERATE_LOG_LEVEL", file, "return level >= «or_default(level_of_environment)»",
  "std::optional<LogLevel>()", l + "TheEnvironmentSaysTheLevel")
F("set_log_sink", file, "if («sink != nullptr») return (*sink)(record);", "false", l + "ASinkTakesTheDefaultOnesPlaceUntilItGoes")
F("ACCELERATE_LOG_RANK", "src/utils/log_output.cpp", "if («form.rank») payload +=", "false",
  l + "TheRankIsSaidWhenAskedFor")
F("LibTorch's warnings in the log", file, "if («typeid(present) == typeid(c10::WarningHandler)»)", "false",
  l + "WarningsOfLibTorchAndOfTheLibraryGoTheSameWay")
d = "debugging_tests "
F("other signs of memory that is full", "src/memory/memory.cpp",
  "if («text.find(sign) != std::string_view::npos») return true;",
  "std::string_view(sign) == \" out of memory.\" && text.find(sign) != std::string_view::npos",
  "utils_tests Memory.KnowsWhatASmallerBatchCures")
F("release_memory gives memory back", "src/memory/memory.cpp", "«give_freed_memory_back();»", "",
  d + "LogMemory.ReleasedObjectsAreEmptyAndTheirMemoryIsGivenBack")
g = "generate_cli_tests Generate.KeepsLittleBesideTheWeightsAfterALongPrompt"
F("programs give pages of loading back", "programs/generate.cpp", "«accelerate::give_loading_pages_back();»", "", g)
F("a prompt's activations go back", "src/models/generation/generate.cpp",
  "if (prompts && «tokens.numel() >= kManyTokens») give_freed_memory_back();", "false", g)
F("clear_environment", "src/utils/clear_environment.cpp", "before_(all_variables()) { «::clearenv()»; }", "0",
  d + "Environment.IsEmptyForAScopeAndAsBeforeAfterIt")
F("stacks in the hang report", "src/observe/hang_report.cpp", "for (const auto& stack : «thread_stacks::take(kSignal)»)",
  "std::vector<thread_stacks::ThreadStack>()", d + "HangReport.HasTheStacksOfAllThreadsAlsoOfBlockedOnes")
F("collectives in the hang report", "src/comm/faults.cpp", "for (const auto& [key, group] : «progress->status().groups»)",
  "decltype(RankStatus::groups)()", d + "HangReportRanks.SaysWhichCollectiveARankIsIn")
c = "logging_cli_tests "
F("in_order waits for the launcher", "src/logging/logger.cpp", "say(); «logs::wait_for_reader();»", "",
  c + "LoggingLaunched.InOrderIsTheOrderAtTheEndOfTheLauncher")
F("SIGUSR2 spares what has no handler", "src/launch/supervise/supervisor.cpp", "if («handles(pid, SIGUSR2)»)", "true",
  c + "HangReportLaunched.WhatHasNoHandlerIsSpared")
F("stdout is buffered by lines under the launcher", "src/state/lines_at_once.cpp",
  "if («lines_are_wanted()») std::setvbuf", "false", "logging_cli_tests OutputLaunched.IsNotLostByAKill")
F("std::cout apart from stdout is not kept back", "src/state/lines_at_once.cpp",
  "if («lines_are_wanted()» && !dynamic_cast", "false", "logging_cli_tests OutputLaunched.IsNotLostByAKill")
F("the first of several ranks has the terminal", "src/launch/supervise/supervisor.cpp",
  "return interactive_ && «local_rank == 0»;", "false",
  "launch_cli_tests Launch.TheFirstOfSeveralProcessesHasTheTerminal")
F("launch: torchrun's variables", "src/launch/job/settings.cpp",
  'const auto machines = «host.variable("PET_NNODES")»;', "std::optional<std::string>()",
  "launch_tests LaunchEnvironment.TorchrunsVariablesAct")
F("bars write lines into logs", "src/utils/progress.cpp", "«impl_->say();»", "",
  "utils_tests Progress.OneLineAtTheEndWhereThereIsNoTerminal")
F("models::save_pretrained of other weights", "src/models/weights.cpp",
  'save_safetensors(folder / "model.safetensors", «weights», {{"format"', "named_weights(module)",
  "bert_tests Bert.OtherWeightsAreSavedInPlaceOfItsOwn")
F("launch: a file for one process starts one", "src/launch/job/job.cpp",
  "if («is_for_one_process(job)» && job.world_size > 1)", "false",
  "launch_tests LaunchEnvironment.NumbersInFilesForOneProcessStartOne")
F("launch: a rank of mpirun's is one process", "src/launch/job/settings.cpp", "place_ = «place_in_mpi(host)»;",
  "std::optional<LaunchPlace>()", "launch_tests LaunchEnvironment.InsideMpirunALauncherTakesItsRanksPlace")
F("launch: one process is told its rank", "src/launch/job/job.hpp", "return distributed() || «(starter == Starter::launcher && (launcher == Launcher::torchrun || launcher == Launcher::deepspeed))»;",
  "false", "launch_tests LaunchEnvironment.OneProcessOfTorchrunsKindIsToldItsRank")
F("launch: sections of other engines have no say", "src/launch/job/settings.cpp",
  "if («uses_section(section)») take_section", "true",
  "commands_tests Commands.SectionsOfConfigFilesMayHoldWhatNobodyReads")
F("launch: a busy port gives way", "src/launch/launch.cpp", "else if («alone && is_port_busy(job.main_port)») say",
  "false", "launch_cli_tests Launch.FreePortIsChosenAlsoForABusyOne")
F("launch: --tee marks lines of its streams", "src/launch/supervise/rank_streams.cpp",
  ".prefix = «logs.marked & kind» ?", "false", "launch_cli_tests Launch.LinesAreMarkedAsTorchrunDoes")
F("launch: torchrun's words in --rdzv_conf", "src/launch/job/settings.cpp", "if («key == word») take", "false",
  "commands_tests Commands.TorchrunsWordsInRdzvConf")
F("launch: the strategy of FSDP 1 under its other name", "src/launch/job/settings.cpp",
  "if («other == ValueSource::fallback || source > other»)", "false",
  "commands_tests Commands.TheStrategyOfFsdp1ActsUnderBothNames")
F("strangers are led away from the store", "src/network/guarded_port.cpp",
  "const bool ruled = «admit_only(result.way_->strangers, result.way_->source_ports)»;", "false",
  "network_tests GuardedPort.LetsThisUserThroughAndNobodyReachesTheServerOtherwise")
F("connections of this host come from 127.0.0.1", "src/network/guarded_port.cpp",
  "(«attempt < kFromLoopback» ? 0", "false",
  "network_tests GuardedPort.LetsThisUserThroughAndNobodyReachesTheServerOtherwise")
F("scopes that an operator seems to end in are held by it", "src/timeline/activity.cpp",
  "while («!open.empty() && open.back().end < event.end») open.pop_back();", "false",
  "timeline_tests Activity.AnOperatorThatSeemsToEndWithinTheNextScopeDoesNotHoldIt")
F("attention run dry keeps scores", "src/residency/meta_kernels.cpp", "«add_attention(registration);»", "",
  "dry_run_tests DryRun.AttentionKeepsNoScores")
F("the order of buckets is a collective of the group", "src/parallel/averaging/averaging.cpp",
  "«group->guard_collective(\"order of buckets\", [&] { reducer->rebuild_buckets(); });»",
  "reducer->rebuild_buckets();",
  "ddp_habits_tests DdpHabits.ARankThatAgreesOnBucketsIsSeenThere")
F("the monitor's key", "src/launch/monitor/monitor.cpp", "asked = «keyboard_->read().find('h') != std::string::npos»;",
  "false", c + "HangReportLaunched.AKeyOfTheMonitorAsks")
F("the terminal's modes outlive the launcher", "src/launch/system/warden.cpp", "if («has_modes») ::tcsetattr", "false",
  c + "HangReportLaunched.TheTerminalIsGivenBack")

F("quantize copies what links to folders lead to", "src/bigmodel/quantize_to_folder.cpp",
  "if («entry.is_symlink(error)» && fs::is_directory", "false", "quantize_files_tests QuantizeFiles.LinksLeadNowhereElse")
F("quantize copies what files link to", "src/bigmodel/quantize_to_folder.cpp",
  "«check_inside(kOperation, from, file);»", "", "quantize_files_tests QuantizeFiles.LinksLeadNowhereElse")
F("quantize uses folders that others made", "src/bigmodel/quantize_to_folder.cpp",
  "is_new = «fs::create_directory(temporary_, error)»;", "(fs::create_directory(temporary_, error), true)",
  "quantize_files_tests QuantizeFiles.AFolderThatWasMadeInAdvanceIsNotUsed")
F("errors of commands are plain text", "programs/command.hpp", "name, «accelerate::plain_lines(error.what()).c_str()»);",
  "error.what()", "quantize_cli_tests Quantize.MistakesAreNamed")
F("what an MLflow server says is plain text", "src/trackers/mlflow_server.cpp", "plain_text(code), «plain_lines(text)»",
  "text", "external_trackers_tests MlflowTracker.WhatTheServerSaysReachesNoTerminalRaw")
F("sizes whose strides are no numbers", "src/trackers/json_lines.cpp",
  "|| «__builtin_mul_overflow(strides, std::max<int64_t>(*n, 1), &strides)»", "false",
  "trackers_tests JsonLines.DamageIsSaidWithItsLine")
F("a last line that is whole counts", "src/trackers/json_lines.cpp",
  "if (end == text.size() && «parse_json<Json>(written).is_discarded()»)", "true",
  "trackers_tests JsonLines.AreAppendedAndATornLineIsLeftOut")
F("fields of a newer PEFT are named", "src/adapters/lora_config.cpp", "«warn_of_unknown(fields, where);»", "",
  "adapters_tests AdapterFiles.FieldsOfANewerPeftAreNamed")
F("generate says what a temperature is", "programs/generate.cpp", 'given.text("temperature") && «config.temperature < 0»',
  "false", "generate_cli_tests Generate.NumbersAreReadWhole")
F("generate's options that have no place", "programs/generate.cpp", "{ «refuse_without_effect(given);»", "",
  "generate_cli_tests Generate.OptionsWithoutEffectAreRefused")
F("generate's options without effect", "programs/generate.cpp", "«refuse_without_effect(config, given);»", "",
  "generate_cli_tests Generate.OptionsWithoutEffectAreRefused")
F("the hang report ends with what the process does", "src/observe/hang_report.cpp", "if («!does.empty()») text +=", "false",
  "debugging_tests HangReport.HasTheStacksOfAllThreadsAlsoOfBlockedOnes")
F("files of an offload folder lie in it", "src/bigmodel/offload.cpp",
  "folder, file_of(folder, name).filename()); «check_inside(what, folder, file);»", "",
  "bigmodel_tests OffloadFolder.SaysWhatIsWrong")
F("replay stays in its folder", "programs/track.cpp", "«check_name(project);»", "",
  "external_trackers_tests PythonTracker.ReplayStaysInItsFolder")
F("MLflow's password is for its server", "src/trackers/mlflow_server.cpp",
  ".authorized = «origin_of(url) == origin_of(uri_)»", "true",
  "external_trackers_tests MlflowTracker.OnlyItsOwnServerGetsThePassword")

F("device maps: keys of nothing are passed over", "src/bigmodel/loading.cpp",
  "«(holder && *holder != where ? unknown : empty)» += text;", "unknown",
  "bigmodel_tests LoadCheckpoint.KeysOfPythonsMapsForModulesWithoutWeightsArePassedOver")
F("device maps: keys within others are errors", "src/bigmodel/loading.cpp",
  "if («other.empty() || key.starts_with(other + \".\")») holder = &there;", "false",
  "bigmodel_tests LoadCheckpoint.KeysOfPythonsMapsForModulesWithoutWeightsArePassedOver")
# ---- live figures and summaries
m = "monitor_cli_tests MonitorFigures."
F("report_tokens", "src/observe/step_report.cpp", "«tokens_of_program.fetch_add(tokens, std::memory_order_relaxed);»", "",
  m + "AreThoseOfTheProgramWhereItSaysThem")
F("report_flops", "src/observe/step_report.cpp", "«flops_of_program.fetch_add(flops, std::memory_order_relaxed);»", "",
  m + "AreThoseOfTheProgramWhereItSaysThem")
F("launch --monitor_peak_flops", "src/launch/monitor/monitor.cpp",
  'if («!s["monitor_peak_flops"].is_null()») peak_flops_', "false", m + "TokensOperationsAndWaitsOfATraining")
F("operations of a token", "src/model/flops.cpp", "if («table» || counted) continue;", "false",
  m + "TokensOperationsAndWaitsOfATraining")
F("waiting for data", "src/data/prepared_loader.cpp", "waiting(«RunCount::data_wait_ns»);", "RunCount::tensors_in_place",
  m + "TokensOperationsAndWaitsOfATraining")
F("waiting for the last bucket", "src/parallel/gradient_hook.cpp",
  "«counts::add(RunCount::comm_wait_ns, take_wait_since_last_bucket());»", "", m + "TokensOperationsAndWaitsOfATraining")
F("SummaryOptions::depth", "src/accelerator/model_summary_text.cpp",
  "if («options.depth && module.depth > *options.depth») continue;", "false", "summary_tests Summary.TheTableSaysItToPeople")
F("values on their way to codes have memory of their own", "src/bigmodel/few_bits.cpp",
  "floats = «empty_in_huge_pages(value.sizes(), at::kFloat)»;", "at::empty(value.sizes(), at::kFloat)",
  "quantize_tests Quantize.ValuesThatAreEncodedLeaveNoHolesInMemory")
F("numbers that go to disk are described in the dtype that they get", "src/bigmodel/weight_sources.cpp",
  ".bytes = weight.bytes(), .dtype = «weight.target.dtype»,", "weight.target.tensor.scalar_type()",
  "quantize_tests QuantizeOperators.NumbersOnDiskOfAModelWithValuesAreInTheDtypeThatTheyGet")
F("an offload folder from before is compared", "src/bigmodel/weight_sources.cpp",
  "if (!options_.offload_index) «check_same_values(caller_, weight, file, folder);»", "",
  "bigmodel_tests Dispatch.AFolderWithOtherValuesThanTheModelIsRefusedByName")
# ---- limits on codes
file = "src/bigmodel/dispatch.cpp"
limit = "generate_cli_tests Generate.ALimitHoldsForEachEncoding"
stay = "generate_cli_tests Generate.CodesStayCodesWithADtypeAMapAndALimit"
F("codes without room come and go", file, ".comes_and_goes = «!weight.codes_stay»", "false", limit)
F("what stays is to fit into a limit", "src/bigmodel/budget.cpp", "if («!limit || resident <= *limit») return;", "true", limit)
F("maps count codes by their bytes", "src/bigmodel/weight_sources.cpp", "«count_bytes(tree, bytes_by_name(weights));»", "",
  "quantize_tests QuantizeFiles.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("vectors beside codes stay", "src/bigmodel/weight_sources.cpp", "place->is_disk() && «weights[i].target.tensor.dim() <= 1») place", "false", stay)
F("codes stay codes with a limit", "programs/generate.cpp", "options.keep_codes = «!at::hasCUDA()»;",
  "!options.max_memory", stay)
file = "src/models/auto_load.cpp"
a = "quantize_files_tests AutoLoad."
F("codes that are made have room on disk", file, ".offload_folder = «room ? room->folder() : fs::path()»",
  "fs::path()", "generate_cli_tests Generate.CodesThatAreMadeGoToDiskAndLeaveNothingThere", a + "PutsWeightsWhereTheyAreWanted")
F("AutoLoadOptions::dtype", file, "«plan.dtype = given ? *given : dtype_of_files(checkpoint, its_own);»", "",
  a + "TakesTheDtypeOfTheFiles")
F("AutoLoadOptions::device_map", file, "if («!options.device_map») {", "true", a + "PutsWeightsWhereTheyAreWanted")
F("AutoLoadOptions::max_memory", file, ".max_memory = «options.max_memory»,\n                                         .no_split",
  "std::nullopt", a + "PutsWeightsWhereTheyAreWanted")
F("AutoLoadOptions::quantization", file, "«plan.quantization = options.quantization;»", "", a + "PutsWeightsWhereTheyAreWanted")
F("AutoLoadOptions::keep_codes", file, ".keep_codes = «options.keep_codes»,", "false", a + "PutsWeightsWhereTheyAreWanted")
F("AutoLoadOptions::exact_products", file, "options.keep_codes && «options.exact_products»,", "false",
  a + "PutsWeightsWhereTheyAreWanted")
F("AutoLoadOptions::exact_products of encoded weights", file, "«config.exact_products |= options.exact_products;»", "",
  a + "PutsWeightsWhereTheyAreWanted")
F("folders in few bits are loaded as such", file, "plan.quantization = «own_quantization(checkpoint)»;", "std::nullopt",
  a + "ReadsWhatQuantizeWrites")
F("a loaded model looks whether its weights lie where they were put", file,
  "«if (model.causal) model.causal = placed(std::move(model.causal), dispatched);»", "", a + "PutsWeightsWhereTheyAreWanted")
file = "src/accelerator/belonging.cpp"
m = "quantized_models_tests QuantizedModels.AreTrainedWithAnAdapterOrInAPart"
F("training around weights in few bits is refused", "src/accelerator/accelerator.cpp",
  "«refuse_training_around_codes(impl_->run);»", "", m)
F("adapters train around weights in few bits", file, "|| «detail::has_adapter(model->model)») continue", "false", m)
F("a part is trained around weights in few bits", file, "|| !any || «!all_else» ||", "false", m)
F("what has gone says so without LibTorch's stack", "src/residency/touch.cpp",
  "«Member::refuse_gone(tensor);»", "", "residency_tests ResidencyStates.AMemberOutlivesItsResidencyWithAnErrorThatSaysSo")
F("a dry run of mpirun's without its hostfile", "src/launch/starters/mpirun.cpp",
  "if («settings.on(\"dry_run\") && !is_there(file)») return", "false", "commands_tests Commands.MpirunGetsTheWordsOfItsKind")
F("a dry run of mpirun's says who starts what", "src/launch/launch.cpp",
  "if («job.starter == Job::Starter::mpirun») print_started_by(", "false", "commands_tests Commands.MpirunGetsTheWordsOfItsKind")
# ---- DeepSpeed's machines
file = "src/launch/job/deepspeed_machines.cpp"
d = "commands_tests DeepSpeedMachines."
first = d + "AllOthersAreStartedByThisLauncherInTheHostfilesOrder"
nossh, words, variables = (d + name for name in ("WithNosshEachMachineTakesItsSlots", "MpirunAndSrunGetItsWords",
                                                 "VariablesOfDeepspeedEnvReachTheMachines"))
F("deepspeed: C++ programs are started without its program", "src/launch/job/job.cpp",
  "if (deepspeed_starts_machines(s) && «!is_python_program(job.command, s, host)») return", "false", first)
F("deepspeed: Python programs are started by its program", "src/launch/job/program_file.cpp",
  'if («settings.on("module") || program.extension() == ".py" || program.filename().string().starts_with("python")») '
  "return true;", "false", d + "PythonProgramsAreStartedByItsOwn")
F("deepspeed: a script may name Python", "src/launch/job/program_file.cpp",
  'return first && («first->starts_with("#!") ? first->find("python") != std::string::npos : !is_executable(program)»);',
  "false", d + "PythonProgramsAreStartedByItsOwn")
F("deepspeed_inclusion_filter", file, 'include = «s.text("deepspeed_inclusion_filter")»,', "std::string()", first)
F("deepspeed_exclusion_filter", file, 'exclude = «s.text("deepspeed_exclusion_filter")»,', "std::string()", first)
F("deepspeed: num_processes of a machine's slots", file, "machine.slots.resize(«each»);", "machine.slots.size()", first)
F("deepspeed: --remote_shell in place of pdsh", file,
  'job.remote_shell = «s.source("remote_shell") > ValueSource::fallback» ?', "false", first)
F("deepspeed: all machines are told their slots", file, "machine.chosen_slots = «true»;", "false", first)
F("deepspeed: the job's own variables are stronger", file,
  "«for (const auto& [own, value] : protocol(job.settings, host)) job.exported.erase(own);»", "", variables)
F("deepspeed: ranks have no numbers of a file's", file,
  'for (const char* own : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) '
  "«job.exported.erase(own);»", "", words)
F("deepspeed: DS_ENV_FILE", file, 'const std::string name = «host.variable("DS_ENV_FILE")».value_or(',
  "std::optional<std::string>()", variables)
F("deepspeed: variables of MVAPICH", file, 'if («launcher != "mvapich"») return;', "true", words)
F("deepspeed: one command starts all machines", file, "require(«rank == 0»,", "true", d + "Mistakes")
F("deepspeed: a place among the hostfile's machines", file, "job.first_rank = «all_slots({job.remote.begin(), job.remote.begin() + rank})»;",
  "0", nossh)
F("deepspeed: nossh's devices", "src/launch/job/environment.cpp", "if («!job.devices.empty()») env", "false", nossh)
F("deepspeed: where ranks of mpirun's meet", "src/launch/job/environment.cpp", "if («!job.remote.empty()») add_for_machines",
  "false", words)
F("deepspeed: variables reach mpirun's ranks", "src/launch/job/environment.cpp",
  "«env.insert(job.exported.begin(), job.exported.end());»", "", words)
F("deepspeed: variables reach launchers", "src/launch/starters/remote.cpp",
  "for (const auto& [name, value] : «job.exported») line +=", "std::map<std::string, std::string>()", variables)
F("deepspeed: launchers start no others", "src/launch/starters/remote.cpp",
  "if («job.remote.size() > 1 && s.launcher() == Launcher::deepspeed») add(", "false", first)
F("deepspeed: an mpirun of the launcher's kind", "src/launch/starters/mpirun.cpp", "if («is_open_mpi(path) == open_mpi») return",
  "true", words)
F("deepspeed: variables of libraries reach Open MPI's ranks", "src/launch/starters/deepspeed.cpp",
  "if («is_passed_on(name) && !variables.contains(name)») add", "false", words)
F("deepspeed: srun's machines by their names", "src/launch/starters/deepspeed.cpp", "if («filtered») words.insert", "false",
  words)
F("deepspeed: srun's GPUs", "src/launch/starters/deepspeed.cpp",
  'else if («s.source("num_processes") > ValueSource::fallback && !s.computes_on_cpu()») words.insert', "false", words)
F("deepspeed: another machine's port may be busy here", "src/launch/launch.cpp",
  "if (job.needs_port() && «job.remote.empty()»)", "true", d + "AnotherMachinesPortMayBeBusyHere")
F("deepspeed: a step of Slurm's has its machines", "src/launch/job/settings.cpp",
  'set("main_process_port", task->port, ValueSource::environment); '
  '«set("deepspeed_multinode_launcher", "standard", ValueSource::environment);»', "",
  d + "AreThereWhereOthersHaveStartedThem")
F("deepspeed: machines of torchrun's variables are there", "src/launch/job/settings.cpp",
  'take("PET_RDZV_BACKEND", "rdzv_backend", ValueSource::file); '
  '«set("deepspeed_multinode_launcher", "standard", ValueSource::environment);»', "",
  d + "AreThereWhereOthersHaveStartedThem")
F("deepspeed: flags without effect are said", "src/launch/job/remarks.cpp",
  "if («launcher_ == Launcher::deepspeed && !machines_by_deepspeed»)", "false", d + "WhatHasNoEffectIsSaid")
F("launch: slots that a filter chose are the devices", "src/launch/job/hostfile.cpp",
  "host.chosen_slots = «is_named && !whole»;", "false", "machines_fault_tests Hostfile.FiltersChooseMachinesAndSlots")
F("choices in other letters", "cli/arguments.cpp", "«return void(text = choice);»", "{}",
  "commands_tests Commands.WhatTheDocumentationCallsSettingsIsRead")
F("generate finds names of the cache", "programs/generate.cpp", "given = «accelerate::bigmodel::local_model(model)»;",
  "model", "generate_cli_tests Generate.FindsModelsInTheHubsCacheByName")
F("quantize finds names of the cache", "programs/quantize.cpp", "quantize(«accelerate::bigmodel::local_model(words[0])», out",
  "words[0]", "generate_cli_tests Generate.FindsModelsInTheHubsCacheByName")
# ---- products on codes
file = "src/codes/kernels/linear.cpp"
k = "codes_kernels_tests CodesKernels."
F("LinearOptions::exact", file, "= «options.exact» || !x.is_cpu() || !kernels::has_fast_instructions() ? nullptr", "false", k + "ExactIsTheProductWithDecodedWeights")
F("LinearOptions::outlier_threshold", file, "return «options.outlier_threshold > 0» ?", "false",
  k + "OutliersKeepTheirNumbers")
F("gradients come back through codes", "src/codes/kernels/frozen.cpp",
  'exact_product(gradients[0], weight, «!context->saved_data["back"].toBool()»)', 'context->saved_data["back"].toBool()',
  k + "GradientsAreThoseOfDecodedWeights", "quantize_tests QuantizeOperators.GradientsFlowThroughFrozenCodes")
F("gradients through codes have gradients", "src/codes/kernels/frozen.cpp",
  "return «wants_gradient(x, {})» ? FrozenProduct::apply", "false", k + "GradientsAreThoseOfDecodedWeights",
  "quantize_tests QuantizeOperators.GradientsHaveGradients")
F("exact products: sums in parts", "src/codes/kernels/exact.cpp", "if (summed > 0) «to.addmm_(from, by)»;",
  "at::mm_out(to, from, by)", k + "ExactProductsComeInPanelsBothWays")
F("exact products: codes go back into their own order", "src/codes/kernels/exact.cpp",
  "if (!back && !plain_of(w)) «drop_packed(w)»;", "static_cast<void>(0)", k + "ExactProductsComeInPanelsBothWays")
F("whole numbers: two groups of rows", "src/codes/kernels/product_loops.hpp", "block + «g» * p.group_bytes", "0",
  k + "WholeNumbersAreMultipliedExactly")
q = "quantized_models_tests QuantizedModels."
F("LLM.int8(): inputs in any order of memory", "src/codes/llm_int8.cpp",
  "const at::Tensor rows = «x.reshape({-1, k}).contiguous()»;", "x.reshape({-1, k})", q + "TakeInputsOfAnyStrides")
F("operators on codes write where they are told", "src/residency/encoded.cpp",
  "!call.facts.needs_bytes || «call.facts.writes != 0» ||", "false", q + "WriteWhereOperatorsAreTold")
F("products in 8 bits leave operators that write where they are told", "src/precision/fp8/handler.cpp",
  "!places || «call.facts.writes != 0»", "false", "fp8_tests FP8.LeavesOperatorsThatWriteWhereTheyAreTold")
F("codes are multiplied with inputs of their width alone", "src/codes/kernels/exact.cpp",
  "if («x.dim() == 0 || x.size(-1) != w.columns()») raise", "false", q + "RefuseInputsOfAnotherWidth")
F("biases that are broadcast", "src/residency/encoded.cpp",
  "if (has_bias && («bias->dim() != 1 || bias->size(0) != weight.codes.rows()»))", "false",
  q + "AddBiasesThatLibTorchBroadcasts")
F("products on codes choose their types themselves", "src/residency/encoded.cpp",
  "next.compute(«TorchLayers::no_autocast», [&]() -> OptionalTensor", "TorchLayers::program",
  q + "ChooseTypesThemselvesUnderAutocast")
F("codes are saved as values", "src/checkpoint/model_state.cpp", "return «residency::encoded_weight(tensor) != nullptr» ?",
  "false", q + "AreSavedAsOrdinaryTensors")
F("decoded codes are said in a line", "src/accelerator/checkpointing.cpp",
  "if («in_few_bits > 0» && is_main_process())", "false", q + "AreSavedAsOrdinaryTensors")
F("values are looked at before a model's own are taken away", "src/bigmodel/few_bits.cpp",
  "if (!checkpoint) «check_values(weight.name(), target.tensor, target.dtype, *how);»", "",
  q + "KeepTheirValuesWhereQuantizingIsRefused")
F("adapters stay with weights whose values are replaced", "src/adapters/lora_handler.cpp",
  "known = «registry().of(tensor)») watch", "static_cast<LoraLayer*>(nullptr)", q + "KeepTheAdaptersThatTheyHadBefore")
F("BnbQuantizationConfig::keep_in_fp32_modules of a folder", "src/bigmodel/quantize.cpp",
  "if («config.keep_in_fp32_modules.empty()») return config;", "true", q + "AreDescribedAsTheyAre")
F("a folder is described as its codes are", "src/bigmodel/quantize.cpp", "«check_description(model, config);»", "",
  q + "AreDescribedAsTheyAre")
F("AdamW8bitOptions of a group", "src/optim/adam8bit.cpp",
  "group.has_options() ? «merged(options_of(group), defaults)» : defaults", "defaults",
  "adam8bit_tests Adam8bitTest.GroupsHaveTheirOwnOptions")
F("FP8RecipeKwargs of another back end", "src/precision/fp8_kwargs.cpp", "«refuse_without_effect(kwargs);»", "",
  "fp8_accelerator_tests Fp8Settings.WhatContradictsIsRefused")
F("blocks without an inverse are zero", "src/codes/blockwise.cpp", "else if («!std::isfinite(inverse)») absmax = 0;",
  "absmax == 0", "codes_tests Codes.OfHardlyAnythingAreZero")
F("biases of other types", "src/codes/kernels/exact.cpp", "Bias(«bias->to(x.scalar_type())»)", "*bias",
  "codes_kernels_tests CodesKernels.TakeBiasesOfOtherTypes")
file = "src/codes/cuda/codes_on_gpu.cpp"
g = "codes_on_gpu_tests CodesOnGpu."
F("kernels of GPUs: rows that a list names", file, "if («indices.defined()»)", "false", g + "AreDecodedToTheBit")
F("kernels of GPUs: scales that are codes have an offset", file, "weight.offset = «codes.nested->offset»;", "0.0F",
  g + "AreDecodedToTheBit")
F("kernels of GPUs: scales of another number than a power of two", file,
  "scales = «plain_scales(codes)»;", "codes.nested->absmax.repeat({3})", g + "AreDecodedToTheBit")
F("kernels of GPUs: what begins at an odd address is copied", file,
  "return «std::bit_cast<uintptr_t>(whole.const_data_ptr()) % 16 == 0» ? whole", "true", g + "MayBeginAnywhere")
F("kernels of GPUs: rows of any length", file, "const bool in_units = «columns % kUnit == 0» &&", "true",
  g + "OfAnyShapeAreDecodedToTheBit")
F("kernels of GPUs: the bias", file, ".bias = «added.defined()» ?", "false", g + "AreMultipliedWithoutBeingDecoded")
F("kernels of GPUs: many rows are for others", file, "«x.numel() / columns > kMostRows»)", "false",
  g + "LeaveToOthersWhatTheyHaveNoKernelFor")
file = "src/codes/kernels/packed_cache.cpp"
F("keep_once: the memory of the codes goes", file, "«cache.data = cache.scales = at::Tensor();»", "",
  k + "CodesThatAreKeptOnceAreTheSameInEitherOrder")
F("keep_once: the pages of a file go", file, "if («cache.in_file») give_pages_back", "false",
  k + "PagesOfAFileGoWhenItsCodesArePacked")
F("drop_packed of codes that are kept once", file, "const Codes plain = «once ? unpacked(codes) : Codes()»;",
  "Codes()", k + "CodesThatAreKeptOnceAreTheSameInEitherOrder")
F("one row goes through layers directly", "src/models/llama.cpp", "if («context.row && forward_row(hidden, context)»)",
  "false", "llama_tests Llama.OneRowGoesThroughLayersDirectlyUnlessSomebodyWatchesOperators")
F("a profile sees operators of one row", "src/models/direct_rows.cpp", "«!at::hasCallbacks()»", "true",
  "llama_tests Llama.OneRowGoesThroughLayersDirectlyUnlessSomebodyWatchesOperators")
# ---- summoned bytes
r = "fsdp_whole_tests FsdpWhole.SummonedWritesActAndAreLostWhenAskedTo"
file = "src/residency/residency.cpp"
F("what operators write to summoned bytes is lost", file, "if («member.unit().discards_ > 0») return;", "false", r)
F("ranks that keep nothing of what is summoned fetch nothing ahead", file,
  "pin(unit, /*writes=*/false, /*foretells=*/«writeback»);", "true", r)
# ---- layers that change when things happen
r = "engines_tests Engines."
F("backwards that run later average as they were asked to", "src/accelerator/training.cpp",
  "«engine->set_require_backward_grad_sync(asked);»", "", r + "BackwardsRunLater")
F("layers put off backwards", "src/parallel/engine.cpp", "{ «one.backward(next);» }", "next();", r + "BackwardsRunLater")
file = "src/optim/optimizer.cpp"
F("steps go from part to part", file, "[&](const at::Tensor& parameter) { return «wanted.contains(parameter.unsafeGetTensorImpl())»; });",
  "true", r + "OptimizersStepPartByPart")
F("what is in no part is stepped on last", file, "return «!in_parts.contains(parameter.unsafeGetTensorImpl())»;", "false",
  r + "OptimizersStepPartByPart")
F("layers hear of the states of a part", file,
  "if (part.hooks->after_part) «part.hooks->after_part(part.number, optim::states_of(*optimizer, part.parameters));»", "",
  r + "OptimizersStepPartByPart")
F("steps within backward are of what was asked for", file,
  "is_wanted = [&](const at::Tensor& parameter) { return «wanted.contains(parameter.unsafeGetTensorImpl())»; };", "true",
  r + "OptimizersStepWithinBackward")
# ---- shards in any home, by any wire
r = "homes_tests Homes."
file = "src/residency/homes/shard.cpp"
F("shards that lie elsewhere are written back", file, "if (!changes) return;\n    «own_.home->store(values);»", "",
  r + "ShardsLieInAnyHomeAndTravelByAnyWire")
F("what a lossy wire left alone stays exact", file, "kept.take_back(flat, «came»);", "at::Tensor()",
  r + "ShardsLieInAnyHomeAndTravelByAnyWire")
F("changes of shards that lie elsewhere are counted", file, "«++changes_;»", "",
  r + "ShardsLieInAnyHomeAndTravelByAnyWire")
F("neighbours get the messages of all", file, "came_ = «messages.narrow(0, near_->rank() * length, length)».clone();",
  "messages.narrow(0, 0, length)", r + "ShardsLieInAnyHomeAndTravelByAnyWire")
file = "src/residency/homes/wire.cpp"
F("blocks have a scale each", file, "at::amax(at::abs(numbers), «1», /*keepdim=*/true)", "at::IntArrayRef({0, 1})",
  r + "WholeNumbersOnTheWireAreOffByHalfTheirScale")
F("what is not finite is none in the whole block", file, "«scales.masked_fill_(at::isfinite(scales).logical_not_(), kNaN)»",
  "scales", r + "WholeNumbersOnTheWireAreOffByHalfTheirScale")
F("scales without an inverse", file, "at::gt(exact, «std::numeric_limits<float>::min()»)", "0.0",
  r + "WholeNumbersOnTheWireAreOffByHalfTheirScale")
# ---- codes in jobs and in checkpoints
r = "adapters_ranks_tests CodesRanks."
F("replicas take rank 0's codes", "src/parallel/averaging/averaging.cpp",
  "for (const Held& held : given) { if (held.stand_in) «held.stand_in->agree();» }", "",
  r + "ReplicasTakeThoseOfRank0")
F("codes of rank 0 are kept once where others were", "src/parallel/codes/codes.cpp",
  "«if (once) codes::keep_once(weight.codes);»", "", r + "ReplicasTakeThoseOfRank0")
F("ranks compare encodings", "src/parallel/verify_parameters.cpp",
  "if (const auto* weight = «residency::encoded_weight(tensor)»)", "static_cast<residency::EncodedWeight*>(nullptr)",
  r + "OtherEncodingsAreRefusedByName")
F("shards take rank 0's codes", "src/parallel/sharding/sharding.cpp",
  "for (const auto& [tensor, held] : self.others) { if (held.stand_in) «held.stand_in->agree();» }", "",
  r + "TheyAreShardedAndRecomputed", r + "ReplicasOfShardsTrainAdaptersOnThem", r + "TheyMayBeWholeInUnits")
F("codes are sharded", "src/parallel/sharding/sharding.cpp",
  "for (const auto& [stand_in, bytes] : placed) { «stand_in->placed(bytes, groups.ranks());» }", "", r + "TheyAreSharded")
F("a stage gives up others' codes", "src/parallel/pipeline/pipeline.cpp",
  "weight && !held) «residency::give_up(*weight)»;", "static_cast<void>(0)", r + "StagesKeepTheirOwn")
F("checkpoints leave frozen codes out", "src/run_state/models.cpp",
  "return «residency::encoded_weight(tensor) != nullptr»;", "false", r + "CheckpointsLeaveThemOut")
F("a state has values in the place of codes", "src/run_state/models.cpp",
  "if («is_left_out(tensor)») value = value.clone();", "false", r + "TheyAreSharded")
F("a checkpoint's frozen weights are compared", "src/run_state/models.cpp",
  "if (residency::encoded_weight(target) && «!at::equal(target, value.to(target.options()))»)", "false",
  r + "ACheckpointOfOtherWeightsIsRefused")
# ---- products in fp8
f = "fp8_tests Float8."
d = "fp8_tests DelayedScaling."
t = "fp8_tests FP8."
file = "src/codes/kernels/float8_loops.hpp"
F("fp8 saturates", file, "const uint32_t exact = «std::min(magnitude, kLargest)»;", "magnitude",
  f + "EveryBf16IsCastAsLibTorchCasts")
F("fp8 rounds ties to even", file, "((1u << (kShift - 1)) - 1) + «(exact >> kShift & 1)»;", "1u",
  f + "EveryBf16IsCastAsLibTorchCasts")
F("fp8 keeps NaN", file, "static_cast<uint8_t>(«choose(nan, 0x7f, code)»", "code", f + "EveryBf16IsCastAsLibTorchCasts")
file = "src/codes/mxfp8.cpp"
F("MXFP8's exponents round up", file, "const at::Tensor rounded = «exponent.add(up)»;", "exponent",
  f + "ExponentsOfBlocksRoundUp")
file = "src/precision/fp8/delayed.cpp"
F("amax over ranks", file, "if («reduction») {", "AmaxReduction()", d + "RanksAgreeOnTheLargest", t + "RanksShareOneMaximum")
F("histories wait where nothing was seen", file, "history_ = at::where(«seen», rolled, history_);", "seen.logical_or(last.eq(0))",
  d + "FollowsTransformerEnginesRule")
F("FP8Recipe::interval", file, "const at::Tensor due = «updates_.remainder(rule_.interval).eq(0)»;", "seen",
  d + "FollowsTransformerEnginesRule")
F("FP8Recipe::interval counts updates that have seen something", file, "updates_.add_(«seen.any()»)", "at::ones({}, at::kLong)",
  d + "AnIntervalCountsUpdatesThatHaveSeenSomething")
F("FP8Recipe::margin", file, "std::exp2(«-static_cast<float>(rule_.margin)»)", "0.0f", d + "FollowsTransformerEnginesRule")
F("FP8Recipe::amax_compute_algo", file, "«rule_.algorithm == AmaxComputeAlgo::most_recent» ?", "true",
  d + "FollowsTransformerEnginesRule")
F("infinite and missing amax keep the scale", file, "seen.logical_and(«amax.isfinite()»)", "amax.eq(amax)",
  d + "FollowsTransformerEnginesRule")
F("uses of one pass", file, "slot.copy_(«at::maximum(slot, amax)»);", "amax", d + "UsesInOnePassGiveTheLargest")
file = "src/precision/fp8/plan.cpp"
F("FP8Recipe::override_linear_precision fprop", file, "if («fprop») plan.x", "false",
  t + "OverridesComputeThatProductInHighPrecision")
F("FP8Recipe::override_linear_precision dgrad", file, "if («dgrad») plan.g_for_x", "false",
  t + "OverridesComputeThatProductInHighPrecision")
F("FP8Recipe::override_linear_precision wgrad", file, "if («wgrad») plan.g_for_w", "false",
  t + "OverridesComputeThatProductInHighPrecision")
F("FP8Recipe::fp8_format of gradients", file, "return «recipe.fp8_format == FP8Format::e4m3» ?", "true",
  t + "CurrentScalingIsTheWrittenOutFormulaToTheBit")
F("FP8Recipe::use_mxfp8_block_scaling", file, "scaling = «recipe.use_mxfp8_block_scaling» ?", "false",
  t + "BlocksFollowWhatIsSummedOver")
F("FP8Recipe::use_current_scaling", file, "recipe.backend == FP8Backend::te && «!recipe.use_current_scaling»", "true",
  t + "CurrentScalingIsTheWrittenOutFormulaToTheBit")
F("FP8Recipe::config", file, "recipe.backend == FP8Backend::ao && «recipe.config != AORecipe::tensorwise»", "false",
  t + "RowsHaveScalesForEachProduct")
F("weights' gradients of MS-AMP", file, "plan.rounds_gradient = «recipe.backend == FP8Backend::msamp»;", "false",
  t + "MsampRoundsWeightGradients")
F("FP8Recipe::pad_inner_dim", file, "recipe.backend != FP8Backend::ao || «recipe.pad_inner_dim»;", "true",
  t + "InnerDimensionsThatAreNotPaddedAreRefused")
file = "src/precision/fp8/training.cpp"
F("FP8Recipe::module_filter_func", file, "if («recipe.module_filter_func») {", "decltype(recipe.module_filter_func)()",
  t + "FirstAndLastLayersOfTorchaoStay")
F("FP8Recipe::use_autocast_during_eval", file, "&& «!recipe.use_autocast_during_eval») return;", "false",
  t + "EvaluationIsInHighPrecisionUnlessAskedFor")
F("FP8ScopeOptions::training", file, "if («!options.training» && recipe.backend", "false",
  t + "EvaluationIsInHighPrecisionUnlessAskedFor")
F("FP8ScopeOptions::is_first_microbatch", file, ".is_first_microbatch = «options.is_first_microbatch»", "std::nullopt",
  t + "MicroBatchesShareTheWeightsCodes")
F("updates that nobody called", file, "«core->settle();»", "", t + "NobodyHasToCallTheUpdates")
F("FP8Recipe::amax_history_len", file, "fp8::Histories::Rule{«core.recipe.amax_history_len»,", "int64_t{1024}",
  t + "StateContinuesWhereItWas")
F("recomputation in fp8", "src/residency/chain.cpp",
  "for_replay()) «scopes_.emplace_back(entry->link, std::move(again));»", "",
  t + "RecomputationUsesTheScalesOfTheFirstRun")
F("recomputation records no amax", "src/precision/fp8/handler.cpp", "again.records = «false»;", "true",
  t + "RecomputationUsesTheScalesOfTheFirstRun")
F("recomputed units in fp8", "src/residency/activations/operator_tape.cpp",
  "«has_scope()» ? record.keys.included_", "false",
  t + "RecomputedUnitsHaveProductsWithOtherWeights")

# ---- adapters
file = "src/adapters/lora.cpp"
a = "adapters_tests Adapters."
F("LoraConfig::r", "src/adapters/lora_config.cpp", "by_pattern(config.rank_pattern, path, «config.r»)", "int64_t{8}",
  a + "TargetsAreChosenByName")
F("LoraConfig::rank_pattern", "src/adapters/lora_config.cpp", "by_pattern(«config.rank_pattern», path, config.r)",
  "std::vector<std::pair<std::string, int64_t>>{}", a + "TargetsAreChosenByName")
F("LoraConfig::lora_alpha", "src/adapters/lora_config.cpp",
  "by_pattern(config.alpha_pattern, path, «config.lora_alpha»)", "8.0", a + "ScalingFollowsTheConfig")
F("LoraConfig::alpha_pattern", "src/adapters/lora_config.cpp",
  "by_pattern(«config.alpha_pattern», path, config.lora_alpha)", "std::vector<std::pair<std::string, double>>{}",
  a + "ScalingFollowsTheConfig")
F("LoraConfig::lora_dropout", file, "layer->dropout = «config.lora_dropout»", "0", a + "DropoutIsBeforeAInTraining")
F("LoraConfig::target_modules", file, "«!detail::is_listed(config.target_modules, place.path)»",
  "place.parameters.empty() || place.class_name == \"Embedding\"", a + "OnlyTheyAreTrained")
F("LoraConfig::exclude_modules", file, "place.path.empty() || «detail::is_listed(config.exclude_modules, place.path)»",
  "false", a + "TargetsAreChosenByName")
F("LoraConfig::use_rslora", file, "(«config.use_rslora» ? std::sqrt(rank) : rank)", "false",
  a + "ScalingFollowsTheConfig")
F("fan_in_fan_out says nothing of the zoo's linear layers", file,
  "place.class_name == \"Linear\" || «place.class_name == \"Dense\"»;", "false", a + "FanInFanOutSaysNothingOfLinearLayers")
F("LoraConfig::fan_in_fan_out", file, "(«config.fan_in_fan_out» || place.class_name", "false",
  a + "FanInFanOutSaysHowOtherModulesKeepTheirWeights")
F("LoraConfig::init_lora_weights", file, "if («config.init_lora_weights == LoraInit::gaussian»)", "false",
  a + "InitialValuesAreThoseOfTheConfig")
F("LoraConfig::base_model_name_or_path", "src/adapters/lora_config.cpp",
  "config.base_model_name_or_path = «reader.text(\"base_model_name_or_path\")»", "std::string()",
  "adapters_tests AdapterFiles.GoThereAndBack")
F("LoraConfig::task_type", "src/adapters/lora_config.cpp", "config.task_type = «reader.text(\"task_type\")»",
  "std::string()", "adapters_tests AdapterFiles.GoThereAndBack")
F("adapters do not act in backward", "src/adapters/lora_handler.cpp",
  "layer->merged || «residency::within_backward()») return false", "false", "adapters_ranks_tests AdapterRanks.ShardedModelsTrainThem")
F("what an adapter adds is not written down to run again", "src/residency/chain.cpp",
  "of_thread.asked &= «kAllLinks >> first_link << first_link»;", "kAllLinks", "adapters_ranks_tests AdapterRanks.RecomputedUnitsHaveThem")
F("adapters are renewed by prepare", "src/accelerator/accelerator.cpp", "«detail::watch_all_again();»", "",
  "adapters_ranks_tests AdapterRanks.PrepareFindsThoseOfReplacedWeights")
F("adapters move with their model", "src/adapters/lora.cpp",
  "layer->weight.set_data(layer->weight.to(where...)); «detail::watch(*layer);»", "",
  a + "MoveWithTheirModel")
F("zoo's kernels without autograd get the adapter's gradient", "src/adapters/lora_handler.cpp",
  "below_autograd = «call.name().starts_with(\"accelerate_models::\")»;", "false",
  a + "OneTokenOfTheZooIsComputedAsMany")

# ---- 8-bit optimizers
file = "src/optim/adam8bit.cpp"
s = "adam8bit_tests Adam8bitTest.TwentyStepsAreThoseOfBitsandbytesToTheBit"
F("AdamW8bitOptions::lr", file, "lr(«options.lr()»),", "1e-3", s)
F("AdamW8bitOptions::betas", file, "beta1(«std::get<0>(options.betas())»),", "0.9", s)
F("AdamW8bitOptions::betas, second", file, "beta2(«std::get<1>(options.betas())»),", "0.999", s)
F("AdamW8bitOptions::eps", file, "eps(«options.eps()»),", "1e-8", s)
F("AdamW8bitOptions::weight_decay", file, "decay(1 - options.lr() * «options.weight_decay()»)", "0.01", s)
F("AdamW8bitOptions::min_8bit_size", file, "parameter.numel() >= «options.min_8bit_size()»", "4096", s)
F("paged states leave memory", "src/optim/adam8bit.cpp", "«work[i].state->let_go();»", "",
  "adam8bit_tests Adam8bitTest.PagedStatesAreEqualToTheBitAndOutOfMemory")
F("AdamW8bitOptions::paging_folder", "src/optim/adam8bit.cpp",
  "const bool given = «!options.paging_folder().empty()»;", "false",
  "adam8bit_tests Adam8bitTest.WhatCanNotWorkIsRefusedByName")
F("AdamW8bitOptions::paged", "src/optim/adam8bit.cpp",
  "if («!options.paged()» || parameter.numel() < kLeastPaged) return MomentPlace::beside_parameter;", "true",
  "adam8bit_tests Adam8bitTest.PagedStatesAreEqualToTheBitAndOutOfMemory")
F("a second moment that is not zero stays so", "src/codes/blockwise.cpp",
  "«codes[code] == 0 && value > 0 && codes[0] == 0» ? 1", "false",
  "adam8bit_tests Adam8bitTest.ASmallGradientAndThenNoneIsASmallStep")
F("8-bit states are refused in pieces", "src/run_state/run_state.cpp", "if («optim::has_own_state_dict(optimizer)» &&",
  "false", "adapters_ranks_tests Adam8bitRanks.ShardsAreRefusedByName")

# Options without a fault, by struct or Struct::field, and why.
WITHOUT = {name: why for why, names in {
    "settings of another program: tests compare what it is given, field by field":
        "MegatronLMPlugin DeepSpeedPlugin TorchDynamoPlugin TorchTensorParallelConfig "
        "TorchContextParallelConfig DeepSpeedSequenceParallelConfig",
    "of a model: its numbers are compared with transformers', and options_models_test.cpp says what fields change":
        "BertConfig GPT2Config LlamaConfig BertModelOptions BertLoadOptions LlamaLoadOptions",
    "a struct whose fields have faults":
        "AcceleratorOptions::project_config PartialStateOptions::process_group DispatchOptions::offload "
        "LoadAndDispatchOptions::offload OffloadAllOptions::offload",
    "read by the line that has the fault of DispatchOptions' field (settings_of)":
        "LoadAndDispatchOptions::skip_keys LoadAndDispatchOptions::preload_module_classes "
        "LoadAndDispatchOptions::force_hooks LoadAndDispatchOptions::offload_buffers",
    "pinned memory and copies beside the host's work, which need a GPU":
        "CPUOffload::pin_memory DataLoaderOptions::pin_memory ActivationOffloadOptions::pin_memory "
        "OffloadStatesOptions::pin_memory OffloadStatesOptions::non_blocking",
    "read in a header, which tests compile themselves": "FindBatchSizeOptions RandomSamplerOptions::num_samples",
    "compared with the reference, case by case (tests/conformance)":
        "Zero2MemoryOptions Zero3MemoryOptions ParallelismConfig BalancedMemoryOptions::special_dtypes DeviceMapOptions::offload_buffers "
        "DeviceMapOptions::no_split_module_classes "
        "IterableDatasetShardOptions::batch_size IterableDatasetShardOptions::split_batches MixedPrecision::preset",
    "filled in or printed, not acted on": "DeviceMapOptions::verbose DeviceMapOptions::report",
    "the original parameters are always kept; version 2 warns": "FullyShardedDataParallelPlugin::use_orig_params",
    "without it nothing runs, or there is an error": "LaunchOptions::command LaunchOptions::config_file",
    "its fault has the name of its setting, grace_seconds": "LaunchOptions::grace",
}.items() for name in names.split()}

# ---- fp8 of prepared models
file = "src/accelerator/accelerator.cpp"
t = "fp8_accelerator_tests Fp8Model."
s = "fp8_accelerator_tests Fp8Settings."
r = "fp8_accelerator_tests Fp8Ranks."
c = "fp8_accelerator_tests Fp8Checkpoint."
F("mixed_precision fp8", file, "«if (fp8 && !device().is_meta()) core->fp8 = fp8;»", "",
  t + "ComputesInEightBitsWhileItTrains")
F("fp8's scales are the same on all ranks", file,
  "«core->fp8->set_amax_reduction([group](at::Tensor& bits) { group->all_reduce_(bits, Reduction::max); });»", "",
  r + "HaveOneScale")
F("Float8LinearConfig::enable_fsdp_float8_all_gather of a run", file, "«engine->gather_in_fp8(training->weights());»", "",
  r + "GatherInFp8", t + "HalfAsManyBytesTravel")
F("MS-AMP's gradients", file, "«ddp.communication_hook = parallel::fp8_gradients();»", "",
  r + "SendGradientsAsMsAmpDoes")
file = "src/accelerator/forward_scope.cpp"
F("FP8ScopeOptions::training", file, "FP8ScopeOptions{.training = «training»,", "true",
  t + "ComputesInEightBitsWhileItTrains")
F("FP8ScopeOptions::is_first_microbatch", file, ".is_first_microbatch = «is_first_microbatch(model, training)»",
  "std::nullopt", t + "MicroStepsUseTheWeightsCodesAgain")
F("codes of the last group's weights are forgotten", "src/precision/fp8/training.cpp",
  "for (Fp8Weight& weight : core->weights) «weight.kept.reset();»", "", t + "MicroStepsMayUseDifferentWeights")
file = "src/precision/chosen_fp8.cpp"
for field, wrong in {"use_autocast_during_eval": "false", "margin": "0", "interval": "1", "amax_history_len": "1024",
                     "use_mxfp8_block_scaling": "false"}.items():
  F("TERecipeKwargs::" + field, file, f"recipe.{field} = «*fp8.te.{field}»;", wrong, s + "EachFieldReachesTheRecipe")
F("TERecipeKwargs::override_linear_precision", file,
  "recipe.override_linear_precision = «*fp8.te.override_linear_precision»;", "std::array<bool, 3>{}",
  s + "EachFieldReachesTheRecipe", t + "EachSettingChangesTheRun")
F("TERecipeKwargs::fp8_format", file, '«*fp8.te.fp8_format == "HYBRID"» ?', "true", s + "EachFieldReachesTheRecipe",
  t + "EachSettingChangesTheRun")
F("TERecipeKwargs::amax_compute_algo", file, '«*fp8.te.amax_compute_algo == "max"» ?', "false",
  s + "EachFieldReachesTheRecipe", t + "EachSettingChangesTheRun")
F("Float8LinearConfig::recipe", file, "recipe.config = «recipes.at(config.recipe)»;", "AORecipe::tensorwise",
  t + "EachSettingChangesTheRun")
F("AORecipeKwargs::module_filter_func", file, "«recipe.module_filter_func = fp8.ao.module_filter_func;»", "",
  t + "EachSettingChangesTheRun")
F("Float8LinearConfig::pad_inner_dim", file, "recipe.pad_inner_dim = «config.pad_inner_dim»;", "true",
  t + "PadsWhereItMay")
F("MSAMPRecipeKwargs::opt_level", file, '«*fp8.msamp.opt_level == "O1"» ?', "false", s + "EachFieldReachesTheRecipe")
F("one fp8 recipe", "src/accelerator/accelerator.cpp",
  "if («given.index() > 0») raise<ConfigError>( \"Accelerator: kwargs_handlers holds {} and {},", "false", s + "WhatContradictsIsRefused")
file = "src/run_state/fp8_states.cpp"
F("fp8's scales in checkpoints", "src/run_state/state_parts.cpp", "«save_fp8_states(run, folder);»", "",
  t + "ResumesToTheBit", c + "ThatIsDamagedIsRefused")
F("another fp8 recipe's scales are refused", file, "saved.at(field).toInt(); «before != value»)", "false",
  c + "OfAnotherRecipeIsRefused")
F("damaged fp8 scales are refused", file, "if (name.find(\".scale\") != std::string::npos && «!is_scale(value)»)", "false",
  c + "ThatIsDamagedIsRefused")
F("fp8 scales divide, too", file, "«at::isfinite(value.reciprocal()).all().item<bool>()»", "true",
  c + "ThatIsDamagedIsRefused")
F("damaged fp8 histories are refused", file, "«value.lt(0).any().item<bool>()»", "false", c + "ThatIsDamagedIsRefused")
file = "src/precision/fp8_kwargs.cpp"
for field in ("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo",
              "use_mxfp8_block_scaling"):
  F("FP8RecipeKwargs::" + field, file, f"if («!kwargs.{field}»)", "true", "conformance_tests fp8_kwargs")
F("FP8RecipeKwargs::override_linear_precision", file, "if («!kwargs.override_linear_precision»)", "true",
  "conformance_tests fp8_kwargs")
F("FP8RecipeKwargs::backend", file, "if («!kwargs.backend»)", "true", "conformance_tests fp8_kwargs")
F("FP8RecipeKwargs::opt_level", file, "if («!kwargs.opt_level»)", "true", "conformance_tests fp8_kwargs")
for field in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
  F("AORecipeKwargs::" + field, file, f"if («!kwargs.{field}»)", "true", "conformance_tests fp8_kwargs")
F("AORecipeKwargs::config", file, "if («kwargs.config») {", "std::optional<Float8LinearConfig>()",
  t + "EachSettingChangesTheRun")

# ---- DeepSpeed's stages
file = "src/parallel/zero/translate.cpp"
z = "zero_tests Zero."
F("ZeRO keeps what it gathered from step to step", file, "settings.keep_until_step = «true»;", "false",
  z + "StagesOneAndTwoGatherOncePerStep")
F("ZeRO's masters begin as the rounded parameters", file, "settings.first_values_in_param_dtype = «true»;", "false",
  z + "MastersBeginAsTheRoundedParameters")
F("ZeRO's stage 2 refuses no_sync", file, "if («stage == 2»)", "false", z + "NoSyncIsRefusedWhereGradientsAreSplit")
F("ZeRO's stage 3 refuses no_sync", file, "if («stage == 3») settings.always_reduces", "false",
  z + "NoSyncIsRefusedWhereGradientsAreSplit")
F("ignore_unused_parameters", file, "settings.all_have_gradients = «!zero.zero_optimization.ignore_unused_parameters»;",
  "false", z + "UnusedParametersAreNamedWhereAskedFor")
F("zero3_init_flag says where it can't act", "src/parallel/zero/plugin.cpp",
  "config.document().asked_for_init = «init.value_or(false) && config.is_zero3()»;", "false",
  z + "ModelsThatAreNotSplitFromTheStartAreTold")
F("models that are split from the start are fine", "src/parallel/zero/choose.cpp",
  "{ return «is_deferred(item.second)»; }", "false", z + "ModelsThatAreNotSplitFromTheStartAreTold")
F("gradients are asked for of the optimizer that steps", "src/parallel/sharding/sharding.cpp",
  "&& («stepped.contains(member.shard.unsafeGetTensorImpl()) || stepped.contains(member.tensor.unsafeGetTensorImpl())»)",
  "true", z + "UnusedParametersAreThoseOfTheOptimizerThatSteps")
F("stage3_param_persistence_threshold", file, ".stays_up_to = «given.param_persistence_threshold»", "0",
  z + "StagesOneAndTwoGatherOncePerStep")
F("stage3_max_reuse_distance", file, ".reuse_bytes = «bytes_of(given.max_reuse_distance, zero)»", "kMostBytes",
  z + "StagesOneAndTwoGatherOncePerStep")
F("overlap_comm at stage 3", file, "const bool ahead = «given.overlap_comm.value()» &&", "true",
  z + "StageThreesNumbersDecideWhatIsFetchedAhead")
F("stage3_allgather_sequential", file, "&& «!given.allgather_sequential»;", "true",
  z + "StageThreesNumbersDecideWhatIsFetchedAhead")
F("stage3_max_live_parameters", file, ".budget_bytes = «bytes_of(given.max_live_parameters, zero)»", "kMostBytes",
  z + "StageThreesNumbersDecideWhatIsFetchedAhead")
F("allgather_bucket_size", file, "std::min(given.reduce_bucket_size, «given.allgather_bucket_size»)",
  "given.reduce_bucket_size", z + "StagesOneAndTwoGatherOncePerStep")
file = "src/parallel/zero/choose.cpp"
F("gradient_clipping of DeepSpeed's file", file, "rules.max_norm = «std::max(0.0, settings_.gradient_clipping)»;",
  "std::optional<double>()", z + "TheFilesLimitClips")
F("gradient_accumulation_steps of DeepSpeed's file", file,
  "rules.gradient_accumulation_steps = «settings_.gradient_accumulation_steps»;", "std::optional<int64_t>()",
  z + "EveryStageTrainsAsOneProcess")
F("nothing is cast around a model of DeepSpeed's file", file, "rules.autocasts = «settings_.torch_autocast.enabled»;", "true",
  z + "MastersBeginAsTheRoundedParameters")
F("zero3_save_16bit_model", file,
  "if («settings_.zero_optimization.stage == 3 && !settings_.zero_optimization.gather_16bit_weights_on_model_save»)",
  "false", z + "WholeWeightsOfStageThreeMustBeAskedFor")
F("torch_autocast's modules travel in fewer bits", file, "if («autocast_dtype(settings_)») settings.travels_low", "false",
  z + "AutocastOfTheFile")
F("monitors of DeepSpeed's file", file, "return «zero::monitors_of(settings_)»;", "std::vector<FileMonitor>()",
  z + "TheFilesMonitorsRecordEachStep")
F("DEEPSPEED_TIMEOUT", file, "rules.process_group_timeout = «std::chrono::minutes(minutes)»;",
  "std::chrono::minutes(10)", z + "TheGroupsTimeoutIsDeepSpeeds")
F("DeepSpeed and FSDP at once are refused", file, "if («request.fsdp || fsdp_requested()»)", "false",
  z + "WhatDecidesTwiceIsRefused")
F("another optimizer's step may have changed the scale", "src/accelerator/clip.cpp",
  "known = known && «run.optimizers.size() == 1» &&", "true", z + "EachOptimizerIsClippedByTheScaleOfItsOwnGradients")
F("gradients are clipped before each step", "src/accelerator/clip.cpp",
  "«optimizer.set_step_hooks(&rules, {.before = nullptr, .after = nullptr, .divisor = divisor});»", "",
  z + "TheFilesLimitClips",
  z + "EveryStageTrainsAsOneProcess")
F("the file's schedule follows the optimizer's steps", "src/accelerator/dummies.cpp", "/*split_batches=*/«true»", "false",
  z + "TheFilesOptimizerAndScheduleComeForTheDummies")
file = "src/parallel/zero/translate.cpp"
F("gradient_allreduce_op", file, 'settings.sums_gradients = «zero.gradient_allreduce_op == "sum"»;', "false",
  z + "GradientsMayBeSummed")
y = "zero_gradients_tests ZeroGradients."
F("prescale_gradients", file, "settings.divides_before = «zero.prescale_gradients» ?", "false",
  y + "EarlyDivisionsRoundInTheDtypeThatTravels")
F("gradient_predivide_factor", file, ": «zero.gradient_predivide_factor»;", "1.0",
  y + "EarlyDivisionsRoundInTheDtypeThatTravels")
F("sums are not divided early", file, "if («!settings.sums_gradients»)", "true",
  y + "EarlyDivisionsRoundInTheDtypeThatTravels")
F("grad_accum_dtype fp32 at stage 1", file, "if («stage == 1 && widens_sums»)", "false",
  y + "SumsOfMicroStepsHaveTheDtypeThatIsAskedFor")
F("grad_accum_dtype of 16 bits", file, "if («sums && compute_dtype(zero) && !widens_sums») settings.kept_gradients", "false",
  y + "SumsOfMicroStepsHaveTheDtypeThatIsAskedFor")
F("early divisions where gradients are sent", "src/parallel/sharding/collective_reducer.cpp",
  "«if (division.before != 1) flat.div_(division.before);»", "", y + "EarlyDivisionsRoundInTheDtypeThatTravels",
  y + "DividedEarlyOrLateTheyAreAverages")
F("early divisions alone", "src/parallel/sharding/collective_reducer.cpp", "if («options_.before != 1»)  //", "false",
  y + "EarlyDivisionsRoundInTheDtypeThatTravels")
F("early divisions in shared memory", "src/parallel/sharding/shared_memory_store.cpp", "if («options_.before != 1»)",
  "false", y + "EarlyDivisionsRoundInTheDtypeThatTravels", y + "DividedEarlyOrLateTheyAreAverages")
F("early divisions of replicas", "src/parallel/sharding/replicas.cpp", "«if (before_ != 1) gradient.div_(before_);»", "",
  y + "EarlyDivisionsRoundInTheDtypeThatTravels", y + "DividedEarlyOrLateTheyAreAverages")
F("what is left of the division of replicas", "src/parallel/sharding/replicas.cpp", "«if (rest != 1) sum.div_(rest);»",
  "", y + "DividedEarlyOrLateTheyAreAverages")
y += "OfWholeParametersTheyAreUnscaledInFp32"
F("fp16 gradients of whole parameters are unscaled in fp32", "src/optim/grad_scaler.cpp",
  "if («widens && grad.scalar_type() == at::kHalf && !allow_fp16») grad =", "false", y)
F("what no fused kernel divides is unscaled by the scaler", "src/optim/optimizer.cpp",
  "if (self.divisor && «!self.scaler->is_unscaled(optimizer)» && !is_dry", "false", y)
F("replaced gradients are taken together", "src/parallel/sharding/sharding.cpp",
  "«impl_->gradients->settle(other, left);»", "", y)
y = "zero_masters_tests ZeroMasters."
F("masters of 16 bits", file, "settings.masters_in_param_dtype = «zero.has_low_masters()»;", "false",
  y + "StepInTheirOwnPrecision")
F("fp32_optimizer_states of the file", "src/parallel/zero/objects.cpp",
  ".fp32_optimizer_states(«p.fp32_optimizer_states» &&", "true", y + "StepInTheirOwnPrecision")
F("bf16_optimizer_states on the host", "src/parallel/zero/objects.cpp", "&& «!settings.bf16.bf16_optimizer_states»)", "true",
  y + "StepInTheirOwnPrecision")
F("16-bit masters of the host have DeepSpeed's Adam", "src/parallel/zero/objects.cpp",
  "(!p.bias_correction || «on_host»)", "false", y + "StepInTheirOwnPrecision")
F("a program's Adam keeps fp32 moments of 16-bit masters", "src/parallel/zero/choose.cpp",
  "if («optim::give_fp32_moments(optimizer)» && !std::exchange(told_of_moments_, true) && is_rank0())", "false",
  y + "AProgramsAdamStepsAsDeepSpeedsToTheBit", y + "StatesThatAProgramsAdamHasAreKept")
F("the exchange is said once", "src/parallel/zero/choose.cpp", "&& «!std::exchange(told_of_moments_, true)» && is_rank0())",
  "true", y + "TheExchangeIsSaidOnce")
F("amsgrad is refused beside 16-bit masters of the host", "src/parallel/zero/choose.cpp",
  "{ return «has_amsgrad(group.options())»; }", "false", y + "OptimizersThatWouldKeepOtherMomentsAreNamed")
F("zero_force_ds_cpu_optimizer", "src/parallel/zero/choose.cpp",
  "if (exact && «settings_.zero_force_ds_cpu_optimizer» && optim::can_have", "true",
  y + "OptimizersThatWouldKeepOtherMomentsAreNamed")
F("kernels take parameters of 16 bits with fp32 moments", "src/optim/fused_step.cpp",
  "(allow_half_ || «has_fp32_moments(options)»)", "false", y + "AProgramsAdamStepsAsDeepSpeedsToTheBit")
F("steps with fp32 moments round once without kernels, too", "src/optim/optimizer.cpp",
  "if (!«optim::step_with_fp32_moments(*optimizer)») optimizer->step();", "false",
  y + "AProgramsAdamStepsAsDeepSpeedsToTheBit")
F("moments are as exact as a step makes them", "src/optim/optimizer_state.cpp", "{ return «moment_type(o, parameter)»; }",
  "parameter.scalar_type()", y + "StatesThatAProgramsAdamHasAreKept", y + "AProgramsAdamGoesOnFromDeepSpeedsFiles")
F("optimizers that would keep other moments are refused", "src/parallel/zero/choose.cpp",
  "«for (const auto& optimizer : facts.optimizers) check_moments(*optimizer);»", "",
  y + "OptimizersThatWouldKeepOtherMomentsAreNamed")
F("moments are read as exactly as they were saved", "src/run_state/optimizers.cpp",
  "const auto exact = «at::isReducedFloatingType(type) ? at::kFloat : type»;", "type", y + "GoOnFromDeepSpeedsFiles")
F("amsgrad of the file's AdamW", "src/parallel/zero/objects.cpp",
  "to::AdamWOptions(p.lr).betas(betas).eps(p.eps).weight_decay(p.weight_decay).amsgrad(«p.amsgrad»)", "false",
  y + "AmsgradIsTorchs")
F("amsgrad of the file's Adam", "src/parallel/zero/objects.cpp",
  "to::AdamOptions(p.lr).betas(betas).eps(p.eps).weight_decay(p.weight_decay).amsgrad(«p.amsgrad»)", "false",
  y + "AmsgradIsTorchs")
F("log_level of the file", "src/parallel/zero/choose.cpp", "if («settings_.log_level») logs::set_level(", "false",
  z + "TheFilesLogLevelHolds")
y = "zero_engine_tests ZeroStates."
F("a forward with offloaded states is named", "src/parallel/sharding/sharding.cpp",
  "«self.expect_here({OffloadStateTypeEnum::lp_params}, \"forward\");»", "", y + "WhatIsAwayIsNamedWhereItIsNeeded")
F("a step with offloaded states is named", "src/parallel/sharding/sharding.cpp", "«expect_all_states_here(\"step\");»", "",
  y + "WhatIsAwayIsNamedWhereItIsNeeded")
F("gradients that are offloaded are named", "src/parallel/sharding/sharding.cpp",
  "«impl_->expect_here({OffloadStateTypeEnum::lp_grads}, \"gradients\");»", "", y + "WhatIsAwayIsNamedWhereItIsNeeded")
F("loading over offloaded states is named", "src/run_state/models.cpp",
  "«layer->expect_all_states_here(\"loading a checkpoint\");»", "static_cast<void>(layer);",
  y + "WhatIsAwayIsNamedWhereItIsNeeded")
F("states that are reloaded are here", "src/parallel/sharding/sharding.cpp",
  "const auto were = «std::exchange(self.offloaded, {})»;", "self.offloaded", y + "TrainingGoesOnExactlyWhenTheyAreBack")
F("contiguous_grad_buffer is freed", "src/parallel/sharding/sharding.cpp", "«self.reducer->trim();»", "",
  y + "WhatIsGatheredAndBuffersAreFreed")
F("lp_params that are gathered are freed", "src/parallel/sharding/sharding.cpp", "«self.release(); self.units->trim();»",
  "", y + "WhatIsGatheredAndBuffersAreFreed")
F("OffloadStatesOptions::include", "src/accelerator/offload_states.cpp", "= «options.include».value_or(",
  "std::optional<std::vector<OffloadStateTypeEnum>>()", y + "WhatIsAwayIsNamedWhereItIsNeeded")
F("where states cannot be offloaded is said", "src/parallel/sharding/sharding.cpp",
  "if (const char* const why = «self.settings.states_stay»)", "nullptr", y + "WhereTheyCannotGoIsSaid")
F("OffloadStatesOptions::device", "src/accelerator/offload_states.cpp",
  "if («options.device == OffloadDeviceEnum::none»)", "false", y + "WhereTheyCannotGoIsSaid")
y = "zero_engine_tests ZeroEngine."
F("the engine's backward says where groups end", "src/accelerator/deepspeed_engine.cpp",
  "GradientState().set_sync_gradients(«sync_gradients»);", "true", y + "TrainsAsTheAcceleratorDoes")
F("the engine tells of steps that nobody takes", "src/accelerator/deepspeed_engine.cpp",
  "engine = {.group_ended = «true»,", "false", y + "AStepThatNobodyTakesIsNamed")
F("norms are known after the step", "src/accelerator/clip.cpp",
  "«if (!wrapped.empty() && !total.is_meta()) norms[&stepped] = total.item<double>();»", "",
  y + "TellsTheNormOfAllGradients")
F("gradients of DeepSpeed keep 16 bits", file, "if («stage < 3 || ranks == 1») settings.kept_gradients", "false",
  "zero_memory_tests ZeroMemory.ModelStatesAreThoseOfThePaper")
F("Muon's update is of the whole matrix", "src/run_state/pieces_for_steps.cpp",
  "if (of_ranks) «parallel::put_into((*of_ranks)[rank], theirs.to(made.device()), made)»;", "made.zero_()",
  z + "MuonAndLambOfTheFileStepAsAlone")
F("what is made of a matrix goes to all that have pieces of it", "src/run_state/pieces_for_steps.cpp",
  "if (rank < count) «results[rank] = mine.to(values[rank].device())»;", "static_cast<void>(mine)",
  z + "MuonAndLambOfTheFileStepAsAlone")
F("matrices are shared out by their sizes", "src/run_state/pieces_for_steps.cpp",
  "return «held(pieces[a]).whole.numel() > held(pieces[b]).whole.numel()»;", "a < b",
  z + "MatricesForMuonAreSharedOut")
F("Lamb's norms are of whole parameters", "src/run_state/pieces_for_steps.cpp",
  "«group->all_reduce_(sum, Reduction::sum)»; return sum.to(sums.device());", "static_cast<void>(group)",
  z + "MuonAndLambOfTheFileStepAsAlone")
F("the file's Muon has rates of its own", "src/parallel/zero/objects.cpp",
  "rest.lr(«p.adam_lr.value_or(p.lr)»);", "p.lr", z + "MuonAndLambOfTheFileStepAsAlone")
F("what is shown of a gradient does not keep its memory", "src/parallel/sharding/whole_gradients.cpp",
  "if («groups_.ranks() == 1») state.whole.reset();", "false",
  "zero_memory_tests ZeroMemory.ThePeakOfRealRanksIsThatOfTheDryRun")
F("waits for memory are no collectives", "src/comm/waits.cpp", "if («in_step») inside.emplace(", "true",
  "fsdp_tests Fsdp.WaitsForMemoryAreNotCountedAsCollectives")
file = "src/accelerator/tagged_checkpoint.cpp"
z = "zero_checkpoint_tests ZeroCheckpoint."
F("files that were read long ago are closed", "src/formats/input_file.cpp", "while («all.recent.size() > most») {", "false",
  z + "ManyRanksFilesNeedFewDescriptors")
F("files that may stay open do", "src/formats/input_file.cpp", "return std::clamp(«limit.rlim_cur / 2», kFewest, kMost);",
  "kFewest", z + "ManyRanksFilesNeedFewDescriptors")
F("a file in another's place is named", "src/formats/input_file.cpp", "|| «facts.st_ino != inode_» ||", "false",
  z + "FilesThatAreReplacedWhileTheyAreReadAreNamed")
F("a folder is opened once", "src/checkpoint/zero_checkpoint.cpp", "if (!known) «known = std::make_shared<const ZeroCheckpoint>(folder)»; return known;",
  "return std::make_shared<const ZeroCheckpoint>(folder)", z + "LoadingOpensEachFileOnce")
F("SaveTagOptions::exclude_frozen_parameters", file, ".exclude_frozen_parameters = «options.exclude_frozen_parameters»",
  "false", z + "FrozenParametersMayBeLeftOut")
F("SaveTagOptions::save_latest", file, "if («options.save_latest») run_state::write_latest", "true",
  z + "TagsAndClientState")
F("LoadTagOptions::load_module_strict", file, "«options.load_module_strict», /*masters=*/", "true",
  z + "FrozenParametersMayBeLeftOut")
F("LoadTagOptions::load_module_only", file, "if («options.load_module_only») return;", "false", z + "TagsAndClientState")
F("LoadTagOptions::load_optimizer_states", file, "if («options.load_optimizer_states») {", "true",
  z + "TagsAndClientState")
F("LoadTagOptions::load_lr_scheduler_states", file, "for (size_t i = 0; «options.load_lr_scheduler_states» &&", "true",
  z + "TagsAndClientState")
file = "src/checkpoint/zero_to_fp32.cpp"
F("ZeroToFp32Options::max_shard_size", file, "parse_size(«options.max_shard_size»)", 'std::string("5GB")',
  z + "FrozenParametersMayBeLeftOut")
F("ZeroToFp32Options::tag", file, "open(checkpoint_dir, «options.tag», ", "std::string()",
  z + "FrozenParametersMayBeLeftOut")
F("ZeroToFp32Options::exclude_frozen_parameters", file, "options.tag, «options.exclude_frozen_parameters»)", "false",
  z + "FrozenParametersMayBeLeftOut")
F("ZeroToFp32Options::safe_serialization", file, "weights, most, «options.safe_serialization»,", "false",
  z + "FrozenParametersMayBeLeftOut")
file = "src/run_state/zero_files.cpp"
F("DeepSpeed's files end with padding", file, "flat.length = «up_to(all, 2 * ranks)» / ranks;", "up_to(all, ranks)",
  z + "OursHasTheKeysOfTheirs")
F("sub_group_size cuts the vectors of stage 3", file, "how.stage == 3 && «elements >= how.sub_group_size») close();",
  "false", z + "OursHasTheKeysOfTheirs")
F("round_robin_gradients orders the vectors", file, "«how.round_robin» && how.stage < 3", "false",
  z + "OursHasTheKeysOfTheirs")
F("use_node_local_storage", file, "(«model.deepspeed->each_node_writes» && first_on_its_disk)", "false",
  z + "EachMachineCanHaveWhatOneRankWritesForAll")
F("files of an older tag go", "src/run_state/checkpoint_folders.cpp", "«is_ours(name, CheckpointKind::tag)») fs::remove_all",
  "false", z + "ATagMayBeSavedAgainAtAnotherStage")
file = "src/checkpoint/zero_checkpoint.cpp"
F("pieces of stage 3 are each rank's share of a parameter", file,
  "begin = «static_cast<int64_t>(rank) * piece», end", "int64_t{0}", z + "TheirsGoesOnHere")
F("files of another number of ranks are named", file, "«most != ranks_» && !(count", "false",
  z + "FilesOfAnotherNumberOfRanksAreNamed")
u = "universal_checkpoint_tests Universal."
F("checkpoint.load_universal", "src/parallel/zero/objects.cpp",
  ".load_universal = «settings.checkpoint.load_universal»", "false", u + "OthersAreRefusedWhereOneIsAskedFor")
F("latest_universal is found by itself", file, "tag.empty() ? «named_by(kLatestUniversal, folder)» : tag",
  "std::string()", u + "OursHasTheFilesOfTheirs")
F("a universal checkpoint's counts are beside parameters", file, "step = «universal_->step(parameter.name)»;",
  "c10::IValue()", u + "TheirsLoadsHere")
F("a universal checkpoint of stage 3 has a count for each group", file,
  "within = «value_or_none(optimizer_state(), \"optimizer_state_dict\")»;", "c10::IValue()", u + "TheirsLoadsHere")
file = "src/checkpoint/universal_folder.cpp"
F("a vocabulary's padding comes back", file, "if («vocabulary» && may_have_rows(", "false", u + "PatternsMarkParameters")
F("flat tensors of a universal checkpoint get their sizes", file, "if («has_no_gaps(saved)» && numel_in(", "false",
  u + "TheirsLoadsHere")
file = "src/checkpoint/universal_writer.cpp"
F("UniversalOptions::tag", file, "find(checkpoint_dir, «options.tag»)", "std::string()",
  u + "AConversionIsWholeOrNotThere")
F("UniversalOptions::strict", file, "«options_.strict» && !unused.empty()", "true", u + "PatternsMarkParameters")
F("patterns mark parameters", file, "marks = «patterns_.of(name)»;", "Marks()", u + "PatternsMarkParameters")
F("a vocabulary is written without its padding", file, "sizes[0] = «std::min(sizes[0], *marks->rows)»;", "sizes[0]",
  u + "PatternsMarkParameters")
F("a universal checkpoint has each parameter's steps", file, "if («step.isNone()») return;", "true",
  u + "OursHasTheFilesOfTheirs")
F("a universal checkpoint keeps exact counts", file, "\"partition_count\", «\"accelerate_steps\"»}", "\"overflow\"",
  u + "ParametersWithoutStateStaySo")
F("a universal checkpoint's scaler is of its class", file, "«scaler.toGenericDict().contains(\"scale_window\")»",
  "false", u + "OursHasTheFilesOfTheirs")
F("a universal checkpoint has the model's file under both names", file, "if («file.filename() != whole && file.filename() != cut») continue;",
  "true", u + "OursHasTheFilesOfTheirs")
F("a conversion that fails leaves nothing", file, "«fs::remove_all(where_, ignored);»", "",
  u + "PatternsMarkParameters")
file = "src/accelerator/zero_handles.cpp"
F("GatheredParameters takes the modifier's values", file,
  "«if (comm::rank() != *closing->modifier_rank) at::Tensor(parameter).copy_(value);»", "",
  "zero_checkpoint_tests ZeroHandles.GetAndSetWholeValues")
z = "zero_tests Zero."
file = "src/residency/residency.cpp"
F("fetches ahead are limited by their bytes", file, "return «ahead >= *policy_.prefetch_bytes»;", "false",
  "residency_tests ResidencyPolicy.FetchesAheadAreLimitedByTheirBytes")
F("units that come back after few bytes stay", file, "return «between <= *policy_.reuse_bytes»;", "true",
  "residency_tests ResidencyPolicy.AUnitStaysThatComesBackAfterFewBytes")
file = "src/parallel/zero/units.cpp"
F("modules of leaf_module come whole", file, "whole_.push_back(root_[i] != i || «listed» ||", "false",
  z + "LeafModulesAndSmallOnesComeAsAWhole")
F("stage3_module_granularity_threshold", file, "(«how.smallest_average > 0» && elements[i] > 0", "false",
  z + "LeafModulesAndSmallOnesComeAsAWhole")
F("small blocks come at once", file, "|| «elements[i] <= how.largest_whole»);", "false",
  z + "SmallBlocksComeAtOnceWhereTheyAreFetchedAhead")
file = "src/parallel/zero/translate.cpp"
F("zero_optimization.offload_optimizer.ratio is handed on", file,
  "settings.offload_share = «offload.offload_optimizer.ratio»;", "1", z + "AShareOfTheMastersStaysOnTheDevice")
F("data_types.buffer_dtype", file, "if («compute_dtype(zero)») settings.buffer_dtype =", "false",
  z + "BuffersAreCastAsTheFileSays")
F("zero_optimization.log_trace_cache_warnings", file,
  "stage == 3 && «zero.zero_optimization.log_trace_cache_warnings»", "false", z + "AnOrderOfModulesThatBreaksIsTold")
F("data_types.keep_in_fp32_modules", "src/parallel/zero/choose.cpp",
  "if (compute_dtype(settings_) && «settings_.keeps_buffers()»)", "false", z + "BuffersAreCastAsTheFileSays")
F("data_types.keep_in_fp32_modules that matches nothing", "src/parallel/zero/units.cpp", "«if (!any) unmatched(pattern);»", "",
  z + "BuffersAreCastAsTheFileSays")
F("buffers before DeepSpeed 0.19.2", "src/parallel/zero/setting_rules.cpp",
  "if («is_before(options.as_of_version, \"0.19.2\")» && !s.data_types.buffer_dtype", "false",
  z + "BuffersAreCastAsTheFileSays")
F("a receipt says that the program decides about steps", "src/accelerator/receipts.cpp",
  ".counts_micro_steps = «self.counts_micro_steps()»,", "true", z + "TheProgramDecidesAboutStepsWhereTheFileSays")
F("managed_gradient_accumulation", "src/parallel/zero/choose.cpp",
  "rules.counts_micro_steps = «settings_.managed_gradient_accumulation»;", "true",
  z + "TheProgramDecidesAboutStepsWhereTheFileSays")
F("managed_gradient_accumulation counts samples", "src/accelerator/accelerator.cpp",
  "seen = «counts_micro_steps()» ? before + of_step", "true", z + "TheProgramDecidesAboutStepsWhereTheFileSays")
F("a changed order of modules is told of once", "src/parallel/sharding/sharding.cpp",
  "if («!told.insert({after.index(), expected.index(), found.index()}).second») return;", "false",
  z + "AnOrderOfModulesThatBreaksIsTold")
F("log_trace_cache_warnings says where nothing is fetched", "src/parallel/sharding/sharding.cpp",
  "void tell_of_orders() { if («nothing_goes()»)", "false", z + "AnOrderOfModulesThatBreaksIsTold")
F("only the main process tells of a changed order", "src/parallel/sharding/sharding.cpp",
  "if (settings.tells_changed_order && «(!group || group->rank() == 0)»)", "true",
  z + "AnOrderOfModulesThatBreaksIsTold")
F("only what is fetched ahead comes at once", file,
  "together = «ahead ? std::min(given.prefetch_bucket_size, given.max_live_parameters) : 0»;",
  "given.max_live_parameters", z + "SmallBlocksComeAtOnceWhereTheyAreFetchedAhead")

# ---- what lies on a disk
z = "zero_disk_tests ZeroDisk."
d = "residency_tests DirectIo."
m = "residency_tests OnADisk."
file = "src/parallel/zero/translate.cpp"
F("offload_optimizer.device nvme", file, "if («states.device == \"nvme\"») settings.states_on_disk =", "false",
  z + "StatesOnADiskTrainAsInMemory")
F("offload_param.device nvme", file, "|| «parameters.device != \"nvme\"») return;", "true",
  z + "ParametersOnADiskTrainAsInMemory")
F("offload_optimizer.pipeline_read", file, ".reads_ahead = «states.pipeline_read»", "false", z + "GroupsComeAheadOfTheirStep")
F("offload_optimizer.pipeline_write", file, ".writes_behind = «states.pipeline_write»", "false",
  z + "GroupsGoBehindTheirStep")
F("offload_optimizer.buffer_count", file, ".groups_in_memory = «states.buffer_count»", "1", z + "GroupsComeAheadOfTheirStep")
F("sub_group_size with nvme", file, ".group_elements = «zero.zero_optimization.sub_group_size»", "kMostBytes",
  z + "GroupsComeAheadOfTheirStep")
F("offload_param.max_in_cpu", file, ".elements_in_memory = «parameters.max_in_cpu»", "0", z + "SoManyElementsStayInMemory")
F("offload_param's buffers", file, "policy->prefetch_bytes = «std::min(policy->prefetch_bytes.value_or(buffers), buffers)»",
  "policy->prefetch_bytes", z + "BuffersBoundWhatIsReadAhead")
F("aio.block_size", file, ".bytes = «aio.block_size»", "1 << 20", z + "RequestsAreAsTheFileSays")
F("aio.queue_depth", file, ".depth = «aio.queue_depth»", "8", z + "RequestsAreAsTheFileSays")
F("aio.intra_op_parallelism", file, ".threads = «aio.intra_op_parallelism»", "1", z + "RequestsAreAsTheFileSays")
F("aio.single_submit", file, ".one_by_one = «aio.single_submit»", "false", z + "RequestsAreAsTheFileSays")
F("aio.overlap_events", file, ".refills_at_once = «aio.overlap_events»", "true", z + "RequestsAreAsTheFileSays")
F("groups for the pipelines that are on", "src/parallel/zero/setting_rules.cpp", "wrong(«states.buffer_count < least»,", "false",
  z + "WrongFoldersAndNumbersAreNamed")
file = "src/residency/disk/direct_io.cpp"
F("requests are as large as told", file, "const Cut cut(std::move(ranges), «how.bytes»);", "1 << 20", d + "GoesByRequestsAsItIsTold")
F("a thread's share of a transfer", file, "shared_out_over_threads(ranges, «requests_.threads», requests_.bytes)", "1",
  d + "GoesByRequestsAsItIsTold")
F("the next request waits for all", file, "refill = «how.refills_at_once» ||", "true", d + "GoesByRequestsAsItIsTold")
F("the ring is told of each request", file, "slot, «how.one_by_one»)) error", "false", d + "GoesByRequestsAsItIsTold")
file = "src/residency/disk/disk_memory.cpp"
F("room that is used again begins with zeros", file,
  "if («::fallocate(file_.descriptor(), FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, place->here.offset, place->bytes) != 0»)",
  "false", m + "TensorsEndAtAnyTime")
F("what could not be written is not dropped", file, "«if (!place->is_copy) continue;»", "",
  m + "WhatCouldNotBeWrittenStaysInMemory")
F("bytes go past the cache", file, "const int file = «direct_ >= 0 && direct_works_» ?", "false",
  m + "BytesGoToTheDiskAndComeBack")
file = "src/residency/homes/kept_slice.cpp"
F("images are made of masters that have changed", file, "«*made_of == masters._version()»", "true",
  z + "ParametersOnADiskTrainAsInMemory")
file = "src/parallel/sharding/shards_on_disk.cpp"
F("what a step leaves goes to the disk", file, "«take(moments, /*whole=*/true);»", "",
  z + "StatesOnADiskTrainAsInMemory")
F("a full disk is told after the step", file, "«if (!failed_) failed_ = std::current_exception();»", "",
  z + "AFullDiskIsNamedOnAllRanksAndLosesNothing")
F("gradients go to the disk of the states", "src/parallel/sharding/sharding.cpp",
  "} else if (!step_ahead) { «disk.after_gradients({part.index});»", "",
  z + "GradientsLieOnTheDiskFromBackwardToStep")
F("sums of gradients come back to be added to", file, "«states_->bring(gradients)->wait();»", "",
  z + "GradientsLieOnTheDiskFromBackwardToStep")
F("gradients that go leave no memory to be used again", "src/parallel/sharding/shared_memory_store.cpp",
  "gradient = «gradients_go()» ?", "false", z + "GradientsLieOnTheDiskFromBackwardToStep")
F("gradients that a step has divided are written", file, "if («gradient._version() == version») as_they_were.", "true",
  z + "WhatProgramsDoWithGradientsActs")
F("a step's kernels tell that they have divided gradients", "src/optim/fused_step.cpp",
  "if («bucket.device.is_cpu() && number_of(scale) != 1») //", "false", z + "WhatProgramsDoWithGradientsActs")
F("what lies on a disk comes in turns", "src/residency/disk/by_turns.cpp",
  "turn < turns.size() && «turns[turn].disk» ?", "false", z + "GradientsAreLookedAtByTurns")
F("what has been changed in its turn is written", "src/residency/disk/by_turns.cpp", "if (disk && «changes») disk->send(",
  "false", m + "TensorsComeByTurns")
F("FullyShardedDataParallelPlugin::offload_folder", "src/parallel/fsdp/translate.cpp", "if («plugin.offload_folder») {",
  "false", "zero_disk_tests FsdpDisk.AFolderTrainsAsMemory")
