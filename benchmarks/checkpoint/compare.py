#!/usr/bin/env python3
"""Saves, loads and saves behind training on two ranks, in turns with torch.distributed.checkpoint and with plain writes.

usage: compare.py --bin build/release/bin --python PYTHON --folder FOLDER [--megabytes 1000] [--rounds 5] [--layout whole|sharded]
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SHOWN = {"raw": "plain writes with fsync", "save": "save", "load": "load, right after the save", "again": "the same load again", "call": "save behind training: the call", "extra": "what 8 steps take longer meanwhile", "rest": "waiting for it after them"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--megabytes", default="1000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", choices=("whole", "sharded"), help="one of them alone")
    args = parser.parse_args()
    for layout in (args.layout,) if args.layout else ("whole", "sharded"):
        contestants = {
            "ours": [os.path.join(args.bin, "accelerate"), "launch", "-q", "--cpu", "--num_processes", "2", os.path.join(args.bin, "bench_checkpoint")],
            "DCP": [args.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", os.path.join(HERE, "peer.py")],
        }
        found = {name: [] for name in contestants}
        for _ in range(args.rounds):
            for name, command in contestants.items():
                shutil.rmtree(args.folder, ignore_errors=True)
                os.makedirs(args.folder)
                done = subprocess.run([*command, layout, args.folder, args.megabytes], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                if done.returncode or not lines:
                    sys.exit(f"{name} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
                found[name].append(json.loads(lines[-1]))
        print(f"\n{layout}, {found['ours'][0]['bytes'] / 1e6:.0f} MB, ms, median of {args.rounds} rounds\n\n| | ours | torch.distributed.checkpoint |\n|---|---|---|")
        for key, what in SHOWN.items():
            cells = [f"{statistics.median(one[key] for one in found[name]):.1f}" if key in found[name][0] else "" for name in contestants]
            print(f"| {what} | {' | '.join(cells)} |")
        if len({round(one["answer"], 3) for one in found["ours"]}) != 1:
            sys.exit("rounds compute different weights")
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
