#!/usr/bin/env python3
"""Holds the pages against the sources: the texts that docs/troubleshooting.md quotes are in the sources, what docs/from_python.md
says is here ("yes") is declared in a public header, that page has every public name of the reference (reference_names.txt) and does
not contradict itself, and files and folders that pages name are there.

usage: claims.py
"""
import collections
import fnmatch
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def rows(page):
    """(line number, cells) of a page's tables."""
    for number, line in enumerate((ROOT / "docs" / page).read_text().splitlines(), 1):
        if line.startswith("| "):
            yield number, [cell.strip() for cell in line.strip("|").split(" | ")]


def sources():
    """All literals of the program, with those that the compiler joins joined."""
    files = [path for folder in ("src", "include", "cli", "programs") for path in (ROOT / folder).rglob("*.[ch]pp")]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s*\n\s*"', "", text).replace('\\"', '"')


def problems():
    program = sources()
    for number, cells in rows("troubleshooting.md"):
        if quoted := re.fullmatch(r"`([^`]+)`", cells[0]):
            if quoted.group(1) not in program:
                yield f"docs/troubleshooting.md:{number}: no message of the sources contains '{quoted.group(1)}'"
    headers = "\n".join(path.read_text() for path in (ROOT / "include").rglob("*.hpp"))
    for number, cells in rows("from_python.md"):
        if len(cells) == 2 and cells[1].startswith("yes"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                name = name.split(".")[-1]
                if not re.search(rf"\b{re.escape(name)}\b", headers):
                    yield f"docs/from_python.md:{number}: '{name}' is said to be here, and no public header has it"
    # A name may stand in two tables, as a member and as a function.
    verdicts = collections.defaultdict(dict)
    for number, cells in rows("from_python.md"):
        for name in re.findall(r"`([^`]+)`", cells[0]):
            verdicts[re.sub(r"\(.*", "", name).split(".")[-1]][number] = cells[-1].startswith("not here")
    for name, said in sorted(verdicts.items()):
        if len(set(said.values())) > 1:
            yield f"docs/from_python.md:{max(said)}: '{name}' is not here, and it is: see also line {min(said)}"
    for name in (ROOT / "tests/docs/reference_names.txt").read_text().split():
        if not any(fnmatch.fnmatchcase(name, known) for known in verdicts):
            yield f"docs/from_python.md has no row for '{name}'"
    for page in sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")):
        if page.name == "CHANGELOG.md":
            continue  # which tells of files as they were
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for path in re.findall(r"`((?:src|include|cli|programs|tests|examples|docs|scripts|cmake|fuzz|benchmarks)/[\w./-]+)`", line):
                if not (ROOT / path).exists():
                    yield f"{page.relative_to(ROOT)}:{number}: there is no '{path}'"


if __name__ == "__main__":
    if found := list(problems()):
        sys.exit("claims: " + "\n        ".join(found))
    print("claims: the pages and the sources agree")
