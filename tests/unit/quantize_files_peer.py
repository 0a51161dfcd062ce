"""Peer of the tests of quantized files: bitsandbytes, transformers and gguf look at what was made.

usage: quantize_files_peer.py FOLDER

FOLDER has ids.json, f32.gguf with q8_0.gguf …, and model/ and gpt2/ with X_nf4/ (double quantization), X_int8/, X.gguf and X_back/ made of that each; all that is found goes to FOLDER/found.json
"""
import glob
import json
import sys

import bitsandbytes.functional as bnb
import gguf
import numpy as np
import torch
import torch._dynamo
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

torch.set_num_threads(1)
torch._dynamo.config.disable = True
logging.set_verbosity_error()


def perplexity(model, ids, window, stride):
    """As transformers' documentation: "Perplexity of fixed-length models", with the mean over tokens."""
    total, tokens, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : -(end - before)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            with torch.no_grad():
                total += float(model(part, labels=labels).loss) * scored
            tokens += scored
        before = end
        if end == ids.shape[1]:
            break
    return {"loss": total / tokens, "tokens": tokens}


def codes(folder, model):
    def load(name):
        return {tensor: value for file in glob.glob(f"{folder}/{name}/model*.safetensors") for tensor, value in load_file(file).items()}

    weights, four, eight = load(model), load(f"{model}_nf4"), load(f"{model}_int8")
    differing, seen = [], 0
    for name, weight in weights.items():
        if model == "gpt2" and name + ".absmax" in four:
            weight = weight.T.contiguous()  # Conv1D: transformers does so, too
        if name + ".absmax" in four:
            packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            if not (torch.equal(packed, four[name]) and torch.equal(state.absmax, four[name + ".absmax"])):
                differing.append(name)
            seen += 1
        elif not torch.equal(four[name], weight):
            differing.append(name)
        scale = name.replace(".weight", ".SCB")
        if scale in eight and scale != name:
            rows, scales, _ = bnb.int8_vectorwise_quant(weight.half())
            if not (torch.equal(rows, eight[name]) and torch.equal(scales, eight[scale])):
                differing.append(name + " int8")
            seen += 1
    return {"differing": differing, "compared": seen}


def read(path):
    reader = gguf.GGUFReader(path)
    fields = {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            fields[name] = [[int(kind) for kind in field.types], field.contents()]
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def blocks(folder, name, kind):
    fields, tensors = read(f"{folder}/{name}.gguf")
    before, originals = read(f"{folder}/f32.gguf")
    changed = sorted(key for key in {*fields, *before} if fields.get(key) != before.get(key))
    differing = []
    for tensor_name, original in originals.items():
        tensor = tensors[tensor_name]
        if tensor.tensor_type == original.tensor_type:
            same = np.array_equal(tensor.data, original.data)
        else:
            same = tensor.tensor_type == kind and np.array_equal(tensor.data, gguf.quants.quantize(original.data, kind))
        if not same:
            differing.append(tensor_name)
    return {"changed": changed, "differing": differing, "kinds": {key: value.tensor_type.name for key, value in tensors.items()}, "file_type": fields["general.file_type"][1]}


def logits(model, ids, path):
    for module in model.eval().modules():
        module.training = isinstance(module, Linear4bit)  # which in evaluation change their weights for a kernel in bf16
    with torch.no_grad():
        save_file({"logits": model(ids).logits.contiguous()}, path)


def converted(folder, model, ids):
    """A .gguf file of ours of a folder, and the folder that became of it again."""
    fields, tensors = read(f"{folder}/{model}.gguf")
    if model != "gpt2":  # of which transformers reads files with 1024 positions only
        logits(AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"{model}.gguf"), ids, f"{folder}/{model}_gguf_logits.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/{model}_back")
    text = open(f"{folder}/text.txt").read()
    return {"fields": {key: value for key, (_, value) in fields.items()}, "kinds": {key: value.tensor_type.name for key, value in tensors.items()}, "ids": tokenizer(text)["input_ids"],
            "chat": tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True), "eos": tokenizer.eos_token_id}


def main(folder):
    ids = torch.tensor(json.load(open(f"{folder}/ids.json")))[None]
    found = {"codes": {model: codes(folder, model) for model in ("model", "gpt2")}, "converted": {model: converted(folder, model, ids) for model in ("model", "gpt2")}}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model").eval()
    found["perplexity"] = [perplexity(model, ids, window, stride) for window, stride in [(64, 64), (8, 8), (8, 3), (16, 15), (4096, 4096)]]
    for name in ("model_nf4", "gpt2_nf4", "gpt2_int8"):
        logits(AutoModelForCausalLM.from_pretrained(f"{folder}/{name}"), ids, f"{folder}/{name}_logits.safetensors")
    found["blocks"] = {name: blocks(folder, name, kind) for name, kind in [("q8_0", gguf.GGMLQuantizationType.Q8_0), ("q5_1", gguf.GGMLQuantizationType.Q5_1)]}
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


main(sys.argv[1])
