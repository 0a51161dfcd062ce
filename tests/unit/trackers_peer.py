"""Reads what trackers wrote, with the real readers.

killed FOLDER N  what a program left that was killed after it had logged N values
compare FOLDER   a run that went to our TensorBoard tracker and to JSON lines: gives the lines to torch's SummaryWriter and
                 compares the events of both
"""
import base64
import io
import json
import math
import pathlib
import sys

import numpy
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader


def events_of(folder):
    for path in sorted(pathlib.Path(folder).glob("events.out.tfevents.*")):
        yield from LegacyEventFileLoader(str(path)).Load()


def killed(folder, count):
    seen = [e.step for e in events_of(folder / "tb") if e.HasField("summary")]
    lines = (folder / "lines" / "log.jsonl").read_text().split("\n")
    rows = [line["step"] for line in map(json.loads, lines[:-1]) if line["kind"] == "log"]
    for name, steps in (("tensorboard", seen), ("jsonl", rows)):
        assert steps == list(range(count)), f"{name}: {len(steps)} of {count} are there"
    assert not list(folder.glob("unsent*")), "the queue ran over"


def tensor_of(entry):
    bytes_ = base64.b64decode(entry["data"], validate=True)
    return numpy.frombuffer(bytes_, dtype=entry["dtype"]).reshape(entry["shape"])


def number_of(value):
    return float(value["$number"]) if isinstance(value, dict) and list(value) == ["$number"] else value


def write_as_torch(lines, folder):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for line in lines:
        kwargs = {name: value for name, value in line.get("kwargs", {}).items()}
        kwargs.setdefault("walltime", line["time"])
        step = line.get("step")
        if line["kind"] == "log":
            for name, value in line["values"].items():
                value = number_of(value)
                if isinstance(value, str):
                    writer.add_text(name, value, step, walltime=kwargs["walltime"])
                elif isinstance(value, dict):
                    writer.add_scalars(name, value, step, walltime=kwargs["walltime"])
                else:
                    writer.add_scalar(name, value, step, **kwargs)
        elif line["kind"] == "images":
            for name, image in line["values"].items():
                pixels = tensor_of(image)
                call = writer.add_images if pixels.ndim == 4 else writer.add_image
                call(name, pixels, step, **kwargs)
        elif line["kind"] == "histogram":
            writer.add_histogram(line["name"], tensor_of(line["values"]), step, **kwargs)
    writer.close()


def same_histogram(ours, theirs):
    for name in ("min", "max", "num", "sum", "sum_squares"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9), (name, a, b)
    assert list(ours.bucket) == list(theirs.bucket), (list(ours.bucket), list(theirs.bucket))
    assert numpy.allclose(list(ours.bucket_limit), list(theirs.bucket_limit), rtol=1e-12, atol=0)


def same_image(ours, theirs):
    a, b = (numpy.asarray(Image.open(io.BytesIO(one.encoded_image_string))) for one in (ours, theirs))
    assert (ours.height, ours.width, ours.colorspace) == (theirs.height, theirs.width, theirs.colorspace)
    assert a.shape == b.shape and (a == b).all(), (a.shape, b.shape, a.tolist(), b.tolist())


def same_events(ours, theirs, where):
    ours = [e for e in ours if e.HasField("summary")]
    theirs = [e for e in theirs if e.HasField("summary")]
    assert len(ours) == len(theirs), (where, len(ours), len(theirs))
    for a, b in zip(ours, theirs):
        (x,), (y,) = a.summary.value, b.summary.value
        assert (x.tag, a.step) == (y.tag, b.step), (where, x.tag, a.step, y.tag, b.step)
        assert a.wall_time == b.wall_time, (where, x.tag, a.wall_time, b.wall_time)
        kind = x.WhichOneof("value")
        assert kind == y.WhichOneof("value"), (where, x.tag, x, y)
        if kind == "histo":
            same_histogram(x.histo, y.histo)
        elif kind == "image":
            same_image(x.image, y.image)
        else:  # texts and numbers: to the bit, with what says which plugin shows them
            assert x == y or str(x) == str(y), (where, x, y)
    return len(ours)


def session_of(folder):
    """The part of it that the HParams plugin shows."""
    from tensorboard.context import RequestContext
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(folder))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider, multiplexer=multiplexer))
    asking = RequestContext()
    experiment = context.experiment_from_metadata(asking, "0", True, context.hparams_metadata(asking, "0"), [])
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=10)
    request.allowed_statuses.append(api_pb2.STATUS_SUCCESS)
    groups = list_session_groups.Handler(asking, context, "0", request).run()
    (group,) = groups.session_groups
    named = {info.name for info in experiment.hparam_infos}
    assert named == set(group.hparams) | {"far"}, (named, group)  # which is infinite: the plugin shows no such value
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()}
    return values, group.sessions[0]


def compare(folder):
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "start" and kinds[-1] == "finish" and lines[0]["version"] == 1
    write_as_torch(lines, folder / "torch")
    ours = [e for e in events_of(run) if not any(v.tag.startswith("_hparams_") for v in e.summary.value)]
    tables = [e for e in ours if any(v.tag.startswith("samples/") for v in e.summary.value)]
    assert len(tables) == 1 and b"| x | what |\n| --- | --- |\n| 1 | a\\|b |\n" in tables[0].summary.value[0].tensor.string_val[0], tables
    count = same_events([e for e in ours if e not in tables], list(events_of(folder / "torch")), "the run")
    below = sorted(path.name for path in (folder / "torch").iterdir() if path.is_dir())
    assert below == sorted(path.name for path in run.iterdir() if path.is_dir()), below
    for name in below:
        count += same_events(list(events_of(run / name)), list(events_of(folder / "torch" / name)), name)
    values, session = session_of(folder)
    print(count, "events, hparams", json.dumps(values, sort_keys=True), "status", session.status,
          "from", session.start_time_secs > 1e9, "to", session.end_time_secs >= session.start_time_secs)
    import yaml
    print(json.dumps(yaml.safe_load((run / "hparams.yml").read_text()), sort_keys=True))


{"killed": killed, "compare": compare}[sys.argv[1]](pathlib.Path(sys.argv[2]), *map(int, sys.argv[3:]))
