"""Faults in saves behind training."""
from faults import F

b = "behind_training_tests BehindTraining."
s = "snapshot_tests Snapshot."
same = b + "FilesAreThoseOfASaveThatWaits"

# ---- what save_state() is asked for
file = "src/accelerator/checkpointing.cpp"
F("SaveStateOptions::safe_serialization", file, "form_of_state(*impl_->engine, «options.safe_serialization»);", "true",
  "checkpoint_tests CheckpointTest.ResumedRunIsTheUninterruptedOneBitByBit")
F("SaveStateOptions::behind_training", file, "if («options.behind_training») {", "false", same)
F("the next save waits for the one before", file,
  "const SaveStateOptions& options) { «wait_for_checkpoint();»", "", b + "AFileThatCantBeWrittenFailsTheSaveOnAllRanks")
F("load_state waits for the checkpoint", file, "const LoadStateOptions& options) { «wait_for_checkpoint();»", "",
  b + "WhatTheProgramRewritesFailsTheSaveOnAllRanks")
F("end_training waits for the checkpoint", "src/accelerator/accelerator.cpp",
  "impl_->observation.end(); «wait_for_checkpoint();»", "", b + "TheMarkCopiesNextToNothing")
F("older checkpoints go when a save behind training is complete", file,
  "behind->wait(); «impl_->prune_beside(impl_->behind_folder);»", "", b + "AutomaticNamesAndTheLimitActWhenItIsComplete")

# ---- the mark
file = "src/run_state/behind_training.cpp"
F("whole tensors of pieces are refused", file, "if («holding.in_pieces()») raise", "false", b + "WhatCantBeReadLaterIsRefused")
F("rank 0 says which ranks failed", file, "if (verdict.empty() && «!reports[other].failure.empty()»)", "false",
  b + "AFileThatCantBeWrittenFailsTheSaveOnAllRanks")
F("a rank's failure is everybody's", file, "verdict.empty()) { verdict = «std::move(theirs)»;", "std::string()",
  b + "WhatTheProgramRewritesFailsTheSaveOnAllRanks")
F("metadata of pieces is written last", file, "«later.together[i].last(texts);»", "", same)
file = "src/snapshot/ledger.cpp"
F("what is rewritten is kept", file, "«chunk.state = Chunk::State::kept;» counts::add", "", s + "WhatIsRewrittenIsReadAsItWas", same)
F("a write that nobody announced is an error", file, "if («version == one.version» ||", "true",
  s + "AWriteThatNobodyAnnouncedIsNamed", b + "WhatTheProgramRewritesFailsTheSaveOnAllRanks")
F("parameters of shards are watched", "src/run_state/behind_training.cpp",
  "if («!comes_and_goes(parameter)») all.push_back", "false", b + "WhatTheProgramRewritesFailsTheSaveOnAllRanks")
F("parameters that have moved away are not watched", file,
  "if («one.place && one.place != one.tensor.const_data_ptr()») continue;", "false", b + "WritesToShardedParametersAreKept")
F("a view that begins before is found", file, "views_.lower_bound(«begin - longest_view_»)", "begin + 1",
  s + "AWriteThroughAViewIsNamed")
F("a step's own writes are none of the program's", file, "&& «!in_step_») compare_versions(region);", "true",
  s + "AStepMayWriteToOnePartAndThenAnnounceTheNext")
F("versions are taken anew after a step", file, "«one.version = static_cast<int64_t>(one.tensor._version());»", "",
  s + "AStepMayWriteToOnePartAndThenAnnounceTheNext")
F("what was written before a step is found", file, "if (!region.announced) «compare_versions(region);» in_step_ = true;", "",
  s + "AStepMayWriteToOnePartAndThenAnnounceTheNext")
F("optimizers' steps are told", "src/optim/optimizer.cpp", "«const snapshot::StepWrites writes;»\n  Impl& self = *this;", "", same)
F("memory of the state is not copied", file, "return «begin + bytes <= end ? &name : nullptr»;", "nullptr",
  s + "WhatIsRewrittenIsReadAsItWas", b + "TheMarkCopiesNextToNothing")
F("tied tensors are read each", file, "for (auto& chunk : region.chunks) «++chunk.reads»;", "chunk.reads = 1",
  s + "PartsOfOneStorageAndTiedTensorsAreReadEachByItself")
F("memory is held until it is read", file, "Region{begin, bytes, «tensor.storage()»}", "c10::Storage()",
  s + "MemoryOfATensorThatGetsOtherStorageStays")
F("checksums of records make an archive's number", "src/formats/zip_writer.cpp",
  "«sums_ = c10::hash_combine(sums_, entry.crc);»", "", "zip_writer_tests ZipWriter.ItsBytesAreLibTorchs")
F("records of another size are refused", "src/formats/zip_writer.cpp", "if («given != entry.bytes») throw", "false",
  "zip_writer_tests ZipWriter.ARecordOfAnotherSizeIsRefused")
# ---- who rewrites
F("our steps keep old values while they step", "src/optim/kernels/step.cpp",
  "if (old.any()) «old.stream(slice, from, count);»", "", s + "StepsKeepWhatTheyRewrite", same)
F("other steps are announced", "src/optim/optimizer.cpp",
  "return fused->run(grad_scale); «snapshot::keep_all();»", "", same)
F("a user's steps are announced", "src/optim/optimizer.cpp",
  "«snapshot::keep_all();» return optimizer.step(in_step(closure, optimizer));", "", same)
F("writes to shards are announced", "src/residency/homes/kept.cpp",
  "void Kept::take(int64_t begin, const at::Tensor& values) const { «snapshot::keep(values_);»", "",
  b + "WritesToShardedParametersAreKept")
F("writes to shards in shared memory are announced", "src/residency/residency.cpp", "«snapshot::keep(own);»", "",
  b + "WritesToShardedParametersAreKept")
F("what is read into tensors is announced", "src/run_state/filling.cpp", "«snapshot::keep_all();»", "",
  b + "WeightsThatAStateDictReplacesAreKept")
F("one save behind training at a time", "src/accelerator/checkpointing.cpp", "if («snapshot::current()») throw", "false",
  b + "WhatCantBeReadLaterIsRefused")
F("who rewrites a chunk waits for who reads it", "src/snapshot/ledger.cpp",
  "    «wait_until_read(chunk, lock);»\n    if (chunk.state != Chunk::State::live) continue;", "",
  "snapshot_tests Snapshot.WhoComesToAChunkThatIsBeingReadWaits")
