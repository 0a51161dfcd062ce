#!/usr/bin/env python3
"""Runs ninja and shows how far it is and how long is left.

usage: build_progress.py FOLDER [ninja's arguments and targets ...]

On a terminal one line is drawn over and over; elsewhere a line appears every few seconds at most. What compilers print (warnings, errors) is passed on
as it is. Steps are weighted by what they take compared to each other, since a precompiled header takes forty times as long as a link.
"""
import re
import shutil
import subprocess
import sys
import time

STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
WEIGHTS = ((r"\.gch", 30), (r"Unity/unity_(residency|models)", 60), (r"/accelerate(_\w+)?\.dir/Unity/", 25), (r"Building CXX", 14))


def weight(description):
    return next((w for pattern, w in WEIGHTS if re.search(pattern, description)), 1)


def outputs(command):
    """The product of a compiler's or linker's command, in the words of ninja's description of the step."""
    made = re.search(r" -o (\S+)", command)
    return ("Building CXX object " if " -c " in command or ".gch" in command else "Linking ") + (made.group(1) if made else "")


def in_words(seconds):
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{max(1, round(seconds / 10) * 10)} s"


def what(description):
    """'Building CXX object a/b.dir/Unity/unity_comm_cxx.cxx.o' is 'comm', 'Linking CXX executable bin/x' is 'x'."""
    name = description.rsplit("/", 1)[-1]
    if unity := re.match(r"unity_(\w+)_cxx", name):
        target = re.search(r"(\w+)\.dir/", description)
        return target.group(1) if unity.group(1).isdigit() and target else unity.group(1)
    return re.sub(r"(\.cpp|\.cxx|\.hxx)?(\.o|\.gch|\.a)?$", "", name)


def main():
    ninja = ["ninja", "-C", *sys.argv[1:]]
    refreshed = subprocess.run(["ninja", "-C", sys.argv[1], "build.ninja"], capture_output=True, text=True, check=False)
    if refreshed.returncode:
        print(refreshed.stdout + refreshed.stderr, end="")
        return refreshed.returncode
    targets = [word for word in sys.argv[2:] if not word.startswith("-") and not word.isdigit()] or ["all"]
    commands = subprocess.run(["ninja", "-C", sys.argv[1], "-t", "commands", *targets], capture_output=True, text=True, check=True).stdout.splitlines()
    everything = max(1, sum(weight(outputs(command)) for command in commands))
    terminal, began, spoke, done = sys.stdout.isatty(), time.monotonic(), 0.0, 0
    width = shutil.get_terminal_size().columns - 1
    process = subprocess.Popen(ninja, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=None)
    for line in process.stdout:
        step = STEP.match(line)
        if not step:
            if not line.startswith("ninja: Entering directory"):
                print(("\r\033[K" if terminal else "") + line, end="", flush=True)
            continue
        done += weight(step.group(3))
        # Targets that are up to date already are not among ninja's steps: those get their part of the weight of everything.
        total = max(done, everything * int(step.group(2)) / max(1, len(commands)))
        passed, share = time.monotonic() - began, done / total if step.group(1) != step.group(2) else 1.0
        left = f", about {in_words(passed * (1 - share) / share)} left" if share < 1 and passed > 20 else ""
        text = f"  {100 * share:3.0f} %  {step.group(1)} of {step.group(2)} steps{left}  ({what(step.group(3))})"
        if terminal:
            print("\r\033[K" + text[:width], end="", flush=True)
        elif share == 1 or passed - spoke > 15:
            spoke = passed
            print(text, flush=True)
    code = process.wait()
    print(("\r\033[K" if terminal else "") + (f"  built in {in_words(time.monotonic() - began)}" if code == 0 else "  the build failed"), flush=True)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
