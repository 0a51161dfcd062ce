#!/usr/bin/env python3
"""Compiles sources that must not compile, and looks for the reasons that users are to read.

    check.py SOURCE... -- COMPILER FLAGS...

In SOURCE a line that ends with `// expect: TEXT` must be an error whose messages contain TEXT; a line with `// fine`, and
every other one, must not be in any error. All sources are checked in one run of the compiler, -fsyntax-only, each in a
namespace of its own after what they include: most of what it takes is LibTorch's headers.
"""
import pathlib
import re
import subprocess
import sys
import tempfile


def problems(sources, output):
    """The faults of the compiler's output, a line each."""
    expected = {}
    for source in sources:
        lines = pathlib.Path(source).read_text(encoding="utf-8").splitlines()
        marked = {(source, n): m[1].strip() for n, line in enumerate(lines, 1) if (m := re.search(r"// expect: (.+)", line))}
        if not marked:
            return [f"{source} expects nothing"]
        expected |= marked
    errors = errors_by_place(sources, output)
    wrong = [f"{source}:{n} is no error, expected: {text}" for (source, n), text in expected.items() if (source, n) not in errors]
    wrong += [f"{source}:{n} does not say: {text}" for (source, n), text in expected.items() if text not in errors.get((source, n), text)]
    wrong += [f"{':'.join(map(str, place or ['none of the sources']))} is an error, expected none" for place in errors.keys() - expected.keys()]
    return wrong


def errors_by_place(sources, output):
    """The messages for each (source, line); None for errors that no line of them leads to.

    GCC names the line that asked for a template before the error (once for all errors in one instantiation), Clang after.
    """
    here = re.compile(f"({'|'.join(map(re.escape, sources))}):(\\d+):")
    errors, asked, at, own, text = {}, None, None, False, None

    def close():
        if text is not None:
            errors[at] = errors.get(at, "") + text

    for line in output.splitlines(keepends=True):
        found = here.match(line)
        place = (found[1], int(found[2])) if found else None
        if re.search(r": (fatal )?error: ", line):
            close()
            own = place is not None
            at, text = place if own else asked, ""
        elif place and "required from here" in line:
            asked = place
        elif place and "requested here" in line and not own:
            at = place
        if text is not None:
            text += line
    close()
    return errors


def unit_of(sources):
    """One source with all of them."""
    texts = [pathlib.Path(source).read_text(encoding="utf-8") for source in sources]
    includes = dict.fromkeys(line for text in texts for line in re.findall(r"^#include .*$", text, re.M))
    parts = [f'namespace {pathlib.Path(source).stem} {{\n#include "{source}"\n}}' for source in sources]
    return "\n".join([*includes, *parts]) + "\n"


def main():
    separator = sys.argv.index("--")
    sources, command = sys.argv[1:separator], sys.argv[separator + 1:]
    with tempfile.NamedTemporaryFile("w", suffix=".cpp", encoding="utf-8") as unit:
        unit.write(unit_of(sources))
        unit.flush()
        done = subprocess.run([*command, "-fsyntax-only", unit.name], stderr=subprocess.PIPE, text=True,
                              env={"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"}, check=False)
    wrong = ["they compile"] if done.returncode == 0 else problems(sources, done.stderr)
    if wrong:
        print(done.stderr)
        print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
