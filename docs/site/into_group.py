#!/usr/bin/env python3
"""Doxygen's filter for public headers: puts what a header declares into the group of its module, which its folder names."""
import pathlib
import re
import sys

path = pathlib.Path(sys.argv[1])


def without_tags(line):
    """No header writes HTML: `<n>` in a comment is a placeholder, std::vector<T> a type, and ::value behind one no link."""
    code, slashes, comment = line.partition("///")
    pieces = comment.split("`")
    pieces[::2] = [re.sub(r"<(?=[\w/])", "&lt;", piece).replace(">::", ">\\::") for piece in pieces[::2]]
    return code + slashes + "`".join(pieces)


text = "\n".join(map(without_tags, path.read_text().split("\n")))
root = next(p for p in path.resolve().parents if p.name == "accelerate" and p.parent.name == "include")
below = path.resolve().relative_to(root)
module = below.parts[0] if len(below.parts) > 1 else below.stem
if (root.parent.parent / "src" / module).is_dir():
    # On the same line, so that warnings name the right one.
    text = re.sub(r"^(namespace accelerate\S* \{)", rf"\1 /** @addtogroup {module} */ /** @{{ */", text, flags=re.M)
    text = re.sub(r"^(\}  // namespace accelerate\S*)$", r"/** @} */ \1", text, flags=re.M)
sys.stdout.write(text)
