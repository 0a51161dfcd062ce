"""Faults in what models and tokenizers write for transformers."""
from faults import F

# ---- save_model of other weights
layout = "checkpoint_tests CheckpointTest.SaveModelHasTheReferencesLayout"
several = "zoo_tests ZooSaving.OtherWeightsInSeveralFiles"
placed = "zoo_tests ZooSaving.DispatchedAndInFewBits"
file = "src/checkpoint/save_model.cpp"
F("save_model of other weights", file, "write_tensors(model, «each_memory_once(weights)», folder,",
  "state_dict(model, [](const at::Tensor& tensor) { return tensor; })", layout, several)
F("save_model of other weights looks whether they fit", file, "«check_weights(model, weights, sizes);»", "", layout, several)
F("weights that come and go are copied to be saved", file, "return «comes_here» ? tensor", "false", placed)
file = "src/checkpoint/model_state.cpp"
F("other weights have whole shapes", file, "if («found->second.sizes() != expected») differences", "false", layout, several)
file = "src/accelerator/checkpointing.cpp"
F("save_model of other weights max_shard_size", file, "const int64_t max_bytes = «checkpointing::parse_size(max_shard_size)»;",
  "int64_t{1} << 40", layout)
F("save_model of other weights safe_serialization", file, "weights, &sizes, folder, max_bytes, «safe_serialization»);",
  "true", layout)

# ---- save_pretrained
every = "zoo_tests ZooSaving.EveryArchitectureIsReadHereAndByTransformers"
file = "src/models/auto_save.cpp"
F("PretrainedModel::save_pretrained max_shard_size", file,
  "return «checkpointing::parse_size(max_shard_size.value_or(\"50GB\"))»;", "int64_t{1} << 40", several)
F("PretrainedModel::save_pretrained max_shard_size of weights in few bits", file, "if («max_shard_size») raise", "false",
  placed)
F("PretrainedModel::save_pretrained of other weights", file, "checkpointing::save_model(ModelRef(module_), «weights», nullptr,",
  "named_weights(*module_)", several)
F("save_pretrained keeps generation_config.json", file, "if («source.generation_config») write_text_file", "false", several)
F("save_pretrained names the class", file, "if («fields.contains(\"model_type\")») fields", "false", every)
F("save_pretrained says the dtype of what it writes", file,
  "config[\"dtype\"] = «formats::python_name(weight.scalar_type())»;", "\"float16\"", every)
F("save_pretrained keeps weights in few bits so", file, "if («dispatched_ && dispatched_->code_bytes() > 0») return", "false",
  placed)
F("save_pretrained refuses blocks of .gguf files", file, "if («!source.quantization») throw", "false", placed)

# ---- tokenizers
saved = "tokenizer_tests Tokenizer.SavedFilesAreThoseThatWereRead"
file = "src/models/tokenizer/files.cpp"
F("a saved tokenizer names its class", file, "if («said != name && said != name + \"Fast\"») {", "false", saved)
file = "src/models/tokenizer/tokenizer.cpp"
F("a saved tokenizer replaces another one", file, "if («!files.contains(name)») std::filesystem::remove", "false", saved)
F("a tokenizer that no file can hold is not saved", file, "if («files.empty()») throw", "false", saved)
