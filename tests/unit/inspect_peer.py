"""Writes what only Python writes: inspect_peer.py FOLDER"""
import pathlib
import sys

import numpy
import torch

folder = pathlib.Path(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
model[1].weight = torch.nn.Parameter(model[0].weight[:, :2])  # a view of half of the other's bytes
torch.export.save(torch.export.export(model, (torch.randn(1, 3),)), str(folder / "model.pt2"))
torch.save(model, folder / "whole.pt")
torch.jit.script(torch.nn.Linear(3, 2)).save(str(folder / "script.pt"))
torch.save({"a": torch.arange(3)}, folder / "old.bin", _use_new_zipfile_serialization=False)
torch.serialization.set_crc32_options(False)
torch.save({"a": torch.arange(3)}, folder / "without_sums.bin")
torch.serialization.set_crc32_options(True)
checkpoint = folder / "checkpoint"
checkpoint.mkdir()
torch.save({"w": torch.zeros(2)}, checkpoint / "pytorch_model.bin")
torch.save({"step": 7, "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}, checkpoint / "random_states_0.pkl")
