#!/usr/bin/env python3
"""The cost of one logged number in each step of 5 ms, here and in Python's Accelerate. Both must have written the same curve.

usage: compare.py --bin build/release/bin --python PYTHON [--steps 1000]     PYTHON needs accelerate and tensorboard
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
READ = """
import glob, sys
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
for path in glob.glob(sys.argv[1] + "/run/events*"):
    for event in LegacyEventFileLoader(path).Load():
        for value in event.summary.value:
            print(event.step, value.tag, value.simple_value)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--steps", default="1000")
    args = parser.parse_args()
    curves = {}
    print("| | a call, median | of a step of 5 ms | processor time of all threads, a step | of it |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for command in ([os.path.join(args.bin, "bench_trackers")], [args.python, str(HERE / "accelerate_peer.py")]):
            folder = os.path.join(scratch, str(len(curves)))
            done = subprocess.run([*command, args.steps, folder], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
            result = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
            call, processor = result["call_us"], result["processor_us"]
            print(f"| {result['contestant']} | {call:.1f} us | {call / 50:.3f} % | {processor:.1f} us | {processor / 50:.3f} % |")
            curves[result["contestant"]] = subprocess.run([args.python, "-c", READ, folder], capture_output=True, text=True, check=True).stdout
    ours, theirs = curves.values()
    if ours != theirs or ours.count("\n") != int(args.steps):
        sys.exit("the curves differ: the times mean nothing")


if __name__ == "__main__":
    main()
