#!/usr/bin/env python3
"""Steps with states on a disk, in turns with the same bytes read and written by themselves, and with DeepSpeed's.

usage: compare.py --bin build/release/bin --folder FOLDER [--deepspeed PYTHON] [--rounds 5] [--steps 5] [--rows 1] [--threads 2]

With --rows of some thousand, backward takes as long as the disk does, and the last lines say how much of the disk's time steps within backward hide.
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
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="that compute")
    args = parser.parse_args()
    modes = ["memory", "nvme", "pipelined"]
    contestants = {mode: [os.path.join(args.bin, "bench_disk_step"), mode] for mode in ["raw", *modes, "memory_backward", "memory_at_once", "pipelined_backward"]}
    if args.deepspeed:
        contestants |= {f"DeepSpeed, {mode}": [args.deepspeed, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", os.path.join(HERE, "deepspeed_peer.py"), mode] for mode in modes}
    times, answers, moved = {key: [] for key in contestants}, {}, {}
    for _ in range(args.rounds):
        for key, command in contestants.items():
            done = subprocess.run([*command, args.folder, str(args.steps), str(args.rows)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)})
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
    # What the disk adds to a step, in plain order and within backward; and what the order alone changes.
    shown, left = best["pipelined"] - best["memory"], best["pipelined_backward"] - best["memory_backward"]
    print(f"\nThe disk adds {shown:.0f} ms in plain order, {left:.0f} ms within backward: {1 - left / shown:.0%} of it is hidden.")
    print(f"In memory a step within backward takes {best['memory_backward'] / best['memory']:.2f} of one in plain order, and one at once {best['memory_at_once'] / best['memory']:.2f}.")


if __name__ == "__main__":
    main()
