"""The same step with DeepSpeed on its CPU accelerator. usage: deepspeed_peer.py gpt|bert|narrow STEPS 1|2|3     (the stage of ZeRO)

torch's fused AdamW, which DeepSpeed's own for CPUs is not faster than (benchmarks/optimizer_step).
"""
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import json, logging, resource, sys, time
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch_fsdp import MODELS, draw

logger.setLevel(logging.ERROR)


def main():
    task, steps, stage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    make, loss_of = MODELS[task]
    model = make()
    draw(model)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(100 + dist.get_rank())
    answer, times = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        answer.append(loss.item())
        times.append((time.perf_counter() - begin) * 1000)
    rss = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    dist.all_reduce(rss, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"contestant": f"DeepSpeed, stage {stage}", "answer": answer, "ms": times, "rss_mb": rss.item(), "pss_mb": 0, "parameters_mb": 0, "parameters_bound_mb": 0}), flush=True)


if __name__ == "__main__":
    main()
