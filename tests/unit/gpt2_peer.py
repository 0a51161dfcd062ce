"""Peer of the GPT-2 tests: what transformers makes of the same weights and inputs.

usage: gpt2_peer.py tiny FOLDER OUT            saves a small random model to FOLDER, whose name ends in -<kind>; OUT holds inputs, logits and gradients
       gpt2_peer.py logits FOLDER INPUTS OUT   loads a folder that was saved in C++; OUT holds its logits
"""
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

KINDS = {"plain": {}, "untied": {"tie_word_embeddings": False, "n_inner": 40}, "scaled": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "activation_function": "relu"}}


def tiny(folder, out):
    torch.manual_seed(0)
    # A large range makes differences of formulas visible.
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=3, n_head=3, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **KINDS[folder.rsplit("-", 1)[1]])).eval()
    for name, parameter in model.named_parameters():
        if "ln_" in name or name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    ids = torch.randint(0, 50, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    positions = torch.arange(9).unsqueeze(0).repeat(3, 1)
    positions[1] += 5
    logits = model(input_ids=ids, position_ids=positions).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits": logits.detach()}
    tensors.update({f"grad.{name}": p.grad for name, p in model.named_parameters()})
    with torch.no_grad():
        tensors["masked_logits"] = model(input_ids=ids, attention_mask=mask).logits
    save_file({k: v.contiguous() for k, v in tensors.items()}, out)


def logits(folder, inputs, out):
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is GPT2LMHeadModel
    with torch.no_grad():
        save_file({"logits": model.eval()(**load_file(inputs)).logits}, out)


{"tiny": tiny, "logits": logits}[sys.argv[1]](*sys.argv[2:])
