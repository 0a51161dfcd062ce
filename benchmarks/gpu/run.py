#!/usr/bin/env python3
"""Ours against torch and Hugging Face Accelerate on one GPU: answers first, then times, within a budget of time.

usage: run.py --bin build/release/bin --python PYTHON --work FOLDER --out FOLDER [--seconds 300] [--rounds 3] [--only TASK,…]
       [--layers 32] [--tokens 6] [--rehearse]
PYTHON needs torch, accelerate and transformers, and bitsandbytes and peft for weights in few bits; without it only our own times are shown. A LLaMA of 7 B (fp16, 13.5 GB; less with fewer
--layers) is written into --work once. Writes gpu.json and gpu.md into --out. --rehearse: the same on the CPU with tiny models, which
proves this program and nothing about speed. Rounds go on while there is time; what fails or is late is named and does not stop the rest.
Tables are written anew after each contestant, so that whoever ends this program has what was measured until then.
Exit status 1: something failed, or answers differed. Targets that are missed are in the table only.
"""
import argparse, functools, json, os, platform, shutil, signal, socket, statistics, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
OURS, PEER = "ours", "peer"


def tasks(args):
    """Name, arguments of both contestants, seconds that one of them may take; what matters most comes first."""
    folder, tokens = os.path.abspath(args.work), str(args.tokens)
    sizes = ["tiny"] if args.rehearse else ["124m", "774m"]
    yield f"train {sizes[0]}", ["train", sizes[0]], 90
    yield "products", ["products", width(args)], 90
    yield "cpu_offload", ["cpu_offload", folder, tokens], 120
    yield "load", ["load", folder, tokens], 90
    yield "qlora", ["qlora", folder, "32" if args.rehearse else "512"], 120
    yield "launch", ["launch"], 60
    yield "all_reduce", ["all_reduce"], 60
    for size in sizes[1:]:
        yield f"train {size}", ["train", size], 90
    yield "disk_offload", ["disk_offload", folder, str(min(args.tokens, 3))], 120  # seconds each where the disk is slow


def width(args):
    """Of the weight of `products`."""
    return "64" if args.rehearse else "4096"


def wanted(args, task):
    return any(task.startswith(name) for name in args.only.split(","))


def rows(args):
    """Title, task, our measure, their measure, what of it ("ms": the median; another: that fact; "wall": of the process), target."""
    for size in ["tiny"] if args.rehearse else ["124m", "774m"]:
        for way, title in [("plain", "plain"), ("ddp", "DDP, a group of one rank"), ("fsdp", "FSDP, one rank")]:
            yield f"GPT-2 {size}, step, {title}", f"train {size}", way, way, "ms", 1.0
    for kind, peer in [("bf16", "bf16"), ("nf4", "nf4"), ("int8", "int8"), ("fp8", "bf16")]:
        for count in ["1", "16", "256", width(args)] if kind != "fp8" else ["16", "256", width(args)]:
            title = f"{width(args)} x {width(args)}, {kind}{f' against {peer}' if peer != kind else ''}, rows: {count}"
            yield title, "products", f"{kind}, {count} rows", f"{peer}, {count} rows", "ms", 1.0
    yield "7 B, step of LoRA beside nf4, 512 tokens", "qlora", "step", "step", "ms", 1.0
    yield "7 B, checkpoint to GPU", "load", "load", "load", "ms", 1.0
    yield "7 B, token, weights on the GPU", "load", "token", "token", "ms", 1.0
    for way, name in [("cpu_offload", "cpu offload"), ("disk_offload", "disk offload")]:
        yield f"7 B, {name}: until ready", way, "streamed", "token", "setup_ms", 1.0  # its first: page-locked memory is kept
        yield f"7 B, {name}: first token", way, "default", "token", "first_ms", 1.0
        yield f"7 B, {name}: token, all weights come anew", way, "streamed", "token", "ms", 2.0
        yield f"7 B, {name}: token, as the library decides", way, "default", "token", "ms", 2.0
    yield "launch to the end of the first step", "launch", "first step", "first step", "wall", 1.0
    for size in [4, 65536, 4194304]:
        yield f"all_reduce alone, {size} bytes", "all_reduce", str(size), str(size), "ms", 1.0


# Of a loss, and of the largest of some logits: bf16 has 3 digits, fp16 rounds at other places in the two implementations.
# fp8 and LLM.int8() round what ours and the peer's other products don't.
TOLERANCE = {"train": 5e-3, "products": 0.1, "qlora": 2e-2, "load": 2e-2, "cpu_offload": 2e-2, "disk_offload": 2e-2}


def differ(task, ours, theirs):
    """Why two results are not the same answer; empty if they are."""
    a, b = ours.get("answer", []), theirs.get("answer", [])
    if len(a) != len(b) or None in a or None in b:
        return f"{len(a)} and {len(b)} numbers, or some that are not finite"
    if ours.get("tokens", []) != theirs.get("tokens", []):
        return f"tokens {ours['tokens']} and {theirs['tokens']}"
    tolerance, largest = TOLERANCE.get(task.split()[0], 1e-6), max(map(abs, b), default=0)
    worst = max((abs(x - y) / (abs(y) if task.startswith("train") else largest or 1) for x, y in zip(a, b)), default=0)
    return f"by {worst:.2g}, of {tolerance:g} allowed" if worst > tolerance else ""


class Job:
    """Runs contestants one after the other within the budget, and keeps what they print."""

    def __init__(self, args):
        self.args, self.deadline = args, time.monotonic() + args.seconds
        self.results = {}  # task -> contestant -> measure -> {"ms": samples of all rounds, facts: a list each, ...}
        self.walls = {}  # (task, contestant) -> ms
        self.problems = {}  # (task, contestant) -> text

    def environment(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        home = os.path.join(os.path.abspath(self.args.work), "home")  # no configuration file of this machine's
        env = {**os.environ, "MASTER_PORT": port, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        if self.args.rehearse:
            env |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return env

    def command(self, who, task, arguments):
        program = [os.path.join(os.path.abspath(self.args.bin), "bench_gpu")] if who == OURS else [self.args.python, os.path.join(HERE, "peer.py")]
        if task != "launch":
            return program + arguments
        cpu = ["--cpu"] if self.args.rehearse else []
        if who == OURS:
            return [os.path.join(os.path.abspath(self.args.bin), "accelerate"), "launch", "-q", "--num_processes", "1", *cpu, *program, *arguments]
        return [self.args.python, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", *cpu, *program[1:], *arguments]

    def run(self, command, limit):
        """@return milliseconds, JSON lines, and why it failed"""
        limit = min(limit, self.deadline - time.monotonic())
        if limit < 2:
            return 0, [], "not run: the time was over"
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            begin, problem = time.perf_counter(), ""
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self.environment(), start_new_session=True)
                try:
                    status = process.wait(limit)
                    problem = f"exit status {status}" if status else ""
                except subprocess.TimeoutExpired:
                    problem = f"killed after {limit:.0f} s"
                finally:  # also when this program is to end
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            except OSError as error:
                problem = str(error)
            wall = (time.perf_counter() - begin) * 1000
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        lines = []
        for line in texts[0].splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                pass
        return wall, [line for line in lines if isinstance(line, dict) and "measure" in line], problem + (": " + texts[1][-800:].strip() if problem else "")

    def take(self, task, who, lines):
        for line in lines:
            if "error" not in line and not self.args.rehearse and not line.get("device", "").startswith("cuda"):
                line["error"] = f"computed on {line.get('device')}"
            if "error" in line:
                self.problems[task, who] = f"{line['measure']}: {line['error']}"
                continue
            kept = self.results.setdefault(task, {}).setdefault(who, {}).setdefault(line["measure"], {})
            for key, value in line.items():
                if key == "ms":
                    kept.setdefault("ms", []).extend(value)
                elif isinstance(value, (int, float)):
                    kept.setdefault(key, []).append(value)
                else:
                    kept[key] = value

    def prepare(self):
        """The model of the tasks on weights, written by the peer's Python."""
        if not self.args.python:
            return "no --python to write the model with"
        folder, layers = os.path.abspath(self.args.work), self.args.layers
        done = os.path.join(folder, "index.json")  # comes last
        try:
            with open(os.path.join(folder, "checkpoint", "config.json")) as file:
                config = json.load(file)
            if os.path.exists(done) and config["num_hidden_layers"] == layers and (config["hidden_size"] < 4096) == self.args.rehearse:
                return ""
        except (OSError, ValueError):
            pass
        free = shutil.disk_usage(folder).free / 1e9
        if not self.args.rehearse and free < 5 + 0.41 * layers:
            return f"{free:.0f} GB are free in {folder}, {5 + 0.41 * layers:.0f} are needed; give fewer --layers"
        command = [self.args.python, os.path.join(HERE, "peer.py"), "prepare", folder, str(layers)] + (["tiny"] if self.args.rehearse else [])
        return self.run(command, 150)[2]

    def all(self, report):
        contestants = [OURS, PEER] if self.args.python else [OURS]
        unprepared = None
        for number in range(self.args.rounds):
            for task, arguments, limit in tasks(self.args):
                if not wanted(self.args, task):
                    continue
                if len(arguments) == 3 and unprepared is None:
                    unprepared = self.prepare()
                    print(f"model: {unprepared or 'there'}", flush=True)
                for who in contestants if number % 2 == 0 else contestants[::-1]:  # in turns: the machine's mood hits all alike
                    if (task, who) in self.problems:
                        continue
                    last = self.walls.get((task, who), [0])[-1] / 1000
                    if number > 0 and last * 1.1 > self.deadline - time.monotonic():
                        continue  # a further round that would not end
                    if len(arguments) == 3 and unprepared:
                        wall, lines, problem = 0, [], "no model: " + unprepared
                    else:
                        wall, lines, problem = self.run(self.command(who, task, arguments), limit)
                    if problem:
                        self.problems[task, who] = problem
                    else:
                        self.walls.setdefault((task, who), []).append(wall)
                    self.take(task, who, lines)
                    print(f"round {number + 1}, {task}, {who}: {wall / 1000:.1f} s {self.problems.get((task, who), '')}", flush=True)
                    report()

    def value(self, task, who, measure, what):
        samples = self.walls.get((task, who), []) if what == "wall" else self.results.get(task, {}).get(who, {}).get(measure, {}).get(what, [])
        return statistics.median(samples) if samples else None

    def measures(self, task, who):
        return self.results.get(task, {}).get(who, {})


def spread(job, task, who, measure, what):
    samples = job.walls.get((task, who), []) if what == "wall" else job.measures(task, who).get(measure, {}).get(what, [])
    return f"{statistics.median(samples):.4g} ({min(samples):.4g} to {max(samples):.4g})" if samples else "-"


def table(job):
    """Rows as dicts; an answer that differs leaves no ratio."""
    for title, task, our, their, what, target in rows(job.args):
        if not wanted(job.args, task):
            continue
        ours, theirs = job.value(task, OURS, our, what), job.value(task, PEER, their, what)
        row = {"title": title, "ours_ms": ours, "peer_ms": theirs, "target": target, "ours": spread(job, task, OURS, our, what), "peer": spread(job, task, PEER, their, what), "ratio": None, "note": ""}
        tells = ("token", "token") if our == "load" else (our, their)  # what was loaded is told by what it computes
        if tells[0] in job.measures(task, OURS) and tells[1] in job.measures(task, PEER):
            row["note"] = differ(task, job.measures(task, OURS)[tells[0]], job.measures(task, PEER)[tells[1]])
            if row["note"]:
                row["note"] = "answers differ: " + row["note"]
            elif ours and theirs:
                row["ratio"] = theirs / ours
        elif job.args.python:
            row["note"] = "incomplete, see below"
        yield row


def derived(job):
    """Sentences about more than one row."""
    for size in ["tiny"] if job.args.rehearse else ["124m", "774m"]:
        for way in ["ddp", "fsdp"]:
            shares = []
            for who in (OURS, PEER):
                plain, other = (job.value(f"train {size}", who, one, "ms") for one in ("plain", way))
                shares += [f"{who} {100 * (other / plain - 1):+.1f} %"] if plain and other else []
            if shares:
                yield f"GPT-2 {size}: {way} of one rank against plain: {', '.join(shares)}."
        peaks = [(way, [job.value(f"train {size}", who, way, "peak_mb") for who in (OURS, PEER)]) for way in ("plain", "ddp", "fsdp")]
        peaks = [f"{way} {mine:.0f} and {theirs:.0f}" for way, (mine, theirs) in peaks if mine and theirs]
        if peaks:
            yield f"GPT-2 {size}: peak of the allocator in 10^6 bytes, ours and the peer's: {'; '.join(peaks)}."
    for kind in ("nf4", "int8", "fp8"):
        shares = []
        for count in ["1", "16", "256", width(job.args)]:
            few, bf16 = (job.value("products", OURS, f"{one}, {count} rows", "ms") for one in (kind, "bf16"))
            shares += [f"{bf16 / few:.2f} with {count}"] if few and bf16 else []
        if shares:
            yield f"Ours, a product in {kind}: times as fast as in bf16, by rows of x: {', '.join(shares)}."
    link = [job.value("cpu_offload", who, "bandwidth", "gb_per_s") for who in (OURS, PEER)]
    link = max((one for one in link if one), default=None)
    for way in ["cpu_offload", "disk_offload"]:
        size, ms = job.value(way, OURS, "streamed", "gb_per_token"), job.value(way, OURS, "streamed", "ms")
        if size and ms:
            rate = size / ms * 1000
            share = f", {100 * rate / link:.0f} % of the {link:.1f} GB/s of copies from page-locked memory" if link else ""
            yield f"{way}: ours brings {size:.2f} GB for each token at {rate:.1f} GB/s{share}{' (target 85 %)' if way == 'cpu_offload' else ''}."
    known = [(task, measure, job.measures(task, OURS)[measure]) for task, measure in [("load", "token"), ("cpu_offload", "streamed"), ("cpu_offload", "default"), ("disk_offload", "streamed"), ("disk_offload", "default")] if measure in job.measures(task, OURS)]
    if len(known) > 1:
        first = known[0][2]["answer"]  # disk offload gives fewer tokens
        others = [f"{task} ({measure})" for task, measure, result in known if any(a != b for a, b in zip(first, result["answer"]))]
        yield f"Ours gives the same logits bit for bit wherever the weights are: {'no: ' + ', '.join(others) if others else 'yes'} ({len(known)} ways)."


@functools.cache
def machine(python):
    def said(command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    gpu = said(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]) or "no GPU"
    versions = "import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in ('torch', 'accelerate', 'transformers')))"
    return f"{gpu}; {os.cpu_count()} cores, {platform.machine()}; {said([python, '-c', versions]) if python else 'no peers'}"


def report(job):
    """Writes both files. @return the table, and whether something failed or differed"""
    args, table_rows, sentences = job.args, list(table(job)), list(derived(job))
    problems = {f"{task}, {who}": text for (task, who), text in job.problems.items()}
    lines = [
        f"# Ours and the peers on one GPU, {time.strftime('%Y-%m-%d')}" + (" (rehearsal on the CPU with tiny models: says nothing about speed)" if args.rehearse else ""),
        "",
        f"{machine(args.python)}. {args.layers} layers in the 7 B model; at most {args.rounds} rounds in turns, {args.seconds - job.deadline + time.monotonic():.0f} s in all.",
        "Milliseconds, median (range). Ratio: how many times faster ours is; only where the answers were the same: losses within 0.5 % (bf16), logits within 2 % of the largest (fp16), tokens exactly, products in few bits within 10 % of the largest. The checkpoint was in the",
        "system's cache where that has room: files are not read cold.",
        "",
        "| task | ours | torch, accelerate | ratio | target | |",
        "|---|---|---|---|---|---|",
    ]
    for row in table_rows:
        ratio, met = (f"{row['ratio']:.2f}x", "met" if row["ratio"] >= row["target"] else "**missed**") if row["ratio"] else ("-", row["note"])
        lines.append(f"| {row['title']} | {row['ours']} | {row['peer']} | {ratio} | {row['target']:.0f}x | {met} |")
    lines += ["", *[f"- {sentence}" for sentence in sentences]]
    if problems:
        lines += ["", "What failed:", ""] + [f"- {who}: `{' '.join(problem.split())[-600:]}`" for who, problem in problems.items()]
    text = "\n".join(lines) + "\n"
    with open(os.path.join(args.out, "gpu.md"), "w") as file:
        file.write(text)
    walls = {f"{task}, {who}": ms for (task, who), ms in job.walls.items()}
    with open(os.path.join(args.out, "gpu.json"), "w") as file:
        json.dump({"machine": machine(args.python), "rehearsal": args.rehearse, "layers": args.layers, "rows": table_rows, "sentences": sentences, "results": job.results, "walls_ms": walls, "problems": problems}, file, indent=1)
    return text, bool(problems) or any(row["note"].startswith("answers") for row in table_rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--python", default=os.environ.get("ACCELERATE_TEST_PYTHON", ""))
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.seconds = args.seconds or (170 if args.rehearse else 300)
    args.layers = args.layers or (4 if args.rehearse else 32)
    os.makedirs(args.work, exist_ok=True)
    os.makedirs(args.out, exist_ok=True)
    job = Job(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    job.all(lambda: report(job))
    text, failed = report(job)
    print(text)
    return 1 if failed else 0


sys.exit(main())
