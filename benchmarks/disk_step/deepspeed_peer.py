"""The same steps with DeepSpeed on its CPU accelerator. usage: deepspeed_peer.py memory|nvme|pipelined FOLDER STEPS [ROWS]     (needs libaio-dev)"""
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import json, logging, sys, time
import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn

logger.setLevel(logging.ERROR)
WIDTH, LAYERS = 2048, 16


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_((torch.arange(WIDTH * WIDTH) % 251 - 125).div(125.0 * 26).view(WIDTH, WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def main():
    mode, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rows = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Wide()
    zero = {"stage": 3, "sub_group_size": 8 << 20}
    if mode != "memory":
        on = mode == "pipelined"
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "pin_memory": False, "buffer_count": 8, "pipeline_read": on, "pipeline_write": on}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "bf16": {"enabled": True}, "zero_optimization": zero, "aio": {"block_size": 8388608, "queue_depth": 8}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).to(torch.bfloat16)
    answer, times = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        times.append((time.perf_counter() - begin) * 1000)
        answer.append(loss.item())
    print(json.dumps({"contestant": f"DeepSpeed, {mode}", "answer": answer, "ms": times}), flush=True)


if __name__ == "__main__":
    main()
