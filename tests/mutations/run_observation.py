"""Faults in what a DeepSpeed configuration asks to see of a run, and in how recomputed layers keep their inputs."""
from faults import F

z = "zero_observation_tests ZeroObservation."
s = "plugins_tests ZeroSettings."
p = "profiler_tests ModuleProfile."
f = "profiler_tests OperatorFlops."

# ---- from the file
file = "src/parallel/zero/objects.cpp"
F("wall_clock_breakdown", file, "{.times = «settings.wall_clock_breakdown»,", "false",
  z + "TimesOfEachStepAreLinesAndRecords")
F("memory_breakdown", file, ".memory = «settings.memory_breakdown»}", "false", z + "MemoryIsPrintedAroundEachPhase")
F("flops_profiler.enabled", file, "= settings.flops_profiler; «flops.enabled»)", "false",
  z + "OperationsOfTheStepAreCountedByModule")
F("flops_profiler.profile_step", file, "{.step = «flops.profile_step»,", "int64_t{1}",
  z + "TheProfileIsPrintedOnceAtItsStep")
F("flops_profiler.module_depth", file, ".module_depth = «flops.module_depth»,", "int64_t{-1}",
  z + "TheProfileIsPrintedOnceAtItsStep")
F("flops_profiler.top_modules", file, ".top_modules = «flops.top_modules»,", "int64_t{1}",
  z + "OperationsOfTheStepAreCountedByModule")
F("flops_profiler.detailed", file, ".detailed = «flops.detailed»,", "true", z + "TheProfileIsPrintedOnceAtItsStep")
F("flops_profiler.output_file", file, ".file = «flops.output_file.value_or(\"\")»,", "std::string()",
  z + "OperationsOfTheStepAreCountedByModule")
F("a profile that can't be written is an error of all at prepare", "src/accelerator/run_observation.cpp",
  "if (facts.is_main_process && «!opened(wanted.flops->file, std::ios::app)»)", "false",
  z + "AProfileThatCantBeWrittenIsAnErrorOfAllRanksAtPrepare")
F("a profile that can't be written later ends all ranks", "src/accelerator/run_observation.cpp",
  "if (const auto group = «comm::world_group()»)", "std::shared_ptr<comm::Group>()",
  z + "AProfileThatCantBeWrittenLaterEndsAllRanks")
F("flops_profiler.recompute_fwd_factor", file, ".recompute_fwd_factor = «flops.recompute_fwd_factor»};", "0.0",
  z + "TheProfileIsPrintedOnceAtItsStep")
F("comms_logger.enabled", file, "if («!comms.enabled» || logs_comms", "true",
  z + "CollectivesAreCountedByOperationAndSize")
F("comms_logger.verbose", file, "observed.comms.emplace().verbose = «comms.verbose»;", "false",
  z + "CollectivesAreCountedByOperationAndSize")
F("comms_logger.prof_ops", file, "if («comms.prof_all») return observed;", "true", z + "OnlyNamedCollectivesAreCounted")
F("activation_checkpointing.profile", file, "if («given.profile && PartialState().is_main_process()»)", "false",
  z + "RecomputedLayersAreTimed")
F("keys of recomputation are told of", file,
  "«observed.of_recomputation.push_back(entry.key);»", "", z + "KeysOfRecomputationAreNamedWhereNothingIsRecomputed")
F("activation_checkpointing.cpu_checkpointing", file, "rules{.inputs_on_host = «given.cpu_checkpointing»,", "false",
  z + "RulesOfRecomputedLayersAreTheFiles")
F("activation_checkpointing.synchronize_checkpoint_boundary", file,
  ".synchronize = «given.synchronize_checkpoint_boundary»};", "false",
  z + "RulesOfRecomputedLayersAreTheFiles")
F("what is seen of a run is the file's", "src/parallel/zero/choose.cpp", "return «zero::observed_of(settings_)»;",
  "Observed()", z + "TimesOfEachStepAreLinesAndRecords", z + "CollectivesAreCountedByOperationAndSize")
F("names of collectives are DeepSpeed's", "src/parallel/zero/setting_rules.cpp", "wrong(«!known», fmt::format(\"'comms_",
  "false", s + "WhatIsSeenOfARunActsWhereThereIsSomethingToSee")
F("flops_profiler switches the times on", "src/parallel/zero/setting_rules.cpp",
  "if («s.flops_profiler.enabled») s.wall_clock_breakdown = true;", "false",
  s + "WhatIsSeenOfARunActsWhereThereIsSomethingToSee", z + "OperationsOfTheStepAreCountedByModule")

# ---- the run
file = "src/accelerator/run_observation.cpp"
F("evaluations are in no step", file, "return «c10::GradMode::is_enabled()» && of &&", "true",
  z + "MemoryIsPrintedAroundEachPhase")
F("only the main process prints what is seen", file, "if (phases && «facts.is_main_process») watching_", "true",
  z + "TimesOfEachStepAreLinesAndRecords")
F("micro-steps have a line", file, "if («phase == Phase::backward && !GradientState().sync_gradients()»)", "false",
  z + "TimesOfEachStepAreLinesAndRecords")
F("times are records of monitors", file, "«monitors_.record(values);»",
  "", z + "TimesOfEachStepAreLinesAndRecords")
F("the end of training prints what collectives cost", file,
  "if («std::exchange(summary_due_, false)» && facts_.is_main_process)", "false",
  z + "CollectivesAreCountedByOperationAndSize")
F("a profile is made once", file, "|| «profiling_ != Profiling::not_yet» ||", "false",
  z + "TheProfileIsPrintedOnceAtItsStep")
F("parameters of modules below count", file,
  "at >= 0; at = «modules[static_cast<size_t>(at)].parent») for (const auto& [name, parameter]", "int64_t{-1}",
  z + "OperationsOfTheStepAreCountedByModule")

# ---- collectives
file = "src/comm/group_collectives.cpp"
F("all_gathers are counted when they are complete", file,
  "}, «counted_after(logged)», of);", "nullptr", z + "CollectivesAreCountedByOperationAndSize")
F("reduce_scatters are counted when they are complete", file, "output.reset(); «logged.end();»", "",
  z + "CollectivesAreCountedByOperationAndSize")
F("reductions in shared memory are counted", "src/parallel/sharding/shared_memory_store.cpp",
  "«states_[p].under_way.end();»", "", z + "CollectivesAreCountedByOperationAndSize")
F("meetings in shared memory are counted", "src/comm/shared_memory.cpp",
  "«const LoggedScope logged(Collective::barrier, 0, *group_);»", "", z + "CollectivesAreCountedByOperationAndSize")
file = "src/comm/comms_log.cpp"
F("only named collectives are counted", file,
  "if («!log.settings.operations.empty() && !log.settings.operations.contains(collective)») return;", "false",
  z + "OnlyNamedCollectivesAreCounted")
F("reset_comms_log", file, "void reset_comms_log() { auto& log = comms_log(); const MutexLock lock(log.mutex); «log.costs.clear();»",
  "", z + "OnlyNamedCollectivesAreCounted")
F("log_summary prints on the main process", file, "if («rank() != 0») return;", "false",
  z + "OnlyNamedCollectivesAreCounted")
F("show_straggler", file, "if («show_straggler») text +=", "false", z + "StragglersAreTold")
F("what a collective costs is the shortest time of any rank", file, "«group->all_reduce_(shortest, Reduction::max);»", "",
  z + "StragglersAreTold")
F("asking for stragglers does not count", file, "std::vector<StragglerRecord> straggler_records() { «const Unlogged uncounted;»",
  "", z + "StragglersAreTold")

# ---- operations
file = "src/profiler/module_profile.cpp"
F("what an operator is made of does not count again", file, "if («costed > 0») ++costed;", "false",
  f + "ProductsAreTwoOperationsForEachMultiplication")
F("operators between two modules' are of both", file, "size_t common = 0; while («common < one.size()» &&", "false && common < one.size()",
  p + "OperatorsBelongToTheModuleWhoseParametersTheyHaveOrLieBetween")
F("activations are of their modules", file, "if («is_named(i, name)») return i;", "false",
  p + "OperatorsBelongToTheModuleWhoseParametersTheyHaveOrLieBetween")
F("tied weights count where they are used", file, "«modules[module].class_name.starts_with(\"Embedding\") == table»;",
  "true", p + "TiedWeightsCountWhereTheyAreUsed")
F("parameters are seen through views", file, "if («found == places.end() && !tensor.is_inference() && tensor.is_view()»)",
  "false", p + "OperatorsBelongToTheModuleWhoseParametersTheyHaveOrLieBetween")
file = "src/profiler/operator_flops.cpp"
F("a bias of a convolution is added", file, "bias = «is_there(inputs, 2) ? 1 : 0»;", "int64_t{0}",
  f + "ConvolutionsMeetEachWeightAtEachPlace")
F("a layer's bias counts in no product", file, "of_macs(length, «added && sum.defined() && sum.dim() > 1» ? 1 : 0)", "added",
  f + "ProductsAreTwoOperationsForEachMultiplication", z + "OperationsOfTheStepAreCountedByModule")
F("batch_norm computes more in training", file, "((«is_true(inputs, 5)» ? 4 : 1)", "true", f + "AttentionNormsAndTheRest")

# ---- recomputed layers
file = "src/residency/activations/checkpoint_rules.cpp"
F("runs of recomputed layers are timed", file, "if («rules_->timed») rules_->timed(", "false",
  z + "RecomputedLayersAreTimed")
F("rules of recomputed layers end with the run", file, "if («process.rules == rules_») process.rules.reset();", "false",
  z + "RecomputedLayersAreTimed")
