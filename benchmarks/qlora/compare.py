"""A step of LoRA on MiniLM, in fp32 and in 4 bits, next to Python's on the same machine: in turns; medians of steps, the
best of the rounds.

usage: OMP_NUM_THREADS=2 compare.py BIN_LORA MODEL PAIRS [ROUNDS]     (BIN_LORA: the example by_feature/lora.cpp)
"""
import os
import re
import subprocess
import sys
import tempfile

STEPS = {1: 200, 4: 100, 16: 60}


def milliseconds(command, pattern):
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(re.search(pattern, run.stdout).group(1))


def main(program, model, pairs, rounds="3"):
    best = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(int(rounds)):
            for batch, steps in STEPS.items():
                ours = [program, "--model", model, "--pairs", pairs, "--only", "adapters", "--batch_size", str(batch),
                        "--train_size", str(batch * steps), "--eval_size", "16", "--output_dir", folder]
                peer = [sys.executable, os.path.join(os.path.dirname(__file__), "peer.py")]
                for kind, flags in (("fp32", []), ("nf4", ["--load_in_4bit"])):
                    found = {"ours": milliseconds(ours + flags, r"steps of ([0-9.]+) ms"),
                             "peer": milliseconds(peer + [kind, model, pairs, str(batch), str(steps)], r"median ([0-9.]+)")}
                    for who, ms in found.items():
                        best[batch, kind, who] = min(best.get((batch, kind, who), 1e9), ms)
    print("| batch | LoRA, ours | LoRA, Python | QLoRA, ours | QLoRA, Python |\n|---|---|---|---|---|")
    for batch in STEPS:
        print(f"| {batch} | " + " | ".join(f"{best[batch, kind, who]:.1f}" for kind in ("fp32", "nf4")
                                          for who in ("ours", "peer")) + " |")


main(*sys.argv[1:])
