"""Linear layers in few bits against bitsandbytes on the CPU: answers first, then times, in turns; the best round counts.

usage: OMP_NUM_THREADS=1 bitsandbytes_peer.py BENCH_CODES_LAYERS [ROUNDS] [N K] [train]

`train`: forward, and backward to the layer's input, as adapters need it; the answers are gradients then.
"""
import json
import os
import subprocess
import sys
import tempfile
import time

import bitsandbytes as bnb
import torch
from safetensors.torch import load_file, save_file


def layers(weight, trains):
    n, k = weight.shape
    dense = torch.nn.Linear(k, n, bias=False)
    dense.weight.data.copy_(weight)
    int8 = bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, threshold=0.0)
    int8.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    nf4 = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    nf4.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
    # As fp32, and as bf16, for which bitsandbytes has kernels of its own.
    bf16 = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    bf16.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
    found = {"fp32": dense, "int8": int8, "nf4": nf4, "nf4 in bf16": bf16}
    return {name: layer.to("cpu").train(trains).requires_grad_(False) for name, layer in found.items()}


def ours_of(name, trains):
    """Without gradients our products read codes, whatever they compute in."""
    return name if trains else name.split(" ")[0]


def step(layer, x, gradient):
    """The forward's result, or the gradient of x."""
    if gradient is None:
        with torch.no_grad():
            return layer(x)
    x.grad = None
    layer(x).backward(gradient)
    return x.grad


def main(program, rounds="5", n="4096", k="4096", mode=""):
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    torch.manual_seed(0)
    weight = torch.randn(int(n), int(k)) * 0.02
    trains = mode == "train"
    sizes = (64, 256) if trains else (1, 16, 128)
    inputs = {("t" if trains else "x") + f".{rows}": torch.randn(rows, int(k)) for rows in sizes}
    gradients = {f"g.{rows}": torch.randn(rows, int(n)) for rows in sizes} if trains else {}
    theirs = layers(weight, trains)
    if trains:
        del theirs["int8"]
    best, ours = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        given, out = os.path.join(folder, "in.safetensors"), os.path.join(folder, "out.safetensors")
        save_file({"weight": weight, **inputs, **gradients}, given)
        for turn in range(int(rounds)):
            for name, ms in json.loads(subprocess.check_output([program, given, out, "4"])).items():
                ours[name] = min(ours.get(name, 1e9), ms)
            answers = load_file(out)
            for name, layer in theirs.items():
                for key, x in inputs.items():
                    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
                    x, gradient = x.detach().to(dtype).requires_grad_(trains), gradients.get("g" + key[1:])
                    gradient = gradient if gradient is None else gradient.to(dtype)
                    for _ in range(4):
                        begin = clock()
                        y = step(layer, x, gradient)
                        ms = (clock() - begin) * 1e3
                        case = name + key[1:]
                        best[case] = min(best.get(case, 1e9), ms)
                    if turn == 0:
                        answer = answers[ours_of(name, trains) + key[1:]]
                        error = ((y.float() - answer).norm() / answer.norm()).item()
                        if error > 0.015:  # a percent is what rounding activations to 8 bits or weights to bf16 makes
                            sys.exit(f"{case}: answers differ by {error:.4f}, so times mean nothing")
    print(f"{threads} threads, [{n}, {k}], bitsandbytes {bnb.__version__}, load {os.getloadavg()[0]:.1f}\n")
    print("| layer | rows | ours, ms | bitsandbytes, ms | times |\n|---|---|---|---|---|")
    for case, ms in best.items():
        name, rows = case.rsplit(".", 1)
        mine = ours[ours_of(name, trains) + "." + rows]
        print(f"| {name} | {rows} | {mine:.2f} | {ms:.2f} | {ms / mine:.1f} |")


main(*sys.argv[1:])
