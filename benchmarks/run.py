#!/usr/bin/env python3
"""Runs the contestants of each task in turns on this machine, compares their answers first, then prints and saves their times.

usage: run.py --bin build/release/bin [--python PYTHON] [--rounds 3] [--only TASK] [--out FILE.md]
PYTHON needs torch and accelerate; without it only our own times are shown.
"""
import argparse, json, os, platform, statistics, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))


def run(command, env=None):
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **(env or {})}, timeout=900)
    wall = (time.perf_counter() - begin) * 1000
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result = json.loads(lines[-1]) if lines else {"answer": [], "ms": []}
    return result, wall


def tasks(args):
    ours = os.path.join(args.bin, "accelerate")
    # `accelerate launch --cpu --num_processes 2` starts one process only; several on CPUs go through torchrun.
    peer = [args.python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    alone = [args.python, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1", "--num_processes", "1", "--num_cpu_threads_per_process", "1"]

    def script(task):
        return os.path.join(HERE, task, "accelerate_peer.py")

    launch = [ours, "launch", "-q", "--cpu", "--num_cpu_threads_per_process", "1", "--num_processes"]
    # name, our command, the peer's, what is timed ("steps": the median of the steps after the first 2; "passes": the best; "wall": the whole process)
    yield "DDP step, GPT 33.7 M, 2 ranks", launch + ["2", os.path.join(args.bin, "bench_ddp_step"), "gpt", "8"], peer + [script("ddp_step"), "gpt", "8"], "steps"
    yield "DDP step, MLP 1 M in 64 layers, 2 ranks", launch + ["2", os.path.join(args.bin, "bench_ddp_step"), "mlp", "200"], peer + [script("ddp_step"), "mlp", "200"], "steps"
    yield "loader, 625 batches of 32, no workers", [os.path.join(args.bin, "bench_dataloader"), "0"], [args.python, script("dataloader"), "0"], "passes"
    yield "loader, 625 batches of 32, 2 workers", [os.path.join(args.bin, "bench_dataloader"), "2"], [args.python, script("dataloader"), "2"], "passes"
    yield "launch of a program that does nothing", launch + ["1", "/bin/true"], alone + ["--no_python", "/bin/true"], "wall"
    yield "launch to the end of the first step, 2 ranks", launch + ["2", os.path.join(args.bin, "bench_startup")], peer + [script("startup")], "wall"


def close(a, b):
    return len(a) == len(b) and all(abs(x - y) <= 2e-5 * max(1, abs(x), abs(y)) for x, y in zip(a, b))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--python", default=os.environ.get("ACCELERATE_TEST_PYTHON", ""))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    rows = []
    for name, ours, peer, kind in tasks(args):
        if args.only not in name:
            continue
        contestants = {"ours": ours} | ({"accelerate": peer} if args.python else {})
        samples = {key: [] for key in contestants}
        answers = {}
        for _ in range(args.rounds):  # in turns: the machine's mood hits both alike
            for key, command in contestants.items():
                result, wall = run(command)
                answers[key] = result["answer"]
                samples[key].append(wall if kind == "wall" else statistics.median(result["ms"][2:]) if kind == "steps" else min(result["ms"]))
        if len(answers) == 2 and not close(*answers.values()):
            sys.exit(f"{name}: the answers differ, so times mean nothing: " + str({key: values[:5] for key, values in answers.items()}))
        best = {key: min(values) for key, values in samples.items()}
        ratio = best["accelerate"] / best["ours"] if "accelerate" in best else float("nan")
        text = {key: f"{min(v):.1f} ({min(v):.1f} to {max(v):.1f})" for key, v in samples.items()}
        rows.append(f"| {name} | {text['ours']} | {text.get('accelerate', '-')} | {ratio:.2f}x |")
        print(rows[-1], flush=True)
    head = [
        f"# Against torch and Hugging Face Accelerate, {time.strftime('%Y-%m-%d')}",
        "",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread per rank, {args.rounds} rounds in turns; milliseconds, best (range over rounds). Answers were equal within 2e-5, relative.",
        "The last column says how many times faster ours is.",
        "",
        "| task | ours | accelerate | ratio |",
        "|---|---|---|---|",
    ]
    if args.out:
        with open(args.out, "w") as file:
            file.write("\n".join(head + rows) + "\n")


main()
