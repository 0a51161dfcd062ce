#!/usr/bin/env python3
"""Our offloading next to Hugging Face Accelerate's: one model, the same ways, in turns; answers are compared before times.

usage: compare.py --bin build/release/bin --python PYTHON --model FOLDER [--rounds 2] [--tokens 5] [--only WAY] [--out FILE.md]
FOLDER is made if it is not there (2 GB; ways that offload to disk need as much again while they run). PYTHON needs torch, transformers and accelerate.
"""
import argparse, json, os, platform, statistics, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))


def run(command):
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())), "BENCH_START_MS": str(time.time() * 1000)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def sequential_read(folder, flags):
    """GB/s at which dd reads the checkpoint once from the disk: through the system's cache, which mapped weights fill too, or (iflag=direct) past it."""
    path = os.path.join(folder, "model.safetensors")
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    begin = time.time()
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M", *flags], check=True, capture_output=True)
    return os.path.getsize(path) / 1e9 / (time.time() - begin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--python", default=os.environ.get("ACCELERATE_TEST_PYTHON", ""))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    ours, peer = [os.path.join(args.bin, "bench_big_model")], [args.python, os.path.join(HERE, "accelerate_peer.py")]
    if not os.path.exists(os.path.join(args.model, "model.safetensors")):
        subprocess.run(peer + ["write", args.model], check=True)
    load_before = os.getloadavg()[0]
    # name, our way, their way, cold?
    tasks = [
        ("memory, warm", "memory", "memory", []),
        ("cpu_offload, warm", "cpu_offload", "cpu_offload", []),
        ("load_checkpoint_and_dispatch to disk, warm", "load", "load", []),
        ("disk_offload, warm", "disk_offload", "disk_offload", []),
        ("load_checkpoint_and_dispatch to disk, cold", "load", "load", ["cold"]),
        ("read within 600 MB", "read", "load", []),
    ]
    lines, disk = [], {"through the cache": [], "past it": []}
    size = os.path.getsize(os.path.join(args.model, "model.safetensors"))
    reading = []  # GB/s of ours
    for name, our_way, their_way, cold in tasks:
        if args.only and args.only not in name:
            continue
        results = {"ours": [], "accelerate": []}
        for _ in range(args.rounds):  # in turns: the machine's mood hits both alike
            if cold or our_way == "read":
                disk["through the cache"].append(sequential_read(args.model, []))
                disk["past it"].append(sequential_read(args.model, ["iflag=direct"]))
            results["ours"].append(run(ours + [our_way, args.model, str(args.tokens)] + cold))
            results["accelerate"].append(run(peer + [their_way, args.model, str(args.tokens)] + cold))
        a, b = results["ours"][-1]["answer"], results["accelerate"][-1]["answer"]
        if any(abs(x - y) > 1e-4 * max(1, abs(y)) for x, y in zip(a, b)):
            sys.exit(f"{name}: the answers differ, so times mean nothing: {a} {b}")
        best = {who: {"load": min(r["load_ms"] for r in rs), "first": min(r["first_ms"] for r in rs), "token": min(statistics.median(r["ms"][1:]) for r in rs), "first token": min(r["ms"][0] for r in rs)} for who, rs in results.items()}
        cells = [f"{best['ours'][k]:.0f} / {best['accelerate'][k]:.0f} ({best['accelerate'][k] / best['ours'][k]:.1f}x)" for k in ("load", "first", "first token", "token")]
        if cold or our_way == "read":
            reading.append(f"{name}: {size / 1e6 / best['ours']['first token']:.2f}" + (f", later tokens {size / 1e6 / best['ours']['token']:.2f}" if our_way == "read" else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = "\n".join(
        [
            f"# Weights elsewhere, side by side, {time.strftime('%Y-%m-%d')}",
            "",
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {args.rounds} rounds in turns, best of them; load average {load_before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.",
            "A LLaMA of 493 M fp32 parameters, a forward of one token; milliseconds, ours / Hugging Face Accelerate (how many times faster). Answers were equal within 1e-4, relative.",
            "Reading all weights from the disk, best, GB/s: dd (8 MB at a time) " + ", ".join(f"{way} {max(rates):.2f}" for way, rates in disk.items() if rates) + "; ours, with the computation: " + "; ".join(reading) + ".",
            "",
            "| task | load | process start to first token | first token | later tokens, median |",
            "|---|---|---|---|---|",
        ]
        + lines
    )
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")
    print(text)


main()
