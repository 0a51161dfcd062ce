"""The same step with torch and Hugging Face Accelerate. usage: accelerate_peer.py gpt|mlp STEPS"""
import json, sys, time
import torch
from torch import nn
from accelerate import Accelerator


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.l1, self.l2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj, self.f1, self.f2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.l1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, D))
        return x + self.f2(nn.functional.gelu(self.f1(self.l2(x))))


class GPT(nn.Module):
    def __init__(self, V, d, L, h, T):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, d), nn.Embedding(T, d)
        for i in range(L):
            self.add_module(f"h{i}", Block(d, h))
        self.L, self.ln, self.head = L, nn.LayerNorm(d), nn.Linear(d, V, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for i in range(self.L):
            x = getattr(self, f"h{i}")(x)
        return self.head(self.ln(x))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(64))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def main(task, steps):
    accelerator = Accelerator(cpu=True)
    model = GPT(8192, 512, 8, 8, 128) if task == "gpt" else MLP()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.02)
    # fused: the best that PyTorch offers on CPUs.
    model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    torch.manual_seed(100 + accelerator.process_index)
    losses, ms = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        if task == "gpt":
            ids = torch.randint(0, 8192, (4, 129))
            loss = nn.functional.cross_entropy(model(ids[:, :128]).view(-1, 8192), ids[:, 1:].reshape(-1))
        else:
            loss = model(torch.randn(8, 128)).square().mean()
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        ms.append((time.perf_counter() - begin) * 1000)
    if accelerator.is_main_process:
        print(json.dumps({"contestant": "accelerate", "answer": losses, "ms": ms}), flush=True)


main(sys.argv[1], int(sys.argv[2]))
