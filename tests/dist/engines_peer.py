"""Peer of engines_test.cpp: what a stack of layers has written as a sharded checkpoint, read by torch.distributed.checkpoint.

usage: engines_peer.py FOLDER EXPECTED.safetensors
"""
import pathlib
import sys
import tempfile

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def main():
    folder, expected = sys.argv[1], load_file(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "whole.pt"
        dcp_to_torch_save(folder, file)
        found = torch.load(file, weights_only=True)
    assert set(found) == set(expected), f"found {sorted(found)}, expected {sorted(expected)}"
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name}: found {found[name]}, expected {value}"
    print(f"{len(found)} tensors equal")


main()
