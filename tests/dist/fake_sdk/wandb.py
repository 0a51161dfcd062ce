"""Stands for an SDK with a fault. FAKE_SDK_FAULT says which, as `where:what`: where init, config, log or finish, what
one of the functions below. FAKE_SDK_FILE gets what arrives, a line of JSON each."""

import json
import math
import os
import signal
import sys
import time


def hang():
    time.sleep(1000)


def spin():
    while True:
        pass


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def mid_line():
    os.write(3, b'{"deta')
    os._exit(0)


def leave():
    sys.exit("not logged in")


def ask():
    input("API key: ")


def flood():
    for _ in range(2000):
        os.write(1, b"x" * 16384 + b"\n")
        os.write(2, b"{}\n" * 1000)


def answer_in_our_place():
    print('{"error": "not the channel"}', flush=True)


def raise_error():
    raise ValueError("no such project")


def happens(where):
    fault = os.environ.get("FAKE_SDK_FAULT", "")
    if fault.startswith(where + ":"):
        globals()[fault.split(":")[1]]()


def named(value):
    """JSON has no words for numbers that are none."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def note(**what):
    with open(os.environ["FAKE_SDK_FILE"], "a") as file:
        file.write(json.dumps(what) + "\n")


class Config:
    def update(self, values, allow_val_change=False):
        happens("config")
        note(config=values, allowed=allow_val_change)


class Table:
    def __init__(self, columns, data):
        self.content = {"columns": columns, "data": data}


class Image:
    def __init__(self, array):
        self.content = {"shape": list(array.shape), "sum": int(array.sum())}


class Histogram:
    def __init__(self, values):
        self.content = {"values": [float(value) for value in values]}


class Run:
    id, name, dir = "the id", "the name", None
    config = Config()

    @property
    def url(self):
        raise ValueError("offline")

    def log(self, values, step=None, **others):
        happens("log")
        values = {name: named(value) for name, value in values.items()}
        note(log=json.loads(json.dumps(values, default=lambda one: one.content)), step=step, others=others)

    def finish(self):
        happens("finish")
        note(finish=True)


def init(project, **others):
    note(pid=os.getpid(), project=project, others=others, stdin=sys.stdin.read())
    note(descriptors=sorted(int(name) for name in os.listdir("/proc/self/fd")))
    happens("init")
    return Run()
