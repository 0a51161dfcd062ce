"""Faults in what `accelerate inspect` says of checkpoints."""
from faults import F

i = "inspect_tests Inspect."
p = "inspect_cli_tests InspectCli."

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
