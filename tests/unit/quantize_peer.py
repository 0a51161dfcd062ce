"""Peer of the tests of quantized models: transformers with bitsandbytes.

usage: quantize_peer.py save KIND WEIGHTS FOLDER OUT   loads a model in few bits, saves it to FOLDER and what it computes to OUT
       quantize_peer.py load FOLDER OUT                loads such a folder and writes what it computes to OUT
       quantize_peer.py int8 OUT                       a layer of LLM.int8(): its weight, inputs and results
       quantize_peer.py torch FILE OUT                 the tensors of a safetensors file as torch.save writes them
KIND: nf4, fp4 or int8.
"""
import sys

# Imports take most of the time, and all tasks of a test program share them (python_server.py); so what transformers would
# import by itself for each of these models is here, too.
import bitsandbytes
import torch
import torch._dynamo
import transformers.integrations.bitsandbytes  # noqa: F401
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, BertModel, BitsAndBytesConfig  # noqa: F401

torch.set_num_threads(1)
torch._dynamo.config.disable = True
KINDS = {
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32),
    "int8": dict(load_in_8bit=True),
}


def compute(model, out):
    # In evaluation, layers of 4 bits change their weights for a kernel in bf16; in training, those of 8 bits decode theirs.
    model.train(any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules()))
    with torch.no_grad():
        result = model(torch.arange(1000, 1012).view(2, 6))
    save_file({"hidden": result.last_hidden_state.contiguous(), "pooled": result.pooler_output.contiguous()}, out)


def without_dropout(folder):
    config = AutoConfig.from_pretrained(folder)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0
    return config


def save(kind, weights, folder, out):
    model = AutoModel.from_pretrained(weights, config=without_dropout(weights), dtype=torch.float32, quantization_config=BitsAndBytesConfig(**KINDS[kind]))
    compute(model, out)
    model.save_pretrained(folder)


def load(folder, out):
    compute(AutoModel.from_pretrained(folder, config=without_dropout(folder), dtype=torch.float32), out)


def int8(out):
    draw = torch.Generator().manual_seed(3)
    tensors = {"weight": torch.randn(48, 64, generator=draw), "bias": torch.randn(48, generator=draw)}
    x = torch.randn(3, 5, 64, generator=draw)
    x[1, 2, 7], x[0, 0, 9] = 40, -9
    tensors["x"] = x
    for threshold in (0.0, 6.0):
        layer = bitsandbytes.nn.Linear8bitLt(64, 48, has_fp16_weights=False, threshold=threshold)
        layer.load_state_dict({name: tensors[name] for name in ("weight", "bias")})
        layer = layer.to("cpu").eval()  # in training it multiplies with the decoded weight
        for rows, given in {"all": x, "one": x[1, 2:3], "half": x.half()}.items():
            tensors[f"y.{threshold:.0f}.{rows}"] = layer(given).detach().contiguous()
    save_file(tensors, out)


if __name__ == "__main__":
    {"save": save, "load": load, "int8": int8, "torch": lambda file, out: torch.save(load_file(file), out)}[sys.argv[1]](*sys.argv[2:])
