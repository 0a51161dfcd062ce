"""The cost of the launcher itself, next to Hugging Face Accelerate's and torchrun, in turns on the same machine: prints a table for benchmarks/results.

    python3 benchmarks/launcher.py --bin build/release/bin --python PYTHON      (PYTHON has torch and accelerate)
"""
import argparse
import os
import socket
import subprocess
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--bin", required=True)
parser.add_argument("--python", required=True)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()
ours = [os.path.join(os.path.abspath(args.bin), "accelerate"), "launch", "-q"]
peer = [args.python, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1", "--num_processes", "1", "--num_cpu_threads_per_process", "1", "--no_python"]
torchrun = [args.python, "-m", "torch.distributed.run", "--no_python"]
folder = tempfile.mkdtemp()  # also the working folder: no module there is taken for one of Python's

RESTARTED = """if [ "$TORCHELASTIC_RESTART_COUNT" = 1 ]; then [ $RANK != 0 ] || date +%s%N > again; exit 0; fi
if [ $RANK = 1 ]; then sleep 1; date +%s%N > killed; kill -9 $$; fi
sleep 60"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run(command):
    return subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)


def wall(command):
    start = time.perf_counter()
    if run(command).returncode != 0:
        raise SystemExit(f"failed: {command}")
    return (time.perf_counter() - start) * 1000


def restart(command):
    script = os.path.join(folder, "restarted.sh")  # a file, since torchrun replaces what begins with a dollar on its command line
    open(script, "w").write(RESTARTED)
    if run(command + ["/bin/sh", script]).returncode != 0:
        raise SystemExit(f"failed: {command}")
    again, killed = (int(open(os.path.join(folder, name)).read()) for name in ("again", "killed"))
    return (again - killed) / 1e6


def resident(commands, name):
    """The largest resident and private memory, in MB, of processes whose command line contains `name`, in the middle of a job."""
    jobs = [subprocess.Popen(c + ["/bin/sleep", "8"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for c in commands]
    time.sleep(6)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = open(f"/proc/{pid}/cmdline").read().replace("\0", " ")
            if name in line and "/bin/sh" not in line.split()[0]:
                rollup = dict(l.split(":") for l in open(f"/proc/{pid}/smaps_rollup").read().splitlines()[1:])
                found.append((int(rollup["Rss"].split()[0]) / 1e3, int(rollup["Private_Dirty"].split()[0]) / 1e3))
        except (OSError, ValueError):
            pass
    for job in jobs:
        job.wait()
    return max(found)


def row(task, measure, mine, theirs):
    a, b = [], []
    for _ in range(args.rounds):
        a.append(measure(mine))
        b.append(measure(theirs))
    print(f"| {task} | {min(a):.1f} ({min(a):.1f} to {max(a):.1f}) | {min(b):.1f} ({min(b):.1f} to {max(b):.1f}) | {min(b) / min(a):.1f}x |", flush=True)


print("load before:", open("/proc/loadavg").read().split()[0])
print("| task, ms | ours | peer | ratio |\n|---|---|---|---|")
row("a program that does nothing (accelerate launch)", wall, ours + ["--cpu", "--num_processes", "1", "/bin/true"], peer + ["/bin/true"])
row("256 programs that do nothing (torchrun)", wall, ours + ["--cpu", "--num_processes", "256", "/bin/true"], torchrun + ["--nproc_per_node", "256", "--master_port", free_port(), "/bin/true"])
row("from kill -9 of a rank of 2 until rank 0 runs again (torchrun)", restart, ours + ["--cpu", "--num_processes", "2", "--max_restarts", "1"],
    torchrun + ["--nproc_per_node", "2", "--max_restarts", "1", "--master_port", free_port()])
two = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
print("\n| memory, MB | resident | private |\n|---|---|---|")
for task, commands, name in (("launcher, one machine", [ours + ["--num_processes", "2"]], "accelerate launch"),
                             ("agent, two machines", [ours + two + ["--machine_rank", str(i)] for i in range(2)], "accelerate-agent"),
                             ("torchrun, one machine", [torchrun + ["--nproc_per_node", "2", "--master_port", free_port()]], "torch.distributed.run")):
    rss, private = resident(commands, name)
    print(f"| {task} | {rss:.1f} | {private:.1f} |", flush=True)
