"""The process in which a tracker's Python SDK lives: requests come as JSON lines, each gets one line as answer.

Descriptor 3 is the channel; SDKs have stdin from /dev/null, and what they print goes to the tracker, which keeps the
end of it for messages. So nothing that an SDK does to its own descriptors can be taken for an answer.
"""

import base64
import faulthandler
import importlib
import json
import os
import select
import socket
import sys
import threading
import time


class Refused(Exception):
    """Something that this service has no place for: left out, and said once."""


def array(value):
    import numpy

    return numpy.frombuffer(base64.b64decode(value["data"]), dtype=value["dtype"]).reshape(value["shape"])


def images(value):
    """[N, H, W, C] uint8, as N arrays; those of one channel lose it, as libraries of images want it."""
    return [one[:, :, 0] if one.shape[2] == 1 else one for one in array(value)]


def unescaped(value):
    """As docs/formats/json_lines.md has it: JSON has no words for some numbers, which are {"$number": "nan"}."""
    if value.keys() == {"$number"}:
        return float(value["$number"])
    return {name[1:] if name.startswith("$") else name: one for name, one in value.items()}


def is_number(value):
    return isinstance(value, (int, float))


class Service:
    """One run of one service. What a subclass leaves out, its service has not."""

    package = None  # what is imported
    known_by = {}  # what the user may want to know of a run, by the attributes of `run` that have it

    def __init__(self, package):
        self.sdk = package

    def details(self):
        found = {}
        for name, attribute in self.known_by.items():
            try:
                value = getattr(self.run, attribute)
                value = value() if callable(value) else value
            except Exception:  # a run that is offline has no address, say
                continue
            if value:
                found[name] = str(value)
        return found

    def config(self, values):
        raise Refused("has no place for a configuration")

    def log(self, values, step, options):
        raise Refused("has no place for values")

    def images(self, values, step, options):
        raise Refused("has no place for images")

    def table(self, name, columns, rows, step, options):
        raise Refused("has no place for tables")

    def histogram(self, name, values, step, options):
        raise Refused("has no place for histograms")

    def finish(self):
        self.run.finish()


class Wandb(Service):
    package = "wandb"
    known_by = {"id": "id", "name": "name", "url": "url", "folder": "dir"}

    def start(self, project, folder, options):
        self.run = self.sdk.init(project=project, **options)

    def config(self, values):
        self.run.config.update(values, allow_val_change=True)

    def log(self, values, step, options):
        self.run.log(values, step=step, **options)

    def images(self, values, step, options):
        self.log({name: [self.sdk.Image(one) for one in images(batch)] for name, batch in values.items()}, step, options)

    def table(self, name, columns, rows, step, options):
        self.log({name: self.sdk.Table(columns=columns, data=rows)}, step, options)

    def histogram(self, name, values, step, options):
        self.log({name: self.sdk.Histogram(values)}, step, options)


class Trackio(Wandb):
    package = "trackio"

    def config(self, values):
        self.sdk.config.update(values)

    def images(self, values, step, options):
        for name, batch in values.items():
            batch = images(batch)
            for place, one in enumerate(batch):
                self.log({name if len(batch) == 1 else f"{name}/{place}": self.sdk.Image(one)}, step, options)


class SwanLab(Wandb):
    package = "swanlab"

    def start(self, project, folder, options):
        super().start(project, folder, options)
        self.sdk.config["FRAMEWORK"] = "🤗Accelerate"  # by which SwanLab chooses a logo

    def config(self, values):
        self.sdk.config.update(values)

    def log(self, values, step, options):
        text = {name: self.sdk.Text(value) for name, value in values.items() if isinstance(value, str)}
        self.run.log({**values, **text}, step=step, **options)

    def table(self, name, columns, rows, step, options):
        self.run.log({name: self.sdk.echarts.Table().add(columns, rows)}, step=step, **options)

    def histogram(self, name, values, step, options):
        raise Refused("has no place for histograms")


class Comet(Service):
    package = "comet_ml"
    known_by = {"id": "get_key", "name": "get_name", "url": "url"}

    def start(self, project, folder, options):
        self.run = self.sdk.start(project_name=project, **options)

    def config(self, values):
        self.run.log_parameters(values)

    def log(self, values, step, options):
        if step is not None:
            self.run.set_step(step)
        for name, value in values.items():
            if is_number(value):
                self.run.log_metric(name, value, step=step, **options)
            elif isinstance(value, str):
                self.run.log_other(name, value, **options)
            elif isinstance(value, dict):
                self.run.log_metrics(value, step=step, **options)

    def images(self, values, step, options):
        from PIL import Image  # from an array Comet would want matplotlib too

        for name, batch in values.items():
            for one in images(batch):
                self.run.log_image(Image.fromarray(one), name=name, step=step, **options)

    def table(self, name, columns, rows, step, options):
        self.run.log_table(name + ".csv", tabular_data=rows, headers=columns or False, **options)

    def histogram(self, name, values, step, options):
        self.run.log_histogram_3d(values, name=name, step=step, **options)

    def finish(self):
        self.run.end()


class ClearML(Service):
    package = "clearml"
    known_by = {"id": "id", "name": "name", "url": "get_output_log_web_page"}

    def start(self, project, folder, options):
        options = dict(options)
        options.setdefault("project_name", os.environ.get("CLEARML_PROJECT", project))
        options.setdefault("task_name", os.environ.get("CLEARML_TASK", project))
        self.run = self.sdk.Task.init(**options)

    def config(self, values):
        self.run.connect_configuration(values)

    @staticmethod
    def title_and_series(name):
        for prefix in ("eval", "test", "train"):
            if name.startswith(prefix + "_"):
                return {"title": name[len(prefix) + 1 :], "series": prefix}
        return {"title": name, "series": "train"}

    def log(self, values, step, options):
        logger, left_out = self.run.get_logger(), []
        for name, value in values.items():
            if not is_number(value):
                left_out.append(name)
            elif step is None:
                logger.report_single_value(name=name, value=value, **options)
            else:
                logger.report_scalar(**self.title_and_series(name), value=value, iteration=step, **options)
        if left_out:
            raise Refused("takes numbers only, which these are not: " + ", ".join(left_out))

    def images(self, values, step, options):
        for name, batch in values.items():
            for one in images(batch):
                self.run.get_logger().report_image(
                    **self.title_and_series(name), iteration=step, image=one, **options
                )

    def table(self, name, columns, rows, step, options):
        self.run.get_logger().report_table(
            **self.title_and_series(name), iteration=step, table_plot=[columns] + rows, **options
        )

    def histogram(self, name, values, step, options):
        import numpy

        counts, edges = numpy.histogram(values, bins=min(64, max(1, values.size)))
        self.run.get_logger().report_histogram(
            **self.title_and_series(name),
            iteration=step,
            values=counts,
            xlabels=[f"{edge:g}" for edge in edges[:-1]],
            **options,
        )

    def finish(self):
        self.run.close()


class Aim(Service):
    package = "aim"
    known_by = {"id": "hash", "name": "name"}

    def start(self, project, folder, options):
        self.run = self.sdk.Run(repo=folder or ".", **options)
        self.run.name = project

    def config(self, values):
        self.run["hparams"] = values

    def log(self, values, step, options):
        for name, value in values.items():
            if isinstance(value, str):
                value = self.sdk.Text(value)
            self.run.track(value, name=name, step=step, **options)

    def images(self, values, step, options):
        for name, batch in values.items():
            batch = [self.sdk.Image(one, **options.get("aim_image", {})) for one in images(batch)]
            self.run.track(batch, name=name, step=step, **options.get("track", {}))

    def histogram(self, name, values, step, options):
        self.run.track(self.sdk.Distribution(values), name=name, step=step, **options)

    def finish(self):
        self.run.close()


SERVICES = {
    "wandb": Wandb,
    "trackio": Trackio,
    "swanlab": SwanLab,
    "comet_ml": Comet,
    "clearml": ClearML,
    "aim": Aim,
}


def answer(service, request):
    """Does what a request asks for. @return what the answer holds."""
    do, step, options = request["do"], request.get("step"), request.get("options") or {}
    if do == "start":
        service.start(request["project"], request["folder"], options)
        return {"details": service.details()}
    if do == "config":
        service.config(request["values"])
    elif do == "log":
        service.log(request["values"], step, options)
    elif do == "images":
        service.images(request["values"], step, options)
    elif do == "table":
        service.table(request["name"], request["columns"], request["rows"], step, options)
    elif do == "histogram":
        service.histogram(request["name"], array(request["values"]), step, options)
    elif do == "finish":
        service.finish()
    return {}


def leave_with(channel):
    """The tracker is gone: what a run needs for its end gets a moment, whatever the SDK is doing."""
    ended = select.poll()
    ended.register(channel, select.POLLRDHUP)
    ended.poll()
    time.sleep(5)
    os._exit(1)


def main():
    os.set_inheritable(3, False)
    channel = socket.socket(fileno=3)
    threading.Thread(target=leave_with, args=(channel.fileno(),), daemon=True).start()
    nowhere = open(os.devnull, "w")
    service, finished = None, False
    with channel.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            request = json.loads(line, object_hook=unescaped)
            # For a call that never comes back and holds the interpreter's lock too. The tracker gives up before.
            faulthandler.dump_traceback_later(request["limit"] + 5, exit=True, file=nowhere)
            try:
                if request["do"] == "start":
                    kind = SERVICES[request["tracker"]]
                    service = kind(importlib.import_module(kind.package))
                result = answer(service, request)
                finished = finished or request["do"] == "finish"
            except Refused as refusal:
                result = {"refused": str(refusal)}
            except BaseException as error:  # SystemExit too: some SDKs leave where they miss a login
                result = {"error": f"{type(error).__name__}: {error}"}
            channel.sendall((json.dumps(result, default=str) + "\n").encode())
            faulthandler.cancel_dump_traceback_later()
            if finished:
                break
    if service is not None and not finished:
        try:
            service.finish()
        except BaseException:
            pass


main()
