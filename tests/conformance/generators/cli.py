#!/usr/bin/env python3
"""Makes cli_launch_env_more.json and config_roundtrip_more.json from Hugging Face Accelerate 1.15: what its launcher does with command lines and config
files, on an invented machine with so many GPUs and 8 cores; and what it writes of config files that it has read.

usage: cli.py OUTPUT_FOLDER        (with the Python that has accelerate, torch and PyYAML)
"""
import json
import os
import sys
import tempfile
import unittest.mock as mock

FOLDER = tempfile.mkdtemp()
for name in list(os.environ):
    if name.startswith(("ACCELERATE_", "FSDP_", "RANK", "MASTER", "OMP_")):
        del os.environ[name]
os.environ["HF_HOME"] = FOLDER

import psutil
import torch
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import launch as prepare

# Command lines before the program, without a config file, on a machine with 4 GPUs.
LINES = [
    '--gpu_ids 0,2',
    '--gpu_ids 1 --num_processes 1',
    '--gpu_ids all',
    '--multi_gpu --gpu_ids 0,1,2',
    '--dynamo_backend inductor --dynamo_mode max-autotune --dynamo_use_fullgraph --dynamo_use_dynamic',
    '--dynamo_use_regional_compilation --dynamo_backend eager',
    '--dynamo_backend tvm --num_processes 1',
    '--use_fsdp --fsdp_offload_params true --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 2000 --fsdp_backward_prefetch BACKWARD_POST --fsdp_state_dict_type FULL_STATE_DICT --fsdp_forward_prefetch true --fsdp_use_orig_params false --fsdp_activation_checkpointing true',
    '--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false --fsdp_activation_checkpointing_offload true',
    '--use_fsdp --fsdp_transformer_layer_cls_to_wrap BertLayer --fsdp_cpu_ram_efficient_loading false',
    '--use_fsdp --use_parallelism_config',
    '--use_parallelism_config',
    '--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_sp_size 2 --parallelism_config_sp_seq_length 128 --num_processes 4',
    '--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_sp_size 2',
    '--multi_gpu --num_processes 4 --main_process_port 0',
    '--multi_gpu --main_process_port 1234',
    '--use_fsdp --mixed_precision fp8 --fp8_backend msamp --fp8_opt_level O1',
    '--cpu --mixed_precision bf16 --num_processes 8',
    '--cpu --num_processes 3 --num_cpu_threads_per_process 5',
    '--cpu --num_processes 2 --gpu_ids 0',
    '--cpu --num_processes 16',
    '--cpu --num_processes 4 --num_machines 4 --main_process_ip a --main_process_port 5 --machine_rank 1',
    '--num_machines 2 --num_processes 4 --multi_gpu',
    '--num_machines 2 --num_processes 5 --machine_rank 0 --multi_gpu --main_process_ip x --main_process_port 4',
    '--tpu',
    '--tpu --mixed_precision bf16',
    '--tpu --tpu_cluster --vm a --env B=1',
    '--use_deepspeed --zero_stage 2 --gradient_clipping 0.5 --mixed_precision bf16',
    '--use_deepspeed --deepspeed_config_file ds.json --enable_cpu_affinity --debug --gpu_ids 0,1',
    '--use_deepspeed --offload_optimizer_device nvme --gradient_accumulation_steps 3',
    '--use_deepspeed --num_machines 2 --num_processes 8 --machine_rank 0 --deepspeed_hostfile hf --main_process_ip 10.0.0.1 --main_process_port 29511 --deepspeed_inclusion_filter worker-0@worker-1:0,2',
    '--use_deepspeed --num_machines 2 --num_processes 8 --machine_rank 1 --deepspeed_hostfile hf --main_process_ip 10.0.0.1 --deepspeed_exclusion_filter w --deepspeed_multinode_launcher openmpi',
    '--use_deepspeed --num_machines 2 --num_processes 8 --machine_rank 1 --deepspeed_hostfile hf --main_process_ip 10.0.0.1 --main_process_port 7 --no_python',
    '--use_deepspeed --num_machines 2 --num_processes 8 --machine_rank 1 --deepspeed_multinode_launcher standard --main_process_ip 10.0.0.1 --main_process_port 7',
    '--use_deepspeed --use_fsdp',
    '--tpu --cpu',
    '--use_megatron_lm',
    '--use_megatron_lm --megatron_lm_attention_dropout 0.1 --megatron_lm_hidden_dropout 1e-5 --megatron_lm_recompute_granularity full --megatron_lm_recompute_method block --megatron_lm_recompute_num_layers 2 --megatron_lm_attention_softmax_in_fp32 true --megatron_lm_calculate_per_token_loss true --megatron_lm_use_rotary_position_embeddings false --megatron_lm_expert_tensor_parallel_size 2 --megatron_lm_decoder_last_pipeline_num_layers 3',
    '--use_megatron_lm --megatron_lm_gradient_clipping 100000 --megatron_lm_eod_mask_loss 1',
    '--mixed_precision fp32',
    '--mixed_precision FP16',
    '--num_processes 0',
    '--role w --max_restarts 2 --monitor_interval 1 --tee 1 --log_dir x',
    '--multi_gpu -m',
    '--no_python --multi_gpu',
    '--debug --use_fsdp',
    '--gradient_accumulation_steps 4',
    '--mpirun_hostfile hf --cpu --num_processes 2',
    '--same_network --multi_gpu',
    '--downcast_bf16 --tpu',
    '--use_fsdp --cpu',
    '--bogus 1',
    '--num_processes x',
    '--num_processes',
    '--fsdp_version 3',
    '--enable_cpu_affinity --cpu',
    '--fp8_backend te --mixed_precision fp8 --fp8_override_linear_precision yes,no,1',
    '--quiet --debug --num_processes 1',
    '--main_process_port 0 --cpu --num_processes 2',
]
# Config files, and the lines with which each of them is tried.
CONFIGS = [
    {'distributed_type': 'MULTI_GPU', 'num_processes': 4, 'mixed_precision': 'bf16', 'gpu_ids': '0,1,2', 'debug': True},
    {'distributed_type': 'MULTI_CPU', 'num_processes': 4, 'use_cpu': True, 'mixed_precision': 'no'},
    {'distributed_type': 'FSDP', 'num_processes': 8, 'mixed_precision': 'fp16', 'fsdp_config': {'fsdp_version': 2, 'fsdp_offload_params': True, 'fsdp_auto_wrap_policy': 'NO_WRAP'}, 'parallelism_config': {'parallelism_config_cp_size': 2, 'parallelism_config_dp_shard_size': 4}},
    {'distributed_type': 'FSDP', 'num_processes': 8, 'fsdp_config': {'offload_params': True, 'sharding_strategy': 1, 'fsdp_cpu_ram_efficient_loading': True, 'fsdp_sync_module_states': False}},
    {'distributed_type': 'FSDP', 'num_processes': 8, 'fsdp_config': {'sharding_strategy': 'FULL_SHARD', 'min_num_params': 1000, 'fsdp_ignored_modules': 'a.*b'}},
    {'distributed_type': 'DEEPSPEED', 'num_processes': 2, 'deepspeed_config': {'zero_stage': 3, 'offload_param_device': 'cpu', 'gradient_clipping': 1.0, 'zero3_init_flag': True, 'zero3_save_16bit_model': False, 'deepspeed_moe_layer_cls_names': 'A'}},
    {'distributed_type': 'DEEPSPEED', 'num_processes': 8, 'num_machines': 2, 'machine_rank': 0, 'main_process_ip': 'h', 'main_process_port': 5, 'deepspeed_config': {'zero_stage': 1, 'deepspeed_hostfile': 'hf', 'deepspeed_multinode_launcher': 'pdsh'}},
    {'distributed_type': 'MEGATRON_LM', 'num_processes': 4, 'megatron_lm_config': {'megatron_lm_tp_degree': 2, 'megatron_lm_pp_degree': 2, 'megatron_lm_num_micro_batches': 2, 'megatron_lm_recompute_activations': True, 'megatron_lm_gradient_clipping': 1}},
    {'distributed_type': 'NO', 'mixed_precision': 'fp8', 'fp8_config': {'backend': 'TE', 'fp8_format': 'E4M3', 'margin': 1, 'override_linear_precision': [True, False, False], 'use_autocast_during_eval': True}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'mixed_precision': 'fp8', 'fp8_config': {'backend': 'AO', 'enable_fsdp_float8_all_gather': True, 'pad_inner_dim': False}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'num_machines': 2, 'machine_rank': 1, 'main_process_ip': '10.0.0.1', 'main_process_port': 29500, 'rdzv_backend': 'c10d', 'same_network': True, 'mixed_precision': 'bf16'},
    {'distributed_type': 'XLA', 'num_processes': 8, 'mixed_precision': 'bf16', 'main_training_function': 'go', 'downcast_bf16': 'yes'},
    {'distributed_type': 'MULTI_XPU', 'num_processes': 2, 'dynamo_config': {'dynamo_backend': 'INDUCTOR', 'dynamo_mode': 'reduce-overhead', 'dynamo_use_dynamic': True}},
    {'distributed_type': 'NO', 'num_processes': 1, 'use_cpu': True, 'enable_cpu_affinity': True},
    {'distributed_type': 'MULTI_GPU', 'num_processes': -1},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 4, 'gpu_ids': '0'},
    {'distributed_type': 'BAD', 'num_processes': 4},
    {'num_processes': 4},
    {'distributed_type': 'NO', 'bogus': 1},
    {'compute_environment': 'AMAZON_SAGEMAKER', 'distributed_type': 'DATA_PARALLEL', 'ec2_instance_type': 'a', 'iam_role_name': 'b', 'mixed_precision': 'no', 'num_machines': 2},
    {'distributed_type': 'MULTI_CPU', 'num_processes': 4, 'num_machines': 2, 'machine_rank': 1, 'main_process_ip': 'h', 'main_process_port': 3, 'use_cpu': True, 'mpirun_config': {'mpirun_hostfile': '/h'}},
]
LINES_WITH_CONFIG = [
    '',
    '--num_processes 2 --mixed_precision bf16',
    '--cpu --num_processes 2',
    '--use_fsdp --num_processes 2',
    '--multi_gpu --num_processes 2',
    '--debug --num_processes 3',
    '--dynamo_backend eager',
    '--gpu_ids 0 --num_processes 2',
    '--num_processes 1',
]
# Line, GPUs, variables of the caller.
VARIABLES = [
    ('--cpu --num_processes 4', 0, {'OMPI_COMM_WORLD_LOCAL_SIZE': '2'}),
    ('--cpu --num_processes 4', 0, {'MPI_LOCALNRANKS': '1', 'OMP_NUM_THREADS': '0'}),
    ('--multi_gpu', 4, {'PYTHONPATH': '/x'}),
    ('--use_deepspeed', 4, {'PYTHONPATH': '/x', 'OMP_NUM_THREADS': '7'}),
]
# Config files that are read and written.
ROUND_TRIPS = [
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'yes'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'no'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '1234'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '1.5'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '1e5'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'on'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'null'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '~'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '2024-01-02'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '10:30'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'a: b'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'a #b'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '- x'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '-x'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '?'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'x '},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': ''},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': "'q'"},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': "it's"},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '[a]'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '{a}'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '#h'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '*a'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '&a'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '!t'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '%p'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '@x'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '`x'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'a,b'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'a:b'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'a:'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'é'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'ü: x'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '='},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '0x1F'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '0o7'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '017'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '.5'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '1_000'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '+1'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '12e03'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'true '},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'NO'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'None'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '192.168.0.1'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '10.0.0.1:29500'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '|'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '>'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'a\tb'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'line1\nline2'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': 'C:\\x'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_ip': '"q"'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'main_process_port': 29500, 'machine_rank': 1, 'num_machines': 2},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'tpu_env': []},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'tpu_env': ['A=1', 'B: 2'], 'tpu_vm': ['x'], 'commands': ['ls -l', "echo 'a'"]},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'fsdp_config': {}, 'deepspeed_config': {'gradient_clipping': 1.0, 'zero_stage': 3}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'deepspeed_config': {'gradient_clipping': 1e-05}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'deepspeed_config': {'gradient_clipping': 100000.0}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'fp8_config': {'backend': 'TE', 'override_linear_precision': [False, True, False], 'margin': 0}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'dynamo_config': {'dynamo_backend': 'INDUCTOR'}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'dynamo_backend': 'TVM'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'fp16': True},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'fp16': False},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'mixed_precision': None},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'use_cpu': True, 'debug': True, 'enable_cpu_affinity': True},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'mpirun_config': {'mpirun_hostfile': '~/x'}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'parallelism_config': {'parallelism_config_tp_size': 2}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'megatron_lm_config': {'megatron_lm_tp_degree': 2}},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'rdzv_backend': None},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'machine_rank': None},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'gpu_ids': '0,1'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'gpu_ids': '0'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'downcast_bf16': 'no'},
    {'distributed_type': 'MULTI_GPU', 'num_processes': 2, 'bogus': 1, 'other': 2},
    {'distributed_type': 'NO'},
    {'distributed_type': 'NO', 'num_processes': 3},
    {'distributed_type': 'MULTI_CPU'},
    {'distributed_type': 'MULTI_CPU', 'num_processes': 3},
    {'distributed_type': 'FSDP'},
    {'distributed_type': 'FSDP', 'num_processes': 3},
    {'distributed_type': 'DEEPSPEED'},
    {'distributed_type': 'DEEPSPEED', 'num_processes': 3},
    {'distributed_type': 'XLA'},
    {'distributed_type': 'XLA', 'num_processes': 3},
    {'distributed_type': 'MEGATRON_LM'},
    {'distributed_type': 'MEGATRON_LM', 'num_processes': 3},
    {'distributed_type': 'MULTI_XPU'},
    {'distributed_type': 'MULTI_XPU', 'num_processes': 3},
    {'distributed_type': 'TP'},
    {'distributed_type': 'TP', 'num_processes': 3},
    {'distributed_type': 'BAD'},
    {'distributed_type': 'BAD', 'num_processes': 3},
    {'distributed_type': 'DATA_PARALLEL'},
    {'distributed_type': 'DATA_PARALLEL', 'num_processes': 3},
    {'compute_environment': 'AMAZON_SAGEMAKER', 'ec2_instance_type': 'a', 'iam_role_name': 'b', 'mixed_precision': 'no', 'distributed_type': 'NO'},
    {'compute_environment': 'AMAZON_SAGEMAKER', 'ec2_instance_type': 'a', 'iam_role_name': 'b', 'mixed_precision': 'no', 'distributed_type': 'DATA_PARALLEL'},
    {'compute_environment': 'AMAZON_SAGEMAKER', 'ec2_instance_type': 'a', 'iam_role_name': 'b', 'mixed_precision': 'no', 'distributed_type': 'MODEL_PARALLEL'},
    {'compute_environment': 'AMAZON_SAGEMAKER', 'ec2_instance_type': 'a', 'iam_role_name': 'b', 'mixed_precision': 'no', 'distributed_type': 'MULTI_GPU'},
    {'compute_environment': 'AMAZON_SAGEMAKER', 'ec2_instance_type': 'a', 'iam_role_name': 'b', 'mixed_precision': 'no', 'distributed_type': 'DATA_PARALLEL', 'profile': 'p', 'additional_args': {'a': {'b': [1, 2]}}, 'dynamo_config': {'dynamo_backend': 'EAGER'}, 'num_machines': 3},
    {'compute_environment': 'AMAZON_SAGEMAKER', 'distributed_type': 'DATA_PARALLEL', 'ec2_instance_type': 'a'},
    {},
    {'compute_environment': 'BAD', 'distributed_type': 'NO'},
]
PROGRAM = ["train", "--lr", "1e-4"]
TORCHRUN = ("nproc_per_node nnodes node_rank master_addr master_port rdzv_endpoint rdzv_backend rdzv_conf max_restarts monitor_interval tee log_dir role module no_python").split()


def run(argv, config, gpus, variables, base):
    """The processes that the reference would start: its own functions prepare it, and nothing is started."""
    os.environ.clear()
    os.environ.update(base)
    os.environ.update(variables)
    before = dict(os.environ)
    if config is not None:
        path = os.path.join(FOLDER, "given.yaml")
        with open(path, "w") as file:
            yaml.safe_dump(config, file)
        argv = ["--config_file", path] + argv
    found = {}

    def keep(launcher, command, environment, torchrun):
        changed = {k: v for k, v in environment.items() if before.get(k) != v and k != "PYTHONPATH"}
        found.update(launcher=launcher, cmd=command, env=changed, torchrun=torchrun)

    def torchrun(args):
        return {k: getattr(args, k) for k in TORCHRUN if hasattr(args, k)}

    def simple(args):
        command, environment = prepare.prepare_simple_launcher_cmd_env(args)
        keep("simple", ["<python>" if word == sys.executable else word for word in command], environment, None)

    def several(args):
        environment = prepare.prepare_multi_gpu_env(args)
        keep("torchrun", None, environment, torchrun(args))

    def deepspeed(args):
        command, environment = prepare.prepare_deepspeed_cmd_env(args)
        keep("deepspeed", command, environment, None if command else torchrun(args))

    def tpu(args):
        keep("tpu", None, prepare.prepare_tpu(args, {})[1], None)

    patches = [
        (torch.cuda, "device_count", lambda: gpus), (torch.cuda, "is_available", lambda: gpus > 0), (psutil, "cpu_count", lambda logical=False: 8),
        (prepare, "is_port_in_use", lambda port: False), (prepare, "get_free_port", lambda: 29500), (prepare, "is_fp8_available", lambda: True),
        (launch, "is_bf16_available", lambda ignored=False: True), (launch, "simple_launcher", simple), (launch, "multi_gpu_launcher", several),
        (launch, "deepspeed_launcher", deepspeed), (launch, "tpu_launcher", tpu), (launch, "tpu_pod_launcher", tpu),
        (launch, "sagemaker_launcher", lambda config, args: found.update(launcher="sagemaker", cmd=None, env={}, torchrun=None)),
    ]
    for patch in patches:
        mock.patch.object(*patch).start()
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(argv))
        return found
    except SystemExit:
        return {"error": "SystemExit: a mistake on the command line"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".replace(FOLDER, "<folder>")[:300]}
    finally:
        mock.patch.stopall()


def round_trip(extension, config):
    given, written = (os.path.join(FOLDER, f"{name}.{extension}") for name in ("given", "written"))
    with open(given, "w") as file:
        (yaml.safe_dump if extension == "yaml" else json.dump)(config, file)
    try:
        read = load_config_from_file(given)
        (read.to_yaml_file if extension == "yaml" else read.to_json_file)(written)
        with open(written) as file:
            return file.read()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".replace(given, "<file>")}


def main():
    base = dict(os.environ)
    tried = [(line, None, 4, {}) for line in LINES]
    tried += [(line, config, 4, {}) for line in LINES_WITH_CONFIG for config in CONFIGS]
    tried += [(line, None, gpus, variables) for line, gpus, variables in VARIABLES]
    cases = []
    for line, config, gpus, variables in tried:
        argv = line.split() + PROGRAM
        cases.append({"argv": argv, "config": config, "n_accelerators": gpus, "env_in": variables, "note": None, "expect": run(argv, config, gpus, variables, base)})
    trips = [[extension, config, round_trip(extension, config)] for config in ROUND_TRIPS for extension in ("yaml", "json")]
    for name, rows in (("cli_launch_env_more", cases), ("config_roundtrip_more", trips)):
        with open(os.path.join(sys.argv[1], name + ".json"), "w") as file:
            json.dump({"accelerate": "1.15.0", "what": "see generators/cli.py", "cases": rows}, file, separators=(",", ":"))


main()
