"""Peer of the tests of codes: what bitsandbytes and gguf make of tensors.

usage: codes_peer.py encode FILE [WEIGHTS]
FILE (safetensors) gets for each case, whose name is ENCODING/BLOCK SIZE/dq or plain/TENSOR: its .input, .data, .scales (nested: .nested and
.offset) and .decoded in the input's dtype. WEIGHTS: a safetensors file, some tensors of which are cases too.
"""
import sys

import bitsandbytes.functional as bnb
import gguf
import torch
import torch._dynamo
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
torch._dynamo.config.disable = True  # bitsandbytes would compile its rules for each size


def tensors(weights):
    draw = torch.Generator().manual_seed(7)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw)

    one_outlier = normal(16, 128) * 1e-3
    one_outlier[3, 77] = 1000
    cases = {
        "normal": normal(64, 256),
        "zeros": torch.zeros(4, 96),
        "zeros_after": torch.cat([normal(1, 64), torch.zeros(1, 64)]),
        "one_outlier": one_outlier,
        "tiny": normal(8, 64) * 1e-30,
        "small_steps": torch.linspace(-1, 1, 64 * 64).reshape(64, 64),
        "odd": normal(7, 13),
        "odd_rows": normal(33, 130),
        "one": normal(1, 1),
        "vector": normal(257),
        "cube": normal(3, 5, 64),
        "empty": torch.zeros(0, 64),
        "negative_zero": -torch.zeros(2, 64),
        "wide": normal(3, 5000),
    }
    cases |= {f"{name}_{dtype}": normal(32, 128).to(getattr(torch, dtype)) for name in ("normal",) for dtype in ("float16", "bfloat16")}
    if weights:
        real = load_file(weights)
        for name in ("encoder.layer.0.attention.self.query.weight", "encoder.layer.5.output.dense.weight", "embeddings.position_embeddings.weight"):
            cases[name] = real[name]
            cases[name + "_half"] = real[name].half()
    return cases


def table_times_scale(packed, state, numel):
    """bitsandbytes' rule of decoding; its own kernel for AVX-512 takes wrong scales where rows are shorter than blocks."""
    halves = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], 1).view(-1)[:numel].long()
    scales = state.absmax
    if state.nested:
        scales = bnb.dequantize_blockwise(scales, state.state2) + state.offset
    return (state.code[halves] * scales.repeat_interleave(state.blocksize)[:numel]).to(state.dtype).view(state.shape)


def encode(path, weights=None):
    out = {}

    def add(case, **parts):
        for part, tensor in parts.items():
            out[f"{case}.{part}"] = tensor.contiguous().clone()

    for name, values in tensors(weights).items():
        for kind in ("nf4", "fp4"):
            for block in (64, 128, 2048) if name in ("normal", "odd_rows", "wide", "empty") else (64,):
                for nested in (False, True):
                    if nested and values.numel() == 0:
                        continue
                    packed, state = bnb.quantize_4bit(values, blocksize=block, quant_type=kind, compress_statistics=nested)
                    decoded = table_times_scale(packed, state, values.numel())
                    if values.numel() and values.shape[-1] % block == 0:  # where its kernel is right
                        assert torch.equal(decoded, bnb.dequantize_4bit(packed, state)), (name, kind, block)
                    case = f"{kind}/{block}/{'dq' if nested else 'plain'}/{name}"
                    add(case, input=values, data=packed, scales=state.absmax, decoded=decoded)
                    if nested:
                        add(case, nested=state.state2.absmax, offset=state.offset.reshape(1))
        if values.dim() == 2 and values.numel():
            codes, scales, _ = bnb.int8_vectorwise_quant(values.clone())
            decoded = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales)
            add(f"int8_rowwise/0/plain/{name}", input=values, data=codes, scales=scales, decoded=decoded.to(values.dtype))
        for kind in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
            # (gguf divides by subnormal scales, which overflows)
            if values.shape[-1] % 32 or not values.numel() or name == "tiny":
                continue
            type_ = getattr(gguf.GGMLQuantizationType, kind.upper())
            blocks = gguf.quants.quantize(values.float().numpy(), type_)
            decoded = torch.from_numpy(gguf.quants.dequantize(blocks, type_)).to(values.dtype)
            add(f"{kind}/0/plain/{name}", input=values, data=torch.from_numpy(blocks), decoded=decoded)
    out["dynamic_map"] = bnb.create_dynamic_map()
    out["nf4"], out["fp4"] = (bnb.get_4bit_type(kind, device="cpu") for kind in ("nf4", "fp4"))
    save_file(out, path)


if __name__ == "__main__":
    {"encode": encode}[sys.argv[1]](*sys.argv[2:])
