"""Peer of the tokenizer tests: what the `tokenizers` package makes of many texts.

usage: tokenizer_peer.py cases GGUF FOLDER        writes for each kind FOLDER/KIND/tokenizer.json (for gpt2 vocab.json and merges.txt) and FOLDER/KIND/cases.jsonl: text, ids, decoded
       tokenizer_peer.py auto FOLDER CASES        prints how many of these transformers' tokenizer of the folder has other ids for, and its chat
       tokenizer_peer.py saved FOLDER             reads the tokenizers in it, and fails where one has other ids than its cases.json
       tokenizer_peer.py layouts FOLDER           makes a folder for each way in which files around a vocabulary say what transformers' tokenizers do with it; cases.json in each
       tokenizer_peer.py record FILE              writes fixtures/tokenizer_folders.json: layouts that contradict themselves, and what transformers makes of them
       tokenizer_peer.py random FOLDER SEED COUNT  makes folders whose files say random things, and contradict each other; cases.json in each that transformers can read
       tokenizer_peer.py parts FOLDER             makes a folder for each part of tokenizer.json; cases.json in each, what the package does
       tokenizer_peer.py prose FOLDER TEXT        prints the ids of a file

The vocabulary is SmolLM2's, from its .gguf file; KIND says what is around it.
"""
import json
import os
import random
import sys

import gguf
import quick_gguf  # noqa: F401

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TROUBLE = ["Hello", " world", "it's", "I'LL", "don't", "we've", "123", "4567890", "\u00b2\u00bd", "\u0663\u0664", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u0085", "\u2028", "caf\u00e9", "cafe\u0301", "\u4f60\u597d",
           "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0645\u0631\u062d\u0628\u0627", "\U0001f600", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u200b", "\ufeff", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>",
           "def f(x):\n    return x**2\n", "#include <vector>", "{\"a\": [1, 2]}", "http://a.b/c?d=e&f", "==========", "-" * 70, "a" * 40, "ab" * 300, "\x00", "\x07", "'", "''s", "\"", "\ufffd", "\ud7ff", "\U0010fffd", "_", "\u00df", "\u01c5",
           "x\u0301\u0302", "\u1e69", "s\u0323\u0307", "\u212b", "\ufb01"]


def make(kind, tokens, merges, folder):
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


def cases(path, folder):
    fields = gguf.GGUFReader(path).fields
    tokens, merges = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()
    for kind in ("smollm", "gpt2", "llama3", "nfc"):
        os.makedirs(f"{folder}/{kind}")
        cases_of(kind, tokens, merges, f"{folder}/{kind}")


def cases_of(kind, tokens, merges, folder):
    tokenizer = make(kind, tokens, merges, folder)
    with open(f"{folder}/cases.jsonl", "w", encoding="utf-8") as file:
        for text in texts(kind):
            ids = tokenizer.encode(text).ids
            file.write(json.dumps({"text": text, "ids": ids, "decoded": tokenizer.decode(ids), "all": tokenizer.decode(ids, skip_special_tokens=False)}) + "\n")


def added(content, **flags):
    return dict(dict(content=content, lstrip=False, rstrip=False, single_word=False, normalized=False, special=True), **flags)


def tagged(content, **flags):
    return dict(content=content, __type="AddedToken", **flags)


def chat_ml(first):
    return {str(first): added("<|im_start|>"), str(first + 1): added("<|im_end|>")}


# Each: model_type of config.json (None: no such file), what tokenizer_config.json says (None: no such file), other files, tokens at the beginning of the vocabulary, and what is
# done to a tokenizer.json (None: the vocabulary is in vocab.json and merges.txt).
GPT2, NEOX, QWEN, FAST = ({"tokenizer_class": name} for name in ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"))
END, OPT = ["<|endoftext|>"], ["<s>", "<pad>", "</s>", "<unk>"]
FIRST = 271  # free id behind END
LAYOUTS = {
    "gpt2": ("gpt2", None, {}, END, None),
    "opt": ("opt", dict(GPT2, add_bos_token=True, bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"), {}, OPT, None),
    "opt_of_its_map": ("opt", dict(GPT2, add_bos_token=True), {"special_tokens_map": dict(bos_token=added("</s>", normalized=True), eos_token="</s>", unk_token="</s>", pad_token="<pad>")}, OPT, None),
    "both_ends": ("gpt2", dict(GPT2, add_bos_token=True, add_eos_token=True), {}, END, None),
    "added_json": ("gpt2", dict(GPT2, eos_token="<|im_end|>"), {"added_tokens": {"<|im_start|>": FIRST, "<|im_end|>": FIRST + 1}}, END, None),
    "added_json_backwards": ("gpt2", dict(GPT2, eos_token="<|im_end|>"), {"added_tokens": {"<|im_end|>": FIRST + 1, "<|im_start|>": FIRST}}, END, None),
    "added_json_and_map": ("gpt2", None, {"added_tokens": {"<|im_end|>": FIRST}, "special_tokens_map": {"eos_token": "<|im_end|>", "pad_token": None}}, END, None),
    "added_decoder": ("gpt2", dict(GPT2, eos_token="<|im_end|>", added_tokens_decoder=chat_ml(FIRST)), {}, END, None),
    "decoder_before_map": ("gpt2", dict(GPT2, eos_token="<|im_end|>", added_tokens_decoder=chat_ml(FIRST)), {"special_tokens_map": {"eos_token": "<|im_start|>"}, "added_tokens": {"<other>": FIRST + 2}}, END, None),
    "map_wins": ("gpt2", dict(GPT2, eos_token="<|im_start|>"), {"special_tokens_map": {"eos_token": added("<|im_end|>", lstrip=True)}}, END, None),
    "no_names": ("gpt2", dict(GPT2, bos_token=None, eos_token=None, unk_token=None), {}, END, None),
    "not_in_the_vocabulary": ("gpt2", dict(GPT2, pad_token="<pad>", eos_token="<|im_end|>"), {}, [], None),
    "additional": ("gpt2", dict(GPT2, additional_special_tokens=["<|im_start|>", added("<|im_end|>", __type="AddedToken", rstrip=True)]), {}, END, None),
    "extra_of_map": ("gpt2", dict(GPT2, extra_special_tokens=["<|im_end|>"]), {"special_tokens_map": {"extra_special_tokens": ["<|im_start|>"], "additional_special_tokens": ["<other>"]}}, END, None),
    "chat_of_map": ("gpt2", GPT2, {"special_tokens_map": {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}}, END, None),
    "chat_of_map_in_vain": ("gpt2", dict(GPT2, additional_special_tokens=["<other>"]), {"special_tokens_map": {"additional_special_tokens": ["<|im_start|>"]}}, END, None),
    "chat_of_map_beside_names": ("gpt2", dict(GPT2, extra_special_tokens={"x_token": "<other>"}), {"special_tokens_map": {"additional_special_tokens": ["<|im_start|>"]}}, END, None),
    "json_and_chat_of_map": ("llama", FAST, {"special_tokens_map": {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}}, END, lambda made: None),
    "names_in_order": ("gpt2", dict(GPT2, z_token="<|im_end|>", extra_special_tokens={"y_token": "<|im_start|>", "b_token": "<other>"}), {}, END, None),
    "names_of_its_own": ("gpt2", dict(GPT2, image_token="<|im_start|>", extra_special_tokens={"audio_token": "<|im_end|>"}), {}, END, None),
    "flags": ("gpt2", dict(GPT2, added_tokens_decoder={str(FIRST): added("<|im_start|>", lstrip=True, rstrip=True), "260": added("er", single_word=True, special=False)}), {}, END, None),
    "split": ("gpt2", dict(GPT2, split_special_tokens=True, added_tokens_decoder={str(FIRST): added("<|im_start|>", special=False), str(FIRST + 1): added("<|im_end|>")}), {}, END, None),
    "prefix_space": ("gpt2", dict(GPT2, add_prefix_space=True), {}, END, None),
    "codegen": ("codegen", {"tokenizer_class": "CodeGenTokenizerFast"}, {}, END, None),
    "class_of_config_json": ("llama", None, {"config": {"model_type": "llama", "tokenizer_class": "GPT2Tokenizer"}}, END, None),
    "neox": ("gpt_neox", dict(NEOX, add_bos_token=True), {}, END, None),
    "neox_without_class": ("gpt_neox", None, {"added_tokens": {"<|padding|>": FIRST}}, END, None),
    "qwen": ("qwen2", dict(QWEN, add_prefix_space=False, added_tokens_decoder=chat_ml(FIRST), eos_token="<|im_end|>"), {}, END, None),
    "qwen_of_another_class": ("qwen2", GPT2, {}, END, None),
    "json": ("gpt2", None, {}, END, lambda made: None),
    "json_and_map": ("gpt2", GPT2, {"special_tokens_map": {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}}, END, lambda made: None),
    "json_of_no_class": ("llama", FAST, {"special_tokens_map": {"eos_token": "<|im_end|>"}}, END, lambda made: made.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])),
    "json_and_added": ("llama", FAST, {"added_tokens": {"<|im_start|>": FIRST + 1}}, END, lambda made: made.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])),
    "json_and_flags": ("llama", dict(FAST, added_tokens_decoder={str(FIRST): added("<|im_end|>", lstrip=True)}), {}, END, lambda made: made.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])),
    "json_adds_no_bos": ("gpt2", dict(GPT2, add_bos_token=True), {}, END, lambda made: None),
    "json_with_prefix_space": ("gpt2", dict(GPT2, add_prefix_space=True), {}, END, lambda made: None),
    "json_without_prefix_space": ("gpt2", GPT2, {}, END, lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))),
}
# Files that contradict each other, where one wins, and flags of objects.
CONTRADICTING = {
    "roberta": ("roberta", None, {}, OPT + ["<mask>"], None),
    "bart_of_its_class": (None, {"tokenizer_class": "BartTokenizerFast", "add_bos_token": True}, {"special_tokens_map": {"mask_token": added("<mask>", lstrip=True)}}, OPT, None),
    "roberta_of_its_names": ("roberta", {"cls_token": "</s>", "sep_token": "<unk>"}, {}, OPT, None),
    "roberta_json": ("roberta", None, {}, OPT, lambda made: (made.add_tokens([AddedToken("<mask>", lstrip=True, special=True)]), setattr(made, "post_processor", processors.ByteLevel()))),
    "neox_json_adds_no_bos": ("gpt_neox", NEOX, {}, END, lambda made: (setattr(made, "normalizer", normalizers.NFC()), setattr(made, "post_processor", processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])))),
    "padding": ("llama", FAST, {}, END, lambda made: made.enable_padding(pad_token="<pad>", pad_id=271, length=20)),
    "padding_in_vain": ("gpt2", GPT2, {}, END, lambda made: (made.enable_padding(pad_token="<pad>", pad_id=271), made.enable_truncation(2))),
    "padding_of_null": ("llama", dict(FAST, pad_token=None), {}, END, lambda made: made.enable_padding(pad_token="<pad>", pad_id=271)),
    "objects_of_names": ("gpt2", dict(GPT2, eos_token=tagged("</s>", lstrip=True), bos_token=tagged("<s>", rstrip=True, normalized=True), mask_token=tagged("<mask>", single_word=True)), {}, END, None),
    "a_name_of_two_kinds": ("gpt2", dict(GPT2, bos_token=tagged("<s>", lstrip=True), cls_token="<s>"), {}, END, None),
    "decoder_over_object": ("gpt2", dict(GPT2, eos_token=tagged("<|im_end|>", lstrip=True, rstrip=True), added_tokens_decoder=chat_ml(FIRST)), {}, END, None),
    "added_json_over_object": ("gpt2", dict(GPT2, eos_token=tagged("<|im_end|>", lstrip=True)), {"added_tokens": {"<|im_end|>": FIRST}}, END, None),
    "decoder_over_json": ("gpt2", dict(GPT2, added_tokens_decoder=chat_ml(FIRST)), {}, END, lambda made: made.add_tokens([AddedToken("<|im_start|>", lstrip=True), AddedToken("<|im_end|>"), AddedToken("<other>")])),
    "json_over_added_json": ("gpt2", GPT2, {"added_tokens": {"<|im_start|>": FIRST}}, END, lambda made: made.add_tokens([AddedToken("<|im_end|>", rstrip=True, normalized=False)])),
    "names_have_flags_of_json": ("llama", dict(FAST, eos_token=tagged("<|im_end|>", lstrip=True)), {}, END, lambda made: made.add_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)])),
    "qwen_strips_nothing": ("qwen2", dict(QWEN, eos_token=tagged("<|im_end|>", lstrip=True), added_tokens_decoder={str(FIRST): added("<other>", lstrip=True)}), {}, END, None),
    "own_names_of_config_win": ("gpt2", dict(GPT2, image_token="<|im_start|>"), {"special_tokens_map": {"image_token": added("<|im_end|>", lstrip=True), "eos_token": "<other>"}}, END, None),
    "lists_are_joined": ("gpt2", dict(GPT2, additional_special_tokens=["<|im_start|>"]), {"special_tokens_map": {"extra_special_tokens": ["<|im_end|>", {"content": "<other>", "lstrip": True}]}}, END, None),
    "normalized_behind_others": ("gpt2", dict(GPT2, added_tokens_decoder={str(FIRST): added("<|im_start|>", single_word=True, normalized=True), "270": added("the")}), {}, END, None),
    "spelt_bytes": ("gpt2", dict(GPT2, added_tokens_decoder={"268": added("\u0120th", special=False)}), {}, END, None),
}
LAYOUTS.update(CONTRADICTING)
SAID = ["the<|im_start|> 1212<|im_end|> <|endoftext|> <|im_end|>\nin her</s>", " <|im_start|>\u3000x\u00a0 <|im_end|>  y<pad><|padding|>", "er er, erx xer \u00e9er \u5728er er", "", " ", "cafe\u0301 it's <other><s>", " then 12"]


def layouts(folder):
    for name, (model_type, settings, files, first, change) in LAYOUTS.items():
        files = {"config": {"model_type": model_type}, **({"tokenizer_config": settings} if settings else {}), **files}
        if not model_type and "config" in files:
            del files["config"]
        write_folder(f"{folder}/{name}", first, change, files)
        write_cases(f"{folder}/{name}", SAID)


def record(path):
    """Folders with what transformers makes of them, for a test without Python. Vocabularies, merges and texts, which are alike, stand once."""
    import tempfile
    folder = tempfile.mkdtemp()
    layouts(folder)
    vocabularies, recorded = {}, {}
    for name in sorted(CONTRADICTING):
        files = {}
        for file in sorted(os.listdir(f"{folder}/{name}")):
            if file.endswith(".json"):
                files[file.removesuffix(".json")] = json.load(open(f"{folder}/{name}/{file}", encoding="utf-8"))
        vocabulary = files.pop("vocab") if "vocab" in files else files["tokenizer"]["model"].pop("vocab")
        files.get("tokenizer", {"model": {}})["model"].pop("merges", None)
        kind = str(len(vocabulary))
        vocabularies[kind] = vocabulary
        expected = files.pop("cases")
        expected["ids"] = [case["ids"] for case in expected.pop("cases")]
        recorded[name] = dict(vocabulary=kind, files=files, expected=expected)
    merges = open(f"{folder}/gpt2/merges.txt", encoding="utf-8").read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(dict(texts=SAID, merges=merges, vocabularies=vocabularies))[:-1] + ', "folders": {\n')
        file.write(",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items()) + "}}\n")


def write_folder(path, first, change, files):
    os.makedirs(path)
    vocab = {token: i for i, token in enumerate(first + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [tuple(pair.split("+")) for pair in "t+h,h+e,i+n,e+r,a+n,r+e,o+n,a+t,e+n,n+d,1+2,\u0120+th,12+12,th+e".split(",")]
    vocab.update({a + b: len(vocab) + i for i, (a, b) in enumerate(pairs)})
    if change:
        made = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        change(made)
        made.save(f"{path}/tokenizer.json")
    else:
        json.dump(vocab, open(f"{path}/vocab.json", "w"))
        open(f"{path}/merges.txt", "w", encoding="utf-8").write("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))
    for file, content in files.items():
        json.dump(content, open(f"{path}/{file}.json", "w"))


def write_cases(path, texts):
    made = AutoTokenizer.from_pretrained(path)
    cases = [dict(text=text, ids=made(text)["input_ids"], decoded=made.decode(made(text)["input_ids"], skip_special_tokens=True)) for text in texts]
    json.dump(dict(cases=cases, special=[made.bos_token_id, made.eos_token_id, made.pad_token_id], size=len(made)), open(f"{path}/cases.json", "w"))


NAMED = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
WORDS_OF_FOLDERS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "<unk>", "<new>", "<mask>", "cafe\u0301", "the"]
SAID_AT_RANDOM = SAID + [f"{a}{word}{b}" for word in WORDS_OF_FOLDERS for a, b in ((" ", " "), ("th", "er"), ("\n ", "\u3000x"))] + ["caf\u00e9 x", "the the"]


def random_token(draw, content, tagged):
    """A token as such files spell it: text, or an object (of tokenizer_config.json: tagged)."""
    if draw.random() < 0.5:
        return content
    flags = dict(lstrip=draw.random() < 0.3, rstrip=draw.random() < 0.3, single_word=draw.random() < 0.2, normalized=draw.random() < 0.5)
    flags = {name: value for name, value in flags.items() if draw.random() < 0.85}
    if draw.random() < 0.2:
        flags["special"] = draw.random() < 0.5
    return dict(content=content, **flags, **({"__type": "AddedToken"} if tagged else {}))


def random_folder(draw):
    """The arguments of write_folder()."""
    pick = lambda: draw.choice(WORDS_OF_FOLDERS)
    first = draw.choice([END, OPT, OPT + ["<mask>", "<|endoftext|>"]])
    settings, files = {}, {}
    made_of_json = draw.random() < 0.4
    names = ["GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "GPTNeoXTokenizer", "GPTNeoXTokenizerFast", "RobertaTokenizer", "RobertaTokenizerFast", "BartTokenizer"]
    types = ["gpt2", "opt", "gpt_neox", "codegen", "phi", "roberta", "bart"]
    names, types = (names + ["PreTrainedTokenizerFast"] * 5, types + ["llama"]) if made_of_json else (names + ["Qwen2Tokenizer"], types + ["qwen2"])
    if draw.random() < 0.8:
        settings["tokenizer_class"] = draw.choice(names)
    if draw.random() < 0.3 or not settings:
        files["config"] = {"model_type": draw.choice(types)}
    for name in draw.sample(NAMED, len(NAMED)):
        if draw.random() < 0.3:
            settings[name] = None if draw.random() < 0.1 and name not in ("cls_token", "sep_token") else random_token(draw, pick(), True)
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"):
        if draw.random() < 0.2:
            settings[name] = draw.random() < 0.6
    if draw.random() < 0.25:
        settings["additional_special_tokens"] = [random_token(draw, token, True) for token in draw.sample(WORDS_OF_FOLDERS, 2)]
    if draw.random() < 0.15:
        settings["extra_special_tokens"] = draw.choice([None, [], {}, {"y_token": pick(), "x_token": random_token(draw, pick(), True)}, [random_token(draw, token, True) for token in draw.sample(WORDS_OF_FOLDERS, 2)]])
    if draw.random() < 0.15:
        settings["x_token"] = random_token(draw, pick(), True)
    if draw.random() < 0.15:
        settings["z_token"] = random_token(draw, pick(), True)
    size = FIRST + len(first) - 1
    count = draw.randint(1, 4)
    # Most of what a file adds lies behind the vocabulary, where transformers puts it, too.
    new = [token for token in draw.sample(WORDS_OF_FOLDERS, count) if token not in first + ["the"]]
    kind = draw.choice(["none", "decoder", "decoder", "json", "json", "both"])
    flags = lambda: {name: value for name, value in dict(lstrip=draw.random() < 0.2, rstrip=draw.random() < 0.2, normalized=draw.random() < 0.4, single_word=draw.random() < 0.1, special=draw.random() < 0.6).items() if draw.random() < 0.9}
    if kind in ("decoder", "both"):
        settings["added_tokens_decoder"] = {str(size + i): dict(content=token, **flags()) for i, token in enumerate(new)}
        if draw.random() < 0.3:
            settings["added_tokens_decoder"][str(size - 1)] = dict(content="the", **flags())
    if kind in ("json", "both"):
        files["added_tokens"] = {token: size + i for i, token in enumerate(new)}
    if draw.random() < 0.5:
        said = {name: random_token(draw, pick(), False) for name in draw.sample(NAMED, 4) if draw.random() < 0.5}
        if draw.random() < 0.1:
            said["mask_token"] = None
        if draw.random() < 0.3:
            said["additional_special_tokens"] = draw.sample(WORDS_OF_FOLDERS, 2)
        if draw.random() < 0.1:
            said["extra_special_tokens"] = draw.choice([{"w_token": pick()}, [pick(), random_token(draw, pick(), False)]])
        if draw.random() < 0.1:
            said["x_token"] = random_token(draw, pick(), False)
        files["special_tokens_map"] = said
    if settings:
        files["tokenizer_config"] = settings
    inside = [AddedToken(token, **flags()) for token in (new if draw.random() < 0.7 else draw.sample(WORDS_OF_FOLDERS, 2))] if draw.random() < 0.7 else []
    pads = draw.choice([None, None, pick()])

    def change(made):
        if "GPTNeoX" in str(files) or "gpt_neox" in str(files) and "tokenizer_class" not in settings:
            made.normalizer = normalizers.NFC()  # as the class has it; where they differ we go by the file
        made.add_tokens(inside)
        if pads:
            made.enable_padding(pad_token=pads, pad_id=0)
        if draw.random() < 0.3:
            made.post_processor = processors.ByteLevel()

    return first, change if made_of_json else None, files


def random_folders(folder, seed, count):
    for i in range(int(count)):
        path = f"{folder}/{i:03}"
        write_folder(path, *random_folder(random.Random(f"{seed}/{i}")))
        try:
            write_cases(path, SAID_AT_RANDOM)
        except Exception as error:  # transformers can't read some of them
            open(f"{path}/error.txt", "w").write(repr(error))


def spelt(change, without="", unk=None, fuse_unk=False):
    """A small byte-level tokenizer with something changed. `without` these characters in its vocabulary."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *(c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in without)])}
    pairs = [("t", "h"), ("th", "e"), ("e", "r"), ("\u0120", "t"), ("\u0120t", "h"), ("1", "2"), (".", "."), ("-", "-"), ("e", "-")]
    vocab.update({a + b: len(vocab) + i for i, (a, b) in enumerate(pairs)})
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token=unk, fuse_unk=fuse_unk))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    change(made)
    return made


def before_bytes(*steps):
    return lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))


def template(single, *special, pair="$A $B"):
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[(token, ["<s>", "</s>", "<unk>"].index(token)) for token in special])


BEHAVIORS = ("removed", "isolated", "contiguous", "merged_with_previous", "merged_with_next")
WORDS = Regex(r"\p{L}+|\p{N}")
PART_TEXTS = ["the\nthe\nher\n 1234567 12 1, abfe e", "the--other... 1212, e-e-- her's", "--", "...the", " the  the\t--\u2026\u00bfque\u00e9? ", "\u00c3\u00e9\u00e9ooo--o", "<er> h- the", "", "\u3002\u4f60\u597d\u3002\u3002$+<=>^`|~"]


def parts(folder):
    kinds = {
        **{f"split_{behavior}{'_inverted' if invert else ''}": spelt(before_bytes(pre_tokenizers.Split(WORDS, behavior, invert=invert))) for behavior in BEHAVIORS for invert in (False, True)},
        **{f"split_text_{behavior}": spelt(before_bytes(pre_tokenizers.Split("e-", behavior))) for behavior in BEHAVIORS},
        **{f"punctuation_{behavior}": spelt(before_bytes(pre_tokenizers.Punctuation(behavior))) for behavior in BEHAVIORS},
        "unk_that_never_acts": spelt(lambda made: None, unk="<unk>"),
        "unk": spelt(lambda made: None, without="oq\u00c3", unk="<unk>"),
        "fused_unk": spelt(lambda made: None, without="oq\u00c3", unk="<unk>", fuse_unk=True),
        "replace_text": spelt(lambda made: setattr(made, "normalizer", normalizers.Replace("er", "the"))),
        "replace_pattern": spelt(lambda made: setattr(made, "normalizer", normalizers.Sequence([normalizers.Replace(Regex(r"\s+|-{2,}"), " $0\\"), normalizers.NFC()]))),
        "replace_and_added": spelt(lambda made: (setattr(made, "normalizer", normalizers.Replace("er", "-")), made.add_tokens([AddedToken("<er>", normalized=True), AddedToken("h-", normalized=True)]))),
        "roberta": spelt(lambda made: setattr(made, "post_processor", processors.RobertaProcessing(("</s>", 1), ("<s>", 0)))),
        "bert": spelt(lambda made: setattr(made, "post_processor", processors.BertProcessing(("</s>", 1), ("<s>", 0)))),
        "template_among_others": spelt(lambda made: setattr(made, "post_processor", processors.Sequence([processors.ByteLevel(), template("</s> $A <unk> <s>", "</s>", "<unk>", "<s>")]))),
        "two_templates": spelt(lambda made: setattr(made, "post_processor", processors.Sequence([template("<s> $A", "<s>"), template("$A </s>", "</s>", pair="$B </s> $A")]))),
        "roberta_and_template": spelt(lambda made: setattr(made, "post_processor", processors.Sequence([processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), template("<unk> $A", "<unk>")]))),
        "template_and_roberta": spelt(lambda made: setattr(made, "post_processor", processors.Sequence([template("<unk> $A", "<unk>"), processors.RobertaProcessing(("</s>", 1), ("<s>", 0))]))),
        "template_and_bert": spelt(lambda made: setattr(made, "post_processor", processors.Sequence([template("<unk> $A", "<unk>"), processors.BertProcessing(("</s>", 1), ("<s>", 0))]))),
        "replace_by_nothing": spelt(lambda made: setattr(made, "normalizer", normalizers.Replace(Regex("e*"), ""))),
        "split_at_no_text": spelt(before_bytes(pre_tokenizers.Split("", "isolated"))),
        "falcon": spelt(lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(False), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]))),
        **{f"behind_bytes_{behavior}": spelt(lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split(Regex("[\u0120\u00e3\u010a]|\u00a9|e"), behavior)]))) for behavior in BEHAVIORS},
        "digits_in_groups": spelt(before_bytes(pre_tokenizers.Split(Regex(r"(?<=\d)(?=(\d{3})+(?!\d))"), "isolated"))),
        "hexadecimal": spelt(before_bytes(pre_tokenizers.Split(Regex(r"\h+"), "isolated"))),
        "not_hexadecimal": spelt(before_bytes(pre_tokenizers.Split(Regex(r"[^\h ]+|\H\H"), "isolated"))),
        "dots_are_ends_of_lines": spelt(before_bytes(pre_tokenizers.Split(Regex(r"(?m)e.t|(?-m:h.e)"), "isolated"))),
        **{f"borders_{behavior}": spelt(before_bytes(pre_tokenizers.Split(Regex(r"\b"), behavior))) for behavior in BEHAVIORS},
        **{f"none_or_more_{behavior}": spelt(before_bytes(pre_tokenizers.Split(Regex(r"e*"), behavior))) for behavior in BEHAVIORS},
        "replace_at_lines": spelt(lambda made: setattr(made, "normalizer", normalizers.Replace(Regex("^the|r$"), "er"))),
        "added_and_merged": spelt(lambda made: made.add_tokens([AddedToken("the", single_word=True), AddedToken("e", single_word=True), AddedToken("12", single_word=True)])),
    }
    for name, made in kinds.items():
        os.makedirs(f"{folder}/{name}")
        made.save(f"{folder}/{name}/tokenizer.json")
        cases = [dict(text=text, ids=made.encode(text).ids, decoded=made.decode(made.encode(text).ids)) for text in PART_TEXTS]
        json.dump(dict(cases=cases), open(f"{folder}/{name}/cases.json", "w"))


def prose(folder, path):
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    print(json.dumps(tokenizer.encode(open(path, encoding="utf-8").read()).ids))


def auto(folder, cases):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wrong = [case["text"] for case in map(json.loads, open(cases, encoding="utf-8")) if tokenizer(case["text"])["input_ids"] != case["ids"]]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    print(json.dumps({"wrong": len(wrong), "first": wrong[:3], "chat": chat, "special": special, "longest": tokenizer.model_max_length}))


def saved(folder):
    for name in sorted(os.listdir(folder)):
        expected = json.load(open(f"{folder}/{name}/cases.json", encoding="utf-8"))
        write_cases(f"{folder}/{name}", [case["text"] for case in expected["cases"]])
        found = json.load(open(f"{folder}/{name}/cases.json", encoding="utf-8"))
        assert found == expected, (name, found, expected)


{"cases": cases, "prose": prose, "auto": auto, "saved": saved, "layouts": layouts, "record": record, "random": random_folders, "parts": parts}[sys.argv[1]](*sys.argv[2:])
