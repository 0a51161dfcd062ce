"""Peer of fsdp_parity_test.cpp: trains the same model on the same data with PyTorch's own FSDP1 and FSDP2.

usage: fsdp_parity.py FOLDER FILE   reads FOLDER/plan.json and FOLDER/start.safetensors, writes FILE: the plan, and by world size and configuration losses and gradient norms

The test reads tests/dist/fsdp_losses.json; with ACCELERATE_TEST_RECORD=1 it runs this first, which takes a minute and a half of processor time.
torch is imported once: the ranks of all world sizes are forks of this process, which has run no operator yet.
"""
import contextlib
import functools
import json
import os
import sys
import traceback
import warnings

import torch
import torch._dynamo  # optimizers do it when they are made; here it is done once
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

# FSDP1 and NO_SHARD are deprecated, one rank always is NO_SHARD: known.
warnings.simplefilter("ignore")


class Linear(nn.Linear):
    """As LibTorch's C++ module computes it: the bias is added to a result that is rounded already, which matters in bf16."""

    def forward(self, x):
        y = x.matmul(self.weight.t())
        if self.bias is not None:
            y += self.bias
        return y


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width, bias=False), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.l1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.l2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.layers = layers
        for i in range(layers):
            self.add_module(f"h{i}", Block(width, 4))
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids):
        x = self.wte(ids)
        for i in range(self.layers):
            x = getattr(self, f"h{i}")(x)
        return nn.functional.linear(self.norm(x) * self.scale, self.wte.weight)


def shard_1(model, config, mesh):
    policy = {
        "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=config["min_num_params"]),
        "none": None,
    }[config["wrap"]]
    precision = {"": None, "bf16": MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16), "bf16_reduce_fp32": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)}[config["precision"]]
    strategy = ShardingStrategy[config["strategy"]]
    hybrid = {"device_mesh": mesh} if mesh else {}
    return FullyShardedDataParallel(
        model, sharding_strategy=strategy, auto_wrap_policy=policy, mixed_precision=precision, backward_prefetch=BackwardPrefetch.BACKWARD_PRE, use_orig_params=True, device_id=torch.device("cpu"), **hybrid
    )


def shard_2(model, config, mesh):
    """As the reference's fsdp2_prepare_model: units from the bottom up, the root last."""
    wrapped = {
        "transformer": lambda module: isinstance(module, Block),
        "size": lambda module: sum(p.numel() for p in module.parameters()) > config["min_num_params"],
        "none": lambda module: False,
    }[config["wrap"]]
    precision = {"": {}, "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}, "bf16_reduce_fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}}[config["precision"]]
    options = {"reshard_after_forward": config["reshard"], "mp_policy": MixedPrecisionPolicy(**precision), "mesh": mesh}
    for module in reversed(list(model.modules())[1:]):
        if wrapped(module):
            fully_shard(module, **options)
    return fully_shard(model, **options)


@contextlib.contextmanager
def no_sync(model, version):
    if version == 1:
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def train(config, plan, start, rank, world):
    model = Gpt(plan["vocabulary"], plan["width"], plan["layers"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    replicas = config["replicas"]
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
    version = config["version"]
    model = (shard_1 if version == 1 else shard_2)(model, config, mesh)
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        (decay if name.replace("_fsdp_wrapped_module.", "") in matrices else rest).append(parameter)
    optimizer = torch.optim.AdamW([{"params": decay, "lr": 3e-3, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2, "weight_decay": 0.0}], fused=True)
    losses, norms = [], []
    batches, micro_steps = start["batches"], config["accumulate"]
    for step in range(plan["steps"]):
        for micro in range(micro_steps):
            ids = batches[step * micro_steps + micro].chunk(world)[rank]
            with no_sync(model, version) if micro + 1 < micro_steps else contextlib.nullcontext():
                logits = model(ids[:, :-1]).float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                (loss / micro_steps).backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
        norm = model.clip_grad_norm_(plan["max_norm"]) if version == 1 else nn.utils.clip_grad_norm_(model.parameters(), plan["max_norm"]).full_tensor()
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def run(folder, plan, rank, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{world}", rank=rank, world_size=world)
    start = load_file(f"{folder}/start.safetensors")
    results = {config["name"]: train(config, plan, start, rank, world) for config in plan["configurations"] if world in config["world_sizes"]}
    if rank == 0:
        with open(f"{folder}/torch_{world}.json", "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


def main():
    folder, recorded = sys.argv[1:]
    with open(f"{folder}/plan.json") as file:
        plan = json.load(file)
    for world in plan["world_sizes"]:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                try:
                    run(folder, plan, rank, world)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stderr.flush()
                os._exit(code)
            children.append(child)
        for _ in range(world):
            _, status = os.wait()
            if status:  # the others wait for it in vain
                for child in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, 9)
                sys.exit(f"a rank of {world} failed with status {status}")
    results = {}
    for world in plan["world_sizes"]:
        with open(f"{folder}/torch_{world}.json") as file:
            results[world] = {name: {key: [float(f"{value:.9g}") for value in values] for key, values in curve.items()} for name, curve in json.load(file).items()}
    with open(recorded, "w") as file:
        file.write(json.dumps({"torch": torch.__version__, "plan": plan, "results": results}).replace('}, "', '},\n"') + "\n")


main()
