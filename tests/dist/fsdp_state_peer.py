"""Peer of fsdp_state_test: checkpoints of sharded training by PyTorch's FSDP and Accelerate's functions, and what they make of ours.

usage: fsdp_state_peer.py save FOLDER   two ranks train two steps and save with Accelerate: FOLDER/fsdp1_sharded, fsdp2_sharded, fsdp2_full; and own_python, a dict
                                        with all of that in it, with torch.distributed.checkpoint
       fsdp_state_peer.py check FOLDER  FOLDER/<name>_on, own_sharded and own_plain are those two steps later; ours_sharded and ours_full are read by FSDP 2, by a plain
                                        model and by Accelerate's merge

Accelerate doesn't shard on the CPU, so that its save and load functions are called with an object that has what they need of an Accelerator.
FSDP 1 can't save FULL_STATE_DICT on the CPU (the process crashes in torch 2.13); its sharded form is what differs from FSDP 2's.
"""
import os
import sys
import tempfile
from types import SimpleNamespace

import accelerate.utils.fsdp_utils  # like torch, once for all ranks
import torch
import torch._dynamo  # optimizers do it when they are made; here it is done once
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from python_ranks import in_ranks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def adamw(net, matrices):
    groups = [{"params": [p for n, p in net.named_parameters() if (n.removeprefix("_fsdp_wrapped_module.") in matrices) == want]} | extra for want, extra in ((True, {"weight_decay": 0.1}), (False, {"weight_decay": 0.0, "lr": 1e-2}))]
    return torch.optim.AdamW(groups, lr=3e-3)


def steps(net, optimizer, count):
    for _ in range(count):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        optimizer.zero_grad()


MATRICES = ("0.weight", "3.weight")


def accelerator(version):
    return SimpleNamespace(num_processes=dist.get_world_size(), process_index=dist.get_rank(), is_main_process=dist.get_rank() == 0, is_fsdp2=version == 2, wait_for_everyone=dist.barrier)


def sharded(version):
    net = model()
    if version == 1:
        return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    fully_shard(net[0], mesh=(mesh := dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))))
    fully_shard(net, mesh=mesh)
    return net


def save(base):
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    PartialState(cpu=True)  # Accelerate's log wants one
    for version, kind in ((1, "sharded"), (2, "sharded"), (2, "full")):
        net = sharded(version)
        optimizer = adamw(net, MATRICES)
        steps(net, optimizer, 2)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=f"{kind.upper()}_STATE_DICT")
        folder = os.path.join(base, f"fsdp{version}_{kind}")
        save_fsdp_model(plugin, accelerator(version), net, folder, 0)
        save_fsdp_optimizer(plugin, accelerator(version), optimizer, net, folder, 0)
        dist.barrier()
        if (version, kind) == (2, "sharded"):
            dcp.save(own_dict(net, optimizer, 2), checkpoint_id=os.path.join(base, "own_python"))


def own_dict(net, optimizer, step):
    """A user's checkpoint: model and optimizer with everything else that a run needs."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    weights, state = get_state_dict(net, optimizer)
    rank = dist.get_rank()
    return {"app": {"model": weights, "optim": state}, "step": step, "ratio": 0.5, "text": "gr\u00fc\u00df", "bytes": bytes(range(256)), "nothing": None,
            "list": [torch.arange(3.0), {"lr": 0.25}], "plain": [1, "a", None], "pair": (1, 2.5), f"rank{rank}": torch.full((rank + 1,), float(rank))}


def own_values(state):
    """All but tensors that lie in pieces, in a form that can be compared."""
    rank = dist.get_rank()
    return [state[key] for key in ("step", "ratio", "text", "bytes", "nothing", "plain", "pair")] + [state["list"][0].tolist(), state["list"][1], state[f"rank{rank}"].tolist()]


def load_own(base):
    """FSDP 2 on two ranks goes on from ours with PyTorch's own functions, into a model and an optimizer that have not stepped."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    plain = model()
    plain_optimizer = adamw(plain, MATRICES)
    steps(plain, plain_optimizer, 5)
    for name in ("own_sharded", "own_plain"):
        net = sharded(2)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        optimizer = adamw(net, MATRICES)
        state = own_dict(net, optimizer, 0)
        wanted = own_values({**state, "step": 4})
        state.update(ratio=0.0, text="", bytes=b"", nothing=1, plain=None, pair=None, list=[torch.zeros(3), {"lr": 0.0}])
        state[f"rank{dist.get_rank()}"].fill_(9)
        dcp.load(state, checkpoint_id=f"{base}/{name}")
        set_state_dict(net, optimizer, model_state_dict=state["app"]["model"], optim_state_dict=state["app"]["optim"])
        assert own_values(state) == wanted, (own_values(state), wanted)
        steps(net, optimizer, 1)
        weights, moments = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
        equal(weights, dict(plain.state_dict()), name, 1e-6)
        for parameter_name, parameter in plain.named_parameters():
            equal(moments["state"][parameter_name], plain_optimizer.state[parameter], name + parameter_name, 1e-6)


def equal(found, wanted, what, tolerance=0.0):
    assert found.keys() == wanted.keys(), (what, set(found) ^ set(wanted))
    for name, value in wanted.items():
        value, got = value.detach(), found[name].detach()
        assert got.shape == value.shape and (got.double() - value.double()).abs().max() <= tolerance, (what, name, got, value)


def nested(folder):
    """A whole distributed checkpoint, as PyTorch unflattens it."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def check_continued(base):
    """Two steps in Python and two of ours are four in Python. Ours fuses the update: 1e-6 of rounding."""
    net = model()
    optimizer = adamw(net, MATRICES)
    steps(net, optimizer, 4)
    for name in ("fsdp1_sharded", "fsdp2_sharded", "fsdp2_full"):
        equal(nested(f"{base}/{name}_on/pytorch_model_fsdp_0")["model"], dict(net.state_dict()), name, 1e-6)
        state = nested(f"{base}/{name}_on/optimizer_0")["optimizer"]
        for parameter_name, parameter in net.named_parameters():
            equal(state["state"][parameter_name], optimizer.state[parameter], name + parameter_name, 1e-6)
        assert [group["lr"] for group in state["param_groups"]] == [3e-3, 1e-2], state["param_groups"]
        assert [set(group["params"]) for group in state["param_groups"]] == [set(MATRICES), {"0.bias", "1.weight", "1.bias", "3.bias"}]
    from safetensors.torch import load_file
    equal(load_file(f"{base}/fsdp2_full_plain/model.safetensors"), dict(net.state_dict()), "plain", 1e-6)


def load_ours(base):
    """FSDP 2 on two ranks takes ours over through Accelerate's functions, and holds it exactly."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    for kind in ("sharded", "full"):
        for version in (1, 2):
            if version == 1 and kind == "full":
                continue
            net = sharded(version)
            optimizer = adamw(net, MATRICES)
            steps(net, optimizer, 1)  # other values than those to be loaded
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=f"{kind.upper()}_STATE_DICT")
            load_fsdp_model(plugin, accelerator(version), net, f"{base}/ours_{kind}", 0)
            load_fsdp_optimizer(plugin, accelerator(version), optimizer, net, f"{base}/ours_{kind}", 0)
            steps(net, optimizer, 1)
            if version == 1:
                continue
            whole = StateDictOptions(full_state_dict=True)
            weights, state = get_model_state_dict(net, options=whole), get_optimizer_state_dict(net, optimizer, options=whole)
            plain, plain_optimizer = resume_plain(base, kind)
            steps(plain, plain_optimizer, 1)
            if dist.get_rank() == 0:
                equal(weights, dict(plain.state_dict()), kind, 1e-6)
                for name, parameter in plain.named_parameters():
                    equal(state["state"][name], plain_optimizer.state[parameter], kind + name, 1e-6)


def load_everything(base):
    from accelerate import PartialState
    PartialState(cpu=True)
    load_ours(base)
    load_own(base)


def resume_plain(base, kind):
    """A plain model of Python goes on from ours."""
    net = model()
    optimizer = adamw(net, MATRICES)
    if kind == "sharded":
        weights, state = nested(f"{base}/ours_sharded/pytorch_model_fsdp_0")["model"], nested(f"{base}/ours_sharded/optimizer_0")["optimizer"]
    else:
        weights, state = torch.load(f"{base}/ours_full/pytorch_model_fsdp.bin", weights_only=True), torch.load(f"{base}/ours_full/optimizer.bin", weights_only=True)
    net.load_state_dict(weights)
    by_name = dict(net.named_parameters())
    for group, saved in zip(optimizer.param_groups, state["param_groups"]):
        assert {name for name in saved["params"]} == {n for n, p in by_name.items() if any(p is q for q in group["params"])}, saved
        assert group["lr"] == saved["lr"] and group["weight_decay"] == saved["weight_decay"] and tuple(saved["betas"]) == group["betas"]
    for name, fields in state["state"].items():
        optimizer.state[by_name[name]] = dict(fields)
    return net, optimizer


def check(base):
    in_ranks(2, load_everything, base)
    check_continued(base)
    with tempfile.TemporaryDirectory() as scratch:
        from accelerate import PartialState
        from accelerate.utils import merge_fsdp_weights
        from safetensors.torch import load_file
        PartialState(cpu=True)
        merge_fsdp_weights(f"{base}/ours_sharded/pytorch_model_fsdp_0", scratch)
        equal(load_file(f"{scratch}/model.safetensors"), nested(f"{base}/ours_sharded/pytorch_model_fsdp_0")["model"], "merged")


if __name__ == "__main__":
    mode, folder = sys.argv[1:]
    if mode == "save":
        in_ranks(2, save, folder)
    else:
        check(folder)
