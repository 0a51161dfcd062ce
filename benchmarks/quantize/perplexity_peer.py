"""SmolLM2 by transformers with bitsandbytes: perplexity in fp32, and in nf4 as it quantizes by itself.

usage: perplexity_peer.py FILE.gguf TEXT TOKENS FOLDER

FOLDER/fp32 gets the decoded model with its tokenizer, for `accelerate quantize FOLDER/fp32 FOLDER/nf4 --to nf4 --report --text TEXT`. Windows of 512
tokens side by side, the mean over all scored tokens.
"""
import os
import sys

import torch
import torch._dynamo
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
torch._dynamo.config.disable = True
WINDOW = 512


def perplexity(model, ids):
    # In evaluation bitsandbytes' layers change their weights for a kernel in bf16 where the processor has one.
    model.train()
    total, tokens = 0.0, 0
    for begin in range(0, len(ids), WINDOW):
        part = ids[begin:begin + WINDOW][None]
        if part.shape[1] < 2:
            break
        with torch.no_grad():
            logits = model(part).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum").double())
        tokens += part.shape[1] - 1
    return float(torch.tensor(total / tokens, dtype=torch.float64).exp()), tokens


def main(file, text, tokens, folder):
    where = dict(pretrained_model_name_or_path=os.path.dirname(file), gguf_file=os.path.basename(file))
    tokenizer = AutoTokenizer.from_pretrained(**where)
    decoded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del decoded.config.quantization_config  # it was decoded
    model = AutoModelForCausalLM.from_config(decoded.config, dtype=torch.float32)
    model.load_state_dict(decoded.state_dict())
    del decoded
    tokenizer.save_pretrained(f"{folder}/fp32")
    model.save_pretrained(f"{folder}/fp32")
    ids = torch.tensor(tokenizer(open(text).read())["input_ids"][:int(tokens)])
    print("fp32", *perplexity(model, ids), flush=True)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/fp32", quantization_config=how, dtype=torch.float32, device_map={"": "cpu"})
    print("nf4", *perplexity(model, ids), flush=True)


main(*sys.argv[1:])
