"""schedulefree's AdamW on given gradients: weights after each step, and after each tenth those for evaluation."""
import sys

import torch
import torch._dynamo  # optimizers do it when they are made; here it is done once
from safetensors.torch import load_file, save_file
from schedulefree import AdamWScheduleFree

inputs, outputs = sys.argv[1:3]
lr, beta1, beta2, eps, decay = map(float, sys.argv[3:8])
given = load_file(inputs)
weight, bias, unused = (torch.nn.Parameter(t.clone()) for t in (given["start"], given["start"][0], torch.ones(3)))
optimizer = AdamWScheduleFree([weight, bias, unused], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay,
                              warmup_steps=int(sys.argv[8]), foreach=False)
optimizer.train()
result = {}
for i, gradient in enumerate(given["gradients"]):
    weight.grad, bias.grad = gradient.clone(), gradient[1].clone()
    optimizer.step()
    result[f"trained{i}"] = torch.cat([weight.detach().flatten(), bias.detach()])
    if i % 10 == 9:
        optimizer.eval()
        result[f"averaged{i}"] = torch.cat([weight.detach().flatten(), bias.detach()])
        optimizer.train()
save_file(result, outputs)
