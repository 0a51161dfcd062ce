#!/usr/bin/env python3
"""Extracts the code of README.md and docs/ so that it is compiled and run where it stands: nothing is copied.

Every fenced block must say what becomes of it, by its language and, where that is not enough, by an HTML comment on the line before it:

    ```text, ```console              what a program prints; nothing is done with it
    ```cpp                           compiled, and run in a process of its own state, in an empty folder
    ```sh                            run by bash -e, all blocks of a page in one folder and in their order
    ```yaml, ```json, ```python ...  written to the file that the comment names, for the sh blocks of the page

    <!-- snippet: prelude=training+metric -->    code of preludes.hpp that the block begins after
    <!-- snippet: after=NAME -->                 continues the block with name=NAME: that one's code comes first
    <!-- snippet: name=NAME -->
    <!-- snippet: ranks=2 -->                    also run as two ranks
    <!-- snippet: file=NAME -->                  (yaml, json, ...) where the block is written to
    <!-- snippet: throws=ConfigError -->         the block must end in that error
    <!-- snippet: only=compiled because="..." -->     compiled and not run, for that reason
    <!-- snippet: only=parsed because="..." -->       sh: checked by bash -n, for that reason; other languages: looked at by nobody
    <!-- snippet: prelude=NAME -->               sh: a function of preludes.sh that is called first

A block that holds `int main` is a whole program; in the generated source it becomes a function of that program's own namespace, so
that all blocks are one translation unit.

usage: snippets.py cpp OUT.cpp | list | run --bin FOLDER --program PROGRAM [--only TEXT]
"""
import argparse
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUTPUT = {"text", "console"}
FILES = {"yaml", "json", "python", "cmake", "dockerfile", "ini"}
KNOWN = {"prelude", "after", "name", "ranks", "file", "throws", "only", "because"}
DEADLINE_S = 600


class Snippet:
    def __init__(self, page, line, language, options, code):
        self.page, self.line, self.language, self.options, self.code = page, line, language, options, code

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    @property
    def symbol(self):
        return re.sub(r"\W", "_", self.page.removesuffix(".md")) + f"_{self.line}"

    @property
    def is_program(self):
        return re.search(r"^int main\(", self.code, re.M) is not None


def pages():
    return [ROOT / "README.md"] + sorted((ROOT / "docs").rglob("*.md"))


def blocks_of(path):
    """(snippets, problems) of one page."""
    page = path.relative_to(ROOT).as_posix()
    found, problems, comment, lines = [], [], "", path.read_text().splitlines()
    i = 0
    while i < len(lines):
        line = lines[i]
        fence = re.match(r"(\s*)```(\S*)\s*$", line)
        if fence:
            begin, indent = i + 1, len(fence.group(1))
            i += 1
            code = []
            while i < len(lines) and not re.match(r"\s*```\s*$", lines[i]):
                code.append(lines[i][indent:])
                i += 1
            options = {}
            if "snippet:" in comment:
                for word in shlex.split(comment.partition("snippet:")[2].replace("-->", "")):
                    key, _, value = word.partition("=")
                    options[key] = value
            found.append(Snippet(page, begin + 1, fence.group(2), options, "\n".join(code) + "\n"))
            comment = ""
        elif line.startswith("<!--"):
            comment = line
            while "-->" not in comment and i + 1 < len(lines):
                i += 1
                comment += " " + lines[i]
        else:
            if line.startswith("    ") and (i == 0 or not lines[i - 1].strip()) and not in_list(lines, i):
                problems.append(f"{page}:{i + 1}: code by indentation, which no test sees; use a fenced block")
            if "snippet:" in comment and line.strip():
                problems.append(f"{page}:{i + 1}: a snippet comment must stand right before its block")
            comment = "" if line.strip() else comment
        i += 1
    for snippet in found:
        problems += [f"{snippet.place}: {text}" for text in complaints(snippet)]
    return found, problems


def in_list(lines, at):
    while at >= 0 and (not lines[at].strip() or lines[at].startswith("  ")):
        at -= 1
    return at >= 0 and re.match(r"([-*]|\d+\.) ", lines[at]) is not None


def complaints(snippet):
    o, language = snippet.options, snippet.language
    if unknown := set(o) - KNOWN:
        yield f"unknown option {', '.join(sorted(unknown))}"
    if ("only" in o) != bool(o.get("because")):
        yield 'only=... needs because="the reason", and the other way round'
    if language in OUTPUT:
        if o:
            yield f"{language} is what a program prints and takes no options"
    elif language in FILES:
        if "file" not in o and o.get("only") != "parsed":
            yield f'{language} needs file=NAME, or only=parsed because="..."'
    elif language == "sh":
        if o.get("only", "parsed") != "parsed":
            yield "sh takes only=parsed"
    elif language == "cpp":
        if o.get("only", "compiled") != "compiled":
            yield "cpp takes only=compiled"
    else:
        yield (f"a block of language '{language}', expected cpp, sh, text, console" if language else "a block without a language, "
               "expected cpp or sh, which are run, or text or console, which are output")


def all_snippets():
    found, problems = [], []
    for path in pages():
        snippets, wrong = blocks_of(path)
        found += snippets
        problems += wrong
    names = {}
    for snippet in found:
        if name := snippet.options.get("name"):
            if (snippet.page, name) in names:
                problems.append(f"{snippet.place}: two blocks of this page are named '{name}'")
            names[snippet.page, name] = snippet
    for snippet in found:
        if (after := snippet.options.get("after")) and (snippet.page, after) not in names:
            problems.append(f"{snippet.place}: after={after}, but no block of this page has that name")
    if problems:
        sys.exit("snippets: " + "\n          ".join(problems))
    return found, names


# --- C++ -----------------------------------------------------------------------------------------------------------------------------

def preludes():
    """{name: [code of namespace scope, code of a function, names that come first]} of preludes.hpp, whose parts begin with
    `//: NAME`, `//: NAME file` or `//: NAME after OTHER`."""
    parts, name = {}, None
    for number, line in enumerate((HERE / "preludes.hpp").read_text().splitlines(), 1):
        if match := re.match(r"//: (\w+)( file)?(?: after (\w+))?$", line):
            name, scope = match.group(1), 0 if match.group(2) else 1
            parts.setdefault(name, ["", "", []])
            parts[name][2] += [match.group(3)] if match.group(3) else []
            parts[name][scope] += f'#line {number + 1} "{HERE}/preludes.hpp"\n'
        elif name:
            parts[name][scope] += line + "\n"
    return parts


def cpp_text(snippets, names):
    parts = preludes()
    includes, bodies, table = [], [], []

    def take(snippet):
        """Code of a snippet without its includes, with those before it."""
        lines = []
        for line in snippet.code.splitlines():
            if re.match(r"#include", line):
                includes.append(line)
                line = ""
            lines.append(line)
        text = f'#line {snippet.line} "{ROOT}/{snippet.page}"\n' + "\n".join(lines) + "\n"
        before = ""
        if after := snippet.options.get("after"):
            before = take(names[snippet.page, after])
        return before + text

    def preludes_of(snippet):
        wanted = [name for name in snippet.options.get("prelude", "").split("+") if name]
        if after := snippet.options.get("after"):
            wanted = preludes_of(names[snippet.page, after]) + wanted
        if missing := [name for name in wanted if name not in parts]:
            sys.exit(f"snippets: {snippet.place}: preludes.hpp has no '{missing[0]}', only: {' '.join(parts)}")
        return list(dict.fromkeys(part for name in wanted for part in with_needs(name)))

    def with_needs(name):
        return [part for needed in parts[name][2] for part in with_needs(needed)] + [name]

    for snippet in snippets:
        if snippet.language != "cpp":
            continue
        code, before = take(snippet), preludes_of(snippet)
        file_scope = "".join(parts[name][0] for name in before)
        function = "".join(parts[name][1] for name in before)
        if snippet.is_program:
            # A return value at the end, which main may leave out and another function may not.
            head, end, tail = code.rpartition("\n}")
            code = re.sub(r"^int main\(\)", "inline int program()", f"{head}\n  return 0;{end}{tail}", flags=re.M)
            bodies.append(f"namespace {snippet.symbol} {{\n{file_scope}{code}inline void run() {{\n  if (const int status = program()) "
                          f"throw std::runtime_error(\"ended with status \" + std::to_string(status));\n}}\n}}\n")
        else:
            bodies.append(f"namespace {snippet.symbol} {{\n{file_scope}inline void run() {{\n{function}{code}}}\n}}\n")
        table.append(f'    {{"{snippet.place}", &{snippet.symbol}::run, {snippet.options.get("ranks", 1)}, '
                     f'{str("only" in snippet.options).lower()}, "{snippet.options.get("throws", "")}"}},\n')
    unique = "\n".join(dict.fromkeys(includes))
    return (f"// Made by tests/docs/snippets.py from README.md and docs/; errors name the page and its line.\n{unique}\n"
            f'#include "snippets.hpp"\n\n' + "\n".join(bodies) + "\nconst std::vector<Snippet>& all_snippets() {\n"
            "  static const std::vector<Snippet> all = {\n" + "".join(table) + "  };\n  return all;\n}\n")


# --- Running -------------------------------------------------------------------------------------------------------------------------

def bash(script, folder, environment, label):
    """Whether it ended with 0. Everything that it started is ended with it."""
    begin = time.monotonic()
    process = subprocess.Popen(["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
        reason = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        reason = f"did not end within {DEADLINE_S} s"
    if reason:
        print(f"{label}: {reason}\n{output}", flush=True)
    else:
        print("".join(f"{label}: {line}\n" for line in output.splitlines() if line.startswith("skipped: ")), end="")
        print(f"{label}: ran in {time.monotonic() - begin:.1f} s", flush=True)
    return not reason


def run_shell(snippets, arguments):
    failed = left = ran = 0
    for page in dict.fromkeys(s.page for s in snippets):
        mine = [s for s in snippets if s.page == page and (not arguments.only or arguments.only in s.place)]
        if not any(s.language == "sh" for s in mine):
            continue
        with tempfile.TemporaryDirectory(prefix="accelerate_docs_") as scratch:
            folder = pathlib.Path(scratch) / "here"
            folder.mkdir()
            environment = {"PATH": f"{arguments.bin}:{os.environ['PATH']}", "HOME": scratch, "HF_HOME": f"{scratch}/hf", "TMPDIR": scratch,
                           "LANG": "C.UTF-8", "BIN": arguments.bin, "SOURCE": str(ROOT), "DATA": os.environ.get("ACCELERATE_TEST_DATA", ""),
                           "PYTHON": os.environ.get("ACCELERATE_TEST_PYTHON", sys.executable), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
            for s in mine:
                if s.language in FILES and "file" in s.options:
                    (folder / s.options["file"]).parent.mkdir(parents=True, exist_ok=True)
                    (folder / s.options["file"]).write_text(s.code)
                if s.language == "json" and "only" not in s.options:
                    json.loads(s.code)
                if s.language == "python":
                    compile(s.code, s.place, "exec")
                if s.language != "sh":
                    continue
                if "only" in s.options:
                    print(f"{s.place}: not run: {s.options['because']}", flush=True)
                    left += 1
                    failed += subprocess.run(["bash", "-n", "-c", s.code], cwd=folder, check=False).returncode != 0
                    continue
                script = f"source {shlex.quote(str(HERE / 'preludes.sh'))}\n"
                script += "".join(f"{name}\n" for name in s.options.get("prelude", "").split("+") if name)
                ran += 1
                failed += not bash(script + s.code, folder, environment, s.place)
    print(f"shell: {ran} blocks ran, {left} were parsed only, {failed} failed", flush=True)
    return failed


def run(arguments):
    snippets, _ = all_snippets()
    failed = run_shell(snippets, arguments)
    for s in snippets:
        if s.language == "cpp" and "only" in s.options:
            print(f"{s.place}: compiled, not run: {s.options['because']}", flush=True)
        if s.language in FILES and "only" in s.options:
            print(f"{s.place}: {s.language}, not checked: {s.options['because']}", flush=True)
    failed += subprocess.run([arguments.program] + ([arguments.only] if arguments.only else []), check=False).returncode != 0
    most = max((int(s.options.get("ranks", 1)) for s in snippets), default=1)
    if most > 1:
        failed += subprocess.run([f"{arguments.bin}/accelerate", "launch", "--cpu", "--num_processes", str(most), arguments.program]
                                 + ([arguments.only] if arguments.only else []), check=False).returncode != 0
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cpp").add_argument("out", type=pathlib.Path)
    commands.add_parser("list")
    runner = commands.add_parser("run")
    runner.add_argument("--bin", required=True)
    runner.add_argument("--program", required=True)
    runner.add_argument("--only")
    arguments = parser.parse_args()
    if arguments.command == "cpp":
        text = cpp_text(*all_snippets())
        if not arguments.out.exists() or arguments.out.read_text() != text:
            arguments.out.write_text(text)
    elif arguments.command == "list":
        for s in all_snippets()[0]:
            print(s.place, s.language, s.options)
    elif run(arguments):
        sys.exit("snippets: see above")


if __name__ == "__main__":
    main()
