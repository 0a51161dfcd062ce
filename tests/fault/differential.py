"""Our readers and the Python packages on the same damaged files: whoever accepts what the other refuses is explained here, or it is an error.

usage: differential.py VERDICTS [--inputs N] [--table] [FORMAT ...]
VERDICTS is the program of verdicts.cpp; formats are safetensors, gguf, torch and tokenizer. N files of each, 500 unless given: good ones, the fuzzers' corpus, and
both with a few bytes or numbers changed, the same in each run. --table prints the classes of differences as Markdown. The exit status is 1 where one is not explained.
"""
import argparse
import base64
import collections
import io
import json
import os
import pathlib
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import warnings

import gguf
import numpy as np
import safetensors
import safetensors.torch
import tokenizers
import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)
ROOT = pathlib.Path(__file__).resolve().parents[2]

# (format, who accepts it, what the other says, why). Where we are the stricter it is on purpose: a file is refused whose meaning is open, or that asks for more than it has.
EXPLAINED = [
    ("gguf", "ours", "UnicodeDecodeError", "names and texts are bytes to us until somebody shows them"),
    ("gguf", "ours", "TimeoutError|MemoryError", "the package makes an object of each element of an array"),
    ("gguf", "ours", "IndexError", "the package takes the last of a tensor's dimensions; a scalar has none"),
    ("gguf", "package", "a multiple of the alignment", "places of tensors that the format forbids"),
    ("torch", "ours", "UnicodeDecodeError", "texts are bytes to us; no tensor has such a name"),
    ("torch", "ours", "storage_alignment|format_version|version|invalid literal for int|not in a subdirectory|serialization_id", "records beside the pickle and the tensors that it names are passed over"),
    ("torch", "ours", "multidisk|too many files|invalid header or archive|unsupported (feature|method|encryption)", "fields of a zip's headers that say nothing of where the bytes lie are passed over"),
    ("torch", "ours", "restore data location", "everything is read to the CPU, whatever device it was on"),
    ("torch", "package", "end of its directory|is not where its directory says|archive of torch.save", "bytes behind the end, and headers that differ from the directory"),
    ("torch", "package", "memoises in slot", "slots are numbered in order, so that memory is bounded by the file"),
    ("torch", "package", "never needs|its protocol is|values on its stack|reaches beyond", "what torch.save does not write: other opcodes and protocols, values that nobody takes, records that overlap"),
    ("torch", "package", "found a class or function|expected plain data", "only data is read, nothing that a name stands for"),
    ("tokenizer", "ours", "missing field|Missing vocab|did not match any variant", "fields that say nothing about the ids of one text need not be there; where a field has one usual value that is the default"),
    ("tokenizer", "package", "vocabulary lacks", "two tokens with one id, of which the later counts"),
    ("tokenizer", "ours", "PanicException", "the package gives up at the second of two texts in a template for one; we have one"),
    ("tokenizer", "package", "not valid JSON", "the package goes on behind some errors"),
    ("tokenizer", "package", "special token has the id", "a special token beside the vocabulary, which no model could take"),
    ("tokenizer", "package", "tokenizer pattern", "patterns of another kind of regular expressions"),
    ("tokenizer", "package", "is not supported|the post-processor|the normalizer|the pre-tokenizer|the decoder", "parts that this tokenizer has not, or with a name that is misspelt"),
    ("tokenizer", "package", "not of the form", "a part without its type, which the package guesses from the other fields"),
]


# --- good files

def good_safetensors():
    tensors = {"a": torch.arange(6.).reshape(2, 3), "b": torch.arange(4, dtype=torch.uint8), "c": torch.tensor(1.5, dtype=torch.bfloat16), "e": torch.zeros(0, 2)}
    return [safetensors.torch.save(tensors, {"format": "pt"}), safetensors.torch.save({"x": torch.ones(3, dtype=torch.int64)})]


def good_torch():
    tied = torch.arange(6.).reshape(2, 3)
    values = [{"w": tied, "again": tied.t(), "n": 3, "name": "x", "none": None, "list": [1, 2.5, True], "tuple": (1, -2**40)},
              collections.OrderedDict(weight=torch.ones(2, dtype=torch.bfloat16), bias=torch.zeros(0, dtype=torch.int64)), [torch.tensor(True), {"k": [{}, (), []]}],
              {1: torch.ones(2, 2)[:, 1], 2: torch.nn.Parameter(torch.ones(1))}]
    files = []
    for value in values:
        out = io.BytesIO()
        torch.save(value, out)
        files.append(out.getvalue())
    return files


def good_gguf():
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for version in range(2):
            path = os.path.join(folder, "m.gguf")
            writer = gguf.GGUFWriter(path, "llama")
            writer.add_uint32("llama.block_count", 2)
            writer.add_float32("eps", 1e-5)
            writer.add_array("list", [1, 2, 3])
            writer.add_array("tokens", ["a", "bc"])
            writer.add_bool("flag", True)
            writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
            if version:
                writer.add_tensor("q", np.arange(34, dtype=np.uint8).reshape(1, 34), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            files.append(pathlib.Path(path).read_bytes())
    return files


def good_tokenizer():
    vocabulary = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "1": 4, "2": 5, "<s>": 6, "Ġa": 7}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": False, "vocab": vocabulary, "merges": [["a", "b"], ["Ġ", "a"]]}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    full = {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": 6, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "\\p{N}|\\s+(?!\\S)"}, "behavior": "Isolated", "invert": False},
                                                                    {"type": "Digits", "individual_digits": True}, level]},
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                               "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                               "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}}}, "decoder": level, "model": model}
    small = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
             "model": {**model, "merges": ["a b", "Ġ a"]}}
    return [json.dumps(value).encode() for value in (full, small)]


# --- what the packages say: None, or why not

def peer_safetensors(data):
    for _, tensor in safetensors.deserialize(data):
        tensor["shape"]


def peer_torch(data):
    torch.load(io.BytesIO(data), weights_only=True)


def peer_gguf(data):
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.write(data)
        file.flush()
        gguf.GGUFReader(file.name)


def peer_tokenizer(data):
    tokenizers.Tokenizer.from_str(data.decode("utf-8")).encode("ab ab 12")


FORMATS = {"safetensors": (good_safetensors, peer_safetensors, "safetensors"), "gguf": (good_gguf, peer_gguf, "gguf"), "torch": (good_torch, peer_torch, "torch_container"),
           "tokenizer": (good_tokenizer, peer_tokenizer, "tokenizer")}


# --- damage

NUMBERS = [b"0", b"-1", b"1", b"2", b"3", b"24", b"9223372036854775807", b"9223372036854775808", b"1e3", b"1.5", b"null", b"[]", b"{}", b'"x"', b"true"]


def damaged(data, draw):
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(9)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        elif kind == 2:
            del data[at:at + draw.choice([1, 1, 2, 8, 40])]
        elif kind == 3:
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice([1, 1, 2, 8])))
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            begin = draw.randrange(len(data) + 1)
            data[at:at] = data[begin:begin + draw.choice([1, 4, 20, 60])]
        elif kind == 6 and len(data) >= 8:
            at %= len(data) - 7
            value = struct.unpack_from("<Q", data, at)[0] + draw.choice([-1, 1, 8, -8, 1 << 31, 1 << 62, 1 << 63])
            struct.pack_into("<Q", data, at, value % (1 << 64))
        else:  # a number in a text
            found = list(re.finditer(rb"\d+", bytes(data)))
            if found:
                match = draw.choice(found)
                data[match.start():match.end()] = draw.choice(NUMBERS)
    return bytes(data)


def inputs_of(name, count):
    good, _, corpus = FORMATS[name]
    draw = random.Random(f"{name} 16")
    seeds = good()
    lines = (ROOT / "fuzz" / "corpus" / f"{corpus}.base64").read_text().split()
    found = [base64.b64decode(line) for line in lines if len(line) < 3000]
    if name == "torch":
        found = [data for data in found if data.startswith(b"PK")]
    if name == "tokenizer":
        found = [data for data in found if b"\xff" not in data]
    result = seeds + found[:count // 4]
    while len(result) < count:
        # Most from good files: what is far from these both refuse.
        data = draw.choice(seeds) if not found or draw.random() < 0.8 else draw.choice(found)
        result.append(damaged(data, draw))
    return result[:count]


def alike(text):
    """A message without what differs from file to file."""
    text = re.sub(r"'[^']*'|`[^`]*`|b'.*", "'...'", text)
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)[:200]


def too_long(*_):
    raise TimeoutError("takes more than half a second")


def said(data, peer):
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.5)
    try:
        peer(data)
    except BaseException as error:  # Rust's panics derive from it
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def compare(verdicts, name, count):
    """@return {(who accepts, what the other says): [inputs]}, and how many files both accept and both refuse"""
    inputs = inputs_of(name, count)
    text = b"".join(base64.b64encode(data) + b"\n" for data in inputs)
    ours = subprocess.run([verdicts, name], input=text, capture_output=True, check=True).stdout.decode(errors="replace").split("\n")[:-1]
    assert len(ours) == len(inputs), (name, len(ours), len(inputs))
    differences, both = collections.defaultdict(list), collections.Counter()
    for data, verdict in zip(inputs, ours):
        other = said(data, FORMATS[name][1])
        if (verdict == "yes") == (other is None):
            both["accepted" if other is None else "refused"] += 1
        elif other is None:
            differences["package", alike(verdict.removeprefix("no "))].append(data)
        else:
            differences["ours", alike(other)].append(data)
    return differences, both


def main():
    options = argparse.ArgumentParser()
    options.add_argument("verdicts")
    options.add_argument("--inputs", type=int, default=500)
    options.add_argument("--table", action="store_true")
    options.add_argument("--show", action="store_true", help="an input of each difference that is not explained")
    options.add_argument("formats", nargs="*", default=list(FORMATS))
    given = options.parse_intermixed_args()
    # Some packages believe what a header asks for.
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    signal.signal(signal.SIGVTALRM, too_long)
    unexplained = 0
    for name in given.formats or FORMATS:
        differences, both = compare(given.verdicts, name, given.inputs)
        rows = collections.Counter()
        for (who, other), files in sorted(differences.items()):
            row = next((row for row in EXPLAINED if row[0] == name and row[1] == who and re.search(row[2], other)), None)
            rows[row or (name, who, other, None)] += len(files)
        print(f"{name}: {given.inputs} files, both accept {both['accepted']}, both refuse {both['refused']}, differences {sum(rows.values())}")
        for row, number in sorted(rows.items(), key=lambda entry: -entry[1]):
            if row[3] is None:
                unexplained += 1
                print(f"  NOT EXPLAINED: only {row[1]} accept(s) {number}; the other says: {row[2]}")
                if given.show:
                    print("    " + base64.b64encode(differences[row[1], row[2]][0]).decode()[:4000])
            elif given.table:
                print(f"| {row[0]} | {row[1]} | {number} | {row[2]} | {row[3]} |")
    return 1 if unexplained else 0


sys.exit(main())
