#!/usr/bin/env python3
"""The same step by DeepSpeedCPUAdam, which compiles its operator when it is first used. usage: deepspeed_peer.py [MILLIONS OF ELEMENTS [ROUNDS]]; threads by OMP_NUM_THREADS; prints JSON: milliseconds, best and median."""
import json, os, statistics, sys, time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

count = int(sys.argv[1] if len(sys.argv) > 1 else 100) * 1_000_000
parameter = torch.nn.Parameter(torch.randn(count))
parameter.grad = torch.randn(count)
optimizer = DeepSpeedCPUAdam([parameter], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, adamw_mode=True)
optimizer.step()
times = []
for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 7):
    start = time.perf_counter()
    optimizer.step()
    times.append((time.perf_counter() - start) * 1000)
print(json.dumps({"deepspeed": [round(min(times), 2), round(statistics.median(times), 2)]}))
