#!/usr/bin/env python3
"""Makes device_map_more.json from Hugging Face Accelerate 1.15: maps of random models with what the shared cases lack: several groups of tied weights, names that begin or end alike (layer1 and
layer10, h and ah), empty modules, scalars, tensors without elements, special_dtypes, budgets of zero, GPUs that are left out, GPUs in any order. Rows on which the reference fails or counts a tied module twice are left
out.

usage: device_maps.py OUTPUT_FOLDER        (with the Python that has accelerate and torch)
"""
import json
import logging
import pathlib
import random
import sys
import warnings

import torch
from accelerate.utils import modeling

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
rng = random.Random(6)
MODELS, MAPS_PER_MODEL = 60, 12
DTYPES = ["float32"] * 5 + ["float16", "bfloat16", "bool", "int64", "int8", "uint8", "float64", "float8_e4m3fn", "complex64"]
NAMES = [["layer1", "layer10", "layer2", "layer"], ["0", "1", "10", "2"], ["a", "ab", "b", "ba"], ["h", "ah", "x"], ["weight", "w", "q_weight"], ["encoder", "decoder", "coder"]]


def shape():
    kind = rng.random()
    return [] if kind < 0.06 else [0, rng.randint(0, 4)] if kind < 0.1 else [rng.randint(1, 24) for _ in range(rng.randint(1, 2))]


def leaf():
    if rng.random() < 0.08:
        return {"cls": "Identity"}
    node = {"cls": rng.choice(["Linear", "Norm"]), "p": [["weight", shape(), rng.choice(DTYPES)]]}
    if rng.random() < 0.5:
        node["p"].append(["bias", [rng.randint(1, 20)], "float32"])
    if rng.random() < 0.35:
        node["b"] = [["buf", shape(), rng.choice(DTYPES), rng.random() < 0.6]]
    return node


def tree(depth):
    if depth == 0 or rng.random() < 0.25:
        return leaf()
    node = {"cls": rng.choice(["Block", "A", "B"]), "c": [[name, tree(depth - 1)] for name in rng.choice(NAMES)[: rng.randint(1, 4)]]}
    if rng.random() < 0.3:
        node["p"] = [["scale", shape(), rng.choice(DTYPES)]]
    if rng.random() < 0.25:
        node["b"] = [["pos", shape(), rng.choice(DTYPES), rng.random() < 0.6]]
    return node


def build(node):
    module = type(node["cls"], (torch.nn.Module,), {})()
    for name, sizes, dtype in node.get("p", []):
        value = torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=value.is_floating_point()))
    for name, sizes, dtype, persistent in node.get("b", []):
        module.register_buffer(name, torch.empty(sizes, dtype=getattr(torch, dtype), device="meta"), persistent=persistent)
    for name, child in node.get("c", []):
        module.add_module(name, build(child))
    return module


def tied(model):
    names = [name for name, _ in model.named_parameters()]
    rng.shuffle(names)
    ties = []
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        group = [names.pop() for _ in range(min(len(names), rng.choice([2, 2, 3])))]
        ties += [[name, group[0]] for name in group[1:]]
    for name, other in ties:
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, model.get_parameter(other))
    return ties


# The reference keeps groups in sets, so their order changes from run to run. This is the order of first appearance.
def groups_of(model, **_):
    groups = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]


counted_twice = False
size_with_ties = modeling.get_module_size_with_ties


def watched(tied_params, module_size, module_sizes, modules):
    global counted_twice
    result = size_with_ties(tied_params, module_size, module_sizes, modules)
    counted_twice |= len(set(result[1])) != len(result[1]) or any(module_sizes[name] for name in tied_params)
    return result


modeling.find_tied_parameters = groups_of
modeling.get_module_size_with_ties = watched


def main():
    global counted_twice
    models, maps, balanced = {}, [], []
    while len(models) < MODELS:
        node = tree(rng.randint(2, 3))
        model = build(node)
        if not node.get("c") or not any(True for _ in model.parameters()):
            continue
        name = f"more_{len(models)}"
        models[name] = {"tree": node, "ties": tied(model)}
        tensors = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]
        total = int(modeling.compute_module_sizes(model)[""]) + 1
        for _ in range(MAPS_PER_MODEL):
            gpus = sorted(rng.sample(range(6), rng.randint(0, 4)))
            memory = [[gpu, rng.choice([0, total, total // 2, total // 3, total // 4, rng.randint(0, 2 * total)])] for gpu in gpus]
            if rng.random() < 0.7 or not memory:
                memory.append(["cpu", rng.choice([0, total, 2 * total, total // 2])])
            rng.shuffle(memory)
            no_split, dtype = rng.choice([[], [], ["Block"], ["Block", "A"], ["Nope"]]), rng.choice([None, None, "float16", "float32", "int8", "bfloat16"])
            extra = {key: value for key, value in (("fallback_allocation", True), ("clean_result", False), ("offload_buffers", True)) if rng.random() < 0.3}
            if rng.random() < 0.4:
                extra["special_dtypes"] = {n: rng.choice(["float32", "float16", "int8", "float64"]) for n in rng.sample(tensors, min(len(tensors), 2))}
            counted_twice = False
            try:
                found = modeling.infer_auto_device_map(model, dict(memory), no_split, dtype, **extra)
            except (IndexError, AttributeError):
                found = None
            if found is not None and not counted_twice:
                maps.append([name, memory, no_split, dtype, extra, sorted([key, place] for key, place in found.items())])
            # With low_zero the reference takes GPUs for 0, 1, ... without a gap.
            low_zero = rng.random() < 0.4 and [gpu for gpu, size in sorted(memory, key=str) if gpu != "cpu" and size] == list(range(sum(gpu != "cpu" for gpu, _ in memory)))
            shares = modeling.get_balanced_memory(model, dict(memory), no_split, dtype, extra.get("special_dtypes"), low_zero)
            balanced.append([name, memory, no_split, dtype, low_zero, [list(pair) for pair in shares.items()], extra.get("special_dtypes")])
    content = {"accelerate": "1.15.0", "fields": ["model", "max_memory", "no_split_module_classes", "dtype", "extra kwargs", "device_map"],
               "balanced_fields": ["model", "max_memory", "no_split_module_classes", "dtype", "low_zero", "result", "special_dtypes"], "models": models, "infer_auto_device_map": maps, "get_balanced_memory": balanced}
    (pathlib.Path(sys.argv[1]) / "device_map_more.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(len(maps), "maps,", len(balanced), "balanced")


main()
