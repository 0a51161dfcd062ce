"""Files as Python's torch.save and TorchScript write them, of one model in one folder.

usage: torch_files_peer.py FOLDER
"""
import collections
import pathlib
import pickle
import struct
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
expanded = {"scale": torch.tensor([0.5]).expand(6), "rows": torch.arange(3.0).expand(2, 3), "overlapping": torch.arange(6.0).unfold(0, 4, 1)}
torch.save(expanded, folder / "expanded.bin")
torch.save(expanded, folder / "expanded-stream.bin", _use_new_zipfile_serialization=False)
save_file({name: tensor.contiguous() for name, tensor in expanded.items()}, folder / "expanded.safetensors")
torch.save({"mask": torch.ones(1).expand(1 << 14, 1 << 12)}, folder / "too-much.bin")
torch.save({0: torch.ones(2), 11: torch.zeros(3)}, folder / "numbered.bin")
torch.save({0: torch.ones(2), "0": torch.zeros(2)}, folder / "twice.bin")
torch.save({0.5: torch.ones(2)}, folder / "fractions.bin")
conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
torch.save({"w": conjugated}, folder / "conjugated.bin")
torch.save({"w": conjugated}, folder / "conjugated-stream.bin", _use_new_zipfile_serialization=False)
torch.save({"w": conjugated.imag}, folder / "negated.bin")
assert conjugated.is_conj() and conjugated.imag.is_neg()


class Storage:
    def __init__(self, numel):
        self.numel = numel


class OfOld:
    """A tensor as PyTorch 0.3 pickled it."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return torch._utils._rebuild_tensor, (Storage(self.tensor.numel()), 0, tuple(self.tensor.shape), self.tensor.stride())


class OldPickler(pickle._Pickler):
    def persistent_id(self, found):
        return ("storage", torch.FloatStorage, "1", "cpu", found.numel, None) if isinstance(found, Storage) else None


class Python2Pickler(OldPickler):
    """Python 2's counts its memo from 1, writes text in other opcodes, and makes an OrderedDict of a list of pairs."""
    dispatch = dict(pickle._Pickler.dispatch)

    def memoize(self, found):
        self.write(self.put(len(self.memo) + 1))
        self.memo[id(found)] = len(self.memo) + 1, found

    def save_str(self, text):
        short = len(text) < 256
        self.write((b"U" if short else b"T") + struct.pack("<B" if short else "<i", len(text)) + text.encode())
        self.memoize(text)

    dispatch[str] = save_str

    def reducer_override(self, found):
        return (type(found), ([list(pair) for pair in found.items()],)) if isinstance(found, dict) else NotImplemented


for name, pickler in (("old.bin", OldPickler), ("python2.bin", Python2Pickler)):
    with open(folder / name, "wb") as file:
        for part in (0x1950a86a20f9469cfc6c, 1001, dict(protocol_version=1001, little_endian=True, type_sizes=dict(short=2, int=4, long=4))):
            pickle.dump(part, file, protocol=2)
        tensor = torch.arange(6.0).view(2, 3)
        pickler(file, 2).dump(collections.OrderedDict({"weight": OfOld(tensor), "w" * 300: OfOld(tensor)}))
        pickle.dump(["1"], file, protocol=2)
        file.write(struct.pack("<q", 6) + tensor.numpy().tobytes())
    assert torch.load(folder / name, weights_only=False)["weight"].equal(tensor)
