"""The same with transformers. usage: transformers_peer.py load|decode FILE.gguf [TOKENS]"""
import json, os, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(task, path, tokens="64"):
    folder, name = os.path.split(path)
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    ms = [(time.perf_counter() - begin) * 1000]
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    count = int(tokens) if task == "decode" else 2
    if task == "decode":
        ms = []
    with torch.no_grad():
        past, step, result = None, ids, ids
        for i in range(count):
            begin = time.perf_counter()
            out = model(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, step = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            result = torch.cat([result, step], 1)
            if task == "decode" and i > 0:
                ms.append((time.perf_counter() - begin) * 1000)
    print(json.dumps({"contestant": "transformers", "answer": result[0].tolist(), "ms": ms}))


main(*sys.argv[1:])
