"""Peer of the tests of quantized files: bitsandbytes, transformers and gguf look at what was made.

usage: quantize_files_peer.py FOLDER

FOLDER has model/, nf4/ (double quantization), int8/, ids.json, f32.gguf and q8_0.gguf …; all that is found goes to FOLDER/found.json
"""
import json
import sys

import bitsandbytes.functional as bnb
import gguf
import numpy as np
import torch
import torch._dynamo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, logging

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


def codes(folder):
    weights = load_file(f"{folder}/model/model.safetensors")
    four, eight = load_file(f"{folder}/nf4/model.safetensors"), load_file(f"{folder}/int8/model.safetensors")
    differing, seen = [], 0
    for name, weight in weights.items():
        if name + ".absmax" in four:
            packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            if not (torch.equal(packed, four[name]) and torch.equal(state.absmax, four[name + ".absmax"])):
                differing.append(name)
            seen += 1
        elif not torch.equal(four[name], weight):
            differing.append(name)
        scale = name.replace(".weight", ".SCB")
        if scale in eight:
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


def main(folder):
    ids = torch.tensor(json.load(open(f"{folder}/ids.json")))[None]
    found = {"codes": codes(folder)}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model").eval()
    found["perplexity"] = [perplexity(model, ids, window, stride) for window, stride in [(64, 64), (8, 8), (8, 3), (16, 15), (4096, 4096)]]
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/nf4")
    model.train()  # in evaluation, layers of 4 bits change their weights for a kernel in bf16
    with torch.no_grad():
        save_file({"logits": model(ids).logits.contiguous()}, f"{folder}/logits.safetensors")
    found["blocks"] = {name: blocks(folder, name, kind) for name, kind in [("q8_0", gguf.GGMLQuantizationType.Q8_0), ("q5_1", gguf.GGMLQuantizationType.Q5_1)]}
    with open(f"{folder}/found.json", "w") as file:
        json.dump(found, file)


main(sys.argv[1])
