#!/usr/bin/env python3
"""Checks that every setting of a run has an entry in the table of receipts of its owner (src/**/receipts*.cpp).

Settings of a run are what an Accelerator is made with: public fields of the structs that a table names at its beginning, `// settings: Struct`,
with how entries of its fields begin where it is not `Struct.`: `as plugin.`, or `by field`. A field that has no entry has a line there, `// without: plugin.field:
reason`. It fails on a field with neither or with both, on an entry or a listed name without a field, and on a public struct that is called ...Plugin,
...Kwargs or ...Configuration and is named nowhere; and on an entry that no test names: tests/dist/receipts_test.cpp has a job for each in which it acts.
Plugins of layers (LAYERS) have their entries, called Struct.field, in the layer's folder in src/parallel.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS = "include/accelerate/parallel/layers"
TABLES = "receipts*.cpp"  # in the folder of the settings' owner
NO_RUN = {
    "DeepSpeedPlugin": "each key of the configuration has an entry, by the layer", "MegatronLMPlugin": "AcceleratorOptions refuses it", "ProfileKwargs": "of a profile, which shows what it recorded",
    "TorchDynamoPlugin": "AcceleratorOptions refuses what compiles; entries launch.dynamo_*",
    "FP8RecipeKwargs": "deprecated; has the entries of TERecipeKwargs or MSAMPRecipeKwargs",
}
FIELD = re.compile(r"^  (?!using|return|friend|static|struct|explicit)[\w:<>,\s*&()]+?\s&?(\w+(?:, \w+)*)(?:\s*=\s*[^;]*|\{[^()]*\})?;")


def public_structs(folder="include"):
    """{name: [fields]} of all public headers."""
    structs = {}
    for header in sorted((ROOT / folder).rglob("*.hpp")):
        for name, body in re.findall(r"^struct (?:ACCELERATE_API )?(\w+)[^;{]*\{\n(.*?)\n\};", header.read_text(), re.M | re.S):
            fields = [name for line in body.splitlines() for match in [FIELD.match(line)]
                      if match and ") const" not in line for name in match.group(1).split(", ")]
            structs.setdefault(name, fields)
    return structs


# The lines at the beginning of a table.
SETTINGS = re.compile(r"^// settings: (\w+)(?: as ([\w., ]+)|( by field))?$", re.M)  # of this struct; how entries of its fields begin: so, not at all, with its name
WITHOUT = re.compile(r"^// without: ([\w.]+): (.+)$", re.M)  # a field that has no entry, and why


def main():
    structs, wrong = public_structs(), []
    texts = [f.read_text() for f in sorted((ROOT / "src").rglob(TABLES))]
    table = "".join(text for text in texts if SETTINGS.search(text) or "Row<" in text)
    entries = re.findall(r'^\s+(?:\{)"([\w.]+)"', table, re.M)
    tests = "".join(f.read_text() for f in sorted((ROOT / "tests").rglob("*.cpp")))
    run = {struct: [""] if by_field else (prefixes or struct + ".").split(", ") for struct, prefixes, by_field in SETTINGS.findall(table)}
    left_out = dict(WITHOUT.findall(table))
    wrong += [f"{name}: no test names it" for name in entries if not re.search(rf"{re.escape(name)}\b", tests)]
    known = set()
    for struct, prefixes in run.items():
        if not structs.get(struct):
            wrong.append(f"{struct}: no public struct with fields is called so")
        for name in (prefix + field for field in structs.get(struct, []) for prefix in prefixes):
            known.add(name)
            if (name in entries) == (name in left_out):
                both = name in entries
                wrong.append(f"{name} ({struct}): " + ("has an entry and is named without one" if both else
                             f"has no entry in src/**/{TABLES}, and no line there says why ('// without: {name}: …')"))
    layers = public_structs(LAYERS)
    of_layers = "".join(f.read_text() for f in sorted((ROOT / "src/parallel").glob("*/*.cpp")))
    for name in (f"{struct}.{field}" for struct, fields in layers.items() for field in fields):
        known.add(name)
        wrong += [f"{name}: has no entry in src/parallel/*/*.cpp"] if f'"{name}"' not in of_layers else []
        wrong += [f"{name}: no test names it"] if name not in tests else []
    for name in [e for e in entries if not e.startswith("launch.")] + list(left_out):
        if name not in known:
            wrong.append(f"{name}: an entry without a public field")
    wrong += [f"{name}: two entries" for name in set(entries) if entries.count(name) > 1]
    for struct in structs:
        if struct in layers:
            continue
        if re.search(r"(Plugin|Kwargs|Configuration)$", struct) and struct not in run and struct not in NO_RUN:
            wrong.append(f"{struct}: is it given to an Accelerator? Then a table says '// settings: {struct}', else NO_RUN the reason")
    for line in wrong:
        print(f"check_receipts: {line}")
    if not wrong:
        print(f"check_receipts: {len(known)} settings, {len(entries)} entries")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
