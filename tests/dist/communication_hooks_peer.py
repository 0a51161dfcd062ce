"""Peer of communication_hooks_test.cpp: averages the same gradients with PyTorch's DistributedDataParallel and the reference's communication hooks.

usage: communication_hooks_peer.py FOLDER   reads FOLDER/plan.json, writes FOLDER/<configuration>.safetensors: of each step every 13th element of each averaged gradient
"""
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from python_ranks import in_ranks  # noqa: E402

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs  # noqa: E402

# batched_powerSGD_hook calls this with one matrix, which its check for a batch of matrices refuses in torch 2.13.
orthogonalize_batch = powerSGD_hook._orthogonalize
powerSGD_hook._orthogonalize = lambda matrices, epsilon=0: orthogonalize_batch(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

def one_after_the_other(hook):
    """Its second sums go out from threads of gloo's, in another order on each rank where there are several buckets, which ends in an error of gloo's."""
    def run(state, bucket):
        averaged = hook(state, bucket)
        averaged.wait()
        return averaged
    return run


powerSGD_hook.powerSGD_hook = one_after_the_other(powerSGD_hook.powerSGD_hook)
powerSGD_hook.batched_powerSGD_hook = one_after_the_other(powerSGD_hook.batched_powerSGD_hook)
# It refuses bf16 without CUDA, which gloo sums all the same.
torch.nn.parallel.DistributedDataParallel._check_comm_hook = lambda self, hook: None


class Recorded(torch.nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, gradients):
        loss = (self.weights[0] * gradients[0]).sum()
        for weight, gradient in zip(self.weights[1:], gradients[1:]):
            loss = loss + (weight * gradient).sum()
        return loss


def train(folder, plan):
    rank = dist.get_rank()
    for name, config in plan["configurations"].items():
        kwargs = DistributedDataParallelKwargs(
            bucket_cap_mb=1, comm_hook=DDPCommunicationHookType(config["hook"]), comm_wrapper=DDPCommunicationHookType(config["wrapper"]),
            comm_state_option=config["options"])
        model = torch.nn.parallel.DistributedDataParallel(Recorded(plan["shapes"]), bucket_cap_mb=1)
        kwargs.register_comm_hook(model)
        found = {}
        for step in range(plan["steps"]):
            model.zero_grad()
            generator = torch.Generator().manual_seed(1000 + 10 * step + rank)
            model([torch.randn(shape, generator=generator) for shape in plan["shapes"]]).backward()
            for i, weight in enumerate(model.module.weights):
                found[f"{step}.{i}"] = weight.grad.flatten()[::13].clone()
        if rank == 0:
            save_file(found, f"{folder}/{name}.safetensors")
        dist.barrier()


if __name__ == "__main__":
    plan = json.load(open(f"{sys.argv[1]}/plan.json"))
    in_ranks(plan["ranks"], train, sys.argv[1], plan)
