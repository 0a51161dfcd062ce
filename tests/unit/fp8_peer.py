"""The results that fp8 training has to be equal to, written down a second time.

  fp8_peer.py delayed FILE   recorded amax sequences by Transformer Engine's rule of delayed scaling
  fp8_peer.py torchao FILE   casts of torchao's recipes; by torchao itself where it is installed
"""
import math
import sys

import numpy as np
import torch
from safetensors.torch import save_file


def delayed_steps(amaxes, algorithm, length, margin, interval, largest):
    """One tensor's scale and history after each of the updates."""
    f = np.float32
    scale, history = f(1), [f(0)] * length
    updates = 0  # those that have seen something
    for amax in amaxes:
        history[0] = f(amax)
        last = history[0]
        amax_used = f(0)
        if last != 0:
            moved = history[1:] + [last]
            for one in moved:
                if not math.isnan(one) and one > amax_used:
                    amax_used = one
            history = [f(0)] + moved[1:]
        if algorithm == "most_recent":
            amax_used = last
        if updates % interval == 0 and math.isfinite(amax_used) and amax_used > 0:
            with np.errstate(over="ignore"):
                scale = f(f(largest) * f(2.0 ** -margin)) / f(amax_used)
            if math.isinf(scale):
                scale = np.finfo(f).max
        updates += last != 0
        yield scale, list(history)


def delayed(path):
    tensors = {}
    generator = torch.Generator().manual_seed(1)
    plain = (torch.randn(12, generator=generator).abs() * 3).tolist()
    odd = [2.0, 0.0, math.inf, 5.0, math.nan, 1.0, 1e-42, 0.0, 0.0, 3e38, 7.0, math.nan, math.nan, 0.5]
    for name, sequence in {"plain": plain, "odd": odd, "infinite": [math.inf] * 3 + plain}.items():
        for algorithm in ("most_recent", "max"):
            for length in (1, 2, 3, 5):
                for margin, interval in ((0, 1), (2, 1), (-1, 3)):
                    case = f"{name}/{algorithm}/{length}/{margin}/{interval}"
                    steps = list(delayed_steps(sequence, algorithm, length, margin, interval, 448))
                    tensors[case + "/amax"] = torch.tensor(sequence)
                    tensors[case + "/scale"] = torch.tensor([float(scale) for scale, _ in steps])
                    tensors[case + "/history"] = torch.tensor([[float(x) for x in history] for _, history in steps])
    save_file(tensors, path)


def torchao_cast(x, dtype, granularity, dim, power_of_two):
    """Codes and scale of x."""
    try:
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig
        by = ScalingGranularity.TENSORWISE if granularity == "tensor" else ScalingGranularity.AXISWISE
        made = hp_tensor_to_float8_dynamic(x, dtype, LinearMMConfig(), gemm_input_role=GemmInputRole.INPUT,
                                           scaling_granularity=by, axiswise_dim=dim,
                                           round_scales_to_power_of_2=power_of_two)
        return made._data, made._scale, "torchao"
    except ImportError:
        amax = x.abs().max() if granularity == "tensor" else x.abs().amax(dim, keepdim=True)
        largest = torch.finfo(dtype).max
        scale = (largest / amax.double().clamp(min=1e-12)).float()
        if power_of_two:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return (x.float() * scale).clamp(-largest, largest).to(dtype), scale, "its formula"


def torchao(path):
    tensors = {}
    generator = torch.Generator().manual_seed(2)
    inputs = {"normal": torch.randn(24, 48, generator=generator),
              "bf16": torch.randn(24, 48, generator=generator).bfloat16() * 100,
              "small": torch.randn(16, 32, generator=generator) * 1e-13,
              "zero": torch.zeros(16, 16)}
    for name, x in inputs.items():
        tensors[f"{name}/x"] = x
        for dtype, short in ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
            for granularity, dim in (("tensor", None), ("row", -1)):
                for power_of_two in (False, True):
                    codes, scale, by = torchao_cast(x, dtype, granularity, dim, power_of_two)
                    case = f"{name}/{short}/{granularity}/{int(power_of_two)}"
                    tensors[case + "/codes"] = codes.view(torch.uint8).contiguous()
                    tensors[case + "/scale"] = scale.reshape(-1).contiguous()
    print("by", by)
    save_file(tensors, path)


{"delayed": delayed, "torchao": torchao}[sys.argv[1]](sys.argv[2])
