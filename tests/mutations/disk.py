"""Faults in what lies on a disk."""
from faults import F

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
F("where memory is not scarce malloc keeps what is freed", file, "if («on_disk_ >= memory_ / 2») std::call_once", "true",
  "residency_tests MemoryOfDisks.GoesBackToTheSystemWhereItIsScarce")
F("what has left the disk does not count", file, "«disk->count_on_disk(-bytes);»", "",
  "residency_tests MemoryOfDisks.GoesBackToTheSystemWhereItIsScarce")
F("memory of what has gone goes back to the system", file, "std::call_once(once, «let_memory_go»);", "[] {}",
  "residency_tests MemoryOfDisks.GoesBackToTheSystemWhereItIsScarce")
F("what could not be written is not dropped", file, "«if (!place->is_copy) continue;»", "",
  m + "WhatCouldNotBeWrittenStaysInMemory")
F("what was written in memory is not dropped", file, "«place->is_copy = false;» return;", "",
  m + "WhatCouldNotBeWrittenStaysInMemory")
F("bytes go past the cache", file, "const int file = «direct_ >= 0 && direct_works_» ?", "false",
  m + "BytesGoToTheDiskAndComeBack")
file = "src/residency/homes/file.cpp"
f = "residency_tests FileHome."
F("cold bytes go past the cache", file, "if («held») read_through_cache(offset, data, here, name);", "true",
  f + "ColdBytesComeByTheRingAndByPlainCallsWhereTheKernelForbidsIt")
F("a tensor begins within a block", file, "std::memcpy(data + («from - offset»), bytes +", "0",
  f + "ColdBytesComeByTheRingAndByPlainCallsWhereTheKernelForbidsIt")
F("a file's last block comes by itself", file, "«read_through_cache(offset + direct, data + direct, count - direct, name);»",
  "", f + "ColdBytesComeByTheRingAndByPlainCallsWhereTheKernelForbidsIt")
F("a request is given where it was read", "src/residency/disk/direct_io.cpp", "take(«done.offset - count», begin(slot), count);",
  "done.offset", f + "ColdBytesComeByTheRingAndByPlainCallsWhereTheKernelForbidsIt")
file = "src/residency/homes/kept_slice.cpp"
F("images are made of masters that have changed", file, "«*made_of == masters._version()»", "true",
  z + "ParametersOnADiskTrainAsInMemory")
file = "src/parallel/sharding/shards_on_disk.cpp"
F("what a step leaves goes to the disk", file, "«take(moments, /*whole=*/true);»", "",
  z + "StatesOnADiskTrainAsInMemory")
F("states that are loaded lie on the disk at once", file, "«states_->place(state);»", "",
  z + "CheckpointsGoOnInMemoryAndBack")
F("groups that a step passes over do not come", file,
  "are nobody's to send. if («coming_ && coming_->group != group») coming_", "false", "equivalence fuzzer")
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
