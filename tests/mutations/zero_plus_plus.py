"""Faults in what travels in few bits (ZeRO++)."""
from faults import F

z = "zero_plus_plus_tests ZeroPlusPlus."
f = "zero_plus_plus_tests FsdpFewBits."

# ---- what is asked for
file = "src/parallel/zero/translate.cpp"
F("zero_hpz_partition_size", file, "settings.near = «given.zero_hpz_partition_size»;", "0",
  z + "BetweenMachinesAveragesTravel")
F("zero_hpz_partition_size is named where it does nothing", file,
  "settings.near_name = «\"DeepSpeed configuration: zero_hpz_partition_size\"»;", "nullptr",
  z + "PairsTrainAsOneProcess")
F("zero_quantized_weights", file, ".weights = «given.zero_quantized_weights»", "false", z + "WeightsTravelInEightBits")
F("zero_quantized_gradients", file, ".gradients = «given.zero_quantized_gradients»", "false",
  z + "GradientsTravelInFourBits")
F("zero_quantized_nontrainable_weights", file, ".frozen = «given.zero_quantized_nontrainable_weights»", "false",
  z + "FrozenWeightsAreKeptInEightBits", "zero_plus_plus_tests ZeroPlusPlusMemory.OfCodesAndOfSecondCopiesIsCounted")
file = "src/parallel/fsdp/translate.cpp"
F("FullyShardedDataParallelPlugin::quantized_weights", file, ".weights = «plugin.quantized_weights.value_or(false)»",
  "false", f + "AreThoseOfZeroPlusPlus")
F("FullyShardedDataParallelPlugin::quantized_gradients", file,
  ".gradients = «plugin.quantized_gradients.value_or(false)»", "false", f + "AreThoseOfZeroPlusPlus")
F("FullyShardedDataParallelPlugin::quantized_nontrainable_weights", file,
  ".frozen = «plugin.quantized_nontrainable_weights.value_or(false)»", "false", f + "AreThoseOfZeroPlusPlus")
file = "src/parallel/fsdp/plugin.cpp"
F("FSDP_QUANTIZED_* is read", file,
  "bool travels) { if (!field) field = «flag_or_false(variable)»;", "false",
  f + "ComeFromTheEnvironment")
F("what travels nowhere is not asked for in few bits", file,
  "if («*field && travels && effective_strategy(plugin) == ShardingStrategy::no_shard»)", "false",
  f + "AreRefusedWhereNothingTravels")
F("FSDP_RESHARD_AFTER_FORWARD as a number", file, "if («is_number») return environment::integer", "false",
  "fsdp_plugin_tests FsdpPlugin.ReshardAfterForwardMayBeANumberInTheEnvironment")
F("two wires for weights", "src/parallel/fsdp/choose.cpp",
  "if («plugin_.quantized_weights.value_or(false) && !weights.empty()») raise", "false",
  "fp8_accelerator_tests Fp8Ranks.TwoWiresForWeightsAreRefused")

# ---- what becomes of it
file = "src/parallel/sharding/shard_store.cpp"
F("codes are what travels", file, "else if («part.int8») { wire =", "false", z + "WeightsTravelInEightBits",
  z + "BetweenMachinesAveragesTravel")
F("what travels in few bits does whatever the transport is", file, "!disk->has_parameters() && «!settings.quantized.any()»)",
  "true", z + "TrainsNearOneProcess")
file = "src/parallel/sharding/collective_reducer.cpp"
F("what lies between members has no share in scales", file, "if (is_quantized(part.index)) «flat.zero_()»;",
  "flat.fill_(100)", z + "GradientsTravelInFourBits")
file = "src/parallel/sharding/quantized_reduction.cpp"
F("averages of a machine go to all machines", file, ".transpose(«0, 1»).flatten();", "0, 0",
  z + "BetweenMachinesAveragesTravel")
F("averages are divided", file, "running.mean.div_(«static_cast<double>(messages.size(0))»);", "1.0",
  z + "GradientsTravelInFourBits")
file = "src/parallel/sharding/shard_groups.cpp"
F("machines exchange averages", file, "if («ranks == 1 || ranks == size») return groups;", "true",
  z + "BetweenMachinesAveragesTravel")
file = "src/parallel/sharding/sharding.cpp"
F("what stays is gathered as it is", file, "settings.quantized.weights && «!unit.stays»,", "true",
  z + "WhatStaysTravelsAsItIs")
F("frozen codes stay frozen", file, "if (part.coded) «refuse_to_train(part);»", "", z + "FrozenWeightsAreKeptInEightBits")
F("writes are of exact values behind a lossy wire", "src/residency/writes.cpp", "|| «home.lossy()»);", "false",
  f + "WritesAreOfExactValues")
file = "src/residency/homes/coded.cpp"
F("what is not written keeps its codes", file, "at::where(«at::ne(given, seen)», given.to(at::kFloat), exact)",
  "at::ones_like(given, at::kBool)", "homes_tests Homes.CodesTakeWhatIsWrittenAndKeepTheOtherBlocks")
F("codes count changes", file, "«++changes_;»", "", "homes_tests Homes.CodesTakeWhatIsWrittenAndKeepTheOtherBlocks")
