#!/usr/bin/env python3
"""Checks that #include lines follow the arrows of ARCHITECTURE.md, and that starting processes needs no LibTorch.

The arrows are read from the block that begins with ```layers there, so that the document and this check can't drift apart. It fails on
  - an include from one module to another without an arrow, and an arrow that no include uses;
  - a circle of arrows, a module in src/ that is not drawn, a public header that belongs to no module;
  - a public header that includes a private one; a program in cli/ or examples/ that does;
  - cli, launch or config reaching a LibTorch header through any number of includes;
  - the program given with --program being linked with LibTorch.

usage: check_includes.py [--program build/release/bin/accelerate]
"""
import argparse
import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PUBLIC, PRIVATE = ROOT / "include", ROOT / "src"
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.M)
LIBTORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
TORCH_FREE = ("cli", "launch", "config")



def is_door(path):
    """Whether this is a header for programs that only includes others: one directly in include/accelerate/ that is not named after a module."""
    return path.parent == PUBLIC / "accelerate" and not (PRIVATE / path.stem).is_dir()


def drawn_arrows():
    """{module: set of modules it may include}, as ARCHITECTURE.md draws them. '*' on the left is every module."""
    block = re.search(r"^```layers\n(.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), re.M | re.S)
    if not block:
        sys.exit("check_includes: ARCHITECTURE.md has no block that begins with ```layers")
    arrows, for_all = {}, set()
    for line in block.group(1).splitlines():
        left, arrow, right = line.partition("->")
        if not arrow or not left.split():
            continue
        if left.split() == ["*"]:
            for_all.update(right.split())
        for module in left.split():
            arrows.setdefault(module, set()).update(right.split())
    arrows.pop("*", None)
    for target in list(for_all) + [t for targets in arrows.values() for t in targets]:
        arrows.setdefault(target, set())
    return {m: targets | {t for t in for_all if t != m} for m, targets in arrows.items()}, for_all


def module_of(path):
    """The module that a file belongs to; None for doors (accelerate.hpp and its kin), examples and tests."""
    if path.is_relative_to(ROOT / "cli"):
        return "cli"
    if path.is_relative_to(PRIVATE):
        return path.relative_to(PRIVATE).parts[0]
    if path.is_relative_to(PUBLIC) and not is_door(path):
        below = path.relative_to(PUBLIC / "accelerate")
        return below.parts[0] if len(below.parts) > 1 else below.stem
    return None


def resolve(name, includer):
    """The file of this repository that an include names, or None for a system header."""
    for folder in (includer.parent, PRIVATE, PUBLIC):
        path = (folder / name).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            return path
    return None


@functools.cache
def includes(path):
    """[(name as written, file or None)]"""
    names = (quoted or angled for quoted, angled in INCLUDE.findall(path.read_text()))
    return [(name, resolve(name, path)) for name in names]


def declarations(path):
    """The first line of a header that is neither comment nor preprocessor, or None."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return next((line for line in lines if line and not line.startswith(("#", "//"))), None)


def path_to_libtorch(path, seen):
    """The chain of includes from `path` to a LibTorch header, or None."""
    if path in seen:
        return None
    seen.add(path)
    for name, target in includes(path):
        if target is None:
            if LIBTORCH.match(name):
                return [f"<{name}>"]
        elif chain := path_to_libtorch(target, seen):
            return [str(target.relative_to(ROOT))] + chain
    return None


def circle(arrows):
    """A list of modules that lead back to the first one, or None."""
    done = set()

    def walk(module, trail):
        if module in trail:
            return trail[trail.index(module):] + [module]
        if module in done:
            return None
        done.add(module)
        return next((found for target in sorted(arrows[module]) if (found := walk(target, trail + [module]))), None)

    return next((found for module in sorted(arrows) if (found := walk(module, []))), None)


def sources(*folders):
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in (".hpp", ".cpp"))


def check():
    problems, used = [], set()
    arrows, for_all = drawn_arrows()
    known = {p.name for p in PRIVATE.iterdir() if p.is_dir()} | {"cli"}
    problems += [f"ARCHITECTURE.md draws '{m}', which is no folder of src/" for m in sorted(arrows.keys() - known)]
    problems += [f"src/{m} is not drawn in ARCHITECTURE.md" for m in sorted(known - arrows.keys())]
    if found := circle(arrows):
        problems.append("ARCHITECTURE.md draws a circle: " + " -> ".join(found))

    for path in sources("include", "src", "cli"):
        shown, module = path.relative_to(ROOT), module_of(path)
        if is_door(path):
            if declared := declarations(path):
                problems.append(f"{shown}: headers directly in include/accelerate/ that are not named after a module only include others; this one has '{declared}'")
        elif module not in known:
            problems.append(f"{shown}: public header of no module: there is no folder src/{module}")
            continue
        for name, target in includes(path):
            if target is None:
                continue
            if target.is_relative_to(PRIVATE) and not path.is_relative_to(PRIVATE):
                problems.append(f"{shown}: includes the private header '{name}', which is not installed")
            if is_door(path):
                continue
            if is_door(target):
                problems.append(f"{shown}: includes '{name}', which is for programs; include what is needed")
                continue
            other = module_of(target)
            if other == module:
                continue
            used.add((module, other))
            if other not in arrows.get(module, ()):
                problems.append(f"{shown}: includes '{name}': {module} -> {other} is not drawn in ARCHITECTURE.md")
        if module in TORCH_FREE and (chain := path_to_libtorch(path, set())):
            problems.append(f"{shown}: {module} starts processes and must not need LibTorch, but reaches it: " + " -> ".join(chain))
    for path in sources("examples"):
        problems += [f"{path.relative_to(ROOT)}: an example includes the private header '{name}'" for name, target in includes(path)
                     if target and target.is_relative_to(PRIVATE)]
    problems += [f"ARCHITECTURE.md draws {a} -> {b}, which no #include uses: delete the arrow" for a in sorted(arrows)
                 for b in sorted(arrows[a] - for_all) if (a, b) not in used]
    return problems, len(used)


def linked_with_libtorch(program):
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in linked.splitlines() if re.search(r"libtorch|libc10|libpython", line)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", help="an executable that must not be linked with LibTorch")
    options = parser.parse_args()
    problems, count = check()
    if options.program and (libraries := linked_with_libtorch(options.program)):
        problems.append(f"{options.program} is linked with {', '.join(libraries)}; the launcher starts in milliseconds only without")
    for problem in problems:
        print(problem)
    print(f"check_includes: {count} arrows in use, {len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
