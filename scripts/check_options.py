#!/usr/bin/env python3
"""Checks that each field of the public option structs is used by a test.

An option that no test sets, or looks at, may do nothing without anybody's notice. A field counts as used where the code
of a test (.cpp, .hpp; not its comments and texts) has its name after `.`, `->` or `::`. That a test fails where the
option's effect is taken out is what scripts/mutate.py shows.

usage: check_options.py
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPTIONS = re.compile(r"\bstruct\s+(?:ACCELERATE_API\s+)?"
                     r"(\w*(?:Plugin|Kwargs|Options|Configuration|Config|Precision|Offload))\s*(?::[^{;]*)?\{")
NO_FIELD = re.compile(r"(using|return|friend|static|struct|enum|explicit|template|typedef)\b")


def code(text):
    """C++ without comments and what texts say."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


def outer_level(text, begin):
    """The text behind the brace at `begin`, up to its partner; further braces and parentheses are left empty."""
    kept, depth = [], 0
    for letter in text[begin:]:
        depth -= letter in ")}"
        if depth == 0 and letter == "}":
            break
        if depth == 1:
            kept.append(letter)
        depth += letter in "({"
    return "".join(kept)


def names_in(declaration):
    """Names that a declaration of fields declares: `std::map<int, int> a = 1, b;` has a and b."""
    while declaration != (shorter := re.sub(r"<[^<>]*>", "", declaration)):
        declaration = shorter
    if NO_FIELD.match(declaration) or ")" in declaration:
        return []
    return [words[-1] for part in declaration.split(",") if (words := re.findall(r"\w+", part.partition("=")[0]))]


def fields():
    """[(struct, field)] of all public option structs."""
    found = []
    for header in sorted((ROOT / "include").rglob("*.hpp")):
        text = code(header.read_text())
        for struct in OPTIONS.finditer(text):
            body = outer_level(text, struct.end() - 1)
            # A function's body ends without a semicolon.
            for declaration in re.split(r";|\{\}(?=\s*[A-Za-z])", body):
                found += [(struct.group(1), name) for name in names_in(declaration.strip())]
    return found


def main():
    files = (file for file in (ROOT / "tests").rglob("*") if file.suffix in (".cpp", ".hpp"))
    tests = "".join(code(file.read_text(errors="replace")) for file in files)
    used = set(re.findall(r"(?:\.|->|::)\s*(\w+)", tests))
    all_fields = fields()
    unused = [f"{struct}::{field}" for struct, field in all_fields if field not in used]
    for name in unused:
        print(f"{name} is used by no test: write one that fails where the option does nothing, and a fault that shows "
              "it (tests/mutations/faults.py)")
    print(f"check_options: {len(all_fields)} fields, {len(unused)} without a test")
    return 1 if unused or len(all_fields) < 400 else 0


if __name__ == "__main__":
    sys.exit(main())
