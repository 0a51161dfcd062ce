"""Faults in what `accelerate inspect` says of checkpoints, and in `accelerate convert`."""
from faults import F

i = "inspect_tests Inspect."
p = "inspect_cli_tests InspectCli."
c = "convert_files_tests ConvertFiles."

# ---- inspect
F("inspect --json", "cli/commands/inspect.cpp", "if («arguments.on(\"json\")»)", "false", p + "PrintsJson")
F("inspect --verify", "cli/commands/inspect.cpp", "const bool verify = «arguments.on(\"verify\")»;", "false",
  p + "DamageIsNamedAndIsTheExitCode")
F("inspect: damage is the exit code", "cli/commands/inspect.cpp", "return «found.damage.empty()» ?", "true",
  p + "DamageIsNamedAndIsTheExitCode")
F("inspect: names are plain text", "cli/commands/inspect.cpp", "size_text(tensor.bytes), «accelerate::plain_text(tensor.name)», where",
  "tensor.name", p + "PrintsATable")
file = "src/formats/inspect/inspect.cpp"
F("inspect: sizes of the list are compared", file, "«expected.check_size(opened.size());»", "", i + "TheListOfACheckpoint")
F("inspect: the list's checksums are compared", file, "if («!verify_») return;", "true", i + "TheListOfACheckpoint")
F("inspect: what the list covers is compared once", file, "format, verify_ && «!has_checksums(path)», part", "true", i + "TheListOfACheckpoint")
F("inspect: what the list lacks is said", file, "if («manifest_ && !listed»)", "false", i + "TheListOfACheckpoint")
F("convert: a result may lie in what is read", "src/bigmodel/convert_files.cpp", "if («fs::absolute(next->path()).lexically_normal() == work»)",
  "false", c + "WhatIsWholeIsKept")
F("inspect: shards are not listed again", file, "may_hold_tensors(file) && «!shards.contains(file.filename().string())»", "true",
  i + "AnIndexAndItsShards")
F("inspect: DeepSpeed's other tags are other checkpoints", file,
  "for (const auto& other : others) «folders.erase(path / other.substr(1, other.size() - 2));»", "{}", i + "DeepSpeedsFolders")
F("inspect: a tag that is not there", file, "if («!folders.contains(path / tag)»)", "false", i + "DeepSpeedsFolders")
F("inspect: the step of Python's checkpoints", file, "result_.step = «number_in(file, {\"step\"})»;", "std::nullopt",
  i + "WhatPythonWrites")
F("inspect: several checkpoints are refused", file, "if («saves.size() > 1»)", "false", i + "WhatIsNoCheckpointIsRefused")
file = "src/formats/inspect/torch_files.cpp"
F("inspect: DeepSpeed's files that are missing", file, "if («!missing.empty()») complain", "false", i + "DeepSpeedsFolders")
F("inspect: compressed records have no checksum of their bytes", file, "if («entry.stored» && archive.check(name))", "true",
  i + "WhatPythonWrites")
file = "src/formats/inspect/folders.cpp"
F("inspect: items of a distributed checkpoint lie in their files", file, "if («place.offset > file->size() ||»", "",
  i + "DistributedCheckpoints")
F("inspect: checksums of a distributed checkpoint", file, "if («verify») part.checked_bytes += check_item", "false",
  i + "DistributedCheckpoints")
F("inspect: tensors that an index names and shards lack", file, "if («found < names.size()»)", "false", i + "AnIndexAndItsShards")
F("inspect: offloaded files are as long as their weights", file, "if («file.size() < bytes»)", "false", i + "OffloadFolders")
file = "src/formats/zip_archive.cpp"
F("inspect: checksums of torch's archives", file, "if («sum != expected»)", "false", i + "TorchArchives")
F("inspect: archives that have no checksums", file, "if («expected == 0») return", "false", i + "WhatPythonWrites")
F("attributes of what calls made are left out", "src/formats/pickle_reader.cpp",
  "if («takes_all_names() && stack_.size() > bottom() &&»", "false &&", i + "WhatPythonWrites")
F("strides of exported weights", "src/checkpoint/saved_state.cpp", ".strides = «weight.strides»", "std::vector<int64_t>(weight.sizes.size(), 1)",
  i + "WhatPythonWrites")

# ---- convert
file = "src/bigmodel/convert_files.cpp"
F("ConvertFilesOptions::to", file, "const auto wanted = «options_.to.value_or(by_name)»;", "by_name", c + "EachFormatInAndOut")
F("ConvertFilesOptions::dtype", file, "const auto dtype = «options_.dtype» && at::isFloatingType(stored.dtype) ?", "std::optional<at::ScalarType>()",
  c + "DtypesOfFloatsAlone")
F("ConvertFilesOptions::dtype leaves whole numbers alone", file, "options_.dtype && «at::isFloatingType(stored.dtype)» ?", "true",
  c + "DtypesOfFloatsAlone")
F("ConvertFilesOptions::max_shard_size", file, "parse_size(«options_.max_shard_size.value_or(\"50GB\")»)", "std::string(\"50GB\")",
  c + "EachFormatInAndOut")
F("ConvertFilesOptions::tag", file, "ZeroCheckpoint::find(from, «tag»)", "std::string()", c + "DeepSpeedsFolders")
F("ConvertFilesOptions::overwrite", file, "if («!options_.overwrite»)", "false", c + "WhatIsThereIsReplacedWhereThatIsAllowed")
F("ConvertFilesOptions::on_progress", file, "if («options_.on_progress») options_.on_progress(done_", "false",
  c + "WhatIsWholeIsKept")
F("convert: only files of weights are replaced", file, "if («!is_of_a_result(entry.path())»)", "false",
  c + "WhatIsThereIsReplacedWhereThatIsAllowed")
F("convert: files that are whole are kept", file, "if («goes_on» && is_whole(work / names.back()", "false",
  c + "WhatIsWholeIsKept")
F("convert: files that are damaged are made anew", file, "goes_on && «is_whole(work / names.back(), parts[i])»", "true",
  c + "WhatIsWholeIsKept")
F("convert: files of another plan are made anew", file, "&& «there == wanted»;", "true", c + "WhatIsWholeIsKept")
F("convert: one process at a time", file, "if («::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK»)",
  "false", c + "WhatCantBeIsRefused")
F("convert: nothing stays of nothing", file, "if («!any») fs::remove_all(work, error);", "false", c + "ShardsOfFsdp")
F("convert: numbers beyond fp16", "src/bigmodel/quantize_files.cpp",
  "if («dtype == at::kHalf» && (at::isinf(made)", "false", c + "DtypesOfFloatsAlone")
F("convert: an infinity is no overflow", "src/bigmodel/quantize_files.cpp", "(at::isinf(made) & «at::isfinite(values)»)", "at::isinf(made)",
  c + "DtypesOfFloatsAlone")
F("convert: the dtype of numbers in GGUF", "src/bigmodel/quantize_to_gguf.cpp", "is_matrix ? «dtype.value_or(first.dtype)» :", "first.dtype",
  "quantize_files_tests QuantizeFiles.NumbersStayNumbersInAGgufFile")
F("convert: the file_type of numbers in GGUF", "src/bigmodel/quantize_to_gguf.cpp", "return «id == kF16» ? 1 :", "false",
  "quantize_files_tests QuantizeFiles.NumbersStayNumbersInAGgufFile")
