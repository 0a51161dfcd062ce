"""Peer of the DCP tests: PyTorch's and Accelerate's own readers and writers of distributed checkpoints.

usage: dcp_peer.py save FOLDER           two ranks save FOLDER/<case>/, beside each <case>.safetensors and <case>.json with what PyTorch itself reads from it
       dcp_peer.py check FOLDER WANT     everything in FOLDER must be what WANT.safetensors and WANT.json say, read by PyTorch in one process and in three, and merged by Accelerate
       dcp_peer.py merge FOLDER OUT      Accelerate merges FOLDER
       dcp_peer.py load_bin FOLDER FILE  the merged FILE must be what PyTorch makes of FOLDER
       dcp_peer.py metadata IN OUT FORM  writes the metadata at IN again: FORM new, with the newest pickle protocol; old, as early versions of torch did; by_name, as Python 3.11.2 has enumerations
"""
import json
import os
import pickle
import sys
import tempfile

import torch
import torch._dynamo  # optimizers do it when they are made; here it is done once
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from python_ranks import in_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Conv1d(7, 3, 2), torch.nn.Linear(6, 1, dtype=torch.bfloat16))


def one_step(net, optimizer):
    """Gives the optimizer a state; every parameter gets its own gradient."""
    for index, parameter in enumerate(net.parameters()):
        parameter.grad = parameter.detach().clone() * (index + 1)
    optimizer.step()


def dtypes():
    values = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16,
              torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
    return {str(d).removeprefix("torch."): torch.arange(12).reshape(3, 4).to(d) for d in values}


def save_cases(folder):
    case = lambda name: os.path.join(folder, name)
    net = model()
    fully_shard(net[0])
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.8, 0.99))
    one_step(net, optimizer)
    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights}, checkpoint_id=case("pytorch_model_fsdp_0"))
    dcp.save({"optimizer": state}, checkpoint_id=case("optimizer_0"))
    objects = {"step": 7, "large": 2**40, "negative": -3, "ratio": 0.5, "flag": True, "none": None, "text": "gr\u00fc\u00df", "list": [1, 2.5, "x", None, [True]], "empty": [], "pair": (1, "a"),
               "names": {"a.b": {"c": [{"d": 1}, {"d": 2}]}}}
    dcp.save({"model": weights, "optim": state, **objects}, checkpoint_id=case("everything"))

    for name, keywords in {"fsdp1": {}, "fsdp1_mesh": {"device_mesh": init_device_mesh("cpu", (2,))}}.items():
        net = FullyShardedDataParallel(model().float(), use_orig_params=True, device_id=torch.device("cpu"), **keywords)
        FullyShardedDataParallel.set_state_dict_type(net, StateDictType.SHARDED_STATE_DICT)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net.zero_grad()
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        dcp.save({"model": net.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(net, optimizer)}, checkpoint_id=case(name))

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(7 * 6 * 5, dtype=torch.float32).reshape(7, 6, 5)
    replicated = {"rows": distribute_tensor(whole, mesh, [Shard(0)]), "middle": distribute_tensor(whole, mesh, [Shard(1)]), "last": distribute_tensor(whole, mesh, [Shard(2)]),
                  "replica": distribute_tensor(whole, mesh, [Replicate()]), "turned": whole.permute(2, 0, 1), "scalar": torch.tensor(2.5), "nothing": torch.zeros(0, 3),
                  "list": [torch.ones(2), torch.zeros(3)], **dtypes()}
    writer = lambda name, **options: dcp.FileSystemWriter(case(name), **options)
    dcp.save({"state": replicated}, checkpoint_id=case("layouts"))
    dcp.save({"state": replicated}, storage_writer=writer("threads", thread_count=3))
    dcp.save({"state": replicated}, storage_writer=writer("file_per_item", single_file_per_rank=False))


def flat_values(folder):
    """Every tensor and object by its flat name, as PyTorch reads them."""
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, os.path.join(scratch, "all.pt"))
        nested = torch.load(os.path.join(scratch, "all.pt"), weights_only=False)
    paths = dcp.FileSystemReader(folder).read_metadata().planner_data
    values = {}
    for name, path in paths.items():
        value = nested
        for step in path:
            value = value[step]
        values[name] = value
    return ({k: v.contiguous().clone() for k, v in values.items() if isinstance(v, torch.Tensor)}, {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)})


def expect(folder):
    for case in sorted(os.listdir(folder)):
        tensors, objects = flat_values(os.path.join(folder, case))
        save_file(tensors, os.path.join(folder, case + ".safetensors"))
        with open(os.path.join(folder, case + ".json"), "w") as file:
            json.dump(objects, file)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def equal(found, wanted, where):
    assert found.keys() == wanted.keys(), (where, sorted(found.keys() ^ wanted.keys()))
    for name, want in wanted.items():
        got = found[name]
        assert got.dtype == want.dtype and got.shape == want.shape, (where, name, got.dtype, want.dtype, got.shape, want.shape)
        assert torch.equal(raw(got), raw(want)), (where, name, got, want)


def load_in_ranks(folder, want):
    wanted = {k: v for k, v in load_file(want + ".safetensors").items() if v.dtype in (torch.float32, torch.bfloat16) and v.dim() > 0 and v.size(0) > 0}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in (0, -1):
        state = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(dim % tensor.dim())]) for name, tensor in wanted.items()}
        dcp.load(state, checkpoint_id=folder)
        equal({name: tensor.full_tensor() for name, tensor in state.items()}, wanted, f"three ranks, dimension {dim}")


def check(folder, want):
    in_ranks(3, load_in_ranks, folder, want)
    wanted, objects = load_file(want + ".safetensors"), json.load(open(want + ".json"))
    tensors, found = flat_values(folder)
    paths = dcp.FileSystemReader(folder).read_metadata().planner_data
    assert all(isinstance(step, int) == str(step).isdigit() for path in paths.values() for step in path), paths
    equal(tensors, wanted, "one process")
    assert json.loads(json.dumps(found)) == objects, (found, objects)
    if not objects and all(name.startswith("model.") for name in wanted):
        from accelerate.utils import merge_fsdp_weights
        with tempfile.TemporaryDirectory() as scratch:
            merge_fsdp_weights(folder, scratch)
            equal(load_file(os.path.join(scratch, "model.safetensors")), {k.removeprefix("model."): v for k, v in wanted.items()}, "merged by Accelerate")


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "save":
        in_ranks(2, save_cases, arguments[0])
        expect(arguments[0])
    elif mode == "check":
        check(*arguments)
    elif mode == "merge":
        from accelerate.utils import merge_fsdp_weights
        merge_fsdp_weights(*arguments)
    elif mode == "load_bin":
        # A merged .bin file must be what PyTorch itself makes of the folder.
        folder, file = arguments
        nested = {}
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
        _load_state_dict(nested, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        (wanted,) = nested.values()
        same = lambda a, b: (type(a) is type(b) and (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else
                                                   a.keys() == b.keys() and all(same(a[k], b[k]) for k in a) if isinstance(a, dict) else
                                                   len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b))
        found = torch.load(file, weights_only=True)
        assert same(found, wanted), (found, wanted)
    else:
        source, target, form = arguments
        metadata = pickle.load(open(source, "rb"))
        if form == "old":
            from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
            for value in metadata.state_dict_metadata.values():
                if hasattr(value, "properties"):
                    value.properties = TensorProperties(dtype=value.properties.dtype)
            for field in ("storage_meta", "version"):
                del metadata.__dict__[field]
        if form == "by_name":
            from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
            _MEM_FORMAT_ENCODING.__reduce_ex__ = lambda member, protocol: (getattr, (member.__class__, member._name_))
        pickle.dump(metadata, open(target, "wb"), protocol=2 if form == "old" else 5)
