"""The faults that scripts/mutate.py compiles in, one for each option: where its effect is taken out, and which tests
have to notice.

A row is F(name, file, text, wrong, tests...):
  name   what fails to act, Struct::field first; rows of one name are one fault in several places
  text   stands in the file once, however it is broken into lines; what is between « and » is replaced
  wrong  what takes its place: an expression of the same type, or statements where a statement with its semicolon is
         replaced
  tests  "binary Suite.Case", each of which must fail; "conformance_tests FILE" for a file of cases
  each   an expression of C++, for families: there is a fault for each of its values, named name + value, and `of` lists
         those that are run
"""
import dataclasses


@dataclasses.dataclass
class Fault:
    name: str
    file: str
    text: str
    wrong: str
    tests: tuple
    each: str = ""
    of: tuple = ()


FAULTS = []


def F(name, file, text, wrong, *tests, **more):
    FAULTS.append(Fault(name, file, text, wrong, tests, **more))


# Options without a fault, by struct or Struct::field, and why.
WITHOUT = {name: why for why, names in {
    "settings of another program: tests compare what it is given, field by field":
        "MegatronLMPlugin DeepSpeedPlugin TorchDynamoPlugin TorchTensorParallelConfig "
        "TorchContextParallelConfig DeepSpeedSequenceParallelConfig",
    "of a model: its numbers are compared with transformers', and options_models_test.cpp says what fields change":
        "BertConfig GPT2Config LlamaConfig BertModelOptions BertLoadOptions LlamaLoadOptions",
    "a struct whose fields have faults":
        "AcceleratorOptions::project_config PartialStateOptions::process_group DispatchOptions::offload "
        "LoadAndDispatchOptions::offload OffloadAllOptions::offload",
    "read by the line that has the fault of DispatchOptions' field (settings_of)":
        "LoadAndDispatchOptions::skip_keys LoadAndDispatchOptions::preload_module_classes "
        "LoadAndDispatchOptions::force_hooks LoadAndDispatchOptions::offload_buffers",
    "pinned memory and copies beside the host's work, which need a GPU":
        "CPUOffload::pin_memory DataLoaderOptions::pin_memory ActivationOffloadOptions::pin_memory "
        "OffloadStatesOptions::pin_memory OffloadStatesOptions::non_blocking",
    "read in a header, which tests compile themselves": "FindBatchSizeOptions RandomSamplerOptions::num_samples",
    "compared with the reference, case by case (tests/conformance)":
        "Zero2MemoryOptions Zero3MemoryOptions ParallelismConfig BalancedMemoryOptions::special_dtypes DeviceMapOptions::offload_buffers "
        "DeviceMapOptions::no_split_module_classes "
        "IterableDatasetShardOptions::batch_size IterableDatasetShardOptions::split_batches MixedPrecision::preset",
    "filled in or printed, not acted on": "DeviceMapOptions::verbose DeviceMapOptions::report",
    "the original parameters are always kept; version 2 warns": "FullyShardedDataParallelPlugin::use_orig_params",
    "without it nothing runs, or there is an error": "LaunchOptions::command LaunchOptions::config_file",
    "its fault has the name of its setting, grace_seconds": "LaunchOptions::grace",
}.items() for name in names.split()}
