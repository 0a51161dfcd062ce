"""Runs bitsandbytes' 8-bit optimizers.

usage: adam8bit_peer.py codes IN OUT         codes of IN's tensors, by each map and way to search
       adam8bit_peer.py train IN OUT [IN OUT …] SEARCH  as many steps as IN has gradients; SEARCH: nearest or native
"""
import sys

import bitsandbytes as bnb
import bitsandbytes.backends.cpu.ops as cpu
import bitsandbytes.functional as F
import torch

torch.set_num_threads(1)


def nearest(values, code, block=256):
    """The nearest value of the map, as bitsandbytes' own code for dtypes that its library does not take does it."""
    flat = values.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    absmax = blocks.abs().amax(1)
    scaled = torch.clamp(blocks * (1 / absmax[:, None]), -1, 1)
    found = torch.cat([torch.argmin(torch.abs(row[:, None] - code), -1) for row in scaled])
    if code[0] == 0:  # second moments: only a zero is zero
        found[(found == 0) & (scaled.reshape(-1) > 0)] = 1
    return found[: len(flat)].to(torch.uint8).reshape(values.shape), absmax


def make(case):
    params = [torch.nn.Parameter(p.clone()) for p in case["params"]]
    cls = getattr(bnb.optim, case["class"])
    return cls(params, lr=case["lr"], betas=tuple(case["betas"]), eps=case["eps"],
               weight_decay=case["weight_decay"], min_8bit_size=int(case["min_8bit_size"])), params


mode = sys.argv[1]
if mode == "codes":
    given, result = torch.load(sys.argv[2]), {}
    for name, values in given.items():
        for signed in (True, False):
            code = F.create_dynamic_map(signed)
            source = values if signed else values.abs()
            for search in ("nearest", "grid"):
                native = torch.ops.bitsandbytes.quantize_blockwise
                codes, absmax = nearest(source, code) if search == "nearest" else native(source, code, 256)
                key = f"{name}.{'signed' if signed else 'unsigned'}.{search}"
                back = torch.ops.bitsandbytes.dequantize_blockwise(codes, absmax, code, 256, torch.float32)
                result[key] = {"codes": codes, "absmax": absmax, "values": back}
    torch.save(result, sys.argv[3])
elif mode == "train":
    if sys.argv[-1] == "nearest":
        def encode(values, code, absmax, out, block):
            codes, scales = nearest(values, code, block)
            out.copy_(codes), absmax.copy_(scales)
        cpu._quant_blockwise_fp32_direct = encode
    for given, out in zip(sys.argv[2:-1:2], sys.argv[3:-1:2]):
        case = torch.load(given)
        optimizer, params = make(case)
        if "state" in case:
            optimizer.load_state_dict(case["state"])
        for gradients in case["gradients"]:
            for p, g in zip(params, gradients):
                p.grad = g.clone()
            optimizer.step()
        torch.save({"params": [p.detach() for p in params], "state": optimizer.state_dict()}, out)
