"""Ranks of PyTorch's on this machine, for the peers of tests."""
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_ranks(count, function, *arguments):
    """Calls it in `count` forks, which share the imports; so this process must not have computed anything yet. It must be able to run again."""
    for last_try in (False, True):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            return mp.start_processes(start, args=(count, port, function, arguments), nprocs=count, start_method="fork")
        except mp.ProcessExitedException as error:
            # On a busy machine a rank of PyTorch's corrupts its own heap once in some hundred starts ("malloc(): unaligned tcache chunk detected").
            if last_try or not error.signal_name:
                raise
            print(f"{error}; tried again", file=sys.stderr)


def start(rank, count, port, function, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    function(*arguments)
    dist.destroy_process_group()
