#include "accelerate/config/option.hpp"

/// The settings of `accelerate launch`. A row: name, kind, default (JSON), choices, value in help, help, flags, section
/// in config files, environment variable, its form. Names, defaults, choices and variables are the reference's: they
/// are the contract with its files and programs.
namespace accelerate::config {
namespace {

using enum Kind;
constexpr Form kText = Form::text, kLower = Form::lower;

constexpr Option kGeneral[] = {
    {"config_file", text, nullptr, nullptr, "FILE",
     "Config file to take defaults from (default: the one that `accelerate config` writes, if it is there; not with "
     "--cpu)"},
    {"quiet", flag, nullptr, nullptr, nullptr, "At most one line from the launcher itself, when a process failed",
     "--quiet,-q"},
    {"module", flag, nullptr, nullptr, nullptr, "PROGRAM is a Python module, as in `python -m`", "-m,--module"},
    {"no_python", flag, nullptr, nullptr, nullptr, "Execute PROGRAM directly even if its name ends in .py"},
    {"debug", flag, nullptr, nullptr, nullptr,
     "Compare tensor shapes across processes before each collective: slower, but an error instead of a hang", nullptr,
     "", "ACCELERATE_DEBUG_MODE"},
};

constexpr Option kHardware[] = {
    {"cpu", flag, "false", nullptr, nullptr, "Compute on the CPU even where there is an accelerator", nullptr, nullptr,
     "ACCELERATE_USE_CPU"},
    {"multi_gpu", flag, "false", nullptr, nullptr, "Use several accelerators, one process each"},
    {"tpu", flag, "false", nullptr, nullptr, "Start on TPUs"},
};

constexpr const char* kDynamoBackends =
    "no|eager|aot_eager|inductor|aot_ts_nvfuser|nvprims_nvfuser|cudagraphs|ofi|fx2trt|onnxrt|tensorrt|aot_torchxla_"
    "trace_once|torhchxla_trace_once|tvm";

constexpr Option kResources[] = {
    {"mixed_precision", text, nullptr, "no|fp16|bf16|fp8", nullptr, "Number format of the computation (default no)",
     nullptr, "", "ACCELERATE_MIXED_PRECISION"},
    {"num_processes", integer, nullptr, nullptr, "N",
     "Processes over all machines together (default: one per GPU of this machine, else 1)", nullptr, ""},
    {"num_machines", integer, nullptr, nullptr, "N|MIN:MAX",
     "Machines; run the same command on each (default 1). MIN:MAX with --rdzv_backend c10d: the job goes on when "
     "machines come or go",
     nullptr, ""},
    {"num_cpu_threads_per_process", integer, nullptr, nullptr, "N",
     "Threads of each process (default: as in the environment; else, on the CPU with --num_processes, cores / "
     "processes; else 1)",
     nullptr, nullptr, "OMP_NUM_THREADS"},
    {"enable_cpu_affinity", flag, "false", nullptr, nullptr,
     "Bind each process to its share of the cores, near its GPU where there are GPUs", nullptr, "",
     "ACCELERATE_CPU_AFFINITY"},
    {"dynamo_backend", text, nullptr, kDynamoBackends, nullptr,
     "Graph compiler for Python programs (torch.compile); C++ programs don't look at it", nullptr, "dynamo_config",
     "ACCELERATE_DYNAMO_BACKEND"},
    {"dynamo_mode", text, "\"default\"", "default|reduce-overhead|max-autotune", nullptr,
     "What the graph compiler optimises for", nullptr, "dynamo_config", "ACCELERATE_DYNAMO_MODE", kText},
    {"dynamo_use_fullgraph", flag, "false", nullptr, nullptr, "The graph compiler must take the model as one graph",
     nullptr, "dynamo_config", "ACCELERATE_DYNAMO_USE_FULLGRAPH", kText},
    {"dynamo_use_dynamic", flag, "false", nullptr, nullptr, "The graph compiler expects changing shapes", nullptr,
     "dynamo_config", "ACCELERATE_DYNAMO_USE_DYNAMIC", kText},
    {"dynamo_use_regional_compilation", flag, "false", nullptr, nullptr,
     "The graph compiler compiles repeated blocks once", nullptr, "dynamo_config",
     "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", kText},
};

constexpr Option kParadigms[] = {
    {"use_deepspeed", flag, "false", nullptr, nullptr, "Train with DeepSpeed (ZeRO)"},
    {"use_fsdp", flag, "false", nullptr, nullptr,
     "Shard parameters, gradients and optimizer state over the processes (FSDP)", nullptr, nullptr,
     "ACCELERATE_USE_FSDP"},
    {"use_parallelism_config", flag, "false", nullptr, nullptr,
     "Combine several kinds of parallelism; with --use_fsdp --fsdp_version 2", nullptr, nullptr,
     "ACCELERATE_USE_PARALLELISM_CONFIG"},
    {"use_megatron_lm", flag, "false", nullptr, nullptr, "Train with Megatron-LM", nullptr, nullptr,
     "ACCELERATE_USE_MEGATRON_LM"},
};

constexpr Option kDistributed[] = {
    {"gpu_ids", text, nullptr, nullptr, "IDS", "GPUs of this machine to use: numbers with commas, or all", nullptr, ""},
    {"same_network", flag, "false", nullptr, nullptr, "All machines are on one local network", nullptr, ""},
    {"machine_rank", integer, nullptr, nullptr, "N", "This machine's number, from 0 (needed with several)", nullptr,
     ""},
    {"main_process_ip", text, nullptr, nullptr, "ADDRESS", "Address of machine 0 (needed with several)", nullptr, ""},
    {"main_process_port", integer, nullptr, nullptr, "PORT",
     "Port on machine 0 where the processes meet; 0 or left out: a free one (needed with several machines)", nullptr,
     ""},
    {"tee", text, "\"0\"", nullptr, "STREAMS",
     "Streams written to log files and, after [rankN]:, to the terminal: 0 none, 1 stdout, 2 stderr, 3 both, or by "
     "local rank: 0:1,1:3",
     "-t,--tee"},
    {"log_dir", text, nullptr, nullptr, "FOLDER",
     "Keep log files in FOLDER/<run>/attempt_<n>/<local rank>/{stdout,stderr}.log"},
    {"role", text, "\"default\"", nullptr, "NAME", "Name that the processes find in ROLE_NAME"},
    {"rdzv_backend", text, "\"static\"", nullptr, nullptr,
     "How several machines meet at --main_process_ip and --main_process_port: static (a fixed number, each with its "
     "--machine_rank) or c10d (ranks as they come)",
     nullptr, ""},
    {"rdzv_conf", text, "\"\"", nullptr, "KEY=VALUE,...",
     "Settings of that: token or token_file, local_addr, bind, join_timeout, last_call_timeout, close_timeout, "
     "keep_alive_interval, ... (docs/multi_node.md)"},
    {"max_restarts", integer, "0", nullptr, "N", "Start all processes again, up to N times, after one failed"},
    {"monitor_interval", number, "0.1", nullptr, "SECONDS",
     "After a failure, time for the other processes to fail by themselves before they are stopped"},
};

constexpr Option kTpu[] = {
    {"tpu_use_cluster", flag, "false", nullptr, nullptr, "Start on all workers of a TPU pod", "--tpu_cluster", ""},
    {"tpu_use_cluster", unset, "true", nullptr, nullptr, "On this worker only (what a pod start uses for its workers)",
     "--no_tpu_cluster"},
    {"tpu_use_sudo", flag, "false", nullptr, nullptr, "Use sudo on the workers of a pod", nullptr, ""},
    {"vm", append, nullptr, nullptr, "NAME", "A worker of the pod by its name; may be given several times"},
    {"env", append, nullptr, nullptr, "NAME=VALUE", "A variable for the workers of a pod; may be given several times"},
    {"main_training_function", text, nullptr, nullptr, "NAME",
     "Function of a Python script that each TPU process calls (default main)", nullptr, ""},
    {"downcast_bf16", flag, "false", nullptr, nullptr, "On TPUs, float becomes bfloat16 and double float32", nullptr,
     ""},
};

constexpr Option kDeepSpeed[] = {
    {"deepspeed_config_file", text, nullptr, nullptr, "FILE", "DeepSpeed's own configuration (JSON)", nullptr,
     "deepspeed_config", "ACCELERATE_DEEPSPEED_CONFIG_FILE", kText},
    {"zero_stage", integer, nullptr, nullptr, "0-3",
     "What ZeRO shards: 1 optimizer state, 2 also gradients, 3 also parameters (default 2)", nullptr,
     "deepspeed_config", "ACCELERATE_DEEPSPEED_ZERO_STAGE", kText},
    {"offload_optimizer_device", text, nullptr, nullptr, "none|cpu|nvme",
     "Where optimizer state waits (default none: on the device)", nullptr, "deepspeed_config",
     "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", kLower},
    {"offload_param_device", text, nullptr, nullptr, "none|cpu|nvme",
     "Where parameters wait (default none: on the device)", nullptr, "deepspeed_config",
     "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", kLower},
    {"offload_optimizer_nvme_path", text, nullptr, nullptr, "FOLDER", "Folder for optimizer state on NVMe", nullptr,
     "deepspeed_config", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", kText},
    {"offload_param_nvme_path", text, nullptr, nullptr, "FOLDER", "Folder for parameters on NVMe", nullptr,
     "deepspeed_config", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", kText},
    {"gradient_accumulation_steps", integer, nullptr, nullptr, "N",
     "Batches per optimizer step, unless the program says otherwise", nullptr, "deepspeed_config",
     "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", kText},
    {"gradient_clipping", number, nullptr, nullptr, "NORM", "Gradients are clipped to this norm", nullptr,
     "deepspeed_config", "ACCELERATE_GRADIENT_CLIPPING", kLower},
    {"zero3_init_flag", text, nullptr, nullptr, "true|false",
     "With ZeRO stage 3: shard parameters already when the model is made", nullptr, "deepspeed_config",
     "ACCELERATE_DEEPSPEED_ZERO3_INIT", kLower},
    {"zero3_save_16bit_model", text, nullptr, nullptr, "true|false", "With ZeRO stage 3: save whole 16-bit weights",
     nullptr, "deepspeed_config", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", kLower},
    {"deepspeed_hostfile", text, nullptr, nullptr, "FILE",
     "Machines for DeepSpeed's own starters, a line each: NAME slots=N", nullptr, "deepspeed_config"},
    {"deepspeed_exclusion_filter", text, nullptr, nullptr, "FILTER", "Machines and slots to leave out: NAME@NAME:0,2",
     nullptr, "deepspeed_config"},
    {"deepspeed_inclusion_filter", text, nullptr, nullptr, "FILTER", "Machines and slots to use, and no others",
     nullptr, "deepspeed_config"},
    {"deepspeed_multinode_launcher", text, nullptr, nullptr, "NAME",
     "Who starts the other machines: pdsh (default), standard (nobody: run this command on each), openmpi, mvapich, "
     "mpich, nossh, slurm",
     nullptr, "deepspeed_config"},
    {"deepspeed_moe_layer_cls_names", text, nullptr, nullptr, "CLASSES",
     "Mixture-of-experts layers of Transformers, with commas", nullptr, "deepspeed_config",
     "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", kText},
};

constexpr Option kFsdp[] = {
    {"fsdp_version", text, "\"1\"", "1|2", nullptr, "1: units of flat parameters; 2: each parameter sharded by itself",
     nullptr, "fsdp_config", "FSDP_VERSION", kText},
    {"fsdp_offload_params", text, "\"false\"", nullptr, "true|false", "Shards wait in host memory", nullptr,
     "fsdp_config", "FSDP_OFFLOAD_PARAMS", kLower},
    {"fsdp_min_num_params", integer, "100000000", nullptr, "N", "SIZE_BASED_WRAP makes a unit of this many parameters",
     nullptr, "fsdp_config", "FSDP_MIN_NUM_PARAMS", kText},
    {"fsdp_sharding_strategy", text, "\"FULL_SHARD\"", nullptr, "NAME",
     "Version 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2", nullptr, "fsdp_config",
     "FSDP_SHARDING_STRATEGY", kText},
    {"fsdp_reshard_after_forward", text, "\"true\"", nullptr, "true|false|NAME",
     "Version 2: give up whole parameters between forward and backward; or a strategy of version 1", nullptr,
     "fsdp_config", "FSDP_RESHARD_AFTER_FORWARD", kLower},
    {"fsdp_auto_wrap_policy", text, nullptr, nullptr, "NAME",
     "What becomes a unit: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP", nullptr, "fsdp_config",
     "FSDP_AUTO_WRAP_POLICY", kText},
    {"fsdp_transformer_layer_cls_to_wrap", text, nullptr, nullptr, "CLASSES",
     "TRANSFORMER_BASED_WRAP makes a unit of each module of these classes", nullptr, "fsdp_config",
     "FSDP_TRANSFORMER_CLS_TO_WRAP", kText},
    {"fsdp_backward_prefetch", text, nullptr, nullptr, "NAME", "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH", nullptr,
     "fsdp_config", "FSDP_BACKWARD_PREFETCH", kText},
    {"fsdp_state_dict_type", text, nullptr, nullptr, "NAME",
     "How checkpoints are written: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT", nullptr, "fsdp_config",
     "FSDP_STATE_DICT_TYPE", kText},
    {"fsdp_forward_prefetch", text, "\"false\"", nullptr, "true|false", "Fetch the next unit while one computes",
     nullptr, "fsdp_config", "FSDP_FORWARD_PREFETCH", kLower},
    {"fsdp_use_orig_params", text, "\"true\"", nullptr, "true|false",
     "Version 1: the optimizer sees the model's own parameters", nullptr, "fsdp_config", "FSDP_USE_ORIG_PARAMS",
     kLower},
    {"fsdp_cpu_ram_efficient_loading", text, "\"true\"", nullptr, "true|false",
     "Only the first process reads a pretrained model", nullptr, "fsdp_config", "FSDP_CPU_RAM_EFFICIENT_LOADING",
     kLower},
    {"fsdp_sync_module_states", text, "\"true\"", nullptr, "true|false",
     "All processes take rank 0's values at the start", nullptr, "fsdp_config", "FSDP_SYNC_MODULE_STATES", kLower},
    {"fsdp_activation_checkpointing", text, "\"false\"", nullptr, "true|false",
     "Compute a unit's activations again in backward instead of keeping them", nullptr, "fsdp_config",
     "FSDP_ACTIVATION_CHECKPOINTING", kLower},
    {"fsdp_activation_checkpointing_offload", text, "\"false\"", nullptr, "true|false",
     "Version 2: what checkpointing keeps waits in host memory", nullptr, "fsdp_config",
     "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", kLower},
};

constexpr Option kMegatron[] = {
    {"megatron_lm_tp_degree", integer, "1", nullptr, "N", "Processes that share each layer (tensor parallel)", nullptr,
     "megatron_lm_config", "MEGATRON_LM_TP_DEGREE", kText},
    {"megatron_lm_use_custom_fsdp", truth, "false", nullptr, "BOOL", "Megatron's own FSDP", nullptr,
     "megatron_lm_config", "MEGATRON_LM_USE_CUSTOM_FSDP", kText},
    {"megatron_lm_no_load_optim", truth, "false", nullptr, "BOOL", "Don't load optimizer state", nullptr,
     "megatron_lm_config", "MEGATRON_LM_NO_LOAD_OPTIM", kText},
    {"megatron_lm_eod_mask_loss", truth, "false", nullptr, "BOOL", "No loss at ends of documents", nullptr,
     "megatron_lm_config", "MEGATRON_LM_EOD_MASK_LOSS", kText},
    {"megatron_lm_overlap_cpu_optimizer_d2h_h2d", truth, "false", nullptr, "BOOL",
     "Copies to and from the host run beside the optimizer on the CPU", nullptr, "megatron_lm_config",
     "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D", kText},
    {"megatron_lm_no_save_optim", truth, "false", nullptr, "BOOL", "Don't save optimizer state", nullptr,
     "megatron_lm_config", "MEGATRON_LM_NO_SAVE_OPTIM", kText},
    {"megatron_lm_optimizer_cpu_offload", truth, "false", nullptr, "BOOL", "The optimizer runs on the CPU", nullptr,
     "megatron_lm_config", "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD", kText},
    {"megatron_lm_use_precision_aware_optimizer", truth, "false", nullptr, "BOOL", "Optimizer state in low precision",
     nullptr, "megatron_lm_config", "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER", kText},
    {"megatron_lm_decoder_last_pipeline_num_layers", integer, nullptr, nullptr, "N",
     "Layers of the last pipeline stage (default: an equal share)", nullptr, "megatron_lm_config",
     "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS", kText},
    {"megatron_lm_pp_degree", integer, "1", nullptr, "N", "Pipeline stages", nullptr, "megatron_lm_config",
     "MEGATRON_LM_PP_DEGREE", kText},
    {"megatron_lm_num_micro_batches", integer, nullptr, nullptr, "N", "Micro-batches per batch in a pipeline", nullptr,
     "megatron_lm_config", "MEGATRON_LM_NUM_MICRO_BATCHES", kText},
    {"megatron_lm_sequence_parallelism", text, nullptr, nullptr, "true|false",
     "Also split along the sequence where tensors are parallel", nullptr, "megatron_lm_config",
     "MEGATRON_LM_SEQUENCE_PARALLELISM", kText},
    {"megatron_lm_recompute_activations", text, nullptr, nullptr, "true|false",
     "Compute chosen activations again in backward", nullptr, "megatron_lm_config", "MEGATRON_LM_RECOMPUTE_ACTIVATIONS",
     kText},
    {"megatron_lm_use_distributed_optimizer", text, nullptr, nullptr, "true|false",
     "Shard optimizer state over data-parallel processes", nullptr, "megatron_lm_config",
     "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", kText},
    {"megatron_lm_gradient_clipping", number, "1.0", nullptr, "NORM", "Gradients are clipped to this norm; 0 for never",
     nullptr, "megatron_lm_config", "MEGATRON_LM_GRADIENT_CLIPPING", kText},
    {"megatron_lm_recompute_granularity", text, nullptr, nullptr, "full|selective", "What is computed again", nullptr,
     "megatron_lm_config", "MEGATRON_LM_RECOMPUTE_GRANULARITY", kText},
    {"megatron_lm_recompute_method", text, nullptr, nullptr, "uniform|block", "How layers to compute again are chosen",
     nullptr, "megatron_lm_config", "MEGATRON_LM_RECOMPUTE_METHOD", kText},
    {"megatron_lm_recompute_num_layers", integer, nullptr, nullptr, "N", "Layers to compute again", nullptr,
     "megatron_lm_config", "MEGATRON_LM_RECOMPUTE_NUM_LAYERS", kText},
    {"megatron_lm_attention_backend", text, nullptr, nullptr, "NAME", "Implementation of attention", nullptr,
     "megatron_lm_config", "MEGATRON_LM_ATTENTION_BACKEND", kText},
    {"megatron_lm_expert_model_parallel_size", integer, nullptr, nullptr, "N",
     "Processes over which experts are spread", nullptr, "megatron_lm_config", "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE",
     kText},
    {"megatron_lm_context_parallel_size", integer, nullptr, nullptr, "N", "Processes over which a sequence is spread",
     nullptr, "megatron_lm_config", "MEGATRON_LM_CONTEXT_PARALLEL_SIZE", kText},
    {"megatron_lm_attention_dropout", number, nullptr, nullptr, "RATE", "Dropout of attention", nullptr,
     "megatron_lm_config", "MEGATRON_LM_ATTENTION_DROPOUT", kText},
    {"megatron_lm_hidden_dropout", number, nullptr, nullptr, "RATE", "Dropout between layers", nullptr,
     "megatron_lm_config", "MEGATRON_LM_HIDDEN_DROPOUT", kText},
    {"megatron_lm_attention_softmax_in_fp32", text, nullptr, nullptr, "true|false", "Softmax of attention in fp32",
     nullptr, "megatron_lm_config", "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32", kText},
    {"megatron_lm_expert_tensor_parallel_size", integer, nullptr, nullptr, "N", "Processes that share each expert",
     nullptr, "megatron_lm_config", "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE", kText},
    {"megatron_lm_calculate_per_token_loss", text, nullptr, nullptr, "true|false", "Average the loss by tokens",
     nullptr, "megatron_lm_config", "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS", kText},
    {"megatron_lm_use_rotary_position_embeddings", text, nullptr, nullptr, "true|false", "Rotary position embeddings",
     nullptr, "megatron_lm_config", "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS", kText},
};

constexpr Option kFp8[] = {
    {"fp8_backend", text, nullptr, "ao|te|msamp", nullptr, "Who computes in fp8: torchao, Transformer Engine or MS-AMP",
     nullptr, "fp8_config", "ACCELERATE_FP8_BACKEND", kText},
    {"fp8_use_autocast_during_eval", flag, "false", nullptr, nullptr,
     "te: fp8 in evaluation too; results are usually better without", nullptr, "fp8_config",
     "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", kText},
    {"fp8_margin", integer, "0", nullptr, "N", "te: margin of the scaling factors", nullptr, "fp8_config",
     "ACCELERATE_FP8_MARGIN", kText},
    {"fp8_interval", integer, "1", nullptr, "N", "te: steps between new scaling factors", nullptr, "fp8_config",
     "ACCELERATE_FP8_INTERVAL", kText},
    {"fp8_format", text, "\"HYBRID\"", "HYBRID|E4M3|E5M2", nullptr,
     "te: bits for exponent and mantissa; HYBRID is E4M3 forward and E5M2 backward", nullptr, "fp8_config",
     "ACCELERATE_FP8_FORMAT", kText},
    {"fp8_amax_history_len", integer, "1024", nullptr, "N", "te: steps whose largest values are remembered", nullptr,
     "fp8_config", "ACCELERATE_FP8_AMAX_HISTORY_LEN", kText},
    {"fp8_amax_compute_algo", text, "\"most_recent\"", "max|most_recent", nullptr,
     "te: which of the remembered values counts", nullptr, "fp8_config", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", kText},
    {"fp8_override_linear_precision", booleans, "[false, false, false]", nullptr, "B,B,B",
     "te: whether forward, data gradient and weight gradient are computed in higher precision", nullptr, "fp8_config"},
    {"fp8_opt_level", text, "\"O2\"", "O1|O2", nullptr, "msamp: what is communicated in 8 bits", nullptr, "fp8_config",
     "ACCELERATE_FP8_OPT_LEVEL", kText},
    {"fp8_enable_fsdp_float8_all_gather", boolean, "1", nullptr, "BOOL",
     "ao: gather parameters in fp8 with FSDP version 2", nullptr, "fp8_config",
     "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", kText},
    {"fp8_pad_inner_dim", boolean, "1", nullptr, "BOOL", "ao: pad matrices to the sizes that fp8 products need",
     nullptr, "fp8_config", "ACCELERATE_FP8_PAD_INNER_DIM", kText},
};

constexpr Option kAws[] = {
    {"aws_access_key_id", text, nullptr, nullptr, "ID",
     "Key for Amazon SageMaker, where the config file names no profile"},
    {"aws_secret_access_key", text, nullptr, nullptr, "SECRET",
     "The key's secret; visible to other users of this machine while the command runs"},
};

constexpr Option kMpi[] = {
    {"mpirun_hostfile", text, nullptr, nullptr, "FILE", "Start the processes by mpirun, on the machines of this file",
     nullptr, "mpirun_config"},
};

constexpr Option kParallelism[] = {
    {"parallelism_config_dp_replicate_size", integer, "1", nullptr, "N", "Copies of the (sharded) model", nullptr,
     "parallelism_config", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", kText},
    {"parallelism_config_dp_shard_size", integer, "1", nullptr, "N", "Processes over which parameters are sharded",
     nullptr, "parallelism_config", "PARALLELISM_CONFIG_DP_SHARD_SIZE", kText},
    {"parallelism_config_tp_size", integer, "1", nullptr, "N", "Processes that share each layer (tensor parallel)",
     nullptr, "parallelism_config", "PARALLELISM_CONFIG_TP_SIZE", kText},
    {"parallelism_config_cp_size", integer, "1", nullptr, "N",
     "Processes over which a sequence is spread (context parallel)", nullptr, "parallelism_config",
     "PARALLELISM_CONFIG_CP_SIZE", kText},
    {"parallelism_config_cp_backend", text, "\"torch\"", "torch", nullptr, "Implementation of context parallelism",
     nullptr, "parallelism_config", "PARALLELISM_CONFIG_CP_BACKEND", kText},
    {"parallelism_config_cp_comm_strategy", text, "\"allgather\"", nullptr, "allgather|alltoall",
     "How context parallelism exchanges keys and values", nullptr, "parallelism_config",
     "PARALLELISM_CONFIG_CP_COMM_STRATEGY", kText},
    {"parallelism_config_sp_size", integer, "1", nullptr, "N",
     "Processes over which a sequence is spread (sequence parallel)", nullptr, "parallelism_config",
     "PARALLELISM_CONFIG_SP_SIZE", kText},
    {"parallelism_config_sp_backend", text, "\"deepspeed\"", "deepspeed", nullptr,
     "Implementation of sequence parallelism", nullptr, "parallelism_config", "PARALLELISM_CONFIG_SP_BACKEND", kText},
    {"parallelism_config_sp_seq_length", text, nullptr, nullptr, "N", "Length of all sequences, where it is one",
     nullptr, "parallelism_config", "PARALLELISM_CONFIG_SP_SEQ_LENGTH", kText},
    {"parallelism_config_sp_seq_length_is_variable", truth, "true", nullptr, "BOOL",
     "Lengths of sequences change between batches", nullptr, "parallelism_config",
     "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", kText},
    {"parallelism_config_sp_attn_implementation", text, "\"sdpa\"", nullptr, "NAME",
     "Attention of the model: sdpa, flash_attention_2, ...", nullptr, "parallelism_config",
     "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", kText},
};

constexpr Option kProgram[] = {
    {"training_script", text, nullptr, nullptr, "PROGRAM", "An executable, or a .py file that Python runs",
     "training_script", nullptr, nullptr, Form::none, true},
    {"training_script_args", words, nullptr, nullptr, "ARGUMENTS", "Its arguments", "training_script_args", nullptr,
     nullptr, Form::none, true},
};

constexpr Option kOurs[] = {
    {"redirects", text, "\"0\"", nullptr, "STREAMS", "Streams written to log files only; as --tee"},
    {"hostfile", text, nullptr, nullptr, "FILE",
     "Start the job on all machines of this file, a line each: NAME slots=N (processes)"},
    {"include", text, nullptr, nullptr, "FILTER",
     "Machines and slots of the hostfile to use, and no others: NAME@NAME:0,2"},
    {"exclude", text, nullptr, nullptr, "FILTER", "Machines and slots of the hostfile to leave out"},
    {"remote_shell", text, "\"ssh\"", nullptr, "PROGRAM",
     "Who starts the launchers of --hostfile: ssh, pdsh, or what takes a name and a command as ssh does"},
    {"processes_per_machine", integer, nullptr, nullptr, "N",
     "Processes on this machine, where machines differ (default: an equal share of --num_processes)"},
    {"grace_seconds", number, "10.0", nullptr, "SECONDS",
     "Time from SIGTERM or Ctrl-C to SIGKILL; a second Ctrl-C kills at once"},
    {"dry_run", flag, "false", nullptr, nullptr,
     "Print what would be started, and with which variables, and start nothing"},
    {"monitor", flag, "false", nullptr, nullptr,
     "Show live what each process does: a table below the output on a terminal, elsewhere now and then on stderr "
     "(docs/monitor.md)"},
    {"monitor_port", integer, nullptr, nullptr, "PORT",
     "The same as a web page on this machine at http://127.0.0.1:PORT/; 0: at a free port, which is printed"},
    {"monitor_host", text, "\"127.0.0.1\"", nullptr, "ADDRESS",
     "Address at which the page is served; whoever reaches it can read the last lines of the output"},
    {"monitor_seconds", number, nullptr, nullptr, "SECONDS",
     "How often the monitor looks (default 1; without a terminal it prints every 10)"},
};

/// In config files only.
constexpr Option kFileOnly[] = {
    {"compute_environment", text, "\"LOCAL_MACHINE\"", "LOCAL_MACHINE|AMAZON_SAGEMAKER", nullptr,
     "Where the processes run", "", ""},
    {"distributed_type", text, nullptr,
     "NO|MULTI_CPU|MULTI_GPU|MULTI_NPU|MULTI_MLU|MULTI_SDAA|MULTI_MUSA|MULTI_XPU|DEEPSPEED|FSDP|XLA|MEGATRON_LM|MULTI_"
     "HPU|MULTI_NEURON",
     nullptr, "Kind of training; every file has it", "", ""},
    {"use_cpu", flag, "false", nullptr, nullptr, "As --cpu", "", ""},
    {"tpu_name", text, nullptr, nullptr, nullptr, "Name of the TPU pod", "", ""},
    {"tpu_zone", text, nullptr, nullptr, nullptr, "Zone of the TPU pod", "", ""},
    {"command_file", text, nullptr, nullptr, nullptr, "`accelerate tpu-config`: file of commands for the pod's workers",
     "", ""},
    {"commands", words, nullptr, nullptr, nullptr, "`accelerate tpu-config`: commands for the pod's workers", "", ""},
    {"tpu_vm", words, nullptr, nullptr, nullptr, "Workers of the pod by their names", "", ""},
    {"tpu_env", words, nullptr, nullptr, nullptr, "Variables for the pod's workers", "", ""},
    {"fsdp_ignored_modules", text, nullptr, nullptr, nullptr,
     "Modules that are not sharded: a regular expression for whole names", "", "fsdp_config", "FSDP_IGNORED_MODULES",
     kText},
};

constexpr Option kSageMaker[] = {
    {"compute_environment", text, "\"AMAZON_SAGEMAKER\"", "LOCAL_MACHINE|AMAZON_SAGEMAKER", nullptr,
     "Where the processes run", "", ""},
    {"distributed_type", text, nullptr, "NO|DATA_PARALLEL|MODEL_PARALLEL", nullptr,
     "Kind of training; every file has it", "", ""},
    {"mixed_precision", text, nullptr, "no|fp16|bf16|fp8", nullptr, "Number format of the computation", "", ""},
    {"use_cpu", flag, "false", nullptr, nullptr, "Compute on the CPU", "", ""},
    {"debug", flag, "false", nullptr, nullptr, "Compare tensor shapes before each collective", "", ""},
    {"ec2_instance_type", text, nullptr, nullptr, nullptr, "Kind of machine", "", "", nullptr, Form::none, true},
    {"iam_role_name", text, nullptr, nullptr, nullptr, "Role that the job runs under", "", "", nullptr, Form::none,
     true},
    {"image_uri", text, nullptr, nullptr, nullptr, "Container image", "", ""},
    {"profile", text, nullptr, nullptr, nullptr, "Profile of the AWS credentials", "", ""},
    {"region", text, "\"us-east-1\"", nullptr, nullptr, "AWS region", "", ""},
    {"num_machines", integer, "1", nullptr, nullptr, "Machines", "", ""},
    {"gpu_ids", text, "\"all\"", nullptr, nullptr, "GPUs of each machine", "", ""},
    {"base_job_name", text, "\"accelerate-sagemaker-1\"", nullptr, nullptr, "Beginning of the job's name", "", ""},
    {"pytorch_version", text, "\"1.10.2\"", nullptr, nullptr, "PyTorch of the container", "", ""},
    {"transformers_version", text, "\"4.17.0\"", nullptr, nullptr, "Transformers of the container", "", ""},
    {"py_version", text, "\"py38\"", nullptr, nullptr, "Python of the container", "", ""},
    {"sagemaker_inputs_file", text, nullptr, nullptr, nullptr, "Table of input channels", "", ""},
    {"sagemaker_metrics_file", text, nullptr, nullptr, nullptr,
     "Table of metrics and the expressions that find them in logs", "", ""},
    {"additional_args", text, nullptr, nullptr, nullptr, "More settings of the job", "", ""},
    {"dynamo_config", text, nullptr, nullptr, nullptr, "Graph compiler for Python programs", "", ""},
    {"enable_cpu_affinity", flag, "false", nullptr, nullptr, "Bind processes to cores", "", ""},
};

constexpr Alias kAliases[] = {
    {"fp8_config", "amax_history_length", "fp8_amax_history_len"},
    {"fp8_config", "amax_compute_algorithm", "fp8_amax_compute_algo"},
    {"fp8_config", "optimization_level", "fp8_opt_level"},
    {"fp8_config", "fp8_fp8_format", "fp8_format"},
    {"fsdp_config", "fsdp_backward_prefetch_policy", "fsdp_backward_prefetch"},
};

}  // namespace

const CommandTable& launch_table() {
  static const CommandTable table{"launch",
                                  "Start a program in one or many processes",
                                  "accelerate launch [options] PROGRAM [arguments of PROGRAM]",
                                  {{"", kGeneral},
                                   {"Hardware Selection", kHardware},
                                   {"Resource Selection", kResources},
                                   {"Training Paradigm", kParadigms},
                                   {"Distributed GPUs", kDistributed},
                                   {"TPU", kTpu},
                                   {"DeepSpeed", kDeepSpeed},
                                   {"FSDP", kFsdp},
                                   {"Megatron-LM", kMegatron},
                                   {"FP8", kFp8},
                                   {"AWS", kAws},
                                   {"MPI", kMpi},
                                   {"ParallelismConfig", kParallelism},
                                   {"Positional", kProgram},
                                   {kAdditions, kOurs},
                                   {"Config files only", kFileOnly}}};
  return table;
}

std::span<const Option> sagemaker_keys() { return kSageMaker; }
std::span<const Alias> aliases() { return kAliases; }

}  // namespace accelerate::config
