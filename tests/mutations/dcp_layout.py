"""Faults in layouts of distributed checkpoints: when they are written, the rules, the indexes, and what is compared
before and while they are read."""
from faults import F

d = "distributed_checkpoint_tests DcpLayout."
u = "dcp_tests "
limit = d + "TakesTheMetadatasPlaceWhereItWouldListTooManyParts"
own = d + "RulesOfOnesOwnAreCompared"
ranks = d + "FitsAnyNumberOfRanksBitByBit"
saves = u + "DcpFolderWithLayout.FilesOfDifferentSavesAreRefused"
layout = u + "DcpLayout.DamageIsNamed"
index = u + "DcpItemIndex.ComesBackAndItsDamageIsNamed"
rules = u + "DcpShards.RulesThatCannotBeAreNamed"

# ---- when
file = "src/run_state/distributed_items.cpp"
F("ACCELERATE_DCP_LISTED_PARTS", file, "«environment::integer({kVariable})».value_or(", "std::optional<int64_t>()", limit)
F("ACCELERATE_DCP_LISTED_PARTS where it is not set", file, "value_or(«1'000'000»)", "0", limit)
F("ACCELERATE_DCP_LISTED_PARTS below 0", file, "if («most < 0») raise", "false", limit)
F("ACCELERATE_DCP_LISTED_PARTS is rank 0's", file, "{std::move(mine), true, bytes, «digests[2]»}", "listed_parts", limit)
F("ranks with another limit are alike", file, "alike &= «i % 3 == 2» ||", "false", limit)
F("a part counts for each rank that has some", file, "parts += «rule_of(leaf, 0).holders(numel)»", "1", limit)
F("parts without a rule are listed", file, "if («!leaf.follows_rule») return -1", "false", limit)
F("values of ranks' own are listed", file, "if («of_all.alike» && listed_parts_of", "true", limit)
F("a layout says which replica writes", file, "rule_of(leaf, «writer.at(leaf.name)»)", "0", ranks)
F("no rank tells of its parts", file, "if («!layout_») records = gather_object", "true", d + "NoRankTellsOfItsParts")
F("a layout is kept between saves", file, "if (kept.size() > «kMostKept») kept.pop_front", "0", own)
F("a layout is kept for its own leaves", file, "if («one.bytes == bytes» && one.ranks", "true", own)
F("a layout is written behind training", file, "if («layout») return formats::write_dcp_layout", "nullptr",
  d + "RunsGoOnFromItAlsoWhenItWasSavedBehindTraining")

# ---- rules
file = "src/run_state/state_dict.cpp"
F("a rank's parts are compared with their rule", file, "if («expected == found») return", "true", own)
F("a rule is possible for all replicas", file, "sent.sizes, comm::world_size()); «!wrong.empty()»)", "false", own)
F("steps of replicas are possible", file, "if («sent.equal.replica_step < 1») fail", "false", own)
file = "src/parallel/sharding/sharding.cpp"
F("the engine's rule begins where the tensor does", file, "EqualShards{.begin = «member.offset»,", "0", ranks)
F("the engine's rule has its replicas", file, ".replica_step = «groups.mesh.step(comm::Axis::dp_replicate)»", "1", ranks)
F("tensors that lie otherwise have no rule", file,
  "else if («member.tensor.strides() == c10::contiguous_strides(member.tensor.sizes())»)", "true", limit)
file = "src/formats/dcp/shards.cpp"
F("boxes behind a part of a row", file, "const int64_t whole = first + «(from % row != 0)»;", "0",
  u + "DcpShards.BoxesAreTheElementsInTheirOrder")
F("boxes of the beginning of a row", file, "if («to % row») within(last", "false",
  u + "DcpShards.BoxesAreTheElementsInTheirOrder")
F("members that have nothing of a box are passed over", file, "(«at = next_under(at, sizes, box)») >= 0;", "at",
  u + "DcpShards.MembersUnderABoxAreThoseThatHaveSomeOfIt")
F("ranks between members are none", file, "|| «(rank - first) % step != 0» ||", "false",
  u + "DcpShards.MembersShareOutEachElementOnce")
F("ranks behind the last member are none", file, "|| «(rank - first) / step >= members») return", "false",
  u + "DcpShards.MembersShareOutEachElementOnce")
F("a rule holds all elements", file, "«end > all») return", "false", rules)
F("a rule's product fits", file, "if («__builtin_mul_overflow(rule.each, rule.members, &all)» ||",
  "(all = rule.each * 1, false)", rules)
F("a rule's ranks are the job's", file, "«last >= ranks») return", "false", rules)

# ---- the layout
file = "src/formats/dcp/layout.cpp"
F("a layout of another version", file, "«version != kLayoutVersion») fail", "false", layout)
F("a layout of no ranks, or too many", file, "if («ranks_ < 1 || ranks_ > kMostLayoutRanks») fail", "false", layout)
F("members of a layout that are not known", file, "if («object.size() != count») fail", "false", layout)
F("a name twice in a layout", file, "if («!names_.insert(entry.name).second») fail(\"the name", "false", layout)
F("ranks of a layout's values", file, "if («rank < 0 || rank >= ranks_») fail", "false", layout)
F("dtypes of a layout", file, "if («torch_element_bytes(info.dtype) == 0») fail", "false", layout)
F("sizes of a layout", file, "if («!numel || *numel > std::numeric_limits<int64_t>::max() / kMostLayoutElementBytes») fail",
  "!numel", layout)
F("rules of a layout", file, "ranks_); «!wrong.empty()») fail(\"{} {}\"", "false", layout)
F("lists in a layout's paths", file, "if (const auto wrong = paths_.add(path); «!wrong.empty()»)", "false", layout)

# ---- the index
file = "src/formats/dcp/item_index.cpp"
F("an index at the end", file, "if («!footer.ends_with(kIndexMagic)») fail", "false", index)
F("an index's checksum", file, "crc32c::of(bytes); «found != checksum»)", "false", index)
F("items lie before their index", file,
  "«item.offset < 0 || item.length <= 0 || item.offset > begin || item.length > begin - item.offset»)", "false", index)
F("items in their order", file, "if (i > 0 && «place_in_index(item) <= place_in_index(index.items.back())»)", "false", index)
F("an index of a rank", file, "if («index.rank < 0» || count", "false", index)
file = "src/formats/dcp/writer.cpp"
F("a rank writes all that its layout says", file, "if («found == written.end()» ||", "false",
  u + "DcpFolderWithLayout.RanksWriteWhatTheLayoutSays")
F("a rank writes no more than its layout says", file, "if («index.items.size() != records.size()»)", "false",
  u + "DcpFolderWithLayout.RanksWriteWhatTheLayoutSays")

# ---- folders
file = "src/formats/dcp/folder.cpp"
F("an index is of its rank", file, "if («index->rank != rank» || index->layout", "false", saves)
F("an index is of its layout", file, "|| «index->layout != metadata_.checksum»)", "false", saves)
F("an index has no more than the layout says", file, "if («index->items.size() != items.size()»)", "false", saves)
F("parts beside a box are not opened", file, "if («intersect(part, box)») parts.push_back({std::move(part)", "std::optional<DcpBox>(part)",
  u + "DcpFolderWithLayout.ReadsWhatRanksSaved")
file = "src/formats/dcp/metadata_reader.cpp"
F("a folder has one of both", file, "if (is_there(folder / kDcpLayoutFile)) { if («is_there(path)»)", "false", saves)
F("a folder with a layout is one", file, "kDcpMetadataFile) || «is_there(folder / kDcpLayoutFile)»;", "false", ranks)
F("preparing removes a layout", "src/formats/dcp/writer.cpp", "for (const auto* last : {kDcpMetadataFile, «kDcpLayoutFile»})",
  "kDcpMetadataFile", u + "DcpFolderWithLayout.PreparingRemovesIt")
file = "src/run_state/checkpoint_folders.cpp"
F("a layout takes the metadata's place", file, "if («formats::is_dcp_folder(finished)»)", "false",
  d + "ReplacesMetadataWhenItIsComplete")
F("a layout may be replaced by a conversion", "src/bigmodel/convert_files.cpp", "«name == formats::kDcpLayoutFile» ||", "false",
  ranks)
file = "src/formats/inspect/folders.cpp"
F("pieces of a layout are counted", file, "try { «for (const auto& held : places.parts_of_rank(rank)) take(*held.entry, held.chunk);»", "",
  u + "DcpFolderWithLayout.IsInspected")
F("a file that is missing is told of once", file,
  "for (const auto& item : held_by(metadata, «rank»)) count(", "-1",
  u + "DcpFolderWithLayout.IsInspected")
