"""Faults in data parallelism, sharding and residency."""
from faults import F

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
F("grad() of sharded parameters", file, "if («part.members.front().tensor.is_meta()») continue;", "true",
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
F("averages that a backward has begun end before replicas are set apart", "src/parallel/sharding/sharding.cpp",
  "void Sharding::set_apart(bool apart) { «impl_->recover();»", "",
  "communication_hooks_tests LocalSgd.ABackwardThatThrewBeforeItLeavesNothing")
