"""Files as Python's torch.save and TorchScript write them, of one model in one folder.

usage: torch_files_peer.py FOLDER
"""
import pathlib
import sys

import torch
from safetensors.torch import save_file


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(10, 4)
        self.body = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True)
torch.manual_seed(0)
net = Net().eval()
state = {name: tensor.clone() for name, tensor in net.state_dict().items() if name != "head.weight"}
save_file(state, folder / "model.safetensors")
torch.jit.script(net).save(str(folder / "script.pt"))
torch.jit.trace(net, torch.arange(3)).save(str(folder / "trace.pt"))
torch.save(net.state_dict(), folder / "zip.bin")
torch.save(net.state_dict(), folder / "stream.bin", _use_new_zipfile_serialization=False)
half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in net.state_dict().items()}
torch.save(half, folder / "half.bin", _use_new_zipfile_serialization=False)
torch.save({"part": torch.arange(12.0).reshape(3, 4)[:, 1:3], "whole": torch.zeros(0)}, folder / "views.bin", _use_new_zipfile_serialization=False)
torch.save({"model": net.state_dict()}, folder / "nested.bin")
torch.save(net, folder / "module.bin")
