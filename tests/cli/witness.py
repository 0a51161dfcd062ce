#!/usr/bin/env python3
"""Runs an example as a witness: on one process, then on two, whole (DDP) and sharded (--use_fsdp), which meet in shared
memory and through sockets; sharded on one of these twice (which, the name's length says; whole where it can't be sharded).
What it prints has to match OUTCOME, a regular expression, and the numbers in its groups have to be
  the same to the letter   in both runs of a kind,
  the same to --tolerance  in all kinds (relative: the engines add in different orders),
  the same to --near       as those of one process (absolute; the global batch is another one there, unless --alone says so).
An example that can't be sharded ends with a named error then: --refused is its text, which every rank must have said.
`witness.py --make_small_bert SOURCE FOLDER` makes the model that stands for $bert."""
import argparse
import array
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

TRANSPORTS = {"shared memory": "1", "sockets": "0"}
# The run alone, and one of two (whole or sharded, which the name's length says), begin and end as they do for users. In the others LibTorch is neither loaded,
# where the example can serve (tests/support/program_server.hpp), nor taken apart (cmake/AccelerateTogether.cmake): most of what a small one takes.
LEAVES = {"ACCELERATE_TEST_LEAVES_LIBTORCH": "1"}
SERVER = "ACCELERATE_TEST_PROGRAM_SERVER"


class Server:
    """The example as a server of itself, while it is entered."""

    def __init__(self, program):
        self.program = program

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="witness-")
        self.environment = LEAVES | {SERVER: f"{self.folder.name}/socket"}
        self.process = subprocess.Popen([self.program], stdin=subprocess.DEVNULL, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | self.environment)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def wait(self):
        while not os.path.exists(self.environment[SERVER]):
            if self.process.poll() is not None:
                sys.exit(f"{self.program} as a server has ended with {self.process.returncode}, expected it to wait for programs to start")
            time.sleep(0.01)


def make_small_bert(source, folder):
    """A BERT with the tokenizer of the one in `source`, but two layers of width 32 and random numbers."""
    sizes, layers, draw = {384: 32, 1536: 64}, 2, random.Random(7)
    for file in source.iterdir():
        if file.is_file() and file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    with open(source / "model.safetensors", "rb") as weights:
        header = json.loads(weights.read(struct.unpack("<Q", weights.read(8))[0]))
    made, data = {}, bytearray()
    for name, entry in header.items():
        number = re.match(r"encoder\.layer\.(\d+)\.", name)
        if name == "__metadata__" or (number and int(number[1]) >= layers):
            continue
        shape = [sizes.get(size, size) for size in entry["shape"]]
        count = 1
        for size in shape:
            count *= size
        if entry["dtype"] == "I64":
            values = array.array("q", range(count))
        elif name.endswith("LayerNorm.weight"):
            values = array.array("f", [1.0]) * count
        else:
            values = array.array("f", (number / 200000 for number in array.array("h", draw.randbytes(2 * count))))
        made[name] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [len(data), len(data) + len(values) * values.itemsize]}
        data += values.tobytes()
    text = json.dumps(made).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


class Witness:
    def __init__(self, options):
        self.options, self.problems, self.runs = options, [], 0
        self.bert = None
        self.server = None

    def run(self, label, processes, flags, environment, words):
        """@return the numbers of OUTCOME's groups, or None"""
        scratch = tempfile.mkdtemp(prefix="witness-")
        try:
            words = [word.replace("$scratch", scratch).replace("$data", self.options.data or "") for word in words]
            words = [self.some_digits(scratch) if word == "$digits" else self.bert if word == "$bert" else word for word in words]
            program = "from_program_server" if SERVER in environment else self.options.example
            command = [f"{self.options.bin}/accelerate", "launch", *(flags or ["--cpu"]), "--num_processes", str(processes),
                       "--main_process_port", "0", f"{self.options.bin}/{program}", *words]
            self.runs += 1
            if SERVER in environment:
                self.server.wait()
            result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                                    env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment, cwd=self.options.source)
        finally:
            shutil.rmtree(scratch)
        said = f"--- {label}: {' '.join(command)}\nexit code {result.returncode}\n{result.stdout}{result.stderr}"
        if flags and self.options.refused:
            if result.returncode == 0 or result.stderr.count(self.options.refused) < processes:
                self.problems.append(f"{said}\nexpected an error with '{self.options.refused}', of every rank")
            return None
        found = re.search(self.options.outcome, result.stdout + result.stderr, re.DOTALL)
        if result.returncode or not found:
            self.problems.append(f"{said}\nexpected {self.options.outcome}")
            return None
        print(f"{label}: {' '.join(found.groups())}", flush=True)
        return found.groups()

    def some_digits(self, folder):
        """@return a file of every fourth of the data's digits, which are sorted"""
        with open(f"{self.options.data}/mnist_5k.csv") as source, open(f"{folder}/digits.csv", "w") as target:
            target.writelines(itertools.islice(source, 0, None, 4))
        return target.name

    def compare(self, what, ours, theirs, equal):
        if ours and theirs and not all(equal(a, b) for a, b in zip(ours, theirs)):
            self.problems.append(f"{what}: {ours}, expected {theirs}")

    def close(self, a, b):
        return abs(float(a) - float(b)) <= self.options.tolerance * max(abs(float(a)), abs(float(b)))

    def near(self, a, b):
        return abs(float(a) - float(b)) <= self.options.near

    def testify(self):
        if not self.options.served:
            return self.testify_with_files()
        with Server(f"{self.options.bin}/{self.options.example}") as self.server:
            return self.testify_with_files()

    def testify_with_files(self):
        words = self.options.words
        if "$bert" in words:
            with tempfile.TemporaryDirectory(prefix="witness-") as self.bert:
                make_small_bert(pathlib.Path(self.options.data, "minilm"), pathlib.Path(self.bert))
                return self.testify_on(words)
        return self.testify_on(words)

    def testify_on(self, words):
        as_for_users = ("sharded" if len(self.options.example) // 2 % 2 else "whole", "1")
        later = self.server.environment if self.server else LEAVES
        alone = self.run("one process", 1, [], {}, self.options.alone.split() if self.options.alone else words)
        first = None
        layouts = {"whole": []} | {"sharded" + more: ["--use_fsdp", *more.split()] for more in ["", *self.options.sharded]}
        for layout, flags in layouts.items():
            for transport, shared in TRANSPORTS.items():
                label = f"{layout}, {transport}"
                environment = {"ACCELERATE_SHARED_MEMORY": shared}
                once = self.run(label, 2, flags, environment | ({} if (layout, shared) == as_for_users else later), words)
                if flags and self.options.refused:
                    continue
                first = first or once
                if layout == ("whole" if self.options.refused else "sharded") and shared == str(len(self.options.example) % 2):
                    again = self.run(label, 2, flags, environment | later, words)
                    self.compare(f"{label}, the second time", again, once, lambda a, b: a == b)
                self.compare(f"{label}, beside the first kind", once, first, self.close)
        self.compare("two processes, beside one", first, alone, self.near)
        print("\n".join(self.problems) or f"{self.options.example}: {self.runs} runs, a witness each")
        return bool(self.problems)


def main():
    if sys.argv[1:2] == ["--make_small_bert"]:
        return make_small_bert(*map(pathlib.Path, sys.argv[2:4]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--outcome", required=True)
    parser.add_argument("--alone", default="", help="arguments on one process, where they differ")
    parser.add_argument("--sharded", action="append", default=[], help="flags of a further sharded kind")
    parser.add_argument("--refused", default="")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--near", type=float, default=0.02)
    parser.add_argument("--served", action="store_true", help="the example can be a server of itself")
    parser.add_argument("--needs_data", action="store_true")
    parser.add_argument("example")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    options.data = os.environ.get("ACCELERATE_TEST_DATA")
    if options.needs_data and not options.data:
        print("skipped: ACCELERATE_TEST_DATA is not set (scripts/test.sh sets it)")
        return 0
    return Witness(options).testify()


if __name__ == "__main__":
    sys.exit(main())
