"""Faults in what the facade, its state and its checkpoints do."""
from faults import F

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
F("ProjectConfiguration::total_limit", file, "if («writes_for_all() && project.automatic_checkpoint_naming» && project.total_limit)", "false",
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

# ---- what nobody asks for and everybody relies on
p = "data_tests PreparedDataLoader."
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
