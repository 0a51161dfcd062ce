"""bench_generate on codes next to llama.cpp on the same GGUF file: answers first, then times, in turns. Prints Markdown.

usage: compare.py BENCH_GENERATE FILE.gguf PYTHON [ROUNDS]      PYTHON has llama-cpp-python, compiled with the machine's own instructions

Times of one thread are of the processor, which others on the machine change little; those of two are of the clock.
"""
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TASKS = {"load": "64", "decode": "200", "prefill": "512"}


def run(command, threads):
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    return json.loads(subprocess.check_output(command, env=environment, stderr=subprocess.DEVNULL))


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def main(program, path, python, rounds="3"):
    load_before = os.getloadavg()[0]
    commands = {
        "ours": lambda task: [program, task, path, TASKS[task], "--codes"],
        "llama.cpp": lambda task: [python, os.path.join(HERE, "llama_cpp_peer.py"), task, path, TASKS[task]],
    }
    print("| task | threads | ours | llama.cpp | times | same first tokens | RSS ours | RSS llama.cpp |\n" + "|---" * 8 + "|")
    for threads in (1, 2):
        for task in TASKS:
            times, results = {name: [] for name in commands}, {}
            for _ in range(int(rounds)):
                for name, command in commands.items():
                    result = results[name] = run(command(task), threads)
                    times[name] += result["cpu_ms" if threads == 1 else "ms"]
            same = common(results["ours"]["answer"], results["llama.cpp"]["answer"])
            asked = 4 if task != "prefill" else 0
            if same <= asked:
                sys.exit(f"{task}: answers differ from the first new token on, so times mean nothing")
            best = {name: min(values) for name, values in times.items()}
            middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
            shown = {name: f"{best[name]:.2f} ({middle[name]:.2f}) ms" for name in commands}
            rate = {"load": 0, "decode": 1000, "prefill": 1000 * int(TASKS[task])}[task]
            if rate:
                shown = {name: f"{text}, {rate / best[name]:.0f} tokens/s" for name, text in shown.items()}
            rss = {name: f"{result['rss'] / 1e6:.0f} MB (peak {result['peak_rss'] / 1e6:.0f})" for name, result in results.items()}
            print(f"| {task} | {threads} | {shown['ours']} | {shown['llama.cpp']} | {best['llama.cpp'] / best['ours']:.2f} |"
                  f" {same - asked} of {len(results['ours']['answer']) - asked} | {rss['ours']} | {rss['llama.cpp']} |", flush=True)
    peer = run(commands["llama.cpp"]("load"), 1)
    print(f"\nBest of {rounds} rounds in turns (median). Load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after. "
          f"{peer['rss_before'] / 1e6:.0f} MB of llama.cpp's are Python with its library, before the model.")


main(*sys.argv[1:])
