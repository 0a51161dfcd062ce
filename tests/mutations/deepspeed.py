"""Faults in DeepSpeed's stages."""
from faults import F

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
F("zero3_init_flag acts on models of files", "src/models/weights.cpp", "if («!plugins || !plugins->makes_models_empty()» ||",
  "true", "zero_engine_tests ZeroInit.ModelsOfFilesAreSplitFromTheStart")
F("zero3_init_flag is that of the active plugin", "src/parallel/zero/plugins.cpp",
  "return by_name_[«active_»].second.zero3_init_flag", "0", "zero_engine_tests ZeroInit.ModelsOfFilesAreSplitFromTheStart")
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
F("fp16 gradients of whole parameters are unscaled in fp32", "src/optim/widen_gradient.hpp",
  "const auto kept = «member» ? member->home().keeps() : std::nullopt;", "false", y)
F("optimizers of users get gradients in their masters' dtype", "src/optim/optimizer.cpp",
  "{ «widen_for_others(optimizer);» if (!closure) return closure;", "",
  "zero_tests Zero.OptimizersOfUsersGetGradientsInTheirMastersDtype")
F("so do those that compute gradients in a closure", "src/optim/optimizer.cpp",
  "closure(); «widen_for_others(optimizer);»", "", "zero_tests Zero.OptimizersOfUsersGetGradientsInTheirMastersDtype")
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
  "if («optim::step_with_fp32_moments(*optimizer)») return;", "false",
  y + "AProgramsAdamStepsAsDeepSpeedsToTheBit")
F("moments are as exact as a step makes them", "src/optim/optimizer_state.cpp", "{ return «moment_type(o, parameter)»; }",
  "parameter.scalar_type()", y + "StatesThatAProgramsAdamHasAreKept", y + "AProgramsAdamGoesOnFromDeepSpeedsFiles")
F("optimizers that would keep other moments are refused", "src/parallel/zero/choose.cpp",
  "«for (const auto& optimizer : facts.optimizers) check_moments(*optimizer);»", "",
  y + "OptimizersThatWouldKeepOtherMomentsAreNamed")
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
