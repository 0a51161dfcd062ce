"""Python's Accelerate with its TensorBoard tracker, as ours.cpp: accelerate_peer.py STEPS FOLDER"""
import json
import math
import statistics
import sys
import time

from accelerate import Accelerator


def measure(steps, log):
    calls, before = [], time.process_time()
    for step in range(steps):
        time.sleep(0.005)
        begin = time.perf_counter()
        log(step)
        calls.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(calls), (time.process_time() - before) * 1e6 / steps


steps, folder = int(sys.argv[1]), sys.argv[2]
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
accelerator.init_trackers("run")
idle = measure(steps, lambda step: None)
with_log = measure(steps, lambda step: accelerator.log({"loss": math.sin(step)}, step=step))
accelerator.end_training()
print(json.dumps({"contestant": "accelerate", "call_us": with_log[0], "processor_us": with_log[1] - idle[1]}))
