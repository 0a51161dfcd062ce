#!/usr/bin/env python3
"""Checks that #include lines follow the arrows of ARCHITECTURE.md, and that starting processes needs no LibTorch.

The arrows are read from the block that begins with ```layers there, so that the document and this check can't drift apart. A module is a
folder of src/ with the folder of include/accelerate/ that has its name, cli/, programs/, or a folder below one of these that is drawn by its
path. `umbrella` stands for the headers directly in include/accelerate/ that only include others. The rule:

    A file includes headers, installed or private, of its own module and of those to which an arrow is drawn; public headers and examples
    include installed headers only.

It fails on
  - an include from one module to another without an arrow, and an arrow that no include uses;
  - a circle of arrows, a module that is not drawn, a public header that belongs to no module;
  - a public header or an example that includes a private header;
  - the command line program, the launcher or their helpers (TORCH_FREE) reaching a LibTorch header through any number of includes;
  - a public header that accelerate.hpp, which is to have everything, does not reach; but for those of OWN_LIBRARY, of single layers (LAYERS), and other umbrellas;
  - world_group() in parallel, data or optim (BY_AXES), where comm::mesh() says who works with whom;
  - settings.cpp of a layer (src/parallel/*/), which the launcher compiles, reaching LibTorch or another module than `config`;
  - a plugin's header in src/parallel/sharding, which is told what to do in terms of nobody's plugin;
  - accelerator.hpp and the headers that it includes being more than 24 or longer than 2,400 lines together;
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
TORCH_FREE = ("cli", "launch", "config", "timeline", "programs/sagemaker")  # with the folders below them
UMBRELLA = "umbrella"
OWN_LIBRARY = ("models",)
BY_AXES = ("parallel", "data", "optim")
FACE_HEADERS, FACE_LINES = 24, 2400  # accelerator.hpp and all that it includes, which every program compiles
LAYERS = PUBLIC / "accelerate/parallel/layers"  # plugins of layers, which programs that use them include


def is_door(path):
    """Whether this is a header for programs that only includes others: one directly in include/accelerate/ that is not named after a module."""
    return path.parent == PUBLIC / "accelerate" and not (PRIVATE / path.stem).is_dir()


def drawn_arrows():
    """{module: set of modules it may include}, as ARCHITECTURE.md draws them. '*' on the left is every module but those that such lines below it name."""
    block = re.search(r"^```layers\n(.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), re.M | re.S)
    if not block:
        sys.exit("check_includes: ARCHITECTURE.md has no block that begins with ```layers")
    arrows, for_all = {}, []
    for line in block.group(1).splitlines():
        left, arrow, right = line.partition("->")
        if not arrow or not left.split():
            continue
        if left.split() == ["*"]:
            for_all += right.split()
        for module in left.split():
            arrows.setdefault(module, set()).update(right.split())
    arrows.pop("*", None)
    for target in for_all + [t for targets in arrows.values() for t in targets]:
        arrows.setdefault(target, set())
    below = {m: set(for_all[for_all.index(m) + 1:] if m in for_all else for_all) for m in arrows}
    return {m: targets | below[m] for m, targets in arrows.items() if m != UMBRELLA}, set(for_all)


@functools.cache
def place_of(path):
    """The folders in which a file lies, beginning with the module's: ("launch", "monitor"). Empty for examples and tests."""
    below = path.relative_to(ROOT).parts[:-1]
    if below[:1] in (("cli",), ("programs",)):
        return below
    if below[:1] == ("src",):
        return below[1:]
    if below[:2] == ("include", "accelerate"):
        return below[2:] or (path.stem,)
    return ()


def module_of(path, drawn):
    """The module that a file belongs to; of folders inside each other the innermost that is drawn. None for examples and tests."""
    if is_door(path):
        return UMBRELLA
    if re.fullmatch(r"src/parallel/\w+/settings\.cpp", path.relative_to(ROOT).as_posix()):
        return "config"
    place = place_of(path)
    names = ["/".join(place[:n]) for n in range(len(place), 0, -1)]
    return next((name for name in names if name in drawn), names[-1] if names else None)


def torch_free(module):
    return any(module == name or module.startswith(name + "/") for name in TORCH_FREE)


def resolve(name, includer):
    """The file of this repository that an include names, or None for a system header."""
    top = ROOT / includer.relative_to(ROOT).parts[0]  # cli and programs find their own headers by their own names
    for folder in (includer.parent, PRIVATE, PUBLIC, top):
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
    arrows.setdefault(UMBRELLA, set())
    top = {p.name for p in PRIVATE.iterdir() if p.is_dir()} | {"cli", "programs"}
    known = top | {UMBRELLA}
    problems += [f"ARCHITECTURE.md draws '{m}', which is no folder" for m in sorted(arrows.keys() - known)
                 if "/" not in m or not any((base / m).is_dir() for base in (PRIVATE, ROOT))]
    problems += [f"{m} is not drawn in ARCHITECTURE.md" for m in sorted(top - arrows.keys())]
    if found := circle(arrows):
        problems.append("ARCHITECTURE.md draws a circle: " + " -> ".join(found))

    problems += [f"{path.relative_to(ROOT)}: at::parallel_for is compiled into its caller, which has no OpenMP, and runs alone; use parallel_ranges() of utils/parallel.hpp"
                 for path in sources("include", "src", "cli", "programs") if re.search(r"at::parallel_for\([^)]", path.read_text())]
    problems += [f"{path.relative_to(ROOT)}: world_group() is for barriers, logs and the launcher; ask comm::mesh() for the ranks along the axes that are meant"
                 for path in sources("src") if place_of(path)[0] in BY_AXES and "world_group()" in path.read_text()]
    problems += [f"{path.relative_to(ROOT)}: '{name}' is of one plugin; sharding is told what to do by ShardingSettings, which the plugin's folder fills in"
                 for path in sources("src/parallel/sharding") for name, _ in includes(path) if name.endswith("_plugin.hpp") or "parallel/fsdp/" in name]
    for path in sources("include", "src", "cli", "programs"):
        shown, module = path.relative_to(ROOT), module_of(path, arrows)
        if module == UMBRELLA:
            if declared := declarations(path):
                problems.append(f"{shown}: headers directly in include/accelerate/ that are not named after a module only include others; this one has '{declared}'")
        elif module.split("/")[0] not in known:
            problems.append(f"{shown}: public header of no module: there is no folder src/{module}")
            continue
        for name, target in includes(path):
            if target is None:
                continue
            if path.is_relative_to(PUBLIC) and not target.is_relative_to(PUBLIC):
                problems.append(f"{shown}: includes the private header '{name}', which is not installed")
            other = module_of(target, arrows)
            if module == UMBRELLA or other == module:
                continue
            if other is None:
                problems.append(f"{shown}: includes '{name}', which belongs to no module")
                continue
            used.add((module, other))
            if other not in arrows.get(module, ()):
                problems.append(f"{shown}: includes '{name}': {module} -> {other} is not drawn in ARCHITECTURE.md")
        if torch_free(module) and (chain := path_to_libtorch(path, set())):
            problems.append(f"{shown}: {module} starts processes and must not need LibTorch, but reaches it: " + " -> ".join(chain))
    everything = reached(PUBLIC / "accelerate/accelerate.hpp", set())
    problems += [f"accelerate.hpp does not reach {path.relative_to(PUBLIC)}" for path in sources("include")
                 if path not in everything and not is_door(path) and not path.is_relative_to(LAYERS)
                 and module_of(path, arrows) not in OWN_LIBRARY]
    face = reached(PUBLIC / "accelerate/accelerator.hpp", set())
    lines = sum(path.read_text().count("\n") for path in face)
    if len(face) > FACE_HEADERS or lines > FACE_LINES:
        problems.append(f"accelerator.hpp and what it includes are {len(face)} headers with {lines} lines, expected at most {FACE_HEADERS} with {FACE_LINES}: "
                        "name types by forward declarations, hold options by Given<>, and let those who use a type include its header")
    problems += [f"{path.relative_to(ROOT)}: an example includes the private header '{name}'" for path in sources("examples")
                 for name, target in includes(path) if target and target.is_relative_to(PRIVATE)]
    problems += [f"ARCHITECTURE.md draws {a} -> {b}, which no #include uses: delete the arrow" for a in sorted(arrows)
                 for b in sorted(arrows[a] - for_all) if (a, b) not in used]
    return problems, len(used)


def reached(path, seen):
    """This header and all of this repository that it includes."""
    if path not in seen:
        seen.add(path)
        for _, target in includes(path):
            if target:
                reached(target, seen)
    return seen


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
