"""Adapters by PEFT.

usage: adapters_peer.py make KIND FOLDER       FOLDER/base: a small model; FOLDER/adapter: one that changes it;
                                               FOLDER/result.safetensors: inputs, logits, gradients and merged logits
       adapters_peer.py files FOLDER           FOLDER/base, FOLDER/bert, FOLDER/neox: small models; FOLDER/KIND: adapters with more in their files;
                                               FOLDER/KIND.safetensors: inputs, logits, and logits of the base alone
       adapters_peer.py reload FOLDER          each FOLDER/KIND-ours, which was saved here; FOLDER/KIND-ours.safetensors: its logits
       adapters_peer.py load KIND FOLDER NAME  FOLDER/base with the adapter FOLDER/NAME; FOLDER/NAME.safetensors: its
                                               logits, and its tensors by PEFT's names
"""
import json
import pathlib
import sys

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

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


def old_file(folder):
    """As PEFT saved until 2024."""
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def says(**fields):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return change


# More in adapters' files than A and B of linear layers: settings, and what is done to the folder.
FILES = {
    "eva": ({}, says(init_lora_weights="eva", eva_config={"rho": 2.0, "tau": 0.99, "use_label_mask": True, "label_mask_value": -100, "whiten": False, "adjust_scaling_factors": True})),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, None),
    "old_file": ({}, old_file),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, None),
    "modules_to_save": ({"modules_to_save": ["lm_head", "layers.1.input_layernorm"]}, None),
    "bias_all": ({"bias": "all"}, None),
    "bias_of_targets": ({"bias": "lora_only"}, None),
    "rows": ({"trainable_token_indices": [3, 17]}, None),
    "named_rows": ({"trainable_token_indices": {"embed_tokens": [5]}}, None),
    "patterns": ({"target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"(?<=layers\.1\.self_attn\.)q_proj": 2, r"(?:layers\.0|\d)\.self_attn\.(?>v_proj)": 6}, "alpha_pattern": {r"(?P<side>[qv])_proj(?<!v_proj)": 3}}, None),
    "neox_head": ({"target_modules": ["query_key_value", "lm_head"]}, None),
    "neox_head_whole": ({"target_modules": ["query_key_value"], "modules_to_save": ["lm_head"]}, None),
    "fan_in_fan_out": ({}, says(fan_in_fan_out=True)),  # PEFT turns it off for linear layers
    "classes": ({"target_modules": ["query"], "task_type": "SEQ_CLS"}, None),
}


def base_of(kind):
    base = "bert" if kind == "classes" else "neox" if kind.startswith("neox") else "base"
    return (BertForSequenceClassification if kind == "classes" else AutoModelForCausalLM).from_pretrained(folder / base)


def files():
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, bos_token_id=1,
                                 eos_token_id=2, attention_bias=True, tie_word_embeddings=False)).save_pretrained(folder / "base")
    BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3, num_labels=3)).save_pretrained(folder / "bert")
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)).save_pretrained(folder / "neox")
    for kind, (settings, change) in FILES.items():
        result = {"input_ids": IDS, "base": logits_of(base_of(kind)).detach()}
        config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, **settings})
        model = peft.get_peft_model(base_of(kind), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape) * 0.3)
        model.save_pretrained(folder / kind)
        if change:
            change(folder / kind)
        loaded = peft.PeftModel.from_pretrained(base_of(kind), folder / kind)
        result["logits"] = logits_of(loaded).detach()
        save_file(result, folder / f"{kind}.safetensors")


def reload():
    for kind in FILES:
        model = peft.PeftModel.from_pretrained(base_of(kind), folder / f"{kind}-ours")
        save_file({"logits": logits_of(model).detach()}, folder / f"{kind}-ours.safetensors")


torch.manual_seed(0)
IDS = torch.randint(0, 50, (3, 9))
mode = sys.argv[1]
kind, folder = (sys.argv[2], pathlib.Path(sys.argv[3])) if mode in ("make", "load") else ("", pathlib.Path(sys.argv[2]))
if mode in ("files", "reload"):
    {"files": files, "reload": reload}[mode]()
elif mode == "make":
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
