# A Python program whose rank 1 is killed once: all ranks must find each other again in the next round.
import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) + dist.get_rank()
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
# One write, so that the other rank's line does not come in between.
os.write(1, f"sum {total.item()} after restart {os.environ['TORCHELASTIC_RESTART_COUNT']}\n".encode())
dist.destroy_process_group()
