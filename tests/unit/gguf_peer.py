"""Peer of the GGUF tests: files written by the Python package `gguf`, and what they should read as.

usage: gguf_peer.py encodings FILE EXPECTED       random blocks in every encoding; EXPECTED (safetensors) holds what the package decodes them to
       gguf_peer.py model KIND FILE EXPECTED      a small random model of transformers as llama.cpp's converter would write it; EXPECTED holds inputs and logits
       gguf_peer.py big_endian FILE               a file of the big-endian variant
"""
import sys

import gguf
import numpy as np
import torch

torch.set_num_threads(1)  # small models
from safetensors.numpy import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

Type = gguf.GGMLQuantizationType
# Where fp16 numbers lie in a block: random bytes there would be infinities and NaN.
HALVES = {Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0], Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208]}


def encodings(path, expected):
    draw = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "unknown-architecture")
    decoded = {}

    def add(name, raw, kind, value):
        writer.add_tensor(name, raw, raw_dtype=kind)
        decoded[name] = np.ascontiguousarray(value, dtype=np.float32)

    for kind, places in HALVES.items():
        size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
        rows, blocks = 7, 3
        raw = draw.integers(0, 256, (rows, blocks, bytes_), dtype=np.uint8)
        for place in places:
            scales = (draw.standard_normal((rows, blocks, 1)) * 10.0 ** draw.integers(-8, 3, (rows, blocks, 1))).astype(np.float16)  # subnormal ones, too
            raw[:, :, place:place + 2] = scales.view(np.uint8).reshape(rows, blocks, 2)
        raw = raw.reshape(rows, blocks * bytes_)
        add(kind.name, raw, kind, gguf.quants.dequantize(raw, kind))
    every_half = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    add("F16", every_half.view(np.float16), Type.F16, every_half.view(np.float16))
    add("BF16", every_half.view(np.uint8).reshape(256, 512), Type.BF16, (every_half.astype(np.uint32) << 16).view(np.float32))
    for kind, dtype in [(Type.F32, np.float32), (Type.F64, np.float64), (Type.I8, np.int8), (Type.I16, np.int16), (Type.I32, np.int32), (Type.I64, np.int64)]:
        values = (draw.standard_normal((3, 2, 5)) * 50).astype(dtype)
        add(kind.name, values, kind, values)
    writer.add_tensor("IQ4_NL", np.zeros((2, 18), np.uint8), raw_dtype=Type.IQ4_NL)
    writer.add_uint8("kind.u8", 200)
    writer.add_int8("kind.i8", -100)
    writer.add_uint16("kind.u16", 60000)
    writer.add_int16("kind.i16", -30000)
    writer.add_uint32("kind.u32", 4000000000)
    writer.add_int32("kind.i32", -2000000000)
    writer.add_uint64("kind.u64", 1 << 60)
    writer.add_int64("kind.i64", -(1 << 60))
    writer.add_float32("kind.f32", 0.5)
    writer.add_float64("kind.f64", 0.1)
    writer.add_bool("kind.bool", True)
    writer.add_string("kind.text", "gr\u00fc\u00df")
    writer.add_array("kind.texts", ["a", "", "c\u0300"])
    writer.add_array("kind.numbers", [1, -2, 3])
    writer.add_array("kind.reals", [0.25, -4.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(decoded, expected)


def permuted(weight, heads):
    """Rows as llama.cpp wants them: of each head those of its two halves in turns."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"}
GPT2_NAMES = {"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}


# How files say that rotary frequencies are stretched by four, and what else says nothing that a model does not do anyway.
SCALED = {
    "typed": lambda writer: (writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), writer.add_rope_scaling_factor(4.0)),
    "of_2023": lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0),
    "without_type": lambda writer: writer.add_rope_scaling_factor(4.0),
    "typed_of_2023": lambda writer: (writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), writer.add_float32("llama.rope.scale_linear", 4.0)),
}
UNSCALED = {
    "none": lambda writer: (writer.add_rope_scaling_type(gguf.RopeScalingType.NONE), writer.add_rope_scaling_factor(4.0)),
    "by_one": lambda writer: writer.add_rope_scaling_factor(1.0),
    "remarks": lambda writer: (writer.add_causal_attention(True), writer.add_clamp_kqv(0.0), writer.add_expert_count(0), writer.add_rope_scaling_finetuned(False), writer.add_tensor_data_layout("Meta AI original pth"), writer.add_sliding_window(128)),
}


def model(kind, path, expected):
    torch.manual_seed(1)
    small = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2)
    if kind == "llama":
        made = LlamaForCausalLM(LlamaConfig(**small, rms_norm_eps=1e-5, rope_theta=5000.0, attention_bias=True, mlp_bias=False))
        architecture = "llama"
    elif kind == "llama3":
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        made = LlamaForCausalLM(LlamaConfig(**small, rope_theta=500000.0, rope_scaling=scaling, tie_word_embeddings=True))
        architecture = "llama"
    elif kind in SCALED or kind in UNSCALED or kind == "lists":
        scaling = {"rope_type": "linear", "factor": 4.0} if kind in SCALED else None
        made = LlamaForCausalLM(LlamaConfig(**small, rope_theta=10000.0, rope_scaling=scaling))
        architecture = "llama"
    elif kind == "qwen2":
        made = Qwen2ForCausalLM(Qwen2Config(**small))
        architecture = "qwen2"
    elif kind == "mixtral":
        made = MixtralForCausalLM(MixtralConfig(**small, num_local_experts=4, num_experts_per_tok=2, sliding_window=None))
        architecture = "llama"
    else:
        made = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2))
        architecture = "gpt2"
    made.eval()
    for name, parameter in made.named_parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    config = made.config
    writer = gguf.GGUFWriter(path, architecture)
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    each = (lambda number: [number] * config.num_hidden_layers) if kind == "lists" else lambda number: number
    writer.add_head_count(each(heads))
    writer.add_head_count_kv(each(key_value_heads))
    {**SCALED, **UNSCALED}.get(kind, lambda writer: None)(writer)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "mixtral":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if kind == "llama3":
        head, base = config.hidden_size // heads, config.rope_parameters["rope_theta"]
        plain = 1 / base ** (torch.arange(0, head, 2).float() / head)
        writer.add_tensor("rope_freqs.weight", (plain / made.model.rotary_emb.inv_freq).numpy())
    experts = {}
    for name, value in made.state_dict().items():
        value = value.numpy()
        stem, ending = name.rsplit(".", 1)
        if kind in ("qwen2",) and stem == "lm_head" and config.tie_word_embeddings or stem == "lm_head" and config.tie_word_embeddings:
            continue
        if stem in OUTER_NAMES:
            writer.add_tensor(f"{OUTER_NAMES[stem]}.{ending}", value)
            continue
        parts = name.split(".")
        layer, rest = parts[2], ".".join(parts[3:])
        if kind == "mixtral" and rest.startswith("mlp.experts"):
            experts[(layer, rest)] = value
            continue
        stem, ending = rest.rsplit(".", 1)
        stored = (GPT2_NAMES if architecture == "gpt2" else LLAMA_NAMES)[stem]
        if architecture == "gpt2" and value.ndim == 2:
            value = np.ascontiguousarray(value.T)
        if architecture == "llama" and stored in ("attn_q", "attn_k"):
            value = permuted(value, heads if stored == "attn_q" else key_value_heads)
        writer.add_tensor(f"blk.{layer}.{stored}.{ending}", np.ascontiguousarray(value))
    for (layer, rest), value in experts.items():  # transformers 5 joins gate and up
        if rest.endswith("gate_up_proj"):
            gate, up = np.split(value, 2, axis=1)
            writer.add_tensor(f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate))
            writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up))
        else:
            writer.add_tensor(f"blk.{layer}.ffn_down_exps.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.randint(0, 64, (2, 11))
    with torch.no_grad():
        save_file({"input_ids": ids.numpy(), "logits": made(input_ids=ids).logits.numpy()}, expected)


def big_endian(path):
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(2)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


{"encodings": encodings, "model": model, "big_endian": big_endian}[sys.argv[1]](*sys.argv[2:])
