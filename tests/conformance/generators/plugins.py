#!/usr/bin/env python3
"""Makes deepspeed_plugin_more.json, parallelism_config_more.json, kwargs_megatron_more.json and fp8_kwargs.json from Hugging Face Accelerate 1.15: settings that the shared cases leave out.

usage: plugins.py OUTPUT_FOLDER        (with the Python that has accelerate and torch; DeepSpeed and Megatron-LM are not needed)
"""
import base64
import copy
import itertools
import json
import logging
import os
import pathlib
import sys
import warnings

for name in list(os.environ):
    if name.startswith(("ACCELERATE_", "PARALLELISM_", "MEGATRON_")):
        del os.environ[name]

import accelerate
import numpy
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, DistributedType, MegatronLMPlugin

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)


def outcome(make, env=None):
    saved = dict(os.environ)
    os.environ.update(env or {})
    try:
        return make()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        os.environ.clear()
        os.environ.update(saved)


def plain(config):
    return {key: "inf" if value == float("inf") else value for key, value in config.items()}


DS = "ACCELERATE_DEEPSPEED_"
ALL_AUTO = {
    "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto", "nvme_path": "auto"}, "offload_param": {"device": "auto"},
                          "stage3_gather_16bit_weights_on_model_save": "auto"},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
STAGE1 = {"zero_optimization": {"stage": 1}}


def deepspeed():
    cases = []

    def case(env, **kwargs):
        def make():
            plugin = DeepSpeedPlugin(**copy.deepcopy(kwargs))
            names = ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "offload_param_device", "zero3_init_flag", "zero3_save_16bit_model")
            return {"deepspeed_config": plain(plugin.deepspeed_config), **{name: getattr(plugin, name) for name in names}}
        cases.append([env, kwargs, outcome(make, env)])

    for env in ({}, {DS + "ZERO_STAGE": "3", DS + "OFFLOAD_OPTIMIZER_DEVICE": "nvme", DS + "OFFLOAD_OPTIMIZER_NVME_PATH": "/a", "ACCELERATE_GRADIENT_CLIPPING": "0.5", DS + "ZERO3_SAVE_16BIT_MODEL": "true"},
                {DS + "ZERO3_INIT": "false", DS + "ZERO_STAGE": "3"}, {DS + "ZERO3_INIT": "true", DS + "ZERO_STAGE": "1"}, {"ACCELERATE_FP8_BACKEND": "MSAMP"},
                {"ACCELERATE_FP8_BACKEND": "MSAMP", "ACCELERATE_FP8_OPT_LEVEL": "O2", DS + "ZERO_STAGE": "1"}, {"ACCELERATE_FP8_BACKEND": "MSAMP", DS + "ZERO_STAGE": "3"},
                {"ACCELERATE_FP8_BACKEND": "MSAMP", "ACCELERATE_FP8_OPT_LEVEL": "O9"}, {"ACCELERATE_FP8_BACKEND": "TE"}):
        case(env)
        case(env, hf_ds_config=ALL_AUTO)
        text = json.dumps(ALL_AUTO)
        case({**env, DS + "CONFIG_FILE": text})
        case({**env, DS + "CONFIG_FILE": base64.urlsafe_b64encode(text.encode()).decode()})
    for kwargs in ({"gradient_clipping": 0.0}, {"gradient_clipping": 2.0}, {"gradient_accumulation_steps": 5, "zero_stage": 1}, {"offload_optimizer_device": "cpu", "zero3_init_flag": True},
                   {"zero_stage": 3, "zero3_init_flag": False, "zero3_save_16bit_model": True}, {"hf_ds_config": {"zero_optimization": {}}},
                   {"hf_ds_config": {"zero_optimization": {"stage": None}, "gradient_clipping": None}}, {"hf_ds_config": {"zero_optimization": {"stage": 3, "offload_param": None}}}):
        case({}, **kwargs)
    for source in ("none", "/no/such/file.json"):
        case({DS + "CONFIG_FILE": source})
    case({"ACCELERATE_CONFIG_DS_FIELDS": "zero_stage"})
    for field in ("gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
                  "zero3_init_flag", "deepspeed_config_file", "mixed_precision", "Zero_Stage", ""):
        case({"ACCELERATE_CONFIG_DS_FIELDS": field}, hf_ds_config=STAGE1)

    precisions = []
    for precision in ("no", "fp16", "bf16", "fp8"):
        for sections in ({"fp16": {"enabled": "true"}}, {"bf16": {"enabled": "True"}}, {"fp16": {}, "bf16": {}}, {"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}},
                         {"fp16": {"enabled": "auto", "auto_cast": False}}):
            config = {"zero_optimization": {"stage": 2}, **sections}

            def make():
                plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config))
                plugin.set_mixed_precision(precision)
                return {name: plugin.deepspeed_config.get(name) for name in ("fp16", "bf16")}
            precisions.append([precision, config, outcome(make)])

    base = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "fp16": {"enabled": "auto"}}
    matches = []
    for values in ({"zero_optimization.reduce_bucket_size": 64, "optimizer.params.lr": 0.5, "fp16.enabled": False}, {"optimizer.params.lr": 0.5},
                   {"zero_optimization.reduce_bucket_size": 64, "optimizer.params.lr": 0.5, "fp16.enabled": False, "zero_optimization.stage": 2},
                   {"zero_optimization.reduce_bucket_size": 64, "optimizer.params.lr": 0.5, "fp16.enabled": False, "zero_optimization.stage": 3.0, "optimizer.type": "AdamW", "not.there": 1}):
        def make():
            plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(base))
            plugin.deepspeed_config_process(**values)
            return plain(plugin.deepspeed_config)
        matches.append([base, values, outcome(make)])
    return {"cases": cases, "mixed_precision": precisions, "auto_fill": [], "must_match_fields": ["ds_config", "kwargs", "resulting ds config|error"], "must_match": matches}


class Job:
    def __init__(self, num_processes, is_fsdp2, multi_device, distributed_type):
        self.num_processes, self.is_fsdp2, self.multi_device, self.distributed_type, self.is_main_process = num_processes, is_fsdp2, multi_device, distributed_type, False


def parallelism():
    cases = []
    for sizes in itertools.product((1, 3), (1, 2, 5), (1, 2, 3), (1, 2), (1, 2)):
        def make():
            config = ParallelismConfig(**dict(zip(("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"), sizes)))
            names, shape = config._get_mesh() or ((), ())
            ranks = range(config.total_size)
            mesh = config.sp_size == 1
            names_of = {name: getattr(config, name) for name in ("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names", "fsdp_dim_names", "data_parallel_size", "non_data_parallel_size")}
            return {"total_size": config.total_size, "mesh_dim_names": list(names), "mesh_shape": list(shape),
                    "coords": [[int(c) for c in numpy.unravel_index(rank, shape)] if shape else [] for rank in ranks], **names_of,
                    "data_loader_process_index": [rank // (config.tp_size * config.cp_size) for rank in ranks] if mesh else None,  # as data_loader.py, where there is a mesh
                    "data_loader_num_processes": config.data_parallel_size, "uses_device_mesh": mesh,
                    "validate_with_fsdp2": outcome(lambda: config._validate_accelerator(Job(config.total_size, True, True, DistributedType.FSDP)))}
        cases.append([*sizes, outcome(make)])
    prefix = "PARALLELISM_CONFIG_"
    env_cases = []
    for env in ({prefix + "DP_SHARD_SIZE": "4", prefix + "TP_SIZE": "2"}, {prefix + "DP_REPLICATE_SIZE": "2", prefix + "CP_SIZE": "2"}, {prefix + "SP_SIZE": "4", prefix + "CP_SIZE": "2"},
                {prefix + "SP_SIZE": "2", prefix + "SP_SEQ_LENGTH": "32"}, {prefix + "SP_SIZE": "2", prefix + "SP_SEQ_LENGTH": "None", prefix + "SP_SEQ_LENGTH_IS_VARIABLE": "false"},
                {prefix + "SP_SIZE": "2", prefix + "SP_ATTN_IMPLEMENTATION": "sdpa"}, {prefix + "SP_SIZE": "2", prefix + "SP_ATTN_IMPLEMENTATION": "flash_attention_3"},
                {prefix + "SP_SIZE": "2", prefix + "SP_ATTN_IMPLEMENTATION": "org/other"}, {prefix + "SP_ATTN_IMPLEMENTATION": "eager"}, {prefix + "CP_COMM_STRATEGY": "ring"}, {prefix + "DP_SHARD_SIZE": "-2"}):
        def make():
            config = ParallelismConfig()
            handler = lambda h: h and {"__class__": type(h).__name__, **vars(h)}
            names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend")
            return {**{name: getattr(config, name) for name in names}, "cp_handler": handler(config.cp_handler), "sp_handler": handler(config.sp_handler)}
        if not prefix + "TP_SIZE" in env:  # its handler needs transformers
            env_cases.append([env, {}, outcome(make, env)])
    return {"cases": cases, "env_cases": env_cases, "validate": []}


def megatron():
    prefix = "MEGATRON_LM_"
    cases = []
    for env in ({"DECODER_LAST_PIPELINE_NUM_LAYERS": "3", "USE_CUSTOM_FSDP": "yes", "NO_LOAD_OPTIM": "1", "EOD_MASK_LOSS": "on", "NO_SAVE_OPTIM": "t", "OPTIMIZER_CPU_OFFLOAD": "Y",
                 "OVERLAP_CPU_OPTIMIZER_D2H_H2D": "TRUE", "USE_PRECISION_AWARE_OPTIMIZER": "true"},
                {"ATTENTION_BACKEND": "false", "ATTENTION_SOFTMAX_IN_FP32": "0", "EXPERT_TENSOR_PARALLEL_SIZE": "2", "CALCULATE_PER_TOKEN_LOSS": "no", "USE_ROTARY_POSITION_EMBEDDINGS": "off",
                 "USE_DISTRIBUTED_OPTIMIZER": "true"},
                {"RECOMPUTE_GRANULARITY": "selective", "RECOMPUTE_METHOD": "block", "RECOMPUTE_NUM_LAYERS": "4", "GRADIENT_CLIPPING": "0"}):
        env = {prefix + name: value for name, value in env.items()}
        cases.append([env, outcome(lambda: MegatronLMPlugin().megatron_lm_default_args, env)])
    return {"handlers": {}, "megatron": cases}


def fp8():
    """The handlers' fields as their constructors leave them; their packages need not be there."""
    import accelerate.utils.dataclasses as handlers
    for name in ("is_transformer_engine_available", "is_torchao_available"):
        setattr(handlers, name, lambda: True)

    class Config(dict):
        def __init__(self, **fields):
            super().__init__(fields)
    sys.modules["torchao"] = sys.modules["torchao.float8"] = type(sys)("torchao")
    sys.modules["torchao.float8"].Float8LinearConfig = Config
    prefix = "ACCELERATE_FP8_"
    cases = []

    def case(kind, env=None, **kwargs):
        env = {prefix + name: value for name, value in (env or {}).items()}

        def make():
            fields = dict(vars(getattr(handlers, kind)(**copy.deepcopy(kwargs))))
            fields.pop("module_filter_func", None)
            if kind == "AORecipeKwargs":
                fields["config"] = {**fields["config"]}
            return fields
        cases.append([kind, env, kwargs, outcome(make, env)])

    for kind in ("TERecipeKwargs", "FP8RecipeKwargs"):
        case(kind)
        for env in ({"USE_AUTOCAST_DURING_EVAL": "true"}, {"MARGIN": "3"}, {"MARGIN": "-1"}, {"INTERVAL": "4"}, {"FORMAT": "e4m3"}, {"FORMAT": "E5M2"}, {"FORMAT": "E4M4"},
                    {"AMAX_HISTORY_LEN": "16"}, {"AMAX_COMPUTE_ALGO": "MAX"}, {"AMAX_COMPUTE_ALGO": "mean"}, {"OVERRIDE_FPROP": "1", "OVERRIDE_WGRAD": "yes"}, {"OVERRIDE_DGRAD": "True"},
                    {"USE_MXFP8_BLOCK_SCALING": "true"}, {"MARGIN": "two"}):
            case(kind, env)
        for kwargs in ({"use_autocast_during_eval": True}, {"margin": 2}, {"interval": 3}, {"fp8_format": "e4m3"}, {"fp8_format": "fp8"}, {"amax_history_len": 32}, {"amax_compute_algo": "Max"},
                       {"amax_compute_algo": "min"}, {"override_linear_precision": [True, False, True]}, {"use_mxfp8_block_scaling": True}):
            case(kind, **kwargs)
        case(kind, {"MARGIN": "3", "FORMAT": "E5M2", "OVERRIDE_DGRAD": "1"}, margin=5, fp8_format="E4M3", override_linear_precision=[False, False, True])
    for env in ({"BACKEND": "te"}, {"BACKEND": "MSAMP"}, {"BACKEND": "AO"}, {"BACKEND": "cuda"}):
        case("FP8RecipeKwargs", env)
        case("FP8RecipeKwargs", env, backend="te")
    for env in ({}, {"OPT_LEVEL": "O1"}, {"OPT_LEVEL": "o1"}, {"OPT_LEVEL": "O3"}):
        case("MSAMPRecipeKwargs", env)
        case("MSAMPRecipeKwargs", env, opt_level="O2")
    case("MSAMPRecipeKwargs", opt_level="O4")
    for env in ({}, {"PAD_INNER_DIM": "false"}, {"ENABLE_FSDP_FLOAT8_ALL_GATHER": "0"}, {"PAD_INNER_DIM": "maybe"}):
        case("AORecipeKwargs", env)
        case("AORecipeKwargs", env, pad_inner_dim=True)
        case("AORecipeKwargs", env, enable_fsdp_float8_all_gather=False)
    return {"fields": ["handler", "env", "kwargs", "fields|error"], "cases": cases}


output = pathlib.Path(sys.argv[1])
for name, rows in {"deepspeed_plugin_more": deepspeed(), "parallelism_config_more": parallelism(), "kwargs_megatron_more": megatron(), "fp8_kwargs": fp8()}.items():
    (output / f"{name}.json").write_text(json.dumps({"accelerate": accelerate.__version__, **rows}, separators=(",", ":")) + "\n")
