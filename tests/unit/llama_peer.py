"""Peer of the LLaMA tests: what transformers makes of the same weights and inputs.

usage: llama_peer.py tiny FOLDER OUT            saves a small random model to FOLDER, whose name ends in -<kind>; OUT holds inputs, logits, hidden states and gradients
       llama_peer.py logits FOLDER INPUTS OUT   loads a folder that was saved in C++; OUT holds its logits
       llama_peer.py count FOLDER               prints the number of parameters that the folder's config.json gives
"""
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

KINDS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2, "rope_theta": 500000.0},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 10},
    "biased": {"attention_bias": True, "mlp_bias": True, "pad_token_id": 0, "hidden_act": "gelu"},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    # Short waves, so that a few tokens see all three ranges of frequencies.
    "llama3": {"num_key_value_heads": 2, "head_dim": 16, "rope_theta": 50.0,
               "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
}


def tiny(folder, out):
    torch.manual_seed(0)
    # A large range makes differences of formulas visible.
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, initializer_range=0.3,
                         bos_token_id=1, eos_token_id=2, **KINDS[folder.rsplit("-", 1)[1]])
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    ids = torch.randint(1, 50, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    positions = torch.arange(9).unsqueeze(0).repeat(3, 1)
    positions[1] += 40
    result = model(input_ids=ids, position_ids=positions, output_hidden_states=True)
    torch.nn.functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits": result.logits.detach(), "hidden": result.hidden_states[-1].detach()}
    tensors.update({f"grad.{name}": p.grad for name, p in model.named_parameters()})
    with torch.no_grad():
        tensors["masked_logits"] = model(input_ids=ids, attention_mask=mask).logits
    save_file({k: v.contiguous() for k, v in tensors.items()}, out)


def logits(folder, inputs, out):
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is LlamaForCausalLM
    assert model.dtype == torch.float32
    batch = load_file(inputs)
    with torch.no_grad():
        save_file({"logits": model.eval()(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits}, out)


def count(folder):
    with torch.device("meta"):
        print(sum(p.numel() for p in LlamaForCausalLM(AutoConfig.from_pretrained(folder)).parameters()))


{"tiny": tiny, "logits": logits, "count": count}[sys.argv[1]](*sys.argv[2:])
