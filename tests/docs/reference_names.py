"""Writes reference_names.txt: the public names of Hugging Face Accelerate, of which docs/from_python.md has a row each. With the
reference's newest version in the running Python:

    python3 tests/docs/reference_names.py > tests/docs/reference_names.txt
"""
import types

import accelerate
import accelerate.utils
from accelerate.state import AcceleratorState, GradientState


def public(owner):
    return {name for name in dir(owner)
            if not name.startswith("_") and not isinstance(getattr(owner, name, None), types.ModuleType)}


owners = (accelerate, accelerate.utils, accelerate.Accelerator, accelerate.PartialState, AcceleratorState, GradientState)
print("\n".join(sorted(set().union(*map(public, owners)))))
