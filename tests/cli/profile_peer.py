"""The same numbers as `accelerate profile merge --json`, counted in another way, and traces of PyTorch's own profiler.

usage: profile_peer.py record FOLDER     (by two processes of a launcher: each writes its trace there)
       profile_peer.py shares FOLDER     prints the shares of each step of each rank, as JSON
"""
import glob
import json
import os
import re
import sys

WAITS = ("comm_wait", "unit_wait", "loader_wait")
COMMUNICATION = ("unit_gather", "gradient_reduce", "comm_wait", "collective")


def record(folder):
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    file = os.path.join(folder, f"profile_{dist.get_rank()}.json")
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
                 on_trace_ready=lambda ready: ready.export_chrome_trace(file)) as running:
        for _ in range(6):
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            running.step()
    dist.destroy_process_group()
    os._exit(0)  # at an ordinary end gloo's threads, which the model keeps alive, meet an interpreter that is going down: an abort once in six


def meaning(event, gathered):
    """(what a thread does in it, whether an exchange is under way, whether the thread is in it)"""
    name, category = event["name"], event.get("cat")
    if category == "cpu_op":
        starts = name.startswith(("c10d::", "_c10d_functional")) or name == "record_param_comms"
        return (None if starts else "compute"), False, True
    if category != "user_annotation":
        return None, False, True
    if re.match("(gloo|nccl|mpi|ucc|xccl):", name):
        return None, True, False
    ours = re.match(r"accelerate::(\w+) (\S+)", name)
    if not ours:
        return None, False, True
    kind, subject = ours.groups()
    from_ranks = kind == "unit_wait" and subject in gathered
    if kind in COMMUNICATION or from_ranks:
        return "exchange", True, True
    if kind == "loader_wait":
        return "data", False, True
    if kind.startswith("checkpoint_"):
        return "checkpoint", False, True
    if kind.startswith("unit_") and subject not in gathered:
        return "weights", False, True
    return None, False, True


def shares_of(path):
    trace = json.load(open(path))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and isinstance(e["pid"], int) and isinstance(e["tid"], int)]
    gathered = {m.group(1) for e in events if (m := re.match(r"accelerate::unit_gather (\S+)", e["name"]))}
    steps = [(s["step"], s["begin_us"], s["end_us"]) for s in trace.get("accelerate_steps", [])]
    if not steps:
        steps = [(int(e["name"][13:]), e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("ProfilerStep#")]
    training = {e["tid"] for e in events if e["name"].startswith(("ProfilerStep#", "autograd::engine::evaluate_function"))
                or re.match(f"accelerate::({'|'.join(WAITS)}) ", e["name"])}
    knows = any(re.match("accelerate::(comm_wait|unit_wait) ", e["name"]) for e in events)
    begins = sorted({e["ts"] for e in events} | {e["ts"] + e["dur"] for e in events} | {t for s in steps for t in s[1:]})
    moment = {time: i for i, time in enumerate(begins)}
    under_way = [False] * len(begins)
    doing = {tid: [None] * len(begins) for tid in training}
    # Later beginnings overwrite: the innermost stays. Events that hold everything within are written at the end.
    inside = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    for event in inside:
        what, exchange, in_thread = meaning(event, gathered)
        span = range(moment[event["ts"]], moment[event["ts"] + event["dur"]])
        if exchange:
            for i in span:
                under_way[i] = True
        if what and in_thread and event["tid"] in training:
            lane = doing[event["tid"]]
            for i in span:
                if not (lane[i] in ("data", "checkpoint") or (lane[i] == "weights" and what == "compute")):
                    lane[i] = what
    result = []
    for number, begin, end in sorted(steps, key=lambda s: s[1]):
        sums = dict.fromkeys(("total", "communication", "compute", "exposed", "data", "weights", "checkpoint", "other"), 0.0)
        for i in range(moment[begin], moment[end]):
            length = begins[i + 1] - begins[i]
            now = {lane[i] for lane in doing.values()}
            exposed = "exchange" in now if knows else under_way[i]
            part = ("compute" if "compute" in now else "exposed" if exposed else
                    next((p for p in ("data", "weights", "checkpoint") if p in now), "other"))
            sums["total"] += length
            sums["communication"] += length * under_way[i]
            sums[part] += length
        result.append({"step": number, **{f"{name}_us": value for name, value in sums.items()}})
    return result


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2])
    else:
        files = sorted(glob.glob(os.path.join(sys.argv[2], "profile_*.json")), key=lambda f: int(re.search(r"(\d+)\.json$", f).group(1)))
        print(json.dumps([shares_of(file) for file in files]))
