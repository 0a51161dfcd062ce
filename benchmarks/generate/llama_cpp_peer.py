"""The same with llama.cpp (llama-cpp-python), which computes with the file's 4-bit weights.

usage: llama_cpp_peer.py load|decode|prefill FILE.gguf [TOKENS]
"""
import json
import os
import sys
import time

import llama_cpp


def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024


def prompt_of(model, count):
    text, ids, i = "", [], 0
    while len(ids) < count:
        text += f"Day {i} was long, and nobody knew what came next. "
        ids, i = model.tokenize(text.encode(), add_bos=False), i + 1
    return ids[:count]


def main(task, path, tokens="64"):
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    before = status("VmRSS")  # Python, numpy and the library's code
    begin, cpu = time.perf_counter(), time.process_time()
    model = llama_cpp.Llama(path, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    ms, cpu_ms = [(time.perf_counter() - begin) * 1000], [(time.process_time() - cpu) * 1000]
    count = int(tokens) if task == "decode" else 2
    ids = prompt_of(model, int(tokens)) if task == "prefill" else model.tokenize(b"Once upon a time", add_bos=False)
    if task in ("decode", "prefill"):
        ms, cpu_ms = [], []
    for _ in range(3 if task == "prefill" else 1):
        model.reset()
        result = [] if task == "prefill" else list(ids)
        wanted = len(result) + count
        first = True
        begin, cpu = time.perf_counter(), time.process_time()
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0, reset=True):
            result.append(token)
            if not first if task == "decode" else task == "prefill" and first:
                ms.append((time.perf_counter() - begin) * 1000)
                cpu_ms.append((time.process_time() - cpu) * 1000)
            first = False
            if len(result) == wanted:
                break
            begin, cpu = time.perf_counter(), time.process_time()
    print(json.dumps({"contestant": "llama.cpp", "answer": result, "ms": ms, "cpu_ms": cpu_ms, "rss": status("VmRSS"),
                      "peak_rss": status("VmHWM"), "rss_before": before}))


main(*sys.argv[1:])
