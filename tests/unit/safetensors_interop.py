"""Peer of the safetensors tests: reads or writes the same tensors with the reference package.

usage: safetensors_interop.py write FILE    |    safetensors_interop.py check FILE
Every dtype holds the values 0 1 2 3 4 5 in the shape [2, 3], under its torch name.
"""
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16,
          torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
          torch.complex64]


def tensors():
    values = {str(d).removeprefix("torch."): torch.arange(6).reshape(2, 3).to(d) for d in DTYPES}
    values["f8_e8m0"] = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float8_e8m0fnu)
    values["f4"] = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
    values["scalar"] = torch.tensor(7.5)
    values["empty"] = torch.zeros(0, 4, dtype=torch.float16)
    values['na"me \n\u00e9\u4e2d'] = torch.tensor([1, 2], dtype=torch.int16)
    return values


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def check(path):
    found, expected = load_file(path), tensors()
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, want in expected.items():
        got = found[name]
        assert got.dtype == want.dtype and got.shape == want.shape, (name, got.dtype, want.dtype, got.shape, want.shape)
        assert torch.equal(raw(got), raw(want)), (name, got, want)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "gr\u00fc\u00df"}, file.metadata()


if sys.argv[1] == "write":
    save_file(tensors(), sys.argv[2], {"format": "pt"})
else:
    check(sys.argv[2])
