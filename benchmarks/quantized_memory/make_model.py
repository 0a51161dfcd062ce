"""Writes a model of GPT2-1.5B's shape (48 layers, 1600 wide, 25 heads, 50257 words, 1024 positions; 1.56 billion numbers) with random weights
in fp32: 6.2 GB in 25 files with an index. It is OPT's architecture, because GPT-2's own files have no linear layers (transformers' Conv1D),
which load_and_quantize_model leaves alone, as the reference does. usage: make_model.py FOLDER [LAYERS]"""
import json
import os
import sys

import torch
from safetensors.torch import save_file

WIDTH, WORDS, POSITIONS = 1600, 50257, 1024


def main(folder, layers="48"):
    layers = int(layers)
    os.makedirs(folder, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    where = {}

    def numbers(*shape):
        return torch.empty(shape).normal_(0, 0.02, generator=generator)

    def write(file, tensors):
        save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))

    prefix = "model.decoder."
    write("words.safetensors", {
        prefix + "embed_tokens.weight": numbers(WORDS, WIDTH),
        prefix + "embed_positions.weight": numbers(POSITIONS + 2, WIDTH),
        prefix + "final_layer_norm.weight": torch.ones(WIDTH),
        prefix + "final_layer_norm.bias": torch.zeros(WIDTH),
    })
    for first in range(0, layers, 2):
        tensors = {}
        for layer in range(first, min(first + 2, layers)):
            name = f"{prefix}layers.{layer}."
            for norm in ("self_attn_layer_norm", "final_layer_norm"):
                tensors[f"{name}{norm}.weight"], tensors[f"{name}{norm}.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)
            for module, out, inputs in ([(f"self_attn.{p}_proj", WIDTH, WIDTH) for p in ("q", "k", "v", "out")]
                                        + [("fc1", 4 * WIDTH, WIDTH), ("fc2", WIDTH, 4 * WIDTH)]):
                tensors[f"{name}{module}.weight"] = numbers(out, inputs)
                tensors[f"{name}{module}.bias"] = torch.zeros(out)
        write(f"layers_{first:02}.safetensors", tensors)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {}, "weight_map": where}, file)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({"model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": WORDS, "hidden_size": WIDTH,
                   "num_hidden_layers": layers, "num_attention_heads": 25, "ffn_dim": 4 * WIDTH,
                   "max_position_embeddings": POSITIONS, "do_layer_norm_before": True, "word_embed_proj_dim": WIDTH,
                   "activation_function": "gelu_new"}, file)


main(*sys.argv[1:])
