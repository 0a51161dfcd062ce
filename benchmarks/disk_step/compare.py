#!/usr/bin/env python3
"""Steps with states on a disk, in turns with the same bytes read and written by themselves, and with DeepSpeed's.

usage: compare.py --bin build/release/bin --folder FOLDER [--deepspeed PYTHON] [--rounds 5] [--steps 5]
"""
import argparse, json, os, statistics, subprocess, sys

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--deepspeed", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    modes = ["memory", "nvme", "pipelined"]
    contestants = {mode: [os.path.join(args.bin, "bench_disk_step"), mode] for mode in ["raw", *modes]}
    if args.deepspeed:
        contestants |= {f"DeepSpeed, {mode}": [args.deepspeed, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", os.path.join(HERE, "deepspeed_peer.py"), mode] for mode in modes}
    times, answers, moved = {key: [] for key in contestants}, {}, {}
    for _ in range(args.rounds):
        for key, command in contestants.items():
            done = subprocess.run([*command, args.folder, str(args.steps)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode or not lines:
                sys.exit(f"{key} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
            result = json.loads(lines[-1])
            times[key].append(statistics.median(result["ms"][1:]))
            moved[key] = result.get("bytes", 0)
            answers[key] = result["answer"]
    for key, answer in answers.items():
        if answer and any(abs(a - b) > 2e-2 * abs(b) for a, b in zip(answer, answers["memory"])):
            sys.exit(f"{key} computes something else: {answer}, expected {answers['memory']}")
    best = {key: statistics.median(ms) for key, ms in times.items()}
    print("| | ms a step, median of rounds | MB moved | MB/s | of raw |\n|---|---|---|---|---|")
    raw = moved["raw"] / best["raw"]
    for key, ms in best.items():
        rate = moved[key] / ms
        print(f"| {key} | {ms:.0f} | {moved[key] / 1e6:.0f} | {rate / 1e3:.0f} | {rate / raw:.2f} |" if moved[key] else f"| {key} | {ms:.0f} | | | |")


if __name__ == "__main__":
    main()
