"""Faults in trackers, profiler, logs and live figures."""
from faults import F

# ---- trackers
c = "checkpoint_tests "
p = "data_tests PreparedDataLoader."
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
for what, statement in (("optimizers", "take({run.optimizers[i], run.models, file});"),
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
texts = "comm_tests Comm.TextsOfAnyLength"
F("texts that are too long for a note do not travel with it", file, "if («static_cast<int64_t>(text.size()) <= agreed.most») message", "true", texts)
F("texts that did not travel with notes are gathered", file, "if («*std::max_element(lengths.begin(), lengths.end()) > most») return gather_texts",
  "false", texts)
F("short texts travel with notes", file, "const auto size = static_cast<int64_t>(board ? SharedMemory::most_to_exchange() : «kMessage»);",
  "sizeof note", texts)
F("a long text is broadcast", file, "if («length <= most») return texts", "true", texts)
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

# ---- profiler
file = "src/run_state/checkpoint_folders.cpp"
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
