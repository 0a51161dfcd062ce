"""Peer of the generation tests: what transformers makes of the same models and prompts.

usage: generate_peer.py small FOLDER        random models in FOLDER/llama, FOLDER/gpt2 and FOLDER/t5, and FOLDER/cases.json with settings, prompts and results
       generate_peer.py stops FOLDER        a random model with a tokenizer in FOLDER/stops, and FOLDER/stops.json with stop strings and results
       generate_peer.py warpers OUT         scores before and after transformers' logits processors
       generate_peer.py gguf FILE PROMPTS OUT TOKENS   greedy continuations of the lists of ids in PROMPTS (JSON), and the logits of the first one
"""
import json
import os
import sys
import warnings

import quick_gguf  # noqa: F401
import tokenizers
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration, logging
from transformers.generation import logits_process

torch.set_num_threads(1)  # small models
logging.set_verbosity_error()
warnings.simplefilter("ignore")

SETTINGS = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8},
    {"eos_token_id": [7, 11, 3], "pad_token_id": 1},
    {"eos_token_id": [7, 11, 3], "pad_token_id": 1, "min_new_tokens": 6},
    {"num_beams": 2},
    {"num_beams": 4, "repetition_penalty": 1.3},
    {"num_beams": 3, "eos_token_id": [7, 11, 3, 20, 21], "pad_token_id": 1},
    {"num_beams": 3, "eos_token_id": [7, 11, 3, 20, 21], "pad_token_id": 1, "min_new_tokens": 4},
]
for penalty in [-1.0, 0.0, 0.5, 2.0]:
    for early in [False, True, "never"]:
        SETTINGS.append({"num_beams": 4, "eos_token_id": [7, 11, 3, 20, 21, 30, 31, 32], "pad_token_id": 1, "length_penalty": penalty, "early_stopping": early})


def small(folder):
    torch.manual_seed(2)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.25)),
    }
    cases = []
    for name, model in models.items():
        model.eval()
        model.generation_config = type(model.generation_config)()
        model.config.eos_token_id = model.config.bos_token_id = model.config.pad_token_id = None
        model.save_pretrained(f"{folder}/{name}")
        ids = torch.randint(2, 40, (3, 6))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        mask[2, :1] = 0
        for settings in SETTINGS:
            for attention_mask in (None, mask):
                with torch.no_grad():
                    result = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids) if attention_mask is None else attention_mask, max_new_tokens=12, do_sample=False, **settings)
                cases.append({"model": name, "settings": settings, "input_ids": ids.tolist(), "attention_mask": None if attention_mask is None else mask.tolist(), "result": result.tolist()})
    # Two prompts for which it matters whether beams may hope for all of the length that is left.
    hopeful = torch.stack([torch.randint(2, 40, (12, 6), generator=torch.Generator().manual_seed(seed))[row] for seed, row in [(1, 5), (3, 1)]])
    for early in (False, "never"):
        settings = {"num_beams": 4, "eos_token_id": [7, 11, 3, 20, 21, 30, 31, 32], "pad_token_id": 1, "early_stopping": early}
        with torch.no_grad():
            result = models["llama"].generate(input_ids=hopeful, attention_mask=torch.ones_like(hopeful), max_new_tokens=12, do_sample=False, **settings)
        cases.append({"model": "llama", "settings": settings, "input_ids": hopeful.tolist(), "attention_mask": None, "result": result.tolist(), "hopeful": True})
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=12)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2)  # else all tokens are about equally likely
    model.generation_config = type(model.generation_config)()
    model.config.eos_token_id = model.config.pad_token_id = None
    model.save_pretrained(f"{folder}/t5")
    for settings in [{}, {"repetition_penalty": 1.7}, {"num_beams": 4, "eos_token_id": [7, 11, 3, 20], "pad_token_id": 1}, {"num_beams": 3, "length_penalty": 2.0, "eos_token_id": [7, 11, 3, 20], "pad_token_id": 1}]:
        for attention_mask in (None, mask):
            with torch.no_grad():
                result = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids) if attention_mask is None else attention_mask, decoder_start_token_id=0, max_new_tokens=12, do_sample=False, **settings)
            cases.append({"model": "t5", "settings": settings, "input_ids": ids.tolist(), "attention_mask": None if attention_mask is None else mask.tolist(), "result": result.tolist()})
    json.dump(cases, open(f"{folder}/cases.json", "w"))


def stops(folder):
    """Stop strings are cut from what comes without them: within a token, over several, over the end of the prompt, half a character."""
    pieces = ["\u0120", "\u00c3", "\u00a9"] + [chr(c) for c in range(ord("a"), ord("m"))]
    merges = [("\u0120", "a"), ("a", "b"), ("c", "d"), ("ab", "c"), ("e", "f"), ("ef", "g"), ("\u0120", "h"), ("cd", "e"), ("g", "h"), ("i", "j"), ("ij", "k"), ("k", "l"), ("\u00c3", "\u00a9"), ("b", "a"),
              ("d", "a"), ("f", "a"), ("l", "a"), ("h", "i"), ("j", "a"), ("e", "a"), ("a", "a"), ("b", "b"), ("c", "c"), ("d", "d")]
    pieces += [a + b for a, b in merges]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    torch.manual_seed(4)
    config = LlamaConfig(vocab_size=len(pieces), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)
    model = LlamaForCausalLM(config).eval()
    model.generation_config = type(model.generation_config)()
    model.config.eos_token_id = model.config.bos_token_id = model.config.pad_token_id = None
    model.save_pretrained(f"{folder}/stops")
    tokenizer.save_pretrained(f"{folder}/stops")
    ids = torch.randint(2, len(pieces), (3, 6))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def generated(attention_mask, **settings):
        with torch.no_grad():
            return model.generate(input_ids=ids, attention_mask=attention_mask, max_new_tokens=16, do_sample=False, pad_token_id=1, tokenizer=tokenizer, **settings).tolist()

    def bytes_of(row):
        return "".join(pieces[i] for i in row).replace("\u0120", " ").replace("\u00c3\u00a9", "\u00e9").replace("\u00c3", "").replace("\u00a9", "")

    cases = []
    for attention_mask in (torch.ones_like(ids), mask):
        for beams in (1, 3):
            plain = generated(attention_mask, num_beams=beams, repetition_penalty=1.3)
            for row in plain:
                new = bytes_of(row[6:])
                sought = [[new[at:at + length]] for at in (0, 3, 7) for length in (1, 2, 4) if new[at:at + length]]
                sought += [[bytes_of(row[5:7])[-2:]], [new[2:5], new[5:6]], ["\u00e9"], ["nowhere"], [new[4:7], "nowhere"]]
                for stop_strings in sought:
                    settings = {"num_beams": beams, "repetition_penalty": 1.3, "stop_strings": stop_strings, "eos_token_id": [3]}
                    cases.append({"settings": settings | {"pad_token_id": 1}, "attention_mask": attention_mask.tolist(), "result": generated(attention_mask, **settings)})
    json.dump({"input_ids": ids.tolist(), "cases": cases}, open(f"{folder}/stops.json", "w"))


def warpers(out):
    torch.manual_seed(3)
    scores, ids = torch.randn(5, 50) * 3, torch.randint(0, 50, (5, 8))
    tensors = {"scores": scores, "ids": ids, "repetition": logits_process.RepetitionPenaltyLogitsProcessor(1.4)(ids, scores)}
    for k in (1, 5, 100):
        tensors[f"top_k.{k}"] = logits_process.TopKLogitsWarper(k)(ids, scores)
    for p in (0.01, 0.5, 0.95):
        tensors[f"top_p.{p}"] = logits_process.TopPLogitsWarper(p)(ids, scores)
    all_of_them = logits_process.RepetitionPenaltyLogitsProcessor(1.2)(ids, scores)
    for warper in (logits_process.TemperatureLogitsWarper(0.7), logits_process.TopKLogitsWarper(20), logits_process.TopPLogitsWarper(0.8)):
        all_of_them = warper(ids, all_of_them)
    tensors["all"] = all_of_them
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, out)


def gguf(path, prompts, out, tokens):
    model = AutoModelForCausalLM.from_pretrained(os.path.dirname(path), gguf_file=os.path.basename(path), dtype=torch.float32).eval()
    prompts = json.load(open(prompts))
    with torch.no_grad():
        tensors = {"logits": model(input_ids=torch.tensor(prompts[:1])).logits}
        # One pass over the weights serves all prompts, padded on the left.
        longest = max(map(len, prompts))
        ids = torch.tensor([[2] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        results = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=int(tokens), do_sample=False, eos_token_id=2, pad_token_id=2)
    for i, (prompt, result) in enumerate(zip(prompts, results)):
        new = result[longest:].tolist()
        tensors[f"ids.{i}"] = torch.tensor([prompt + (new[:new.index(2) + 1] if 2 in new else new)])
    save_file({k: v.contiguous() for k, v in tensors.items()}, out)


{"small": small, "stops": stops, "warpers": warpers, "gguf": gguf}[sys.argv[1]](*sys.argv[2:])
