#!/usr/bin/env python3
"""Compiles a source that must not compile, and looks for the reasons that users are to read.

    check.py SOURCE -- COMPILER FLAGS...

In SOURCE a line that ends with `// expect: TEXT` must be an error whose messages contain TEXT; a line with `// fine`, and
every other one, must not be in any error. All of a source is checked in one run of the compiler, -fsyntax-only.
"""
import re
import subprocess
import sys


def problems(source, output):
    """What is wrong with the compiler's output, a line each."""
    with open(source, encoding="utf-8") as file:
        lines = file.read().splitlines()
    expected = {n: m[1].strip() for n, line in enumerate(lines, 1) if (m := re.search(r"// expect: (.+)", line))}
    if not expected:
        return [f"{source} expects nothing"]
    errors = errors_by_line(source, output)
    wrong = [f"line {n} is no error, expected: {text}" for n, text in expected.items() if n not in errors]
    wrong += [f"line {n} does not say: {text}" for n, text in expected.items() if text not in errors.get(n, text)]
    wrong += [f"line {n} is an error, expected none" for n in errors.keys() - expected.keys()]
    return wrong


def errors_by_line(source, output):
    """The messages for each line of the source; None for errors that no line of it leads to.

    GCC names the line that asked for a template before the error (once for all errors in one instantiation), Clang after.
    """
    here = re.compile(re.escape(source) + r":(\d+):")
    errors, asked, at, own, text = {}, None, None, False, None

    def close():
        if text is not None:
            errors[at] = errors.get(at, "") + text

    for line in output.splitlines(keepends=True):
        place = here.match(line)
        if re.search(r": (fatal )?error: ", line):
            close()
            own = place is not None
            at, text = int(place[1]) if own else asked, ""
        elif place and "required from here" in line:
            asked = int(place[1])
        elif place and "requested here" in line and not own:
            at = int(place[1])
        if text is not None:
            text += line
    close()
    return errors


def main():
    source, separator, *command = sys.argv[1:]
    assert separator == "--", __doc__
    done = subprocess.run([*command, "-fsyntax-only", source], stderr=subprocess.PIPE, text=True,
                          env={"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"}, check=False)
    wrong = ["it compiles"] if done.returncode == 0 else problems(source, done.stderr)
    if wrong:
        print(done.stderr)
        print(*(f"{source}: {line}" for line in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
