"""Peer of the wrap policy tests: which modules PyTorch and the reference wrap.

usage: fsdp_wrap_peer.py tree REQUEST     REQUEST holds {"modules": [...], "queries": [...]}; the model is built from the description
       fsdp_wrap_peer.py script OUT       saves a scripted model to OUT; {"queries": [...]} of its own
Prints {"queries": [...], "answers": [...]} in the last line; an answer is a list of module names in the order of registration.
"""
import json
import re
import sys

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.other import get_module_children_bottom_up
from torch import nn
from torch.distributed.fsdp import MixedPrecision, _init_utils, _wrap_utils


def shell_class(name):
    """A class of that name; where PyTorch's policies know the class, one that they take for it."""
    base = getattr(nn, name, nn.Module)
    base = base if base in (nn.ModuleList, nn.ModuleDict, nn.MultiheadAttention, nn.BatchNorm1d) else nn.Module
    return type(name, (base,), {"__init__": lambda self: nn.Module.__init__(self)})


def build(description):
    """Modules are [path, identity, class, [[name, identity, shape], ...]], parents first."""
    classes, modules, parameters, by_path = {}, {}, {}, {}
    for path, identity, class_name, own in description:
        if identity not in modules:
            module = modules[identity] = classes.setdefault(class_name, shell_class(class_name))()
            for name, parameter, shape in own:
                module.register_parameter(name, parameters.setdefault(parameter, nn.Parameter(torch.zeros(shape))))
        by_path[path] = modules[identity]
        if path:
            parent, _, name = path.rpartition(".")
            nn.Module.add_module(by_path[parent], name, modules[identity])
    return by_path[""]


def wrapped_by_version_1(model, query):
    plugin = plugin_of(query)
    plugin.set_auto_wrap_policy(model)
    ignored = [m for n, m in model.named_modules() if re.fullmatch(query["ignored"], n)] if query.get("ignored") else None
    ignored_modules = _init_utils._get_ignored_modules(model, ignored)
    ignored_params = _init_utils._get_ignored_params(model, ignored_modules)
    found = set()

    def wrapper(module, **kwargs):
        found.add(module)
        return module

    if plugin.auto_wrap_policy is not None:
        precision = MixedPrecision(param_dtype=torch.bfloat16) if query.get("mixed") else None
        _wrap_utils._auto_wrap(model, plugin.auto_wrap_policy, ignored_modules, ignored_params, {"mixed_precision": precision}, wrapper)
    return found


def wrapped_by_version_2(model, query):
    plugin = plugin_of(query)
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    found = {m for m in get_module_children_bottom_up(model)[:-1] if policy(m)} if policy else set()
    if query["policy"] == "SIZE_BASED_WRAP":  # takes containers too, which fully_shard then refuses
        found = {m for m in found if not isinstance(m, (nn.ModuleList, nn.ModuleDict))}
    return found


def plugin_of(query):
    size = query["policy"] == "SIZE_BASED_WRAP"
    extra = {"min_num_params": query["min_num_params"]} if size else {"transformer_cls_names_to_wrap": query["classes"]}
    return FullyShardedDataParallelPlugin(fsdp_version=query["version"], auto_wrap_policy=query["policy"], **extra)


def answers(make_model, queries):
    result = []
    for query in queries:
        model = make_model()
        found = (wrapped_by_version_1 if query["version"] == 1 else wrapped_by_version_2)(model, query)
        result.append([name for name, module in model.named_modules() if module in found])
    print(json.dumps({"queries": queries, "answers": result}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x):
        return self.inner(x) + self.bias.sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def script(out):
    torch.jit.script(Net()).save(out)
    answers(Net, [{"version": 1, "policy": "TRANSFORMER_BASED_WRAP", "classes": ["Block"]},
                  {"version": 1, "policy": "TRANSFORMER_BASED_WRAP", "classes": ["Linear", "Block"]},
                  *({"version": v, "policy": "SIZE_BASED_WRAP", "min_num_params": n} for v in (1, 2) for n in (1, 10, 36, 40, 79, 1000))])


if sys.argv[1] == "script":
    script(sys.argv[2])
else:
    with open(sys.argv[2]) as file:
        request = json.load(file)
    answers(lambda: build(request["modules"]), request["queries"])
