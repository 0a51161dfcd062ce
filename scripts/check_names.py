#!/usr/bin/env python3
"""Checks that a name says one thing: a type of the sources has a name of its own, and none is named by a retired word.

Definitions of classes, structs, unions and enums count where they are at the scope of a namespace, also of an anonymous
one, in src/, include/, cli/ and programs/. Nested types are read together with the class around them, and aliases are
abbreviations of one file: both may repeat. The glossary of ARCHITECTURE.md says what the words mean.

usage: check_names.py
"""
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src", "include", "cli", "programs")

# Names that several namespaces have on purpose, with the reason.
PARALLEL = {
    "EncodeOptions": "public: how WordPiece encodes a text (models), and how weights become codes (codes)",
    "Encoding": "public: an encoded text (models), and a form of weights in few bits (codes)",
    "LinearOptions": "public: a linear schedule (optim), and a linear layer on codes (codes)",
    **{name: "an encoding of GGUF: as its files have it (formats), and as products read it (codes)"
       for name in ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")},
}
# Words that mean what another word means: (in names of types, the word to use, names that keep it).
RETIRED = (
    ("Stretch", "Slice", ()),
    ("Piece", "Shard", ("PieceTable", "TextPieces", "PiecesIterator")),
    ("Holding", "Held", ()),
)

COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.S)
# At the beginning of a line: clang-format does not indent what is in a namespace, and indents all else.
TYPE = re.compile(r"^(?:template\s*<[^;{]*?>\s*(?:requires[^;{]*?\s)?)?(?:struct|class|union|enum class|enum)\s+(?:\[\[\w+\]\]\s+)?(?:ACCELERATE_\w+(?:\([^)]*\))?\s+)?"
                  r"(\w+)(?:\s+final)?\s*(?::[^:;{][^;{]*)?\{", re.M)


def defined():
    """{name: the files that define a type of this name}"""
    names = collections.defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.[ch]pp")):
            text = COMMENT_OR_TEXT.sub(lambda m: "\n" * m.group(0).count("\n"), path.read_text())
            for match in TYPE.finditer(text):
                names[match.group(1)].append(str(path.relative_to(ROOT)))
    return names


def problems(names):
    for name, files in sorted(names.items()):
        if len(files) > 1 and name not in PARALLEL:
            yield f"{name} is a type in {' and in '.join(files)}; name the narrower one after what it is about, or list it in PARALLEL with the reason"
        for word, better, keep in RETIRED:
            if word in name and name not in keep and not name.startswith("WordPiece"):
                yield f"{files[0]}: {name}: '{word}' is retired; the glossary of ARCHITECTURE.md has '{better}'"
    for name in sorted(PARALLEL):
        if len(names.get(name, ())) < 2:
            yield f"PARALLEL lists {name}, which is not a type in two places: delete the row"


def main():
    names = defined()
    found = list(problems(names))
    for problem in found:
        print(problem)
    print(f"check_names: {len(names)} types, {len(found)} problem{'' if len(found) == 1 else 's'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
