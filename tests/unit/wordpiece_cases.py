"""Writes what the reference tokenizer makes of texts, one JSON object a line: text, pair or null, max_length or 0, ids, types, decoded.

usage: wordpiece_cases.py pairs DATA OUT      all sentence pairs, each sentence also alone
       wordpiece_cases.py unicode DATA OUT    every code point, and random strings of troublesome characters
       wordpiece_cases.py folder FOLDER OUT   a few texts, by transformers' AutoTokenizer on a saved folder
       wordpiece_cases.py folders FOLDER .    folders with more files, and cases.jsonl in each: a few texts by AutoTokenizer
"""
import json
import os
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


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[E1]", "<s>", "</s>", "<pad>", "<mask>", "<unk>", "the", "quick", "##s", "a", "it", "s", "don", "t", "'", ".", "!", "e1", "##e", "caf", "cafe",
              "\u4f60", "\u597d", "[", "]", "The", "<", ">", "mask"]
NAMES = dict(cls_token="<s>", sep_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>")
LISTED = dict(additional_special_tokens=["[E1]", "[NEW]"])
TEXTS = ["the quicks", "The [E1] a", "it's don't.", "[e1] [NEW]the", "the [MASK] <mask> the", "\u4f60\u597da", "Caf\u00e9 zebra!", "don 't not ' a"]


def added(content, **flags):
    return dict(dict(content=content, lstrip=False, rstrip=False, single_word=False, normalized=False, special=True), **flags)


# Each: tokenizer_config.json, other files, and what is done to a tokenizer.json (None: vocab.txt).
FOLDERS = {
    "plain": ({}, {}, None),
    "electra": (dict(tokenizer_class="ElectraTokenizer"), {}, None),
    "names": (NAMES, {}, None),
    "names_of_map": ({}, {"special_tokens_map": NAMES}, None),
    "map_wins": (dict(cls_token="[CLS]"), {"special_tokens_map": dict(NAMES, cls_token=added("<s>"))}, None),
    "listed": (LISTED, {}, None),
    "listed_in_map": ({}, {"special_tokens_map": LISTED}, None),
    "decoder": (dict(added_tokens_decoder={"5": added("[E1]"), str(len(VOCABULARY)): added("[NEW]", lstrip=True, rstrip=True)}), {}, None),
    "decoder_of_usual": (dict(added_tokens_decoder={str(i): added(token) for i, token in enumerate(VOCABULARY[:5])}, do_lower_case=False), {"special_tokens_map": LISTED}, None),
    "cleans_up": (dict(clean_up_tokenization_spaces=True), {}, None),
    "json": (dict(tokenizer_class="BertTokenizer"), {}, lambda made: None),
    "json_has_more": (dict(tokenizer_class="BertTokenizer"), {}, lambda made: made["model"]["vocab"].update(zebra=len(VOCABULARY))),
    "json_adds": (dict(tokenizer_class="DistilBertTokenizer"), {}, lambda made: made["added_tokens"].append(dict(added("[NEW]"), id=len(VOCABULARY)))),
    "json_of_another_case": ({}, {}, lambda made: made["normalizer"].update(lowercase=False)),
    "json_and_map": ({}, {"special_tokens_map": dict(NAMES, **LISTED)}, lambda made: None),
}


def folders(root):
    from transformers import AutoTokenizer
    for name, (settings, files, change) in FOLDERS.items():
        folder = f"{root}/{name}"
        os.makedirs(folder)
        vocabulary = VOCABULARY
        if change:
            vocabulary = VOCABULARY[:11]  # what vocab.txt says does not count beside it
            made = {"version": "1.0", "added_tokens": [dict(added(token), id=i) for i, token in enumerate(VOCABULARY[:5])],
                    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}, "pre_tokenizer": {"type": "BertPreTokenizer"},
                    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": {token: i for i, token in enumerate(VOCABULARY)}}}
            change(made)
            json.dump(made, open(f"{folder}/tokenizer.json", "w"))
        open(f"{folder}/vocab.txt", "w", encoding="utf-8").write("\n".join(vocabulary) + "\n")
        for file, content in {"config": {"model_type": "bert"}, "tokenizer_config": settings, **files}.items():
            json.dump(content, open(f"{folder}/{file}.json", "w"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with open(f"{folder}/cases.jsonl", "w", encoding="utf-8") as file:
            for text in TEXTS:
                encoding = tokenizer(text)
                file.write(json.dumps({"text": text, "pair": None, "max_length": 0, "ids": encoding["input_ids"], "types": encoding.get("token_type_ids", [0] * len(encoding["input_ids"])),
                                       "decoded": tokenizer.decode(encoding["input_ids"], skip_special_tokens=True)}) + "\n")


def main(mode, data, out):
    if mode == "folders":
        return folders(data)
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
