"""Peer of the checkpoint tests: what PyTorch makes of the files, and files that PyTorch wrote.

usage: checkpoint_peer.py read FOLDER    loads every file as weights_only and goes on training for two steps; prints what it found and the weights
       checkpoint_peer.py write FOLDER   trains the same model and writes optimizer.bin and scheduler.bin beside its weights
"""
import random
import sys

import numpy
import torch
import torch._dynamo  # optimizers do it when they are made; here it is done once
from safetensors.torch import load_file, save_file


def model_and_optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def step(model, optimizer, number):
    x = torch.arange(8, dtype=torch.float32).view(2, 4) / 10 + number
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def show(model):
    for name, tensor in model.state_dict().items():
        print(name, " ".join(f"{value:.7f}" for value in tensor.flatten().tolist()))


folder = sys.argv[2]
model, optimizer = model_and_optimizer()
if sys.argv[1] == "read":
    model.load_state_dict(load_file(f"{folder}/model.safetensors"))
    optimizer.load_state_dict(torch.load(f"{folder}/optimizer.bin", weights_only=True))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    schedule.load_state_dict(torch.load(f"{folder}/scheduler.bin", weights_only=True))
    random_states = torch.load(f"{folder}/random_states_0.pkl", weights_only=True)
    torch.set_rng_state(random_states["torch_manual_seed"])
    # Python's own generators, which load_state wants too, are as set_seed() would leave them.
    random.setstate(random_states["random_state"])
    numpy.random.set_state(random_states["numpy_random_seed"])
    assert random.getstate() == random.Random(torch.initial_seed()).getstate()
    assert numpy.random.rand() == numpy.random.RandomState(torch.initial_seed() & 0xffffffff).rand()
    custom = torch.load(f"{folder}/custom_checkpoint_0.pkl", weights_only=True)
    print("lr", optimizer.param_groups[0]["lr"], "last_epoch", schedule.last_epoch, "step", random_states["step"], "custom", custom["answer"], "draw", torch.randint(10**9, (1,)).item())
    for number in (2, 3):
        step(model, optimizer, number)
    show(model)
else:
    torch.manual_seed(3)
    model, optimizer = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    for number in (0, 1):
        step(model, optimizer, number)
        schedule.step()
    save_file(model.state_dict(), f"{folder}/model.safetensors")
    torch.save(optimizer.state_dict(), f"{folder}/optimizer.bin")
    torch.save(schedule.state_dict(), f"{folder}/scheduler.bin")
    for number in (2, 3):
        step(model, optimizer, number)
    show(model)
