#!/usr/bin/env python3
"""The cost of our own checks and counts: each with and without, in turns within one process, and how neighbours differ.

  counts   the counts behind receipts, in DDP and FSDP steps. objdump finds their instructions, and the program takes
           them out of itself and puts them back between steps (benchmarks/counts_switch.hpp); it ends where a step
           without counts has counted all the same.
  facade   the 24 bytes that ranks exchange before a collective of the facade
  hook     DDP's hook behind each parameter

usage: prices.py [--bin build/release/bin] [--steps 400] [--rounds 3] [--only TASK]
Needs x86; prints a table for benchmarks/results.
"""
import argparse
import json
import os
import random
import re
import statistics
import subprocess
import tempfile

parser = argparse.ArgumentParser()
parser.add_argument("--bin", default="build/release/bin")
parser.add_argument("--steps", type=int, default=400, help="of the smallest model; larger ones take fewer")
parser.add_argument("--rounds", type=int, default=3, help="processes for each row")
parser.add_argument("--only", default="", choices=["", "counts", "facade", "hook"])
args = parser.parse_args()
WARM_UP = 4


def launch(ranks, *command, **env):
    words = [os.path.join(args.bin, "accelerate"), "launch", "-q", "--cpu", "--num_cpu_threads_per_process", "1"]
    words += ["--num_processes", str(ranks), *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **env}, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def pairs(times, on):
    """(with, without) of neighbours."""
    return [(times[i], times[i + 1]) if on[i] else (times[i + 1], times[i]) for i in range(0, len(times) - 1, 2)]


def middle(numbers):
    """The mean of their middle half: steadier than the median, and deaf to the steps in which somebody else ran."""
    quarter = len(numbers) // 4
    return statistics.fmean(sorted(numbers)[quarter:len(numbers) - quarter])


def price(both):
    """(without, the difference, its 95 % interval by resampling)"""
    differences = [a - b for a, b in both]
    draw = random.Random(0)
    means = sorted(middle(draw.choices(differences, k=len(differences))) for _ in range(1000))
    return middle([b for _, b in both]), middle(differences), means[25], means[974]


def sites(program):
    """(offset, length) of each instruction that adds to a count: to one of the arrays, or by a register that the same
    function loads with its address."""
    names = subprocess.run(["nm", "-S", program], capture_output=True, text=True, check=True).stdout
    values = "_ZN10accelerate6counts6detail6values"  # one for each module's enum
    sizes = {name: int(size, 16) for size, name in re.findall(rf"^\w+ (\w+) \w ({values}\w+)$", names, re.M)}
    found, registers, last = [], {}, None  # registers: the size of the array behind each
    command = ["objdump", "-d", "--no-show-raw-insn", program]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.endswith(">:"):
            registers = {}
        code = re.match(r"\s*([0-9a-f]+):\s+(.*)", line)
        if not code:
            continue
        at, text = int(code.group(1), 16), code.group(2)
        if last is not None:
            found.append((last, at - last))
            last = None
        if re.match(r"lock (addq \$0x1|add %r\w+),", text):
            base = re.search(r"(0x[0-9a-f]+)?\((%\w+)(?:,%\w+,8)?\)", text)
            by_register = base and base.group(2) in registers and int(base.group(1) or "0", 16) < registers[base.group(2)]
            if values in text or by_register:
                last = at
        elif text.startswith("call"):
            kept = ("%rbx", "%rbp", "%r12", "%r13", "%r14", "%r15")
            registers = {name: size for name, size in registers.items() if name in kept}
        elif written := re.search(r"[, ](%\w+)(?:\s+#.*)?$", text):
            if text.startswith("lea") and (array := re.search(rf"{values}\w+", text)):
                registers[written.group(1)] = sizes[array.group()]
            elif not re.match(r"cmp|test|push|pop|j", text):  # after a pop comes another path
                registers.pop(written.group(1), None)
                registers.pop(written.group(1).replace("%e", "%r"), None)
    return found


def show(name, unit, both):
    without, difference, low, high = price(both)
    share = "-"
    if difference < 100 * without:
        share = "{:+.2f} ({:+.2f} to {:+.2f}) %".format(*(100 * part / without for part in (difference, low, high)))
    best = [sorted(series)[len(series) // 10] for series in zip(*both)]
    print(f"| {name} | {best[1]:.3f} | {best[0]:.3f} | {without:.3f} {unit} | "
          f"{difference:+.4f} ({low:+.4f} to {high:+.4f}) | {share} | {len(both)} |", flush=True)


def counts():
    for name, program, words, steps in [
        ("DDP, MLP 1 M in 64 layers", "bench_ddp_step", ["mlp"], args.steps),
        ("DDP, GPT 33.7 M", "bench_ddp_step", ["gpt"], max(args.steps // 20, 24)),
        ("FSDP, 100 units of 1 k", "bench_fsdp_step", ["narrow", "2"], max(args.steps // 2, 24)),
        ("FSDP, GPT 33.7 M", "bench_fsdp_step", ["gpt", "2"], max(args.steps // 20, 24)),
    ]:
        path = os.path.join(args.bin, program)
        with tempfile.NamedTemporaryFile("w", suffix=".sites") as file:
            lines = sites(path)
            file.writelines(f"{at} {length}\n" for at, length in lines)
            file.flush()
            wall, cpu, adds, nanoseconds = [], [], 0, []
            for _ in range(args.rounds):
                result = launch(2, path, words[0], steps, *words[1:], BENCH_COUNTS=file.name)
                on = result["counted"][WARM_UP:]
                adds = max(adds, result["adds"])
                nanoseconds.append(result["add_ns"])
                wall += pairs(result["ms"][WARM_UP:], on)
                cpu += pairs(result["cpu_ms"][WARM_UP:], on)
        show(f"{name}, wall", "ms", wall)
        show(f"{name}, CPU", "ms", cpu)
        share = adds * min(nanoseconds) / price(cpu)[0] / 1e4
        print(f"|   it counts {adds} times of {min(nanoseconds):.1f} ns | | | | | {share:.4f} % | |", flush=True)


def facade():
    for ranks in [2, 4]:
        for size in [1 << 10, 1 << 20]:
            series = {}
            for _ in range(args.rounds):
                result = launch(ranks, os.path.join(args.bin, "bench_comm"), "facade", size, args.steps)
                for name, (first, second) in result.items():
                    series.setdefault(name, []).extend(zip(first[WARM_UP:], second[WARM_UP:]))
            for name, both in series.items():
                show(f"{name}, {size >> 10} KB, {ranks} ranks", "us", both)


def hook():
    both = []
    for _ in range(args.rounds):
        first, second = launch(2, os.path.join(args.bin, "bench_comm"), "hook", args.steps)["backward, CPU"]
        both += zip(first[WARM_UP:], second[WARM_UP:])
    show("backward of 128 parameters, 2 ranks, CPU", "us", both)


print("| what | best tenth: without | with | middle: without | difference (its 95 % interval) | share of it | pairs |")
print("|---" * 7 + "|")
for task in [counts, facade, hook]:
    if args.only in ("", task.__name__):
        task()
