#!/usr/bin/env python3
"""train_llm on a model of several times the memory that its control group may have, by nvme: trained, killed, resumed.

usage: in_a_cgroup.py --bin build/release/bin --folder FOLDER [--limit_mb 512] [--layers 160] [--steps 3]

Needs root and control groups (either version). FOLDER is on the disk, with room for some 40 bytes a parameter. Prints the limit, the model's size, what the group used at most, and the losses of
an uninterrupted run beside those of one that was killed (SIGKILL, right after its first checkpoint) and resumed: they must be the same, and so must the weights that both save.
"""
import argparse, filecmp, json, os, pathlib, re, shutil, signal, subprocess, sys, time

CGROUPS = pathlib.Path("/sys/fs/cgroup")


class Group:
    """A control group with a limit on memory, the cache of files included."""

    def __init__(self, limit):
        self.v1 = (CGROUPS / "memory").is_dir()
        self.path = (CGROUPS / "memory" if self.v1 else CGROUPS) / "accelerate_disk_step"
        if self.path.is_dir():
            self.path.rmdir()  # what an earlier run used at most
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if self.v1 else "memory.max")).write_text(str(limit))

    def start(self, command, **more):
        return subprocess.Popen(["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)

    def run(self, command):
        """@return what it said"""
        process = self.start(command)
        said = process.communicate()[0]
        if process.returncode != 0:
            sys.exit(f"ended with {process.returncode}:\n{said}")
        return said

    def most(self):
        return int((self.path / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")).read_text())


def write_model(folder, layers, hidden=512, inner=1408):
    """A configuration, and a tokenizer whose tokens are bytes. Returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = 260
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256, "initializer_range": 0.02, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in printable)}
    tokens = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {letters[byte]: 4 + byte for byte in range(256)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": tokens, "merges": []}
    added = [{"id": i, "content": text, **plain} for text, i in list(tokens.items())[:4]]
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": levels, "post_processor": None, "decoder": levels, "model": bpe}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}))
    return layers * (4 * hidden * hidden + 3 * hidden * inner + 2 * hidden) + vocabulary * hidden + hidden


def losses(text):
    return dict(re.findall(r"step (\d+) loss ([\d.]+)", text))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--folder", required=True, type=pathlib.Path)
    parser.add_argument("--limit_mb", type=int, default=512)
    parser.add_argument("--layers", type=int, default=160)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    parameters = write_model(args.folder / "model", args.layers)
    disk = {"device": "nvme", "nvme_path": str(args.folder / "nvme")}
    zero = {"stage": 3, "sub_group_size": 4000000, "stage3_prefetch_bucket_size": 4000000, "stage3_max_live_parameters": 13000000, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 10000, "stage3_gather_16bit_weights_on_model_save": True, "offload_optimizer": disk | {"pipeline_read": True, "pipeline_write": True}, "offload_param": disk | {"max_in_cpu": 0, "buffer_count": 2, "buffer_size": 4000000}}
    (args.folder / "ds_config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": zero, "aio": {"block_size": 8388608}}))
    (args.folder / "data.txt").write_text("In the beginning was the word, and it was short.\n" * 200)

    def command(out, *more):
        program = [os.path.join(args.bin, "train_llm"), "--model", args.folder / "model", "--from_scratch", "--tokenizer", args.folder / "model", "--data", args.folder / "data.txt", "--seq_length", "16", "--batch_size", "1", "--log_every", "1", "--max_steps", str(args.steps), "--max_new_tokens", "0", "--lr", "1e-4", "--output_dir", args.folder / out]
        launch = [os.path.join(args.bin, "accelerate"), "launch", "-q", "--use_deepspeed", "--deepspeed_config_file", args.folder / "ds_config.json", "--num_processes", "1"]
        return [str(word) for word in [*launch, *program, *more]]

    group = Group(args.limit_mb << 20)
    begin = time.time()
    whole = group.run(command("whole"))
    print(f"limit {args.limit_mb} MiB; model {parameters * 4 / 2**20:.0f} MiB in fp32, {parameters * 16 / 2**20:.0f} MiB with gradients and states; the group had at most {group.most() / 2**20:.0f} MiB; {time.time() - begin:.0f} s", flush=True)
    print("uninterrupted", losses(whole), flush=True)
    killed = group.start(command("killed", "--save_every", "1"), process_group=0)
    text = ""
    for line in killed.stdout:
        text += line
        if line.startswith("saved"):
            os.killpg(killed.pid, signal.SIGKILL)
            break
    killed.wait()
    time.sleep(2)
    resumed = group.run(command("killed", "--save_every", "1000", "--resume"))
    print("killed", losses(text), "resumed", losses(resumed))
    if losses(text) | losses(resumed) != losses(whole):
        sys.exit("the losses differ:\n" + text + resumed)
    if not filecmp.cmp(args.folder / "whole/model.safetensors", args.folder / "killed/model.safetensors", shallow=False):
        sys.exit("the weights differ")
    print("the weights that both have saved are equal to the bit")


if __name__ == "__main__":
    main()
