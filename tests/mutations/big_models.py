"""Faults in models of any size."""
from faults import F

# ---- models of any size
b = "options_tests OptionsOfDispatch."
w = "bigmodel_tests Dispatch."
sources = "src/bigmodel/weight_sources.cpp"
budget = "src/bigmodel/budget.cpp"
file = "src/bigmodel/dispatch.cpp"
F("DispatchOptions::main_device", file, "main_of(placed.map, «options.main_device»),", "std::optional<at::Device>()",
  w + "OnTheMetaDeviceOffloadingIsADryRun")
F("DispatchOptions::state_dict", sources, "take_over(caller, placed.weights, «options.state_dict»);",
  "std::map<std::string, at::Tensor>()", w + "ValuesMayComeFromAStateDict")
F("DispatchOptions::offload_index", sources, "std::optional<OffloadIndex> index = «options.offload_index»;",
  "std::optional<OffloadIndex>()", b + "AnIndexMayReplaceTheFoldersOwn")
F("DispatchOptions::offload_dir", sources, "index = load_offload_index(«options.offload_dir»);",
  'std::filesystem::path("elsewhere")', w + "AModelInMemoryMovesToDiskAndIsReadFromThereAgain")
F("DispatchOptions::skip_keys", file, ".skip_keys = «options.skip_keys»,", "std::vector<std::string>()",
  b + "InputsComeToTheModelButForThoseThatAreNamed")
F("DispatchOptions::preload_module_classes", file, ".whole_classes = «options.preload_module_classes»,",
  "std::vector<std::string>()", b + "ClassesAreFetchedWhole")
F("DispatchOptions::force_hooks", file, ".force_hooks = «options.force_hooks»,", "false",
  b + "InputsComeToTheModelButForThoseThatAreNamed")
F("OffloadAllOptions::preload_module_classes", file, ".preload_module_classes = «options.preload_module_classes»,",
  "std::vector<std::string>()", b + "ClassesAreFetchedWhole")
F("OffloadAllOptions::execution_device", file,
  "{.main_device = «options.execution_device.value_or(bigmodel::accelerator_or_host())»,",
  "bigmodel::accelerator_or_host()",
  w + "OnTheMetaDeviceOffloadingIsADryRun")
F("LoadAndDispatchOptions::max_memory", sources, ".max_memory = «options.max_memory», .no_split_module_classes",
  "std::optional<MaxMemory>()", w + "StrategiesPlaceByMemory")
F("LoadAndDispatchOptions::device_map", sources, "if («!options.device_map») {", "true",
  w + "AModelOnDiskComputesAlikeWithinItsBudget")
F("LoadAndDispatchOptions::full_state_dict", sources, "if («!options.full_state_dict»)", "false",
  w + "MapsAndBudgetsAreCheckedBeforeAnythingIsLoaded")
F("LoadAndDispatchOptions::broadcast_from_rank0", sources, "if («options.broadcast_from_rank0»)", "false",
  w + "MapsAndBudgetsAreCheckedBeforeAnythingIsLoaded")
F("OffloadOptions::readers", file, "std::max<int64_t>(«settings_.offload.readers», 1)", "int64_t{2}",
  b + "SeveralThreadsRead")
F("OffloadOptions::always_read", budget, "= «!settings_.offload.always_read» && all_fit", "true",
  w + "AModelInMemoryMovesToDiskAndIsReadFromThereAgain")
F("OffloadOptions::budget_bytes", budget,
  "«if (settings_.offload.budget_bytes) return *settings_.offload.budget_bytes;» if (settings_.max_memory) if "
  "(const auto given = memory_of(*settings_.max_memory, device))", "", w + "AModelOnDiskComputesAlikeWithinItsBudget")
q = "quantize_tests Quantize"
F("LoadAndDispatchOptions::keep_codes", file, "«options.keep_codes» ? &codes_as_they_are : nullptr", "false",
  q + "Files.GgufBlocksStayAsTheyAre")
F("LoadAndDispatchOptions::exact_products", file, "if («options.exact_products && !options.keep_codes»)", "false",
  q + "Files.GgufBlocksStayAsTheyAre")
file = "src/bigmodel/quantize.cpp"
F("BnbQuantizationConfig::load_in_8bit", file, "if («config.load_in_8bit») return {.encoding", "false",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::load_in_4bit", "src/bigmodel/quantization_config.cpp", "«load_in_8bit == load_in_4bit»", "!load_in_8bit",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::llm_int8_threshold", file, "config.load_in_8bit ? «config.llm_int8_threshold» : 0", "0.0",
  q + "Int8.IsBitsandbytesLayerWithOutliersAndWithout")
F("BnbQuantizationConfig::bnb_4bit_quant_type", file, "«config.bnb_4bit_quant_type == \"nf4\"» ?", "false",
  q + "Operators.ComputeOnCodesWhereTheyCanAndDecodeWhereNot")
F("BnbQuantizationConfig::bnb_4bit_use_double_quant", file, ".double_quantize = «config.bnb_4bit_use_double_quant»",
  "false", q + "Config.ScalesBlocksAndStorageAreAsTheySay")
F("BnbQuantizationConfig::bnb_4bit_blocksize", file, ".block_size = «config.bnb_4bit_blocksize»", "64",
  q + "Config.ScalesBlocksAndStorageAreAsTheySay")
F("BnbQuantizationConfig::bnb_4bit_quant_storage", file,
  "quantized_state_dict(model, «config.bnb_4bit_quant_storage»)", "at::kByte",
  q + "Config.ScalesBlocksAndStorageAreAsTheySay")
F("BnbQuantizationConfig::bnb_4bit_compute_dtype", file,
  "config.load_in_4bit ? std::optional(«config.bnb_4bit_compute_dtype») : std::nullopt", "at::kFloat",
  q + "Config.ComputesInTheDtypeThatItSays")
F("BnbQuantizationConfig::torch_dtype", "include/accelerate/bigmodel/quantize.hpp",
  "return «torch_dtype.value_or(load_in_8bit ? at::kHalf : bnb_4bit_compute_dtype)»;",
  "(load_in_8bit ? at::kHalf : bnb_4bit_compute_dtype)", q + "Config.ComputesInTheDtypeThatItSays")
F("BnbQuantizationConfig::skip_modules", file,
  "«config.skip_modules ? *config.skip_modules : get_keys_to_not_convert(model)»", "get_keys_to_not_convert(model)",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::keep_in_fp32_modules", file,
  "if (std::ranges::find(names, name) == names.end()) «names.push_back(name);»", "",
  q + "Config.DtypesAndNamesDecideWhatBecomesOfEachWeight")
F("BnbQuantizationConfig::exact_products", file, ".exact = «config.exact_products»", "false",
  q + "Operators.AskTheRegistryUnlessProductsAreToBeExact")
F("between weights and description of a saved model none is believed", file,
  "«put_description({{\"quant_method\", bigmodel::kUnfinished}, {\"before\", std::move(before)}});»", "",
  q + "Files.AKilledSaveLeavesWhatIsWholeOrIsRefused")
F("folders of other quantization methods are refused", file,
  "if («!weights_location.empty() && is_there(weights_location / \"config.json\")»)", "false",
  q + "Files.OfOtherMethodsAreRefusedByTheirNames")
F("damaged int8 codes show before anything is loaded", "src/bigmodel/loading.cpp",
  "const auto form = «read(at::kHalf)»;",
  "(weight.encoding == codes::Encoding::int8_rowwise ? codes::Codes{.shape = tensor.sizes, .dtype = at::kHalf} : "
  "read(at::kHalf))", q + "Files.DamagedInEightBitsAreRefusedByNameAndNothingIsLoaded")
F("LoadAndQuantizeOptions::device_map", file, ".device_map = «options.device_map.value_or(everything)»",
  "decltype(options.device_map)(everything)", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::offload_folder", file, ".offload_folder = «options.offload_folder»};",
  "fs::path()", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::max_memory", file,
  ".device_map = options.device_map.value_or(everything), .max_memory = «options.max_memory»",
  "std::optional<MaxMemory>()", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::strict", file, ".strict = «options.strict»", "true",
  q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::no_split_module_classes", file,
  ".no_split_module_classes = «options.no_split_module_classes», .offload_folder = options.offload_folder, .dtype",
  "std::vector<std::string>()", q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("LoadAndQuantizeOptions::offload", file, ".strict = options.strict, .offload = «options.offload»}", "OffloadOptions{}",
  q + "Files.OfAllKindsGiveTheSameModelInMemoryAndOnDisk")
F("EncodeOptions::encoding", "src/codes/encode.cpp", "Codes codes{.encoding = «options.encoding»,", "Encoding::nf4",
  "codes_tests Codes.AreAsNearAsTheirNumberOfBitsAllows")
F("codes of the K family: several ranges are tried", "src/codes/k_blocks.cpp",
  "low + span / Last * «ranges.offset(i)»", "0.0F", "codes_tests CodesOfTheKFamily.AreNearerThanThoseOfGgml")
F("EncodeOptions::block_size", "src/codes/encode.cpp", "codes.block_size = «options.block_size»;", "64",
  "codes_tests Codes.AreAsNearAsTheirNumberOfBitsAllows")
F("EncodeOptions::double_quantize", "src/codes/encode.cpp",
  "«if (options.double_quantize) double_quantize(codes);»", "",
  "codes_tests Codes.WhosePartsDoNotFitAreRefusedByName")
file = "src/bigmodel/quantize_to_folder.cpp"
q = "quantize_files_tests QuantizeFiles."
F("QuantizeFilesOptions::to", file, ".bnb_4bit_quant_type = «options_.to»;", "\"nf4\"", q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::block_size", file, ".block_size = «block_size()»,", "64",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::double_quantize", file, ".double_quantize = «options_.double_quantize»}", "false",
  q + "BitsandbytesTransformersAndGgufReadThem")
F("QuantizeFilesOptions::skip_modules", file, "if (!never && !is_among(module, «options_.skip_modules»)) return",
  "std::vector<std::string>()",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::compute_dtype", file, ".bnb_4bit_compute_dtype = «options_.compute_dtype.value_or(at::kFloat)»", "at::kFloat",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::threshold", file, "config.llm_int8_threshold = «options_.threshold.value_or(6.0)»;", "6.0",
  q + "SaysWhatBecameOfEachTensor")
F("QuantizeFilesOptions::max_shard_size", file, "parse_size(«options_.max_shard_size.value_or(\"50GB\")»);", "\"50GB\"",
  q + "LargeFoldersAreInShardsWithAnIndex")
F("an index names the parts of weights", "src/checkpoint/save_model.cpp",
  "if (const auto found = parts.find(weight); «found == parts.end()») sorted", "true",
  q + "LargeFoldersAreInShardsWithAnIndex")
F("transposed layers of a folder have the codes of their transposes", file,
  "if («transposed») original = original.t().contiguous();", "false", q + "BitsandbytesTransformersAndGgufReadThem")
F("a head that shares the embeddings is named among what stays", "src/bigmodel/quantize_outline.cpp",
  "class_name.ends_with(\"ForCausalLM\") || «class_name.ends_with(\"LMHeadModel\")»", "false",
  q + "BitsandbytesTransformersAndGgufReadThem")
F("the vocabulary of a .gguf file is written", file, "«for (const auto& [name, text] : files) write_file(folder / name, text);»",
  "", q + "AFolderBecomesAFileOfBlocksAndAFolderAgain")
file = "src/bigmodel/quantize_to_gguf.cpp"
F("QuantizeFilesOptions::skip_modules of blocks", file, "why_kept(tensor, is_skipped(tensor.name, «options.skip_modules»));",
  "std::vector<std::string>()",
  q + "BlocksOfAFile")
F("QuantizeFilesOptions::skip_modules of blocks of a folder", file,
  "|| «std::ranges::any_of(target.parts, skipped)»", "false", q + "AFolderBecomesAFileOfBlocksAndAFolderAgain")
F("QuantizeFilesOptions::measure_errors", file, "if («options.measure_errors») result.tensors[i].error", "false",
  q + "BlocksOfAFile")
F("QuantizeFilesOptions::on_progress", file, "if («options.on_progress») options.on_progress(static_cast",
  "std::function<void(int64_t, int64_t)>()",
  q + "WhatCantBeIsNamedAndLeavesNothing")
F("rows of rotary projections are in llama.cpp's order", file, "if («target.rotary_heads == 0») return values;", "true",
  q + "AFolderBecomesAFileOfBlocksAndAFolderAgain")
F("what a .gguf file has no place for is said", file,
  "«std::ranges::move(model.notes, std::back_inserter(result.notes));»", "",
  q + "WhatAFileOfBlocksCanNotSayIsRefusedByName")
F("rows that are no blocks of 256 become blocks of 32", file,
  "if («row % codes::gguf_encoding(wanted).block == 0») return wanted;", "true", q + "BlocksOfTheKFamily")
F("QuantizeFilesOptions::overwrite", "src/bigmodel/quantize_files.cpp", "if («!overwrite») raise", "false",
  q + "BlocksOfAFile")
F("codes of transposed weights are products of their rows", "src/residency/encoded.cpp",
  "return «weight.transposed» ? tensor.t().is_contiguous()", "false",
  "quantize_tests QuantizeOperators.LayersThatStoreTheirTransposeHaveItsCodes")
F("weights in bitsandbytes' few bits on disk are read where they lie", "src/bigmodel/loading.cpp",
  ".bytes = «form.bytes()»,", "int64_t{0}",
  "quantize_tests QuantizeOperators.LayersThatStoreTheirTransposeHaveItsCodes")
F("codes of transposed weights are turned when they are loaded decoded", "src/bigmodel/loading.cpp",
  "«for (const auto& name : target.names) turn_bitsandbytes(checkpoint, name);»", "{}",
  "quantize_tests QuantizeOperators.LayersThatStoreTheirTransposeHaveItsCodes")
F("llama-bpe begins with a token where a .gguf file does not say", "src/models/tokenizer/files.cpp",
  "asks_for(\"tokenizer.ggml.add_bos_token\", «cuts->adds_bos»)", "false",
  "tokenizer_tests Tokenizer.OfAGgufFileBeginsWithATokenWhereItsKindDoes")
g = "gguf_tests Gguf"
F("a factor of rotary frequencies without a type is a linear one", "src/formats/gguf_config.cpp",
  "type = named ? *named : «\"linear\"»;", "\"none\"", g + "Models.FrequenciesAreStretchedHoweverAFileSaysIt")
F("rope.scale_linear of 2023 is a factor", "src/formats/gguf_config.cpp",
  "«if (!factor) factor = fields.number(\"rope.scale_linear\");»", "",
  g + "Models.FrequenciesAreStretchedHoweverAFileSaysIt")
F("keys of a .gguf file that are not known are refused", "src/formats/gguf_keys.cpp", "if («!known») fields.fail(",
  "false", g + ".KeysThatCouldChangeResultsAreKnownOrRefusedByName")
F("keys of a .gguf file have values that a model here has", "src/formats/gguf_keys.cpp",
  "if («known->use == has_to_be» && !is_harmless", "false", g + ".KeysThatCouldChangeResultsAreKnownOrRefusedByName")
F("numbers per layer of a .gguf file are the same or refused", "src/formats/gguf_fields.hpp",
  "if («list.empty() || std::ranges::find_if(list, [&](T one) { return one != list[0]; }) != list.end()»)", "false",
  g + ".KeysThatCouldChangeResultsAreKnownOrRefusedByName")
F("a number for all layers may be a list", "src/formats/gguf_fields.hpp",
  "«if (const auto* list = header_.metadata.find_as<std::vector<int64_t>>(full)) return same_in_all(full, *list);»", "",
  g + "Models.WhatChangesNothingIsReadOver")
F("a part of a split .gguf file is no model", "src/formats/gguf_header.cpp", "«parts > 1») reader.fail(", "false",
  g + ".SaysWhatIsWrongWithAFile")
F("tensors of a .gguf file have bytes of their own", "src/formats/gguf_header.cpp",
  "«tensor.begin < before.begin + before.bytes»", "false", g + ".SaysWhatIsWrongWithAFile")
F("what a .gguf file divides by is above 0", "src/formats/gguf_fields.hpp",
  "if (value && «!(*value > 0 && std::isfinite(*value))»)", "false", g + ".NumbersThatDivideAreAboveZero")
F("a .gguf file has rows for its tokens", "src/formats/gguf_config.cpp", "if (has_tokens && «tokens->elements > rows»)",
  "false", g + ".TokensHaveRowsAndMergesTwoParts")
F("merges of a .gguf file have two parts", "src/formats/gguf_vocabulary.cpp",
  "for (const auto& merge : merges) if («!is_merge(merge)») fail(", "false", g + ".TokensHaveRowsAndMergesTwoParts")
F("whole numbers of a .gguf file stay", "src/bigmodel/quantize_to_gguf.cpp",
  'if (tensor.kept.empty() && «is_of_whole_numbers(*stored.encoding)») tensor.kept', "false",
  "quantize_files_tests QuantizeFiles.WholeNumbersStay")
F("an index has one file for a tensor", "src/formats/index_file.cpp", "{.unique_keys = «true»}", "false",
  "bigmodel_tests LoadCheckpoint.AnIndexWithTwoFilesForATensorIsRefused")
F("big-endian .gguf files are named", "src/formats/gguf_header.cpp",
  "if (const auto turned = __builtin_bswap32(header.version); «turned >= kOldest && turned <= kNewest») fail_turned();",
  "false", g + ".TheBigEndianVariantIsNamed")
file = "src/formats/tokenizer_settings.cpp"
around = "tokenizer_tests TokenizerParity.FilesAroundAVocabularySayWhatTheyDoInTransformers"
F("added_tokens.json adds tokens", file,
  "«if (const auto added = folder_ / \"added_tokens.json\"; is_there(added)) read_added(read_object(added), added);»", "", around)
F("added_tokens_decoder adds tokens", file, "«read_decoder(config_[\"added_tokens_decoder\"]);»", "", around)
F("special_tokens_map.json wins", file, "if (const auto map = folder_ / \"special_tokens_map.json\"; «is_there(map)»)",
  "false", around)
F("a class fills in special tokens", file, "if («content») named_.try_emplace(name, text_token(content));",
  "static_cast<const char*>(nullptr)", around)
F("the class of some models goes by their type", file, "if (of_model != std::end(kClassesOfModels) && "
  "(«name.empty() || of_model->wins»))", "name.empty()", around)
F("add_bos_token begins a text", file, "result_.add_bos = «flag(\"add_bos_token\")»;", "false", around)
F("add_eos_token ends a text", file, "result_.add_eos = «flag(\"add_eos_token\")»;", "false", around)
F("additional_special_tokens are tokens", file, "«for (const auto& one : *list_) add(one);»", "", around)
against = "tokenizer_tests Tokenizer.FilesAroundAVocabularySayWhatTransformersMadeOfThem"
F("padding of tokenizer.json names pad_token", file,
  "«named_.try_emplace(\"pad_token\", text_token(padding->at(\"pad_token\").get<std::string>()));»", "", against)
F("tokens of a name are special", file, "one.special = «one.special || of_names.contains(one.content)»;", "one.special",
  against.replace("Tokenizer.FilesAroundAVocabularySayWhatTransformersMadeOfThem", "TokenizerParity.FilesAroundAVocabularyAtRandom"))
F("Qwen2Tokenizer adds its special tokens plainly", file, "if («known && known->plain_specials»)", "false", against)
F("names of tokenizer_config.json win over those of the map", file,
  "for (const auto* own : {&own_, «&own_of_config_»})", "&own_", against)
F("objects of tokenizer_config.json make no added token special", file,
  "if («!one.of_an_object») special.insert(one.token.content);", "true",
  "tokenizer_tests TokenizerParity.FilesAroundAVocabularyAtRandom")
F("lists of special tokens are joined", file, "if («!list_ || value.is_null()») list_.emplace();", "true", against)
F("the flags of the last time count", file, "«before = token;»", "", against)
F("classes take no added tokens of tokenizer.json", "src/models/tokenizer/files.cpp",
  "if («!known»)  // else transformers adds", "true", against)
F("GPTNeoXTokenizer takes no post_processor of tokenizer.json", "src/models/tokenizer/files.cpp",
  "if («around != Around::of_tokenizer_json») parts.prefix.clear()", "false", against)
F("RobertaTokenizer begins a text with cls_token", "src/models/tokenizer/files.cpp", "«parts.prefix = {*cls};»", "", against)
F("RobertaTokenizer ends a text with sep_token", "src/models/tokenizer/files.cpp", "«parts.suffix = {*sep};»", "", against)
F("normalized tokens are looked for behind the others", "src/models/tokenizer/tokenizer.cpp",
  "(«token.normalized» ? normalized_added : raw_added)", "token.normalized && !parts.normalizers.empty()", against)
F("added tokens are decoded as spelt bytes", "src/models/tokenizer/tokenizer.cpp",
  "return «parts.decodes_added» ? bytes_of_token(token)", "false", around)
F("ids beside a vocabulary are the next ones", file, "if («said != id»)", "false",
  "tokenizer_tests Tokenizer.FilesAroundAVocabularyThatCantBeFollowedAreNamed")
F("add_prefix_space acts beside a tokenizer.json", "src/models/tokenizer/files.cpp",
  "set_prefix_space(root[\"pre_tokenizer\"], «settings.add_prefix_space»)", "false", around)
F("added tokens that are single words are not within one", "src/models/tokenizer/tokenizer.cpp",
  "if («(*found)->single_word» &&", "false", around)
F("special tokens may be split", "src/models/tokenizer/tokenizer.cpp",
  "if (sought->content.empty() || «(token.special && parts.split_special_tokens)») continue;", "false", around)
names = "zoo_tests ZooReference.NamesOfOtherFilesAreKnownHoweverTheyAreLoaded"
F("names in files are with and without that of the body", "src/formats/weight_names.cpp",
  "all.push_back(«name.starts_with(base) ? name.substr(base.size()) : names.base_prefix + name»);", "name", names)
F("GPT-NeoX's head has two names in files", "src/formats/weight_names.cpp",
  "return name == \"embed_out.weight\" ? «\"lm_head.weight\"»", "\"embed_out.weight\"", names)
F("merging says that adapters alone are no model", "src/checkpoint/merge_fsdp_weights.cpp",
  "if («without.empty()») return;", "true", "dcp_tests MergeFsdpWeights.SaysThatAdaptersAloneAreNoModel")
F("adapters of GPT-NeoX's head have transformers 5's name in files", "src/adapters/lora.cpp",
  "return «is_neox ? renamed(name, kOurHead, kTheirHead) : name»;", "name",
  "adapters_tests AdaptersOfPeftsFiles.HaveWhatTheySayAndGoBack")
F("adapters' configs name GPT-NeoX's head as files do", "src/adapters/lora.cpp",
  "return «is_other» ? renamed(config", "false", "adapters_tests AdaptersOfPeftsFiles.HaveWhatTheySayAndGoBack")
alone = "commands_tests Commands.OptionsOfSeveralMachinesAreRemarkedOnWithOne"
F("c10d with one machine is remarked on", "src/launch/job/job.cpp",
  "if («c10d && s.source(\"rdzv_backend\") == ValueSource::flag»)", "false", alone)
F("main_process_ip with one process is remarked on", "src/launch/job/job.cpp",
  "if («job.world_size == 1 && s.source(\"main_process_ip\") == ValueSource::flag»)", "false", alone)
theirs = "zoo_tests Zoo.DeviceMapsHaveTheNamesOfTransformers5"
F("maps by other names dispatch models", "src/bigmodel/weight_sources.cpp", "{.map = «by_own_names(model, device_map)»,",
  "device_map", theirs)
F("maps by other names load and dispatch models", "src/bigmodel/weight_sources.cpp",
  "map = «by_own_names(model, std::get<DeviceMap>(*options.device_map))»;", "std::get<DeviceMap>(*options.device_map)",
  theirs)
F("maps by other names load models", "src/bigmodel/loading.cpp", "map = «by_own_names(model, *map)»;", "*map", theirs)
F("negated views in torch's files are named", "src/formats/torch_container.cpp",
  "«views.kind != Kind::none && !views.items.empty()»)", "false",
  "bigmodel_tests TorchFiles.WhatTheyDoNotHoldIsNamed")
F("weights are loaded by the names that files have", "src/bigmodel/loading.cpp",
  "«bigmodel::use_names(checkpoint, *names, own);»", "", names)
F("folders are quantized by the names that files have", "src/bigmodel/quantize_outline.cpp",
  "«bigmodel::use_names(checkpoint, *names, own);»", "", names)
parts = "tokenizer_tests TokenizerParity.PartsOfTokenizerJsonAreThoseOfThePackage"
F("Split with invert", "src/models/tokenizer/tokenizer.cpp", "is_match = «found != step.invert»", "found", parts)
F("Split merges matches with what is before them", "src/models/tokenizer/tokenizer.cpp",
  "if («is_match && !before && joins»)", "false", parts)
F("Split merges matches with what is behind them", "src/models/tokenizer/tokenizer.cpp", "if («waits && !is_match»)",
  "false", parts)
F("bytes without a token are unk_token", "src/models/tokenizer/bpe.cpp", "id = «known >= 0 ? known : unk_»;", "known",
  parts)
F("fuse_unk", "src/models/tokenizer/bpe.cpp", "known < 0 && after_unk && «fuse_unk_»;", "false", parts)
F("Replace", "src/models/tokenizer/tokenizer.cpp", "replaced += «is_match ? content : piece»;", "piece", parts)
F("RobertaProcessing begins a text", "src/models/tokenizer/files.cpp",
  "if (i == 0) «pieces[i].insert(pieces[i].begin(), cls);»", "", parts)
F("RobertaProcessing behind a template", "src/models/tokenizer/files.cpp",
  "else if («type_of(part) == \"RobertaProcessing\"») pieces[i].insert", "false", parts)
F("templates of what others have put around a text", "src/models/tokenizer/files.cpp",
  "part.at(«pieces.size() == 1 ? \"single\" : \"pair\"»)", "\"single\"", parts)
F("Replace with a pattern of places between characters is refused", "src/models/tokenizer/files.cpp",
  "if («replacement.pattern.can_be_empty() && !replacement.content.empty()»)", "false",
  "tokenizer_tests Tokenizer.NamesWhatItCantDo")
F("matches without characters cut", "src/models/tokenizer/pattern.cpp", "if («!again» && end >= begin", "end > begin", parts)
F("patterns are of lines", "src/models/tokenizer/pattern.cpp", "translated(expression), «PCRE2_MULTILINE»", "0U", parts)
F("added tokens of the vocabulary still merge", "src/models/tokenizer/tokenizer.cpp",
  "is_added[id] && «!of_vocabulary.contains(id)»;", "true", parts)
F("special tokens of the map by the old name", "src/formats/tokenizer_settings.cpp",
  "«old_list_ = said_list(name, value, file);»", "",
  "tokenizer_tests TokenizerParity.FilesAroundAVocabularySayWhatTheyDoInTransformers")
F("normalized added tokens are looked for as they are normalised", "src/models/tokenizer/tokenizer.cpp",
  "normal.content = «normalize(token.content, parts.normalizers)»;", "token.content", parts)
F("ByteLevel behind ByteLevel is refused", "src/models/tokenizer/files.cpp", "if («cuts_bytes_») unsupported(\"behind",
  "false", "tokenizer_tests Tokenizer.NamesWhatItCantDo")
F("cuts behind ByteLevel are of spelt bytes", "src/models/tokenizer/files.cpp", "step.spelt = «cuts_bytes_»;", "false", parts)
F("the kind of a vocabulary that is a list", "src/models/tokenizer/files.cpp", "«is_list ? \"Unigram\" : \"BPE\"»",
  "\"BPE\"", "tokenizer_tests Tokenizer.NamesWhatItCantDo")
beside = "wordpiece_tests WordPiece.FilesBesideTheVocabularyNameAndAddTokens"
F("special_tokens_map.json names a WordPiece tokenizer's tokens", "src/models/wordpiece.cpp", "*token = «found->second»;",
  "*token", beside)
F("tokens added to a WordPiece vocabulary", "src/models/wordpiece.cpp",
  "«if (id == std::ssize(vocabulary)) vocabulary.push_back(token.content);»", "", beside)
F("WordPiece vocabularies of tokenizer.json", "src/models/wordpiece.cpp", "const bool of_json = «is_there(json_path)»;",
  "false", beside)
other_ids = "wordpiece_tests WordPiece.WhatWouldGiveOtherIdsIsRefusedByName"
F("classes that cut text otherwise are no WordPiece tokenizers", "src/formats/tokenizer_settings.cpp",
  "if («name.empty() ? !is_one_of(kBertModels, model_type) : !is_one_of(kBertClasses, name)»)", "false", other_ids)
F("added tokens that are sought in cleaned text are refused", "src/models/wordpiece.cpp",
  "if («!token.special || token.is_normalized() || once_normalized || token.single_word»)", "false", other_ids)
F("an id beyond the vocabulary has no text", "src/models/tokenizer/tokenizer.cpp",
  "if («id < tokenizer_.vocab_size()» && !(skip", "true", "tokenizer_tests Tokenizer.StreamsWholeCharacters")
files = "bigmodel_tests TorchFiles."
F("expanded tensors of torch's files", "src/formats/torch_archive_reader.cpp",
  "if (pickled->numel > «std::max(bytes.size, kMostSharedBytes)» / width)", "bytes.size",
  files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("files of Python 2 count from 1", "src/formats/pickle_reader.cpp", "«if (memo_.empty() && slot == 1) first_slot_ = 1;»",
  "", files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("an OrderedDict of Python 2", "src/formats/pickle_reader.cpp",
  "«items.insert(items.end(), entry.begin(), entry.end());»", "", files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("a list that is named again and again takes no memory", "src/formats/pickle_reader.cpp",
  "if («(copied_ += items.size()) > bytes_.size()») fail(", "false", "dcp_tests DcpDamage.PicklesThatAreNoMetadata")
F("tensors of PyTorch 0.3", "src/formats/torch_container.cpp",
  "const auto* of_old = «pickle.call_of(node, kRebuildOfOld)»;", "nullptr",
  files + "ExpandedTensorsAndThoseOfOldVersionsLoad")
F("pointers of Git LFS are named", "src/input/read_file.cpp",
  "return «begin.starts_with(\"version https://git-lfs.github.com/spec/\")»", "false",
  "bigmodel_tests GitLfs.PointersInThePlaceOfFilesAreNamed")
peft = "adapters_tests AdaptersOfPeftsFiles.HaveWhatTheySayAndGoBack"
trained = "adapters_tests AdaptersOwnValues.AreTrainedBesideThemAndSaved"
F("LoraConfig::modules_to_save", "src/adapters/lora.cpp", "if («detail::is_saved(saved, path)») return true;", "false",
  trained)
F("LoraConfig::bias", "src/adapters/lora.cpp", "if («config.bias == \"none\"» || (name != \"bias\"", "true", trained)
F("LoraConfig::trainable_token_indices", "src/adapters/own_values.cpp", "else «own.parameter.index_copy_(0, indices_of(own), "
  "value.to(own.parameter.options().requires_grad(false)))»;", "own.parameter", peft)
F("values of the model itself that an adapter's file has", "src/adapters/lora.cpp", "«detail::put(*values, value);»", "",
  peft)
F("heads that classify are saved whole", "src/adapters/lora_config.cpp",
  "if («config.task_type == \"SEQ_CLS\" || config.task_type == \"TOKEN_CLS\"»)", "false", trained)
F("adapters that are off give the model's values back", "src/adapters/lora.cpp",
  "«for (const auto& own : own_) own->set_enabled(enabled);»", "", peft)
F("adapter_model.bin", "src/adapters/adapter_file.cpp", "const bool is_old = «!is_there(adapter.file) && is_there(old)»;",
  "false", peft)
F("eva and orthogonal leave the base as it is", "src/adapters/lora_config.cpp",
  "&& «init != \"eva\" && init != \"orthogonal\"»)", "true", peft)
file = "src/models/perplexity.cpp"
F("PerplexityOptions::window", file, "window = «options.window»,", "512", "quantize_files_tests Perplexity.OfAModelThatKnows")
F("PerplexityOptions::stride", file, "stride = «options.stride == 0 ? window : options.stride»", "window",
  "quantize_files_tests Perplexity.OfAModelThatKnows")
F("PerplexityOptions::on_window", file, "«if (options.on_window) options.on_window(scored);»", "",
  "quantize_files_tests Perplexity.OfAModelThatKnows")
file = "src/bigmodel/loading.cpp"
l = "bigmodel_tests LoadCheckpoint."
F("LoadCheckpointOptions::dtype", file,
  "if («!options.dtype || !target.tensor.is_floating_point()») return target.tensor.scalar_type();", "true",
  l + "ConvertsAndKeepsWhatWasAskedFor")
F("LoadCheckpointOptions::keep_in_fp32_modules", file, "for (const auto& module : «options.keep_in_fp32_modules»)",
  "std::vector<std::string>()", l + "ConvertsAndKeepsWhatWasAskedFor")
F("LoadCheckpointOptions::strict", file, "if («!options.strict») check.missing.clear()", "false",
  l + "NotStrictLoadsWhatIsInBoth")
F("LoadCheckpointOptions::device_map", file,
  "«place(caller, model, plan.targets, *map);»", "",
  l + "BadMapsAndFoldersAreErrors")
F("OffloadedWeightsLoaderOptions::save_folder", "src/bigmodel/offload.cpp",
  "options.index = load_offload_index(«options.save_folder»);", 'std::filesystem::path("elsewhere")',
  "bigmodel_tests OffloadFolder.WhatIsInMemoryGoesFirst")

# ---- maps of devices, sizes
file = "src/bigmodel/infer_device_map.cpp"
m = "conformance_tests infer_auto_device_map"
F("DeviceMapOptions::dtype", file, "sizes_(compute_module_sizes(tree, {.dtype = «options.dtype»,",
  "std::optional<std::string>()", m)
F("DeviceMapOptions::special_dtypes", file,
  "sizes_(compute_module_sizes(tree, {.dtype = options.dtype, .special_dtypes = «options.special_dtypes»}))",
  "std::map<std::string, std::string>()", "conformance_tests device_map_more")
F("DeviceMapOptions::max_memory", file,
  "const MaxMemory max_memory = «options.max_memory ? *options.max_memory : get_max_memory()»;", "get_max_memory()", m)
file = "src/bigmodel/device_map.cpp"
y = "conformance_tests balanced_memory"
F("BalancedMemoryOptions::max_memory", file,
  "MaxMemory memory = «options.max_memory ? *options.max_memory : get_max_memory()»;", "get_max_memory()", y)
F("BalancedMemoryOptions::low_zero", file, "const bool low_zero = «options.low_zero» &&", "false", y)
F("BalancedMemoryOptions::dtype", file, "compute_module_sizes(tree, {.dtype = «options.dtype»,",
  "std::optional<std::string>()", y)
F("BalancedMemoryOptions::no_split_module_classes", file,
  "largest_unsplittable(tree, sizes, «options.no_split_module_classes»)", "std::vector<std::string>()", y)
file = "src/bigmodel/sizes.cpp"
z = "conformance_tests module_sizes"
F("SizeOptions::dtype", file, "= «options.dtype ? std::optional(dtype_byte_size(*options.dtype)) : std::nullopt»;",
  "std::optional<double>()", z)
F("SizeOptions::buffers_only", file, "if («options.buffers_only» && kind", "false", z)

# ---- pipelines
file = "src/parallel/pipeline/pipeline.cpp"
k = "pipeline_tests Pipeline."
F("PippyOptions::split_points", file,
  'const bool automatic = «options.split_points == std::vector<std::string>{"auto"}»;', "true",
  k + "NamedSplitPointsAndOtherNumbersOfParts")
F("PippyOptions::num_chunks", file, "«p.options.num_chunks ? p.options.num_chunks : p.stages»", "p.stages",
  k + "NamedSplitPointsAndOtherNumbersOfParts")
F("PippyOptions::gather_output", file, "|| «!p.options.gather_output» ||", "false",
  k + "NestedArgumentsAndResultsOfAllStages")
F("PippyOptions::balance", file, "PipelineBalance balance = «options.balance»;", "PipelineBalance::bytes",
  k + "BalancedByMeasuredTime")

# ---- models' configurations, as far as single places read them
file = "src/models/gpt2.cpp"
gpt2 = "options_tests OptionsOfModels.Gpt2"
F("GPT2Config::attn_pdrop", file, ".attention_dropout = «config.attn_pdrop»,", "0.0", gpt2)
F("GPT2Config::embd_pdrop", file, "wpe_(positions), «config_.embd_pdrop», is_training()", "0.0", gpt2)
F("GPT2Config::resid_pdrop", "src/models/decoder.cpp", "return «dropped(attention_->forward(x, context))»;",
  "attention_->forward(x, context)", gpt2)
F("GPT2Config::resid_pdrop", "src/models/decoder.cpp", "return «dropped»(mlp_ ? mlp_->forward(x)", "Tensor", gpt2)
F("GPT2Config::activation_function", file, "find_activation(«config.activation_function»)", 'std::string("gelu_new")',
  gpt2)
F("GPT2Config::scale_attn_weights", file, "«config.scale_attn_weights» ? 1 / std::sqrt", "true", gpt2)
F("GPT2Config::scale_attn_by_inverse_layer_idx", file,
  ".divides_scores_by_layer = «config.scale_attn_by_inverse_layer_idx»,", "false", gpt2)
file = "src/models/llama.cpp"
llama = "options_tests OptionsOfModels.Llama"
F("LlamaConfig::attention_dropout", file, "is_training() ? «config_.attention_dropout» : 0.0", "0.0", llama)
F("LlamaConfig::attention_bias", file, "all, config_.hidden_size, «config_.attention_bias»)", "false", llama)
F("LlamaConfig::qkv_bias", file, "const bool bias = config_.attention_bias || «config_.qkv_bias»;", "false", llama)
F("LlamaConfig::mlp_bias", file,
  '"up_proj", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, «config_.mlp_bias»)', "false",
  llama)
F("LlamaConfig::num_local_experts", file, "if («config_.num_local_experts») { experts_", "0", llama)
file = "src/models/bert.cpp"
bert = "options_tests OptionsOfModels.Bert"
F("BertConfig::attention_probs_dropout_prob", file, "is_training() ? «config_.attention_probs_dropout_prob» : 0.0",
  "0.0", bert)
F("BertConfig::classifier_dropout", file, "pooled, «config_.classifier_dropout.value_or(config_.hidden_dropout_prob)»,",
  "config_.hidden_dropout_prob", bert)
F("BertConfig::type_vocab_size", file, "make_embedding(«config_.type_vocab_size», config_.hidden_size)", "int64_t{2}",
  bert)

# ---- models of any size, the rest
file = "src/bigmodel/dispatch.cpp"
F("DispatchOptions::offload_buffers", file, ".main = main, .offload_buffers = «options.offload_buffers»,", "false",
  b + "BuffersTravelWhereTheyAreOffloaded")
F("OffloadAllOptions::offload_buffers", file,
  ".offload_index = std::nullopt, .offload_buffers = «options.offload_buffers»,", "false",
  b + "BuffersTravelWhereTheyAreOffloaded")
F("OffloadAllOptions::state_dict", file, ".state_dict = «options.state_dict»,", "decltype(options.state_dict)()",
  w + "ValuesMayComeFromAStateDict")
F("LoadAndDispatchOptions::dtype", sources, "loading{.device_map = std::nullopt, .dtype = «options.dtype»,",
  "std::optional<at::ScalarType>()", b + "CheckpointsAreConvertedAndNeedNotFit")
F("LoadAndDispatchOptions::keep_in_fp32_modules", sources, ".keep_in_fp32_modules = «options.keep_in_fp32_modules»,",
  "std::vector<std::string>()", b + "CheckpointsAreConvertedAndNeedNotFit")
F("LoadAndDispatchOptions::strict", sources, ".strict = «options.strict»}", "true",
  b + "CheckpointsAreConvertedAndNeedNotFit")
F("LoadAndDispatchOptions::offload_folder", sources,
  "if (!tensor.bytes || («converted && !options_.offload_folder.empty()»)) {", "false",
  w + "OtherDtypesAreConvertedAtEachUseOrOnceInAFolder")
F("LoadAndDispatchOptions::no_split_module_classes", sources,
  "map_options{.max_memory = options.max_memory, .no_split_module_classes = «options.no_split_module_classes»,",
  "std::vector<std::string>()", b + "ClassesThatMustNotBeSplitStayWholeInMapsAndWhenTheyAreFetched")
F("LoadAndDispatchOptions::no_split_module_classes of what is fetched", file,
  "«settings.whole_classes.insert(settings.whole_classes.end(), options.no_split_module_classes.begin(), "
  "options.no_split_module_classes.end());»", "",
  b + "ClassesThatMustNotBeSplitStayWholeInMapsAndWhenTheyAreFetched")
F("OffloadOptions::prefetch", file,
  "«settings_.offload.prefetch.value_or(std::clamp<int64_t>(bytes / 4 / largest, 1, 8))»",
  "std::clamp<int64_t>(bytes / 4 / largest, 1, 8)", b + "UnitsAreFetchedAheadAsFarAsIsAskedFor")
F("OffloadOptions::scratch", file, ".scratch = «settings_.offload.scratch»,", "std::filesystem::path()",
  b + "ChangesGoToTheScratchFolder")
F("OffloadedWeightsLoaderOptions::state_dict", "src/bigmodel/offload.cpp",
  "content->in_memory = «std::move(options.state_dict)»;", "decltype(options.state_dict)()",
  "bigmodel_tests OffloadFolder.WhatIsInMemoryGoesFirst")
F("SizeOptions::special_dtypes", "src/bigmodel/sizes.cpp",
  "if (const auto special = options.special_dtypes.find(name); «special != options.special_dtypes.end()»)", "false",
  "bigmodel_tests Describe.HasNamesClassesShapesAndDtypesOfAModule")
F("DeviceMapOptions::clean_result", "src/bigmodel/infer_device_map.cpp", "return «options_.clean_result» ?", "true",
  "conformance_tests infer_auto_device_map")
F("DeviceMapOptions::fallback_allocation", "src/bigmodel/infer_device_map.cpp", "&& «options_.fallback_allocation» &&",
  "false", "conformance_tests device_map_more")
