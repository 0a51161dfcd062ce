"""The same with llama.cpp (llama-cpp-python), which computes with the file's 4-bit weights. usage: llama_cpp_peer.py load|decode FILE.gguf [TOKENS]"""
import json, os, sys, time
import llama_cpp


def main(task, path, tokens="64"):
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    begin = time.perf_counter()
    model = llama_cpp.Llama(path, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    ms = [(time.perf_counter() - begin) * 1000]
    ids = model.tokenize(b"Once upon a time", add_bos=False)
    result, count = list(ids), int(tokens) if task == "decode" else 2
    if task == "decode":
        ms = []
    begin = time.perf_counter()
    for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
        result.append(token)
        if task == "decode" and len(result) > len(ids) + 1:
            ms.append((time.perf_counter() - begin) * 1000)
        if len(result) == len(ids) + count:
            break
        begin = time.perf_counter()
    print(json.dumps({"contestant": "llama.cpp", "answer": result, "ms": ms}))


main(*sys.argv[1:])
