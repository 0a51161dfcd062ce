"""The same saves and loads by torch.distributed.checkpoint, see ours.cpp.

usage: torchrun --nproc_per_node 2 peer.py LAYOUT FOLDER MEGABYTES
"""
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

layout, folder, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
WIDTH = 1024
dist.init_process_group("gloo")
beside_training = dist.new_group(backend="gloo")  # its collectives come from another thread
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, megabytes * 1_000_000 // (12 * WIDTH * WIDTH)))])
if layout == "sharded":
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    call = model
else:
    call = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
x = torch.rand(8, WIDTH)


def step():
    begun = time.perf_counter()
    call(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return (time.perf_counter() - begun) * 1000


def timed(f):
    dist.barrier()
    begun = time.perf_counter()
    f()
    dist.barrier()
    return (time.perf_counter() - begun) * 1000


def state():
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def load():
    found = state()
    dcp.load(found, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


step(), step()
save = timed(lambda: dcp.save(state(), checkpoint_id=f"{folder}/dcp"))
loaded = timed(load)
again = timed(load)
plain = sum(step() for _ in range(8))
begun = time.perf_counter()
future = dcp.async_save(state(), checkpoint_id=f"{folder}/async", process_group=beside_training)
called = (time.perf_counter() - begun) * 1000
beside = sum(step() for _ in range(8))
rest = timed(future.result)
if dist.get_rank() == 0:
    print(json.dumps({"save": save, "load": loaded, "again": again, "call": called, "extra": beside - plain, "rest": rest}))
dist.destroy_process_group()
