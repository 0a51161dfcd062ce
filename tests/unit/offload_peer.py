"""Offload folders, through the reference.

usage: offload_peer.py write FOLDER | check FOLDER
`write` offloads the tensors below; `check` reads a folder that should hold them.
"""
import sys

import torch
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from safetensors.torch import save_file

DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"]


def tensors():
    values = torch.arange(6).reshape(2, 3)
    result = {f"layer.{name}": values.to(getattr(torch, name)) for name in DTYPES}
    result["scalar"] = torch.tensor(2.5)
    result["empty"] = torch.zeros(0, 3)
    result["größe"] = torch.ones(2)
    return result


command, folder = sys.argv[1:]
if command == "write":
    offload_state_dict(folder, tensors())
    save_file({"inner.name": torch.arange(4, dtype=torch.float16)}, f"{folder}/shard.safetensors")
else:
    loader = OffloadedWeightsLoader(save_folder=folder)
    expected = tensors()
    assert list(loader) == list(expected), (list(loader), list(expected))
    for name, want in expected.items():
        got = loader[name]
        assert got.dtype == want.dtype and got.shape == want.shape, (name, got.dtype, got.shape)
        assert torch.equal(got.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)), name
