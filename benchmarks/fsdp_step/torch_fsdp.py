"""The same step with PyTorch's own FSDP. usage: torch_fsdp.py gpt|bert|narrow STEPS 1|2     (1: FullyShardedDataParallel, 2: fully_shard)

The fastest setting of each: AdamW fused; FSDP1 with one flat parameter per unit (use_orig_params=False) and BACKWARD_PRE.
"""
import functools, json, sys, time, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

warnings.simplefilter("ignore")


class Block(nn.Module):
    def __init__(self, d, h, causal):
        super().__init__()
        self.h, self.causal = h, causal
        self.l1, self.l2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj, self.f1, self.f2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.l1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, D))
        return x + self.f2(nn.functional.gelu(self.f1(self.l2(x))))


class Transformer(nn.Module):
    def __init__(self, V, d, L, h, T, causal):
        super().__init__()
        self.L, self.causal = L, causal
        self.wte, self.wpe = nn.Embedding(V, d), nn.Embedding(T, d)
        for i in range(L):
            self.add_module(f"h{i}", Block(d, h, causal))
        self.ln = nn.LayerNorm(d)
        if not causal:
            self.pooler = nn.Linear(d, d)
        self.head = nn.Linear(d, V if causal else 2, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for i in range(self.L):
            x = getattr(self, f"h{i}")(x)
        x = self.ln(x)
        return self.head(x if self.causal else torch.tanh(self.pooler(x[:, 0])))


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        return x + nn.functional.gelu(self.norm(self.linear(x)))


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(100):
            self.add_module(f"u{i}", Unit())
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for i in range(100):
            x = getattr(self, f"u{i}")(x)
        return self.head(x)


def memory(file, key):
    with open(f"/proc/self/{file}") as lines:
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))


def gpt_loss(model):
    ids = torch.randint(0, 8192, (4, 129))
    return nn.functional.cross_entropy(model(ids[:, :128]).view(-1, 8192), ids[:, 1:].reshape(-1))


def bert_loss(model):
    ids = torch.randint(0, 30522, (4, 128))
    return nn.functional.cross_entropy(model(ids), torch.randint(0, 2, (4,)))


def narrow_loss(model):
    return model(torch.randn(16, 32)).square().mean()


WARM_UP = 2
MODELS = {
    "gpt": (lambda: Transformer(8192, 512, 8, 8, 128, True), gpt_loss),
    "bert": (lambda: Transformer(30522, 768, 12, 12, 512, False), bert_loss),
    "narrow": (Narrow, narrow_loss),
}


def draw(model):
    """The values that ours draws, in the order of the parameters' names."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.02)


def main(task, steps, version):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    make, loss_of = MODELS[task]
    model, unit = make(), Unit if task == "narrow" else Block
    draw(model)
    if version == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={unit})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, backward_prefetch=BackwardPrefetch.BACKWARD_PRE, use_orig_params=False, device_id=torch.device("cpu"))
    else:
        for module in model.children():
            if isinstance(module, unit):
                fully_shard(module)
        fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(100 + dist.get_rank())
    losses, ms, pss = [], [], 0
    for i in range(steps + 1):
        timed = i < steps  # one more step looks at what the ranks share
        if i == WARM_UP:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        begin = time.perf_counter()
        loss = loss_of(model)
        if not timed:
            pss = max(pss, memory("smaps_rollup", "Pss"))
        loss.backward()
        if not timed:
            pss = max(pss, memory("smaps_rollup", "Pss"))
        opt.step()
        opt.zero_grad()
        value = loss.item()
        if not timed:
            break
        losses.append(value)
        ms.append((time.perf_counter() - begin) * 1000)
    worst = torch.tensor([memory("status", "VmHWM"), pss])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"contestant": f"FSDP{version}", "answer": losses, "ms": ms, "rss_mb": worst[0].item(), "pss_mb": worst[1].item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
