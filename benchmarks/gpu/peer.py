"""The same with torch, transformers and Hugging Face Accelerate. usage: as ours.cpp, and
peer.py prepare FOLDER LAYERS [tiny]    writes the model of load, cpu_offload and disk_offload, 13.5 GB with 32 layers
"""
import gc, glob, importlib.util, json, os, sys, time
import accelerate
import torch
from torch import distributed, nn

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU") != "true" else "cpu")
BLOCKS, CALLS_PER_BLOCK = 5, 4


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def now():
    return time.perf_counter() * 1000


def measure(name, body):
    """Runs `body`, which gives a dict, and prints it, or what it raised."""
    line = {"measure": name}
    try:
        line |= {"device": str(DEVICE), **body()}
    except Exception as error:  # what comes after it may still work
        line["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(line), flush=True)


def lone_group():
    if not distributed.is_initialized():
        address = f"tcp://127.0.0.1:{os.environ.get('MASTER_PORT', '29511')}"
        distributed.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", init_method=address, rank=0, world_size=1)


# GPT-2

SIZES = {"124m": (768, 12, 12, 50257, 8, 1024), "774m": (1280, 36, 20, 50257, 8, 1024), "tiny": (64, 2, 2, 512, 2, 32)}


def make_gpt2(size):
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, heads, vocabulary, _, tokens = size
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    with DEVICE:
        model = GPT2LMHeadModel(config)
    model.to(DEVICE).train()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, device=DEVICE) * 0.02)
            if "ln_" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


def train(size, way):
    gc.collect()  # what the way before has left
    model = make_gpt2(size)
    accelerator = accelerate.Accelerator(mixed_precision="bf16")
    if way == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        lone_group()
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        for block in model.transformer.h:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        if way == "ddp":
            lone_group()
            model = nn.parallel.DistributedDataParallel(model, device_ids=[0] if DEVICE.type == "cuda" else None)
    _, _, _, vocabulary, batch, tokens = size
    torch.manual_seed(1)
    ids = torch.randint(vocabulary, (batch, tokens)).to(DEVICE)
    targets = ids[:, 1:].reshape(-1)
    losses, ms = [], []
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for block in range(-1, BLOCKS):
        begin = now()
        for _ in range(CALLS_PER_BLOCK):
            logits = model(ids).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocabulary), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        wait()
        if block >= 0:
            ms.append((now() - begin) / CALLS_PER_BLOCK)
    facts = {"peak_mb": torch.cuda.max_memory_allocated() / 1e6} if DEVICE.type == "cuda" else {}
    return {"answer": [loss.item() for loss in losses], "ms": ms, **facts}


def train_all(size):
    for way in ("plain", "fsdp", "ddp"):
        measure(way, lambda: train(SIZES[size], way))


# Collectives, and the first step


def all_reduces():
    def one(numel):
        lone_group()
        tensor, ms = torch.ones(numel, device=DEVICE), []
        for block in range(-1, BLOCKS):
            begin = now()
            for _ in range(200):
                distributed.all_reduce(tensor)
            wait()
            if block >= 0:
                ms.append((now() - begin) / 200)
        return {"answer": [tensor.sum().item()], "ms": ms}

    for size in (4, 65536, 4194304):
        measure(str(size), lambda: one(size // 4))


def first_step():
    def step():
        accelerator = accelerate.Accelerator()
        model = nn.Linear(4, 1)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 0.0)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(2, 4, device=accelerator.device)).mean()
        accelerator.backward(loss)
        optimizer.step()
        return {"answer": [loss.item()]}

    measure("first step", step)


# Weights elsewhere


def prepare(folder, layers, tiny=None):
    """Shards of eight layers. Weights are pieces of one pool of random numbers, so that they cost no more than writing."""
    config = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
    if tiny:
        config = {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float16"}
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    parts = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (width, width), "self_attn.v_proj": (width, width), "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    shards = [{"model.embed_tokens.weight": (vocabulary, width)}]
    for layer in range(layers):
        if layer % 8 == 0:
            shards.append({})
        shards[-1] |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    shards.append({"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)})
    checkpoint = os.path.join(os.path.abspath(folder), "checkpoint")
    os.makedirs(checkpoint, exist_ok=True)
    for old in [os.path.join(folder, "index.json"), *glob.glob(os.path.join(checkpoint, "model-*-of-*.safetensors"))]:
        if os.path.exists(old):  # of another size; the index comes last and says that all is there
            os.remove(old)
    torch.manual_seed(0)
    largest, step = max(vocabulary, inner) * width, 4099  # elements by which the next weight's piece begins later
    pool = (torch.randn(largest + step * layers * len(parts) + step * 8) * 0.02).half()
    ones = torch.ones(width).half()
    weight_map, where, total = {}, {}, 0
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        path = os.path.join(checkpoint, name)
        header, end = {}, 0
        for weight, shape in shard.items():
            size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
            header[weight] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for weight, shape in shard.items():
                begin = step * len(weight_map)
                values = ones if len(shape) == 1 else pool[begin : begin + shape[0] * shape[1]].view(shape)
                if weight == "lm_head.weight":  # a few tokens stand out: rounding does not decide which comes first
                    values = values.clone()
                    values[::100] *= 4
                file.write(memoryview(values.numpy()).cast("B"))
                weight_map[weight] = name
                where[weight] = {"safetensors_file": path, "weight_name": weight, "dtype": "float16"}
        total += end
    with open(os.path.join(checkpoint, "config.json"), "w") as file:
        json.dump(config, file)
    with open(os.path.join(checkpoint, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    with open(os.path.join(folder, "index.json"), "w") as file:
        json.dump(where, file)


def make_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    with accelerate.init_empty_weights():
        return LlamaForCausalLM(LlamaConfig.from_pretrained(os.path.join(folder, "checkpoint"))).half().eval()


def decode(model, count):
    answer, tokens, ms, first = [], [], [], 0
    with torch.inference_mode():
        for i in range(count):
            ids = torch.full((1, 1), (17 + 31 * i) % model.config.vocab_size, device=DEVICE)
            begin = now()
            logits = model(ids, use_cache=False).logits.flatten()
            wait()
            if i == 0:
                first = now() - begin
            else:
                ms.append(now() - begin)
            answer += logits[:8].double().tolist()
            tokens.append(logits.argmax().item())
    return {"answer": answer, "tokens": tokens, "ms": ms, "first_ms": first}


def load(folder, count):
    model = make_llama(folder)

    def dispatch():
        begin = now()
        accelerate.load_checkpoint_and_dispatch(model, os.path.join(folder, "checkpoint"), device_map={"": 0 if DEVICE.type == "cuda" else "cpu"}, dtype=torch.float16)
        wait()
        return {"ms": [now() - begin]}

    measure("load", dispatch)
    measure("token", lambda: decode(model, count))


def bandwidth():
    size, copies, best = 256 << 20, 8, 0
    source = torch.ones(size, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        wait()
        begin = now()
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
        wait()
        best = max(best, copies * size / 1e6 / (now() - begin))
    return {"answer": [target[-1].item()], "gb_per_s": best}


def offloaded(folder, count, disk):
    def token():
        make_llama(folder)  # imports what it needs, which is not to be timed
        begin = now()
        model = make_llama(folder)
        if disk:
            accelerate.disk_offload(model, folder, execution_device=DEVICE)
        else:
            accelerate.load_checkpoint_in_model(model, os.path.join(folder, "checkpoint"), device_map={"": "cpu"}, dtype=torch.float16)
            accelerate.cpu_offload(model, execution_device=DEVICE)
        return {"setup_ms": now() - begin, **decode(model, count)}

    if not disk:
        measure("bandwidth", bandwidth)
    measure("token", token)


# Weights in few bits, as far as there are packages for them


def has(*packages):
    lacking = [one for one in packages if importlib.util.find_spec(one) is None]
    if lacking:
        print(f"not measured without {', '.join(lacking)}", file=sys.stderr)
    return not lacking


def products(width):
    kinds = ("bf16", "nf4", "int8") if has("bitsandbytes") else ("bf16",)
    if len(kinds) > 1:
        import bitsandbytes

    torch.manual_seed(0)
    weight = torch.randn(width, width) * 0.02

    def layer(kind):
        if kind == "nf4":
            made = bitsandbytes.nn.Linear4bit(width, width, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
            made.weight = bitsandbytes.nn.Params4bit(weight.bfloat16(), requires_grad=False, quant_type="nf4")
        elif kind == "int8":
            made = bitsandbytes.nn.Linear8bitLt(width, width, bias=False, has_fp16_weights=False, threshold=0.0)
            made.weight = bitsandbytes.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False)
        else:
            made = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
            made.weight = nn.Parameter(weight.bfloat16())
        return made.to(DEVICE)

    def product(net, rows):
        torch.manual_seed(1)
        x, ms = torch.randn(rows, width).to(DEVICE, torch.bfloat16), []
        for block in range(-1, BLOCKS):
            begin = now()
            for _ in range(20):
                y = net(x)
            wait()
            if block >= 0:
                ms.append((now() - begin) / 20)
        return {"answer": y.flatten()[:16].double().tolist(), "ms": ms}

    with torch.inference_mode():
        for kind in kinds:
            net = layer(kind)
            for rows in (1, 16, 256, width):
                measure(f"{kind}, {rows} rows", lambda: product(net, rows))


def qlora(folder, tokens):
    def steps():
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "checkpoint"), quantization_config=config, dtype=torch.bfloat16, device_map={"": DEVICE})
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
        model.train()
        torch.manual_seed(1)
        ids = torch.randint(model.config.vocab_size, (1, tokens)).to(DEVICE)
        answer, ms = [], []
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for step in range(6):
            begin = now()
            logits = model(ids).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wait()
            if step > 0:
                ms.append(now() - begin)
            else:
                answer = [loss.item()]
        return {"answer": answer, "ms": ms, **({"peak_mb": torch.cuda.max_memory_allocated() / 1e6} if DEVICE.type == "cuda" else {})}

    if has("bitsandbytes", "peft"):
        measure("step", steps)


def main(task, *rest):
    if task == "train":
        train_all(rest[0])
    elif task == "all_reduce":
        all_reduces()
    elif task == "launch":
        first_step()
    elif task == "prepare":
        prepare(rest[0], int(rest[1]), *rest[2:])
    elif task == "products":
        products(int(rest[0]))
    elif task == "qlora":
        qlora(rest[0], int(rest[1]))
    elif task == "load":
        load(rest[0], int(rest[1]))
    else:
        offloaded(rest[0], int(rest[1]), task == "disk_offload")


if __name__ == "__main__":
    main(*sys.argv[1:])
