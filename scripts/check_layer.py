#!/usr/bin/env python3
"""Adds a layer to a copy of the sources, and sees that nothing else has to change for it.

tests/structure/layer has one as its author would write it: a folder in src/parallel, a header for its plugin, settings of the launcher, receipts, a
test, faults. It is put into a copy, with the one line of engines.patch. Fails unless
  - that line is all that has changed in files that were there;
  - the checks of the structure hold in the copy;
  - what is new or changed compiles, and, linked before the library that was built without it, passes its test.

usage: check_layer.py BUILD          of the sources as they are, with its tests (build/release)
"""
import difflib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYER = ROOT / "tests/structure/layer"
CHANGED = "src/parallel/engines.cpp"
CHECKS = ("check_includes.py", "check_names.py", "check_receipts.py", "check_options.py", "mutate.py --check")


def fail(text):
    sys.exit(f"check_layer: {text}")


def copy_sources(copy):
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True)
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    # Without git (an archive): all but what is built.
    names = [name for name in names if name] or [str(path.relative_to(ROOT)) for folder in ("cmake", "include", "scripts", "src", "tests", "cli", "programs", "docs")
                                                 for path in (ROOT / folder).rglob("*") if path.is_file()] + ["ARCHITECTURE.md"]
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def add_layer(copy):
    """The new files. @throws SystemExit where more than the one line changes."""
    new = [path.relative_to(LAYER) for path in sorted(LAYER.rglob("*")) if path.is_file() and path.name != "engines.patch"]
    for path in new:
        if (copy / path).exists():
            fail(f"{path} is there already, expected only new files besides {CHANGED}")
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(LAYER / path, copy / path)
    subprocess.run(["patch", "--quiet", "-p1", "-i", LAYER / "engines.patch"], cwd=copy, check=True)
    before, after = ((folder / CHANGED).read_text().splitlines() for folder in (ROOT, copy))
    changes = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[0] in "+-" and line[:3] not in ("+++", "---")]
    if len(changes) != 1 or changes[0][0] != "+":
        fail(f"{CHANGED} has changed in {len(changes)} lines, expected one new one: {changes}")
    print(f"{len(new)} new files, and one line in {CHANGED}: {changes[0][1:].strip()}")
    return new


def compiler_of(build, copy):
    """The command that compiles a unit of the build's tests, with the same precompiled header; what it has not there, it finds in the copy."""
    entries = json.loads((build / "compile_commands.json").read_text())
    words = shlex.split(next(entry["command"] for entry in entries if "/together_dist_" in entry["file"]))
    kept = words[:words.index("-o")]
    added = [word.replace(str(ROOT), str(copy)) for word in kept if word.startswith(f"-I{ROOT}")]
    return [*kept, *added, "-c"]


def without_libtorch(command):
    """The same without a precompiled header."""
    at = command.index("-include") if "-include" in command else len(command)
    return command[:at] + command[at + 2:]


def linker_of(build, objects, program):
    """The command that links a program of tests, with other objects."""
    lines = subprocess.run(["ninja", "-C", build, "-t", "commands", "bin/together_dist"], capture_output=True, text=True, check=True).stdout
    words = shlex.split(lines.strip().splitlines()[-1])
    words = words[words.index("&&") + 1:] if words[0] == ":" else words
    words = words[:words.index("&&")] if "&&" in words else words
    kept, added = [], False
    for word in words:
        if word.endswith(".o"):
            kept += objects if not added else []
            added = True
        elif word == "bin/together_dist":
            kept.append(program)
        else:
            kept.append(word)
    # The library has the old list of layers; the first definition counts.
    return [*kept, "-Wl,--allow-multiple-definition"]


def main():
    if len(sys.argv) != 2:
        fail("usage: check_layer.py BUILD")
    build = pathlib.Path(sys.argv[1]).resolve()
    copy = build / "layer"
    copy_sources(copy)
    new = add_layer(copy)
    for check in CHECKS:
        result = subprocess.run([sys.executable, *(f"scripts/{check}".split())], cwd=copy, capture_output=True, text=True)
        if result.returncode != 0:
            fail(f"with the layer {check} fails:\n{result.stdout}{result.stderr}")
    sources = [copy / path for path in (pathlib.Path(CHANGED), *new) if path.suffix == ".cpp"]
    generated = copy / "layer_settings.cpp"
    subprocess.run(["cmake", f"-DROOT={copy}", f"-DOUT={generated}", "-P", copy / "cmake/AccelerateLayers.cmake"], check=True)
    settings = [path for path in sources if path.name == "settings.cpp"] + [generated]  # of the launcher, which knows no LibTorch
    # The rest is one source: most of what compiling it takes is LibTorch. The test comes last, which opens namespaces.
    unit = copy / "unit.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in sources if path not in settings))
    compiler, objects = compiler_of(build, copy), []
    for source in [unit, *settings]:
        objects.append(f"{source}.o")
        command = compiler if source is unit else without_libtorch(compiler)
        subprocess.run([*command, source, "-o", objects[-1]], cwd=build, check=True)
    program = str(copy / "columns_tests")
    subprocess.run(linker_of(build, objects, program), cwd=build, check=True)
    result = subprocess.run([program], cwd=copy, capture_output=True, text=True, errors="replace")
    ran = re.search(r"\[  PASSED  \] (\d+) tests", result.stdout)
    if result.returncode != 0 or not ran:
        fail(f"the layer's test fails:\n{result.stdout[-6000:]}{result.stderr[-2000:]}")
    print(f"check_layer: {ran.group(1)} tests of the layer pass")
    shutil.rmtree(copy)


if __name__ == "__main__":
    main()
