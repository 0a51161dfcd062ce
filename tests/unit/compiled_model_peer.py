"""Compiles two small models ahead of time into FOLDER/one.pt2 and FOLDER/two.pt2, and writes what they give eagerly."""
import os
import sys

folder = sys.argv[1]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "cache")

import torch
from safetensors.torch import save_file


class One(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Two(torch.nn.Module):
    def forward(self, x, y):
        return {"sum": x + y, "product": x * y}


torch.manual_seed(0)
one, x = One().eval(), torch.randn(3, 8)
batch = torch.export.Dim("batch", min=1, max=64)
torch._inductor.aoti_compile_and_package(torch.export.export(one, (x,), dynamic_shapes=({0: batch},)), package_path=f"{folder}/one.pt2")
y = torch.randn(3, 8)
torch._inductor.aoti_compile_and_package(torch.export.export(Two(), (x, y)), package_path=f"{folder}/two.pt2")
save_file({"x": x, "y": y, "one": one(x).detach(), "sum": x + y, "product": x * y}, f"{folder}/expected.safetensors")
