"""Faults in the list of a checkpoint's files, in what is looked at by it or by archives' own checksums, in weights that
hooks change, and in saves to disks that are full or fail."""
from faults import F

m = "manifest_tests Manifest."
u = "checkpoint_manifest_tests "
d = "full_disk_tests FullDisk."

# ---- settings
file = "src/accelerator/checkpointing.cpp"
F("ProjectConfiguration::verify_checkpoints", file,
  "«project.verify_checkpoints».value_or(environment", "std::optional<bool>()",
  m + "IsNotLookedAtWhereItIsSwitchedOff")
F("ProjectConfiguration::verify_checkpoints of the environment", file,
  "value_or(«environment::flag(\"ACCELERATE_VERIFY_CHECKPOINTS\").value_or(true)»)", "true",
  m + "IsNotLookedAtWhereItIsSwitchedOff")
F("what a folder lacks by its list is passed over", file, "if («state->is_local_main_process()») for (auto& name",
  "false", m + "ACopyInPartIsPassedOver")
F("a run that goes on counts its steps on", file, "«impl_->run.steps_before += manifest->step - run_state::steps_taken(impl_->run);»",
  "", m + "ListsAndGuardsEveryFile")
F("a hook may write less than the models", "src/run_state/room.cpp", "+= «options.models_as_they_are» ? saved_bytes", "true",
  d + "WhatItTakesIsComparedBeforeAnythingIsWritten")

# ---- who writes
c = "checkpoint_tests CheckpointRanks.RanksThatSeeOneDiskShareOutWhatTheyHaveAlike"
F("ranks share out files that they have alike", "src/run_state/state_files.hpp",
  "return «several || sharers.empty()» ? here", "true", c)
F("ranks that see another disk write none for all", "src/run_state/checkpoint_folders.cpp",
  "if («seeing[rank]») beside_first_", "true", "checkpoint_tests CheckpointRanks.EachMachineCanWriteItsOwnCopy")
F("states of ranks that train apart are rank 0's", "src/run_state/optimizers.cpp",
  "if (model->engine && «!model->engine->apart()»)", "true",
  "communication_hooks_tests LocalSgd.TheOptimizersFileIsRank0sWhileRanksTrainApart")
F("replicas share out the parts that they have alike", "src/run_state/distributed_items.cpp",
  "writer[name] = «least - bytes.begin()»;", "0", "fsdp_state_tests FsdpState.ReplicasResumeBitByBit")
F("replicas that train apart write the first one's parts", "src/run_state/holdings.cpp",
  ".replicas = «apart» ? 1", "false", "communication_hooks_tests LocalSgd.ReplicasThatTrainApartSaveTheFirstOnes")

# ---- the list
file = "src/run_state/manifest.cpp"
F("the list is written", "src/run_state/checkpoint_folders.cpp", "«if (write_last) write_last();»", "",
  m + "ListsAndGuardsEveryFile")
F("a hook's file of the list's name is refused", file, "if («fs::exists(folder_ / formats::kManifestFile)»)", "false",
  m + "AHooksFileOfItsNameIsRefused")
F("another's file of the list's name stays", "src/accelerator/checkpointing.cpp",
  "«if (writes) run_state::keep_file_of_another(folder);»", "", m + "AHooksFileOfItsNameIsRefused")
F("sizes are compared", file, "not_whole(folder, *manifest_); «!lacking.empty()»)", "false", m + "ACopyInPartIsPassedOver")
F("files of another size are not whole", file, "else if («static_cast<int64_t>(bytes) != sums.bytes»)", "false",
  m + "ACopyInPartIsPassedOver")
F("a list that can't be read is passed over", file,
  "return {«fmt::format(\"{} that can be read ({})\", formats::kManifestFile, error.what())»};", "", m + "ACopyInPartIsPassedOver")
F("hooks' files are checked", file, "«!is_checked_when_read(file.first)»)", "false", m + "ListsAndGuardsEveryFile")
F("DeepSpeed's files for others are checked", file, "&& «first != \"latest\"» &&", "true", m + "GuardsDeepSpeedsFiles")
F("checksums are computed while files are written", "src/utils/atomic_file.cpp", "if («RecordedFiles::wants(path_)») sums_",
  "false", u + "FileChecksums.OfWhatIsWrittenIntoAFolder")
F("files elsewhere are not recorded", "src/utils/atomic_file.cpp", "return «name.empty() || *name.begin() == \"..\"» ?",
  "false", u + "FileChecksums.OfWhatIsWrittenIntoAFolder")
F("weights that were merged are forgotten", "src/checkpoint/merge_fsdp_weights.cpp",
  "«formats::forget_in_manifest(folder);»", "", m + "WhatMergingRemovesIsForgotten")
file = "src/formats/checkpoint_manifest.cpp"
F("the list has a checksum itself", file, "checksum_of(root); «sum != expected»)", "false",
  u + "CheckpointManifest.AFlippedBitIsNeverTakenForAnotherList")
F("the list leads nowhere else", file, "if («!is_name_below(name)») fail", "false",
  u + "CheckpointManifest.WhatIsWrongIsNamed")
F("a list of a later version is refused", file, "number(root, \"version\"); «version != kVersion»)", "false",
  u + "CheckpointManifest.WhatIsWrongIsNamed")
F("each part has a checksum", file, "|| «static_cast<int64_t>(all.size() / kDigits) != parts»)", "false",
  u + "CheckpointManifest.WhatIsWrongIsNamed")
F("others' files of the list's name are none", file, "!root.is_object() || «!(has(\"format\") || has(\"files\") || has(kChecksums))»)",
  "false", m + "AHooksFileOfItsNameIsRefused")

# ---- readers
file = "src/formats/input_file.cpp"
F("readers check what they read", file, "if («expected_») return read_by_parts(offset, static_cast", "false",
  m + "ListsAndGuardsEveryFile", u + "ExpectedFiles.PartsThatAreReadAreLookedAtOnce")
F("readers compare the size", file, "if («expected_») expected_->check_size", "false",
  u + "ExpectedFiles.PartsThatAreReadAreLookedAtOnce")
F("a part is looked at once", "src/formats/expected_files.cpp", "if («is_checked_[index].load(std::memory_order_relaxed)») continue;",
  "false", u + "ExpectedFiles.PartsThatAreReadAreLookedAtOnce")
file = "src/checkpoint/saved_state.cpp"
F("mapped tensors are checked", file, "«bytes->check(begin, end - begin);» return", "",
  u + "ExpectedFiles.OfATensorThatIsReadInPartItsPartAlone")
F("random states that are damaged are refused", "src/run_state/state_parts.cpp",
  "catch (const formats::DamagedFile&) { «throw;» }", "", m + "ListsAndGuardsEveryFile")
F("a damaged tensor is named", "src/run_state/models.cpp", "const std::string what = «\"tensor '\" + name + \"'\"»;", "std::string()",
  m + "TheTensorIsNamed")
F("a damaged state of an optimizer is named", "src/run_state/optimizers.cpp",
  "const auto what = «fmt::format(\"'{}' of parameter '{}'\", kind, key)»;", "std::string()", m + "TheTensorIsNamed")

# ---- loading in place
p = "in_place_tests InPlace."
F("weights become whole unit by unit", "src/run_state/models.cpp", "stream.emplace(«part_by_part(std::move(wanted))»);",
  "std::vector<WholeStream::Stage>{std::move(wanted)}", p + "SavingAModelHoldsAUnitAtATime")
F("only rank 0 holds a whole unit", "src/parallel/sharding/sharding.cpp",
  "«everywhere» ? self.groups.shard->all_gather(range)", "true", p + "SavingAModelHoldsAUnitAtATime")
file = "src/formats/input_file.cpp"
F("a part that was read for some bytes serves the next", file, "to && «!take_from_last_part(offset, to, now)»)", "true",
  u + "ExpectedFiles.AFileThatIsReadInTurnIsReadOnce")
F("bytes that are read are counted", "src/accelerator/checkpointing.cpp",
  "«counts::add(CheckpointCount::bytes_read, formats::InputFile::bytes_read() - read_before);»", "", p + "EachRankReadsWhatItHolds")
F("what leads to a tensor is only looked up first", "src/formats/torch_container.cpp",
  "return zip_->record(\"data/\" + key, «ZipArchive::Look::peeks»);", "ZipArchive::Look::checks", u + "ExpectedFiles.WhatLeadsToATensorIsCheckedWithIt")
F("what leads to a tensor is checked with it", "src/formats/torch_archive_reader.cpp",
  "at::NoGradGuard no_grad; «check_header(file, saved);»", "", u + "ExpectedFiles.WhatLeadsToATensorIsCheckedWithIt")
F("what leads to tensors is checked with all of them", "src/formats/torch_archive_reader.cpp",
  "«check_header(*impl_->file, saved);»", "", u + "ExpectedFiles.WhatLeadsToATensorIsCheckedWithIt")
F("what leads to a distributed tensor is checked with it", "src/formats/dcp/reader.cpp",
  "«region.file->check(offset, region.saved.storage_begin - offset);»", "", u + "ExpectedFiles.OfADistributedTensorAllOfItsArchiveIsChecked")
F("what lies behind a distributed tensor is checked with it", "src/formats/dcp/reader.cpp",
  "«region.file->check(end, offset + length - end);»", "", u + "ExpectedFiles.OfADistributedTensorAllOfItsArchiveIsChecked")
F("numbers of another type are read some at a time", "src/formats/torch_archive_reader.cpp",
  "if («to.numel() > kSlabBytes / width» && along >= 0)", "false", p + "NumbersOfAnotherTypeTakeSomeMegabytes")
F("an optimizer's tensors stay", "src/optim/optimizer_state.cpp", "return «fits» ? there", "false", p + "TakesNoMemoryOfItsOwn")
file = "src/run_state/filling.cpp"
F("tensors are read into where they are", file, "if («comes_and_goes(item->to)») fill", "true", p + "TakesNoMemoryOfItsOwn")
F("who compares versions learns of what was read", file, "«at::Tensor(item.to).copy_(read);»",
  "if (!read.is_same(item.to)) at::Tensor(item.to).copy_(read);", p + "TakesNoMemoryOfItsOwn")
F("files are read in the order of the disk", file, "return «std::tie(x.file, x.begin) < std::tie(y.file, y.begin)»;", "false",
  p + "ReadsInTheOrderOfTheDisk")
file = "src/run_state/run_state.cpp"
F("what is undefined is not saved", file, "«refuse_undefined(run, \"save_state\");»", "", m + "TheTensorIsNamed")
F("what was loaded again is saved", file, "«run.undefined.clear();» } void refuse_undefined", "", m + "TheTensorIsNamed")
refused = "checkpoint_tests CheckpointTest.WhatDoesNotFitChangesNothing"
F("an optimizer gets its states back", "src/optim/optimizer_state.cpp", "«optimizer.state() = std::move(before->states);»", "", refused)
F("an optimizer gets its options back", "src/optim/optimizer_state.cpp",
  "«optimizer.param_groups()[g].set_options(std::move(before->options[g]));»", "", refused)

# ---- archives of folders without a list
F("archives' own checksums are looked at", "src/formats/input_file.hpp", "&& «CheckedRecords::wanted()»;",
  "false", m + "WithoutAListArchivesAreGuardedByTheirOwnChecksums")
F("verify_checkpoints holds for archives' own checksums", "src/run_state/manifest.cpp",
  "«if (options.checksums) records_.emplace();»", "records_.emplace();", m + "IsNotLookedAtWhereItIsSwitchedOff")
F("readers check the records that they read", "src/formats/input_file.cpp",
  "«check_records(offset, count, static_cast<const char*>(data));»", "",
  m + "WithoutAListArchivesAreGuardedByTheirOwnChecksums", u + "CheckedRecords.AreLookedAtOnceBeforeAnyOfTheirBytesIsGiven")
F("records are looked at before they are given", "src/formats/expected_files.cpp", "if («~state != crc32_»)", "false",
  m + "WithoutAListArchivesAreGuardedByTheirOwnChecksums", u + "CheckedRecords.AreLookedAtOnceBeforeAnyOfTheirBytesIsGiven")
F("a record is looked at once", "src/formats/expected_files.cpp",
  "void ZipRecord::check(const std::string& file, const std::function<std::string_view(int64_t begin, int64_t bytes)>& read) const { if («is_checked_.load(std::memory_order_relaxed)») return;",
  "false", u + "CheckedRecords.AreLookedAtOnceBeforeAnyOfTheirBytesIsGiven")
F("records don't overlap", "src/formats/input_file.cpp", "if («before.end() > begin») return false;", "false",
  u + "CheckedRecords.AreLookedAtOnceBeforeAnyOfTheirBytesIsGiven")
F("files that a list knows are checked by it alone", "src/formats/input_file.hpp", "return «!expected_» &&",
  "true", u + "CheckedRecords.OfWhichTheListKnowsAllAreNotLookedAtTwice")

# ---- hooks
file = "src/accelerator/checkpointing.cpp"
F("hooks get whole weights of sharded models", file, "if («!engine || !engine->holds_pieces()») return checkpointing::state_dict",
  "true", "fsdp_state_tests FsdpState.HooksChangeWholeWeights")
F("hooks that take weights are refused where each rank writes pieces", file,
  "if («asked && (form == StateForm::sharded || form == StateForm::local || form == StateForm::deepspeed)»)", "false",
  "fsdp_state_tests FsdpState.HooksChangeWholeWeights")

# ---- disks
F("bytes needed and free are compared", "src/run_state/room.cpp", "if («needed > *free»)", "false",
  d + "WhatItTakesIsComparedBeforeAnythingIsWritten")
F("states of optimizers count", "src/run_state/room.cpp", "needed += «saving.form == StateForm::deepspeed» ?", "true",
  d + "WhatItTakesIsComparedBeforeAnythingIsWritten")
F("states in pieces count as those of all ranks", "src/run_state/room.cpp", "bytes += («in_pieces» ? holding", "false",
  d + "WhatItTakesIsComparedBeforeAnythingIsWritten")
F("a full disk says what is free", "src/utils/atomic_file.cpp",
  "return «free ? fmt::format(\"; its disk has {} bytes free\", *free) : \"\"»;", "std::string()",
  d + "ThatIsFullInTheMiddleLosesNothing")
F("flushing of folders and hooks' files is checked", "src/utils/atomic_file.cpp",
  "handle < 0 || «::fsync(handle) != 0» ?", "(::fsync(handle), false)", d + "NoFlushThatFailsIsPassedOver")
F("names of files reach the disk", "src/utils/atomic_file.cpp",
  "const int handle = «::open(path.c_str(), O_RDONLY | O_CLOEXEC)»;", "::open(path.c_str(), O_PATH | O_CLOEXEC)",
  "checkpoint_crash_tests CheckpointCrash.InAnyPhaseOfASave")

# ---- how files are written
a = "checkpoint_manifest_tests AtomicFile."
F("large files go past the system's cache", "src/utils/atomic_file.cpp", "O_WRONLY | «O_DIRECT | O_CLOEXEC»", "O_CLOEXEC",
  a + "GoesPastTheCache")
F("what a disk has refused in the middle is an error", "src/utils/atomic_file.cpp", "if («errno != 0») fail_writing(kBufferBytes);",
  "false", a + "AFullDiskLeavesTheOldFile")
F("what it has refused at the end is, too", "src/utils/atomic_file.cpp", "if («errno != 0») fail_writing(filled_);", "false",
  a + "AFullDiskLeavesTheOldFile")
F("buffers follow each other in the file", "src/utils/atomic_file.cpp", "sent_ += static_cast<int64_t>(«std::exchange(filled_, 0)»);",
  "(std::exchange(filled_, 0), 0)", a + "HasWhatWasWritten")
F("64 bytes move on by the right powers", "src/utils/file_checksums.hpp", "last[i] = _mm_xor_si128(moved(last[i], «by_64»), load", "_mm_setzero_si128()",
  "checkpoint_manifest_tests FileChecksums.ByTableAndByProductsAreTheSame")
F("what 16 bytes are moved on by", "src/utils/file_checksums.hpp", "return {power(8 * bytes + 32), power(8 * bytes - «32»)};", "31",
  "checkpoint_manifest_tests FileChecksums.ByTableAndByProductsAreTheSame")
F("enumerations that Python 3.11.2 wrote", "src/formats/dcp/metadata_reader.cpp", "«\"builtins.getattr\"», \"__builtin__", "\"builtins.nobody\"",
  "dcp_tests DcpWithPython.EveryCaseOfPythonIsReadBitForBit")
