"""MiniLM with LoRA in Python, as examples/by_feature/lora.cpp trains it: transformers, peft, bitsandbytes on the CPU.

usage: peer.py fp32|nf4 MODEL PAIRS BATCH_SIZE STEPS
"""
import random
import statistics
import sys
import time

import bitsandbytes as bnb
import peft
import torch
import transformers


def read_pairs(path):
    with open(path, encoding="utf-8") as lines:
        rows = [line.rstrip("\n").split("\t") for line in lines][1:]
    random.Random(42).shuffle(rows)
    return rows


def main(kind, folder, pairs, batch_size, steps):
    torch.manual_seed(42)
    batch_size, steps = int(batch_size), int(steps)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    how = {}
    if kind == "nf4":
        how["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=["classifier"])
        how["device_map"] = "cpu"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, dtype=torch.float32, **how)
    model = peft.get_peft_model(model, peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["query", "key", "value"], modules_to_save=["classifier"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = bnb.optim.AdamW8bit(trained, 2e-3)
    model.train()
    rows, times, losses = read_pairs(pairs), [], []
    for step in range(steps):
        part = rows[step * batch_size:(step + 1) * batch_size]
        batch = tokenizer([r[1] for r in part], [r[2] for r in part], truncation=True, max_length=128, padding="longest",
                          return_tensors="pt")
        labels = torch.tensor([int(r[0]) for r in part])
        begin = time.perf_counter()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - begin) * 1e3)
        losses.append(loss.item())
    tail = losses[-max(1, steps // 4):]
    print(f"median {statistics.median(times):.2f} ms, mean loss of the last quarter {sum(tail) / len(tail):.4f}")


main(*sys.argv[1:])
