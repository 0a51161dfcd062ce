#!/usr/bin/env python3
"""Whether the runner of conformance cases fails where it has to.

    check_runner.py CONFORMANCE_TESTS CASES

Runs it on a file of six rows, of which one differs on purpose, with lists of such rows that are right and wrong.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

FILE = "skip_batches.json"


def name_of(row):
    """As Report::name_of."""
    text = json.dumps(row, separators=(",", ":"))
    number = 0xCBF29CE484222325
    for byte in text.encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return f"{text[:100]} #{(number ^ number >> 32) % 2**32:08x}"


def main():
    program, cases = sys.argv[1:]
    given = json.loads((pathlib.Path(cases) / FILE).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: pathlib.Path(scratch) / name for name in ("cases", "lists")}
        for folder in folders.values():
            folder.mkdir()

        def run(file, lists, *options):
            (folders["cases"] / FILE).write_text(json.dumps(file), encoding="utf-8")
            (folders["lists"] / FILE).write_text(json.dumps(lists), encoding="utf-8")
            done = subprocess.run([program, "--cases", folders["cases"], *options], stdout=subprocess.PIPE, text=True,
                                  check=False)
            return done.returncode, done.stdout

        listed = ("--differing", folders["lists"])
        code, _ = run(given, {}, "--write-differing", folders["lists"])
        right = json.loads((folders["lists"] / FILE).read_text(encoding="utf-8"))
        assert code == 0 and list(map(len, right.values())) == [1], right
        (reason, names), = right.items()
        rows = given["cases"]
        differing = next(row for row in rows if name_of(row) in names)
        passing = next(row for row in rows if name_of(row) not in names)
        more = given | {"cases": [*rows, [*differing[:-1], differing[-1] - 1]]}  # a row that no list has

        with_passing, with_missing = ({reason: [*names, name]} for name in (name_of(passing), "[] #0"))
        situations = [
            ("a list that is right", run(given, right, *listed), 0, "5 passed, 0 failed (1 differ on purpose)"),
            ("a row that differs is not listed", run(given, {}, *listed), 1, "is not on the list"),
            ("it is listed for another reason", run(given, {"because": names}, *listed), 1, "is not on the list"),
            ("a listed row passes", run(given, with_passing, *listed), 1, "this row passes now"),
            ("a listed row is not there", run(given, with_missing, *listed), 1, "one that is not there: [] #0"),
            ("no row passes", run(given | {"cases": [differing]}, right, *listed), 1, "no row has passed"),
            ("there are no rows", run(given | {"cases": []}, {}, *listed), 1, "no row has passed"),
            ("cases from elsewhere", run(more, right), 0, "5 passed, 0 failed (2 differ on purpose)"),
        ]
    wrong = [f"{what}: exit code {code}, expected {expected} and '{text}'\n{output}"
             for what, (code, output), expected, text in situations if code != expected or text not in output]
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
