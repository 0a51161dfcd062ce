"""Faults in weights in few bits, fp8 and adapters."""
from faults import F

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
  "if («!at::equal(target, value.to(target.options()))»)", "false",
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
