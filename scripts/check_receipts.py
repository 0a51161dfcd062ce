#!/usr/bin/env python3
"""Checks that every setting of a run has an entry in the table of receipts (src/accelerator/receipts_of_*.cpp).

Settings of a run are the public fields of the structs of RUN: what an Accelerator is made with. A field that has no entry is listed in LEFT_OUT
with the reason. It fails on a field with neither or with both, on an entry or a listed name without a field, and on a public struct that is
called ...Plugin, ...Kwargs or ...Configuration and is in neither list; and on an entry that TESTS, where each has a job in which it acts, does not
name. Plugins of layers (LAYERS) have their entries, called Struct.field, in the layer's folder in src/parallel, and any test may name them.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = "tests/dist/receipts_test.cpp"
LAYERS = "include/accelerate/parallel/layers"
# Structs, and how the entries of their fields begin.
RUN = {
    "AcceleratorOptions": ("",),
    "DataLoaderConfiguration": ("dataloader_config.",),
    "GradientAccumulationPlugin": ("gradient_accumulation_plugin.",),
    "ProjectConfiguration": ("project_config.",),
    "DistributedDataParallelKwargs": ("DistributedDataParallelKwargs.",),
    "GradScalerKwargs": ("GradScalerKwargs.",),
    "InitProcessGroupKwargs": ("InitProcessGroupKwargs.",),
    "AutocastKwargs": ("AutocastKwargs.",),
    "FullyShardedDataParallelPlugin": ("fsdp_plugin.",),
    "CPUOffload": ("fsdp_plugin.cpu_offload.",),
    "MixedPrecision": ("fsdp_plugin.mixed_precision_policy.",),
    "StateDictConfig": ("fsdp_plugin.state_dict_config.", "fsdp_plugin.optim_state_dict_config."),
    "ParallelismConfig": ("parallelism_config.",),
    "AORecipeKwargs": ("AORecipeKwargs.",),
    "TERecipeKwargs": ("TERecipeKwargs.",),
    "MSAMPRecipeKwargs": ("MSAMPRecipeKwargs.",),
}
PARTS = "has entries of its own fields"
REFUSED = "anything but its default is refused"
LEFT_OUT = {
    "dataloader_config": PARTS, "project_config": PARTS, "gradient_accumulation_plugin": PARTS, "fsdp_plugin": PARTS, "kwargs_handlers": PARTS,
    "parallelism_config": PARTS, "layer_plugins": "each has entries of its own, in its layer's folder", "fsdp_plugin.cpu_offload": PARTS, "fsdp_plugin.mixed_precision_policy": PARTS,
    "fsdp_plugin.state_dict_config": PARTS, "fsdp_plugin.optim_state_dict_config": PARTS,
    "DistributedDataParallelKwargs.dim": REFUSED, "DistributedDataParallelKwargs.check_reduction": REFUSED,
    "dynamo_backend": REFUSED, "dynamo_plugin": "what compiles is refused; entries launch.dynamo_*", "deepspeed_plugin": "each key of the configuration has an entry, by the layer", "deepspeed_plugins": "likewise", "megatron_lm_plugin": REFUSED,
    "parallelism_config.tp_size": REFUSED, "parallelism_config.cp_size": REFUSED, "parallelism_config.sp_size": REFUSED,
    "parallelism_config.cp_backend": "of an axis that is refused", "parallelism_config.sp_backend": "of an axis that is refused",
    "parallelism_config.tp_handler": "of an axis that is refused", "parallelism_config.cp_handler": "of an axis that is refused",
    "parallelism_config.sp_handler": "of an axis that is refused",
}
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


def main():
    structs, wrong = public_structs(), []
    table = "".join(f.read_text() for f in sorted((ROOT / "src/accelerator").glob("receipts_of_*.cpp")))
    entries = re.findall(r'^\s+(?:\{)"([\w.]+)"', table, re.M)
    tests = (ROOT / TESTS).read_text()
    wrong += [f"{name}: {TESTS} does not name it" for name in entries if not re.search(rf"{re.escape(name)}\b", tests)]
    known = set()
    for struct, prefixes in RUN.items():
        if not structs.get(struct):
            wrong.append(f"{struct}: no public struct with fields is called so")
        for name in (prefix + field for field in structs.get(struct, []) for prefix in prefixes):
            known.add(name)
            if (name in entries) == (name in LEFT_OUT):
                both = name in entries
                wrong.append(f"{name} ({struct}): " + ("has an entry and is in LEFT_OUT" if both else
                             "has no entry in src/accelerator/receipts_of_*.cpp and is not in LEFT_OUT with a reason"))
    for name in [e for e in entries if not e.startswith("launch.")] + list(LEFT_OUT):
        if name not in known:
            wrong.append(f"{name}: an entry without a public field")
    wrong += [f"{name}: two entries" for name in set(entries) if entries.count(name) > 1]
    layers = public_structs(LAYERS)
    of_layers = "".join(f.read_text() for f in sorted((ROOT / "src/parallel").glob("*/*.cpp")))
    all_tests = "".join(f.read_text() for f in sorted((ROOT / "tests").rglob("*.cpp")) if layers)
    for name in (f"{struct}.{field}" for struct, fields in layers.items() for field in fields):
        known.add(name)
        wrong += [f"{name}: has no entry in src/parallel/*/*.cpp"] if f'"{name}"' not in of_layers else []
        wrong += [f"{name}: no test names it"] if name not in all_tests else []
    for struct in structs:
        if struct in layers:
            continue
        if re.search(r"(Plugin|Kwargs|Configuration)$", struct) and struct not in RUN and struct not in NO_RUN:
            wrong.append(f"{struct}: is it given to an Accelerator? Then it goes to RUN, else to NO_RUN with the reason")
    for line in wrong:
        print(f"check_receipts: {line}")
    if not wrong:
        print(f"check_receipts: {len(known)} settings, {len(entries)} entries")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
