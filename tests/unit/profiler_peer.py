"""The output of PyTorch's own profiler. usage: profiler_peer.py tables EVENTS OUT | operators OUT | schedules CASES OUT"""
import json
import sys

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent


def tables(events, out):
    """PyTorch's tables of events that C++ recorded."""
    given = json.load(open(events))
    made = [FunctionEvent(id=e["id"], name=e["name"], overload_name="", thread=e["thread"], start_us=e["start_us"], end_us=e["end_us"],
                          fwd_thread=e["forward_thread"], input_shapes=e["input_shapes"], stack=e["stack"],
                          scope=1 if e["is_backward"] else 0, cpu_memory_usage=e["cpu_memory_usage"], is_async=e["is_async"],
                          sequence_nr=e["sequence_number"], flops=e["flops"], is_user_annotation=e["is_user_annotation"],
                          device_type=DeviceType.CPU) for e in given["events"]]
    found = EventList(made, use_device=None, profile_memory=True, with_flops=True)
    found._build_tree()
    averages = found.key_averages()
    json.dump({
        "plain": averages.table(),
        "sorted": averages.table(sort_by="self_cpu_time_total", row_limit=5, header="The slowest", time_unit="ms"),
        "narrow": averages.table(sort_by="count", max_name_column_width=14, row_limit=-1, time_unit="s"),
        "shapes": found.key_averages(group_by_input_shapes=True).table(sort_by="flops", max_shapes_column_width=18, time_unit="us"),
        "stacks": found.key_averages(group_by_stack_n=2).table(sort_by="cpu_memory_usage", max_src_column_width=12),
        "top": averages.table(top_level_events_only=True, sort_by="cpu_time"),
        "calls": found.table(row_limit=20, top_level_events_only=True),
        "total": found.total_average().cpu_time_total,
    }, open(out, "w"))


def operators(out):
    """Counts, operations, bytes and shapes of a forward and a backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_flops=True,
                                profile_memory=True) as prof:
        x, w = torch.ones(4, 3, 8, 8), torch.full((5, 3, 3, 3), 0.1, requires_grad=True)
        y = torch.conv2d(x, w).relu()
        z = torch.matmul(y.flatten(1), torch.full((180, 7), 0.1))
        (z * z).sum().backward(torch.ones(()))
    rows = {}
    for row in prof.key_averages(group_by_input_shape=True):
        rows[f"{row.key} {row.input_shapes}"] = [row.count, row.flops, row.cpu_memory_usage, row.self_cpu_memory_usage]
    json.dump(rows, open(out, "w"))


def schedules(cases, out):
    """[step at which a trace is ready, steps in it] for each schedule."""
    found = []
    for option in json.load(open(cases)):
        ready = []
        with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], schedule=torch.profiler.schedule(**option),
                on_trace_ready=lambda p: ready.append([p.step_num, sum(e.name == "ProfilerStep*" for e in p.events())])) as prof:
            for _ in range(14):
                torch.ones(2)
                prof.step()
        found.append(ready)
    json.dump(found, open(out, "w"))


globals()[sys.argv[1]](*sys.argv[2:])
