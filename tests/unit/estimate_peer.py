"""Sizes of all modules of small models as transformers builds them: one JSON line for each line of the configs.

usage: estimate_peer.py CONFIGS.jsonl SIZES.jsonl
"""
import json
import sys

import torch
import transformers
from accelerate.utils import calculate_maximum_sizes, compute_module_sizes

transformers.logging.set_verbosity_error()

lines = []
for line in open(sys.argv[1]):
    config = json.loads(line)
    name = config.pop("_class", None)
    with torch.device("meta"):
        configured = transformers.AutoConfig.for_model(**config)
        model = (getattr(transformers, name)._from_config if name else transformers.AutoModel.from_config)(configured)
    total, (largest, names) = calculate_maximum_sizes(model)
    lines.append(json.dumps({"sizes": compute_module_sizes(model), "total": total, "largest": largest, "names": names, "class": type(model).__name__,
                             "in_fp32": sorted(model._keep_in_fp32_modules | model._keep_in_fp32_modules_strict)}))
open(sys.argv[2], "w").write("\n".join(lines) + "\n")
