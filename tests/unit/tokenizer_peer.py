"""Peer of the tokenizer tests: what the `tokenizers` package makes of many texts.

usage: tokenizer_peer.py cases KIND GGUF FOLDER   writes FOLDER/tokenizer.json (for kind gpt2 vocab.json and merges.txt) and FOLDER/cases.jsonl: text, ids, decoded
       tokenizer_peer.py auto FOLDER CASES        prints how many of these transformers' tokenizer of the folder has other ids for, and its chat
       tokenizer_peer.py layouts FOLDER           makes a folder for each way in which files around a vocabulary say what transformers' tokenizers do with it; cases.json in each
       tokenizer_peer.py parts FOLDER             makes a folder for each part of tokenizer.json; cases.json in each, what the package does
       tokenizer_peer.py speed FOLDER TEXT        prints the seconds that encoding a file takes, the best of three

The vocabulary is SmolLM2's, from its .gguf file; KIND says what is around it: smollm, gpt2, llama3 or nfc.
"""
import json
import os
import random
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TROUBLE = ["Hello", " world", "it's", "I'LL", "don't", "we've", "123", "4567890", "\u00b2\u00bd", "\u0663\u0664", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u0085", "\u2028", "caf\u00e9", "cafe\u0301", "\u4f60\u597d",
           "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0645\u0631\u062d\u0628\u0627", "\U0001f600", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u200b", "\ufeff", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>",
           "def f(x):\n    return x**2\n", "#include <vector>", "{\"a\": [1, 2]}", "http://a.b/c?d=e&f", "==========", "-" * 70, "a" * 40, "ab" * 300, "\x00", "\x07", "'", "''s", "\"", "\ufffd", "\ud7ff", "\U0010fffd", "_", "\u00df", "\u01c5",
           "x\u0301\u0302", "\u1e69", "s\u0323\u0307", "\u212b", "\ufb01"]


def make(kind, path, folder):
    import gguf
    import quick_gguf  # noqa: F401
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


def added(content, **flags):
    return dict(dict(content=content, lstrip=False, rstrip=False, single_word=False, normalized=False, special=True), **flags)


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
SAID = ["the<|im_start|> 1212<|im_end|> <|endoftext|> <|im_end|>\nin her</s>", " <|im_start|>\u3000x\u00a0 <|im_end|>  y<pad><|padding|>", "er er, erx xer \u00e9er \u5728er er", "", " ", "cafe\u0301 it's <other><s>"]


def layouts(folder):
    from transformers import AutoTokenizer
    for name, (model_type, settings, files, first, change) in LAYOUTS.items():
        path = f"{folder}/{name}"
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
        files = {"config": {"model_type": model_type}, **({"tokenizer_config": settings} if settings else {}), **files}
        for file, content in files.items():
            json.dump(content, open(f"{path}/{file}.json", "w"))
        made = AutoTokenizer.from_pretrained(path)
        cases = [dict(text=text, ids=made(text)["input_ids"], decoded=made.decode(made(text)["input_ids"], skip_special_tokens=True)) for text in SAID]
        json.dump(dict(cases=cases, special=[made.bos_token_id, made.eos_token_id, made.pad_token_id], size=len(made)), open(f"{path}/cases.json", "w"))


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


def template(single, *special):
    return processors.TemplateProcessing(single=single, special_tokens=[(token, ["<s>", "</s>", "<unk>"].index(token)) for token in special])


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


{"cases": cases, "speed": speed, "auto": auto, "layouts": layouts, "parts": parts}[sys.argv[1]](*sys.argv[2:])
