"""What PEFT makes of adapters.

usage: adapters_peer.py make KIND FOLDER       FOLDER/base: a small model; FOLDER/adapter: one that changes it;
                                               FOLDER/result.safetensors: inputs, logits, gradients and merged logits
       adapters_peer.py load KIND FOLDER NAME  FOLDER/base with the adapter FOLDER/NAME; FOLDER/NAME.safetensors: its
                                               logits, and its tensors by PEFT's names
"""
import pathlib
import sys

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BASES = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3,
                                               initializer_range=0.3, bos_token_id=1, eos_token_id=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24,
                                                  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                                  initializer_range=0.3, bos_token_id=1, eos_token_id=2)),
}
CONFIGS = {
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "r": 4, "lora_alpha": 10, "fan_in_fan_out": True,
             "layers_to_transform": [1], "layers_pattern": "h"},
    "llama": {"target_modules": "all-linear", "r": 3, "lora_alpha": 6.5, "use_rslora": True, "lora_dropout": 0.25,
              "rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {".*v_proj": 2}},
}


def logits_of(model):
    return model.eval()(input_ids=IDS).logits


torch.manual_seed(0)
IDS = torch.randint(0, 50, (3, 9))
mode, kind, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
if mode == "make":
    base = BASES[kind]()
    base.save_pretrained(folder / "base")
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", base_model_name_or_path="tiny",
                             **CONFIGS[kind])
    model = peft.get_peft_model(base, config)
    logits = logits_of(model)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    result = {"input_ids": IDS, "logits": logits.detach()}
    result.update({f"grad.{name.removeprefix('base_model.model.').replace('.default', '')}": p.grad
                   for name, p in model.named_parameters() if p.grad is not None})
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        result["merged"] = logits_of(model.merge_and_unload())
    save_file({name: t.contiguous() for name, t in result.items()}, folder / "result.safetensors")
else:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / sys.argv[4])
    with torch.no_grad():
        result = {"logits": logits_of(model)}
    result.update(peft.get_peft_model_state_dict(model))
    save_file({name: t.contiguous() for name, t in result.items()}, folder / f"{sys.argv[4]}.safetensors")
