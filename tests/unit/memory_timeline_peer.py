"""PyTorch's memory timeline of what memory_timeline_test.cpp runs, too. usage: memory_timeline_peer.py RAW.json.gz OUT.json"""
import sys
import warnings

import torch

warnings.simplefilter("ignore")
raw, plain = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.01)


def step():
    x = torch.full((50, 64), 0.5)
    y = model(x)
    loss = y.mul(y).sum()
    loss.backward()
    model.zero_grad()


step()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True,
                            with_stack=True) as prof:
    for _ in range(2):
        step()
prof.export_memory_timeline(raw, "cpu")
prof.export_memory_timeline(plain, "cpu")
