"""Peer of the tokenizer tests: what the `tokenizers` package makes of many texts.

usage: tokenizer_peer.py cases KIND GGUF FOLDER   writes FOLDER/tokenizer.json (for kind gpt2 vocab.json and merges.txt) and FOLDER/cases.jsonl: text, ids, decoded
       tokenizer_peer.py auto FOLDER CASES        prints how many of these transformers' tokenizer of the folder has other ids for, and its chat
       tokenizer_peer.py speed FOLDER TEXT        prints the seconds that encoding a file takes, the best of three

The vocabulary is SmolLM2's, from its .gguf file; KIND says what is around it: smollm, gpt2, llama3 or nfc.
"""
import json
import os
import random
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import gguf
import quick_gguf  # noqa: F401
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TROUBLE = ["Hello", " world", "it's", "I'LL", "don't", "we've", "123", "4567890", "\u00b2\u00bd", "\u0663\u0664", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u0085", "\u2028", "caf\u00e9", "cafe\u0301", "\u4f60\u597d",
           "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0645\u0631\u062d\u0628\u0627", "\U0001f600", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u200b", "\ufeff", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>",
           "def f(x):\n    return x**2\n", "#include <vector>", "{\"a\": [1, 2]}", "http://a.b/c?d=e&f", "==========", "-" * 70, "a" * 40, "ab" * 300, "\x00", "\x07", "'", "''s", "\"", "\ufffd", "\ud7ff", "\U0010fffd", "_", "\u00df", "\u01c5",
           "x\u0301\u0302", "\u1e69", "s\u0323\u0307", "\u212b", "\ufb01"]


def make(kind, path, folder):
    fields = gguf.GGUFReader(path).fields
    tokens, merges = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind == "llama3"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=kind == "nfc", use_regex=kind != "llama3")
    steps = {"smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level], "gpt2": [byte_level], "nfc": [pre_tokenizers.Digits(individual_digits=False), byte_level],
             "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level]}[kind]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_tokens([AddedToken("<extra caf\u00e9>", normalized=True), AddedToken("<left>", lstrip=True, normalized=False), AddedToken("<right>", rstrip=True, normalized=False)])
    special = ["<|endoftext|>"] if kind == "gpt2" else tokens[:17]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if kind == "llama3":
        tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)])
    if kind == "gpt2":
        json.dump(vocab, open(f"{folder}/vocab.json", "w"))
        open(f"{folder}/merges.txt", "w", encoding="utf-8").write("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))
    else:
        tokenizer.save(f"{folder}/tokenizer.json")
    return tokenizer


def texts(kind):
    draw = random.Random(4)
    yield ""
    for text in TROUBLE:
        yield text
    # Every character that Unicode 14 has assigned, in runs with letters and spaces between: PCRE2 10.42 knows no newer ones.
    import unicodedata
    known = [chr(c) for c in range(1, 0x30000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    if kind == "nfc":  # the package's normalizer orders marks by Unicode 9; those that came later are in another order, or in none
        known = [c for c in known if not unicodedata.combining(c) or unicodedata.ucd_3_2_0.category(c) != "Cn"]
    for i in range(0, len(known), 64):
        yield " ".join(known[i:i + 64]) + "".join(known[i:i + 64])
    for _ in range(3000):
        yield draw.choice(["", " "]).join(draw.choices(TROUBLE, k=draw.randint(1, 12)))
    yield "<left> a  <left>b <right>  c <extra cafe\u0301>x<extra caf\u00e9>"


def cases(kind, path, folder):
    tokenizer = make(kind, path, folder)
    with open(f"{folder}/cases.jsonl", "w", encoding="utf-8") as file:
        for text in texts(kind):
            ids = tokenizer.encode(text).ids
            file.write(json.dumps({"text": text, "ids": ids, "decoded": tokenizer.decode(ids), "all": tokenizer.decode(ids, skip_special_tokens=False)}) + "\n")


def speed(folder, path):
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    text = open(path, encoding="utf-8").read()
    best = 1e9
    for _ in range(3):
        begin = time.perf_counter()
        ids = tokenizer.encode(text).ids
        best = min(best, time.perf_counter() - begin)
    print(json.dumps({"seconds": best, "ids": ids}))


def auto(folder, cases):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wrong = [case["text"] for case in map(json.loads, open(cases, encoding="utf-8")) if tokenizer(case["text"])["input_ids"] != case["ids"]]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    print(json.dumps({"wrong": len(wrong), "first": wrong[:3], "chat": chat, "special": special, "longest": tokenizer.model_max_length}))


{"cases": cases, "speed": speed, "auto": auto}[sys.argv[1]](*sys.argv[2:])
