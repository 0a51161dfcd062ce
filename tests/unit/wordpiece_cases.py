"""Writes what the reference tokenizer makes of texts, one JSON object a line: text, pair or null, max_length or 0, ids, types, decoded.

usage: wordpiece_cases.py pairs DATA OUT      all sentence pairs, each sentence also alone
       wordpiece_cases.py unicode DATA OUT    every code point, and random strings of troublesome characters
       wordpiece_cases.py folder FOLDER OUT   a few texts, by transformers' AutoTokenizer on a saved folder
"""
import json
import random
import sys

from tokenizers import Tokenizer

TROUBLE = ["\u00e9", "e\u0301", "\u0130", "I\u0307", "\u03a3", "\u03c3\u03c2", "\u00df", "\u1e9e", "\ufb01", "\u4e2d", "\u6587", "\uf900", "\U00020000", "\U0002b820", "\U0002ceaf",
           "\u3042\u3099", "\uac00", "\u1112\u1161\u11ab", "\u200b", "\u200d", "\ufeff", "\ufffd", "\u00ad", "\u0000", "\u0007", "\u001f", "\u007f", "\u0085", "\u000b", "\u00a0", "\u2003",
           "\u2028", "\u3000", "\u180e", "\t", "\n", "\r\n", " ", "  ", ".", ",", "!", "?", "'", "n't", "\u2019", "\u201c", "\u2014", "\u2026", "$", "+", "^", "`", "~", "|", "<", "\u00a1",
           "\u0e33", "\u0915\u094d\u0937", "\u05d0\u05b8", "\u0639\u064e", "\U0001f600", "\U0001f468\u200d\U0001f469", "\U0001f1e9", "\U0001d400", "\ue000", "\U0010fffd", "\U000e0041",
           "\u166d", "\u1734", "\u1885", "\ua9bd", "\U000111c9", "\u02bc", "\u212a", "\u2126", "\u1fb3", "\u0345", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]", "[cls]", "[CL", "[[SEP]]",
           "##ing", "##", "#", "un", "believ", "able", "The", "QUICK", "fox", "1234567890", "3.14", "a" * 99, "a" * 100, "a" * 101, "\u00e9" * 100, "\u4e2d" * 60, "x" * 300]


def unicode_texts():
    points = [chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000]
    for begin in range(0, len(points), 512):
        block = points[begin:begin + 512]
        yield " ".join("a" + c + "b" for c in block)
        yield " ".join(block)
    draw = random.Random(1)
    for _ in range(4000):
        yield draw.choice(["", " "]).join(draw.choices(TROUBLE, k=draw.randint(0, 12)))


def cases(mode, tokenizer, data):
    if mode == "pairs":
        for line in open(f"{data}/pairs.tsv", encoding="utf-8").read().split("\n")[1:-1]:
            _, first, second = line.split("\t")
            yield first, None, 0
            yield second, None, 0
            yield first, second, 128
            yield first, second, 40
    else:
        texts = list(unicode_texts())
        for text in texts:
            yield text, None, 0
        short = [t for t in texts[-4000:]]
        for first, second in zip(short[::2], short[1::2]):
            yield first, second, random.Random(len(first) * 31 + len(second)).randint(3, 40)


def main(mode, data, out):
    with open(out, "w", encoding="utf-8") as file:
        if mode == "folder":
            from transformers import AutoTokenizer
            tokenizer = AutoTokenizer.from_pretrained(data)
            assert tokenizer.model_max_length == 77, tokenizer.model_max_length
            for text, pair in [("Hello, World! It's caf\u00e9.", None), ("One sentence", "and \u4e2d\u6587 another"), ("[MASK] stays", None)]:
                encoding = tokenizer(text, pair)
                file.write(json.dumps({"text": text, "pair": pair, "max_length": 0, "ids": encoding["input_ids"], "types": encoding["token_type_ids"],
                                       "decoded": tokenizer.decode(encoding["input_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)}) + "\n")
            return
        tokenizer = Tokenizer.from_file(f"{data}/minilm/tokenizer.json")
        tokenizer.no_padding()
        for text, pair, max_length in cases(mode, tokenizer, data):
            tokenizer.enable_truncation(max_length) if max_length else tokenizer.no_truncation()
            encoding = tokenizer.encode(text, pair)
            file.write(json.dumps({"text": text, "pair": pair, "max_length": max_length, "ids": encoding.ids, "types": encoding.type_ids,
                                   "decoded": tokenizer.decode(encoding.ids)}) + "\n")


main(*sys.argv[1:])
