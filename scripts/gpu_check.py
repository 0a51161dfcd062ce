"""The steps of scripts/gpu_check.sh, which says what they do."""
import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KIT = os.path.join(ROOT, ".gpu_kit")
BUILD = os.path.join(ROOT, "build", "gpu")
STEPS = ["machine", "build", "tests", "benchmarks"]
# Seconds at most, of each program that a step starts, where all have SECONDS; more where they have more.
SECONDS = 530
LIMITS = {"question": 60, "unpack": 60, "configure": 60, "build": 240, "tests": 180, "benchmarks": 400}

TORCH = """
import json, torch
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps({"torch": torch.__version__, "cmake": torch.utils.cmake_prefix_path, "cuda": torch.version.cuda,
                  "gpu": gpu.name if gpu else None, "gpu_bytes": gpu.total_memory if gpu else 0}))
"""


class Check:
    def __init__(self, args):
        self.args = args
        self.end = time.monotonic() + args.seconds
        self.report = {"version": version(), "rehearsal": args.rehearse, "machine": {}, "steps": [], "tests": [], "benchmarks": None}

    def left(self):
        return self.end - time.monotonic()

    def limit(self, kind):
        return min(LIMITS[kind] * max(1, self.args.seconds / SECONDS), self.left())

    def run(self, name, command, limit, env=None):
        """Runs it under its limit, into a log of its own. @return its exit status (None: it took too long), and what it wrote"""
        limit = self.limit(limit)
        log = os.path.join(self.args.out, name + ".log")
        begin = time.monotonic()
        code = None
        with open(log, "wb") as file:
            if limit > 0:
                try:
                    process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, **(env or {})}, start_new_session=True)
                    try:
                        code = process.wait(limit)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                except OSError as error:
                    file.write(f"{command[0]}: {error}\n".encode())
                    code = 127
        seconds = round(time.monotonic() - begin, 1)
        status = "ok" if code == 0 else f"took longer than {max(limit, 0):.0f} s" if code is None else f"exit status {code}"
        self.report["steps"].append({"name": name, "status": status, "seconds": seconds, "log": os.path.basename(log)})
        print(f"{name:<22} {status:<22} {seconds:6.1f} s", flush=True)
        with open(log, errors="replace") as file:
            text = file.read()
        if code != 0:
            print("  " + "\n  ".join(text.splitlines()[-15:]), flush=True)
        return code, text

    def machine(self):
        facts = self.report["machine"]
        facts["system"] = platform.platform()
        facts["cores"] = os.cpu_count()
        code, text = self.run("torch", [sys.executable, "-c", TORCH], "question")
        if code == 0:
            facts.update(json.loads(text.strip().splitlines()[-1]))
        if not facts.get("gpu") and not self.args.rehearse:
            self.fail("torch of python3 sees no GPU here; --rehearse tries on the CPU what has a meaning there")
        for name, command in {"g++": ["g++", "--version"], "cmake_program": ["cmake", "--version"], "ninja": ["ninja", "--version"],
                              "driver": ["nvidia-smi", "--query-gpu=driver_version,memory.used,clocks.sm", "--format=csv,noheader"]}.items():
            if shutil.which(command[0]):
                done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
                facts[name] = (done.stdout.splitlines() or [""])[0]

    def fail(self, why):
        self.report["steps"].append({"name": "precondition", "status": why, "seconds": 0, "log": None})
        print(why, flush=True)

    def build(self):
        torch = self.report["machine"].get("cmake")
        if not torch:
            self.fail("python3 has no torch, whose LibTorch the build takes")
            return
        command = ["cmake", "--preset", "cuda", "-B", BUILD, f"-DTorch_DIR={torch}/Torch", "-DACCELERATE_EXAMPLES=OFF"]
        packed, prefix = os.path.join(KIT, "libraries.tar.gz"), os.path.join(KIT, "prefix")
        if os.path.exists(packed) and not os.path.exists(prefix):
            self.run("unpack", ["tar", "xf", packed, "-C", KIT], "unpack")
        if os.path.exists(prefix):
            command += [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DOPENSSL_ROOT_DIR={prefix}", "-DOPENSSL_USE_STATIC_LIBS=ON", f"-DICU_ROOT={prefix}", f"-DGTEST_ROOT={prefix}"]
        nvcc = shutil.which("nvcc")
        env = {"CUDA_HOME": os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))} if nvcc and "CUDA_HOME" not in os.environ else None
        if self.run("configure", command, "configure", env)[0] != 0:
            return
        # All that can be built is, whatever else can't.
        self.run("build", ["ninja", "-C", BUILD, "-k", "0", "gpu_tests", "bench_gpu", "accelerate_cli", "accelerate_self_test"], "build")

    def environment(self):
        # Peers shall not look for anything on the network.
        env = {"ACCELERATE_TEST_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.args.rehearse:
            env["ACCELERATE_GPU_REHEARSAL"] = "cpu"
        return env

    def tests(self):
        _, text = self.run("tests", ["ctest", "--test-dir", BUILD, "-L", "gpu", "--no-tests=error", "--timeout", "100", "-V"], "tests", self.environment())
        self.report["tests"] = tests_in(text)

    def benchmarks(self):
        limit = int(min(self.limit("benchmarks"), self.left() - 10))
        command = [sys.executable, os.path.join(ROOT, "benchmarks", "gpu", "run.py"), "--bin", os.path.join(BUILD, "bin"), "--python", sys.executable, "--out", self.args.out,
                   "--work", os.path.join(ROOT, "build", "gpu_work"), "--seconds", str(limit - 10), "--layers", "16", "--rounds", "2"]
        if self.args.rehearse:
            command.append("--rehearse")
        self.run("benchmarks", command, "benchmarks", self.environment())
        path = os.path.join(self.args.out, "gpu.json")
        if os.path.exists(path):
            with open(path) as file:
                self.report["benchmarks"] = json.load(file)

    def failed(self):
        return [step for step in self.report["steps"] if step["status"] != "ok"] + [test for test in self.report["tests"] if test["status"] == "failed"]

    def write(self):
        with open(os.path.join(self.args.out, "gpu_check.json"), "w") as file:
            json.dump(self.report, file, indent=1)
        with open(os.path.join(self.args.out, "gpu_check.md"), "w") as file:
            file.write(markdown(self.report, self.args.out))


def version():
    path = os.path.join(KIT, "version.txt")
    if os.path.exists(path):
        with open(path) as file:
            return file.read().strip()
    done = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False) if shutil.which("git") else None
    return done.stdout.strip() if done and done.returncode == 0 else "unknown"


def tests_in(text):
    """The GoogleTest cases that `ctest -V` has shown, by name, with what a case that failed or was skipped said."""
    tests, said = {}, []
    for line in text.splitlines():
        line = re.sub(r"^\d+: ", "", line)
        if re.match(r"\[ RUN      \] ", line):
            said = []
        elif found := re.match(r"\[ +(OK|FAILED|SKIPPED) +\] ([^ ,]+).*\((\d+) ms\)$", line):
            status = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[found[1]]
            tests[found[2]] = {"name": found[2], "status": status, "seconds": int(found[3]) / 1000, "said": [] if status == "passed" else said[-12:]}
            said = []
        else:
            said.append(line[:300])
    return list(tests.values())


def markdown(report, out):
    machine = report["machine"]
    lines = [f"# GPU check of {report['version']}" + (" (rehearsal on a CPU)" if report["rehearsal"] else ""), "",
             f"{machine.get('gpu') or 'no GPU'}, driver {machine.get('driver', 'none')}; torch {machine.get('torch')}, {machine.get('cores')} cores, {machine.get('g++')}.", "",
             "| step | status | seconds |", "|---|---|---:|"]
    lines += [f"| {step['name']} | {step['status']} | {step['seconds']} |" for step in report["steps"]]
    tests = report["tests"]
    if tests:
        count = {status: sum(test["status"] == status for test in tests) for status in ("passed", "failed", "skipped")}
        lines += ["", f"{count['passed']} tests passed, {count['failed']} failed, {count['skipped']} skipped.", "", "| test | status | seconds | said |", "|---|---|---:|---|"]
        for test in sorted(tests, key=lambda test: ("failed", "skipped", "passed").index(test["status"])):
            said = " ".join(part.strip() for part in test["said"] if part.strip()).replace("|", "/")[-200:]
            lines.append(f"| {test['name']} | {test['status']} | {test['seconds']:.1f} | {said} |")
    table = os.path.join(out, "gpu.md")
    if report["benchmarks"] is not None and os.path.exists(table):
        with open(table) as file:
            lines += ["", file.read().rstrip()]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(prog="gpu_check.sh")
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "gpu_check"), metavar="DIR")
    parser.add_argument("--only", action="append", choices=STEPS, metavar="NAME", help=", ".join(STEPS))
    parser.add_argument("--seconds", type=int, default=SECONDS, metavar="N")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.out = os.path.abspath(args.out)
    os.makedirs(args.out, exist_ok=True)
    check = Check(args)
    check.write()
    for step in STEPS:
        # The machine is asked in any case: other steps need the answers.
        if not args.only or step in args.only or step == "machine":
            try:
                getattr(check, step)()
            except (OSError, ValueError, subprocess.SubprocessError) as error:  # a driver that does not answer, a report that was cut off
                check.fail(f"{step}: {error}")
            check.write()
    failed = check.failed()
    print(f"{len(failed)} of {len(check.report['steps']) + len(check.report['tests'])} failed; {os.path.join(args.out, 'gpu_check.md')}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
