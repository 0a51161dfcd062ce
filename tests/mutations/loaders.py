"""Faults in data loaders."""
from faults import F

# ---- loaders
o = "options_tests OptionsOfTraining."
r = "accelerator_tests AcceleratorRanks."
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
