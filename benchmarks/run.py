#!/usr/bin/env python3
"""Runs the contestants of each task in turns on this machine, compares their answers first, then prints and saves their times.

usage: run.py --bin build/release/bin [--python PYTHON] [--data FOLDER] [--deepspeed PYTHON] [--before FOLDER] [--llama_cpp FOLDER] [--rounds 3] [--only TASK] [--out FILE.md]
PYTHON needs torch, accelerate, transformers and gguf; without it only our own times are shown. The first FOLDER is what scripts/fetch_data.sh filled; without it the tasks on real weights are
left out. --deepspeed PYTHON has deepspeed 0.19.8 (`DS_BUILD_OPS=0 pip install deepspeed==0.19.8`) besides. --before FOLDER: the programs of another version of this project instead of the peers. The last FOLDER is where `pip install --target FOLDER llama-cpp-python` has put that (it compiles for a quarter of an hour); it computes with 4-bit weights, the others with fp32.
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

    def binary(task):
        return os.path.join(args.bin, "bench_" + task)

    launch = [ours, "launch", "-q", "--cpu", "--num_cpu_threads_per_process", "1", "--num_processes"]
    # name, command of each contestant, what is timed ("steps": the median of the steps after the first 2; "passes": the best; "wall": the whole process)
    yield "DDP step, GPT 33.7 M, 2 ranks", {"ours": launch + ["2", binary("ddp_step"), "gpt", "8"], "accelerate": peer + [script("ddp_step"), "gpt", "8"]}, "steps"
    yield "DDP step, MLP 1 M in 64 layers, 2 ranks", {"ours": launch + ["2", binary("ddp_step"), "mlp", "200"], "accelerate": peer + [script("ddp_step"), "mlp", "200"]}, "steps"
    yield "loader, 625 batches of 32, no workers", {"ours": [binary("dataloader"), "0"], "accelerate": [args.python, script("dataloader"), "0"]}, "passes"
    yield "loader, 625 batches of 32, 2 workers", {"ours": [binary("dataloader"), "2"], "accelerate": [args.python, script("dataloader"), "2"]}, "passes"
    yield "launch of a program that does nothing", {"ours": launch + ["1", "/bin/true"], "accelerate": alone + ["--no_python", "/bin/true"]}, "wall"
    yield "launch to the end of the first step, 2 ranks", {"ours": launch + ["2", binary("startup")], "accelerate": peer + [script("startup")]}, "wall"
    for name, model, steps in [("GPT 33.7 M", "gpt", 8), ("BERT-base, 110 M", "bert", 5), ("100 units of 1 k", "narrow", 100)]:
        contestants = {}
        for version in ["1", "2"]:
            contestants["ours, v" + version] = launch + ["2", binary("fsdp_step"), model, str(steps), version]
        for version in ["1", "2"]:
            contestants["FSDP" + version] = peer + [os.path.join(HERE, "fsdp_step", "torch_fsdp.py"), model, str(steps), version]
        yield f"FULL_SHARD step, {name}, 2 ranks", contestants, "steps"
    for place, shared in [("shared memory", "1"), ("sockets", "0")]:
        contestants = {}
        for name, asked in [("ours", []), ("ours, step_in_backward", ["FSDP_STEP_IN_BACKWARD=true"]), ("ours, step_at_once", ["FSDP_STEP_AT_ONCE=true"])]:
            contestants[name] = ["env", "ACCELERATE_SHARED_MEMORY=" + shared, *asked, *launch, "2", binary("fsdp_step"), "gpt", "12", "2"]
        yield f"a step within backward, GPT 33.7 M, 2 ranks, {place}", contestants, "steps"
    for name, model, steps in [("GPT 33.7 M", "gpt", 8), ("BERT-base, 110 M", "bert", 5)]:
        own = {kind: launch + ["2", binary("fsdp_step"), model, str(steps), kind] for kind in ["ddp", "2", "zero1", "zero2", "zero3"]}
        contestants = {"ours, DDP": own["ddp"], "ours, FSDP v2": own["2"]}
        for stage in "123":
            contestants[f"ours, stage {stage}"] = own["zero" + stage]
            if args.deepspeed:
                contestants[f"DeepSpeed, stage {stage}"] = [args.deepspeed, *peer[1:], os.path.join(HERE, "fsdp_step", "deepspeed_peer.py"), model, str(steps), stage]
        yield f"ZeRO step, {name}, 2 ranks", contestants, "steps"
    if args.data:
        weights = os.path.join(args.data, "smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
        for threads in sorted({1, os.cpu_count()}):
            with_threads = ["env", f"OMP_NUM_THREADS={threads}"]
            for name, task, kind in [("model and tokenizer from GGUF", "load", "passes"), ("a token", "decode", "steps")]:
                command = [task, weights, "64"]
                contestants = {"ours": with_threads + [binary("generate")] + command, "transformers": with_threads + [args.python, os.path.join(HERE, "generate", "transformers_peer.py")] + command}
                if args.llama_cpp:
                    contestants["llama.cpp, 4 bits"] = with_threads + [f"PYTHONPATH={args.llama_cpp}", args.python, os.path.join(HERE, "generate", "llama_cpp_peer.py")] + command
                yield f"SmolLM2 135 M, {name}, {threads} threads", contestants, kind
            yield f"SmolLM2 135 M, reading all weights once, {threads} threads", {"ours": with_threads + [binary("generate"), "read", weights]}, "passes"


def versions(contestants, args):
    """Ours, and the same with another version's programs."""
    ours = {key: command for key, command in contestants.items() if key.startswith("ours")}
    return ours | {key.replace("ours", "before"): [word.replace(args.bin, args.before, 1) for word in command] for key, command in ours.items()}


def close(a, b):
    return len(a) == len(b) and all(abs(x - y) <= 2e-5 * max(1, abs(x), abs(y)) for x, y in zip(a, b))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--python", default=os.environ.get("ACCELERATE_TEST_PYTHON", ""))
    parser.add_argument("--data", default=os.environ.get("ACCELERATE_TEST_DATA", ""))
    parser.add_argument("--before", default="")
    parser.add_argument("--deepspeed", default="")
    parser.add_argument("--llama_cpp", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    tables = {}  # by names of contestants
    memory = []
    for name, contestants, kind in tasks(args):
        if args.only not in name:
            continue
        if args.before:
            contestants = versions(contestants, args)
        elif not args.python:
            contestants = {key: command for key, command in contestants.items() if key.startswith("ours") or key.startswith("DeepSpeed")}
        samples = {key: [] for key in contestants}
        answers, sizes = {}, {}
        for _ in range(args.rounds):  # in turns: the machine's mood hits all alike
            for key, command in contestants.items():
                result, wall = run(command)
                answers[key] = result["answer"]
                samples[key].append(wall if kind == "wall" else statistics.median(result["ms"][2:]) if kind == "steps" else min(result["ms"]))
                if "rss_mb" in result:
                    sizes[key] = {unit: max(result.get(unit, 0), sizes.get(key, {}).get(unit, 0)) for unit in ["rss_mb", "pss_mb", "parameters_mb", "parameters_bound_mb"]}
        first = next(iter(answers))
        for key, answer in answers.items():
            if key.endswith("4 bits"):  # computes with rounded numbers: the same text at first, not forever
                same = next((i for i, (a, b) in enumerate(zip(answers[first], answer)) if a != b), len(answer))
                print(f"{name}: {key}: {same} of {len(answer)} ids are the same", flush=True)
                if same >= min(16, len(answer)):
                    continue
            if not close(answers[first], answer):
                sys.exit(f"{name}: the answers differ, so times mean nothing: {first} {answers[first][:5]}, {key} {answer[:5]}")
        exact = all(answer == answers[first] for answer in answers.values())
        if args.before:
            print(f"{name}: answers are {'equal to the bit' if exact else 'not equal to the bit'}", flush=True)
        best = {key: min(values) for key, values in samples.items()}
        ours, peers = ([ms for key, ms in best.items() if key.startswith("ours") == mine] for mine in (True, False))
        ratio = f"{min(peers) / min(ours):.2f}x" if peers else "-"
        cells = [f"{min(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in samples.values()]
        row = f"| {name} | {' | '.join(cells)} | {ratio} |"
        print(row, flush=True)
        tables.setdefault(tuple(contestants), []).append(row)
        for key, size in sizes.items():
            held = f"{size['parameters_mb']:.1f} of {size['parameters_bound_mb']:.1f}" if size["parameters_bound_mb"] else "-"
            memory.append(f"| {name} | {key} | {size['rss_mb']:.0f} | {size['pss_mb']:.0f} | {held} |")
            print(memory[-1], flush=True)
    lines = [
        f"# Side by side, {time.strftime('%Y-%m-%d')}",
        "",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread per rank, {args.rounds} rounds in turns; load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.",
        "Milliseconds, best (range over rounds). Answers were equal within 2e-5, relative. The last column says how many times faster our fastest is than their fastest.",
    ]
    for contestants, rows in tables.items():
        lines += ["", f"| task | {' | '.join(contestants)} | ratio |", "|---" * (len(contestants) + 2) + "|"] + rows
    if memory:
        lines += [
            "",
            "Memory of the larger rank in MB (RSS: the peak over the steps after the first 2; PSS: after a forward or a backward, shared pages divided by those who share them; parameters: the peak of what",
            "`residency::stats()` counts plus this rank's shards, of what shard + two largest units + root would be, in 10^6 bytes).",
            "",
            "| task | contestant | peak RSS | PSS | parameters |",
            "|---|---|---|---|---|",
        ] + memory
    if args.out:
        with open(args.out, "w") as file:
            file.write("\n".join(lines) + "\n")


main()
