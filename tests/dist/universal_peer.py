"""DeepSpeed loads a universal checkpoint and has the masters and moments that it should.

    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc-per-node N universal_peer.py FOLDER STATE.pt STAGE DTYPE

FOLDER has latest_universal; STATE.pt is a dict of `weights`, `first` and `second` by parameter, whole and in fp32, as
universal_checkpoint_test.cpp saves it; DTYPE is fp32, bf16 or fp16. Needs DeepSpeed 0.19.8.
"""
import json
import logging
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
import torch


def module_of(weights, trained):
    """A model with these parameters, of zeros."""
    root = torch.nn.Module()
    for name, value in weights.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(torch.zeros_like(value), requires_grad=name in trained))
    return root


def main(folder, state, stage, dtype):
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
    logger.setLevel(logging.ERROR)
    if dtype == "fp16":
        type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    state = torch.load(state)
    with open(os.path.join(folder, "latest_universal")) as file:
        tag = file.read()
    # Frozen ones and second names of tied ones have no states.
    trained = [n for n in state["weights"] if os.path.exists(os.path.join(folder, tag, "zero", n, "exp_avg.pt"))]
    assert len(trained) > 10, trained
    model = module_of(state["weights"], trained)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 10},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        "checkpoint": {"load_universal": True},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None and client_state["epoch"] == 7, (path, client_state.keys())
    assert engine.global_steps == 3, engine.global_steps
    assert engine.get_lr()[0] < 0.011, engine.get_lr()
    by_name = dict(engine.module.named_parameters())
    for name in trained:
        for kind, found in (("weights", safe_get_full_fp32_param(by_name[name])),
                            ("first", safe_get_full_optimizer_state(by_name[name], "exp_avg")),
                            ("second", safe_get_full_optimizer_state(by_name[name], "exp_avg_sq"))):
            assert torch.equal(found.cpu().reshape(-1), state[kind][name].reshape(-1)), (name, kind)
    if dtype == "fp16":
        assert engine.optimizer.loss_scaler.cur_scale == state["scale"].item(), engine.optimizer.loss_scaler.cur_scale
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"parameters": len(trained), "stage": int(stage), "dtype": dtype}))


if __name__ == "__main__":
    main(*sys.argv[1:])
