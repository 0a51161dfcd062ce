"""The same model and the same ways with Hugging Face Accelerate and transformers. usage: accelerate_peer.py WAY FOLDER TOKENS [cold]

`accelerate_peer.py write FOLDER` makes the model."""
import json, os, shutil, sys, time

started = float(os.environ.get("BENCH_START_MS", time.time() * 1000))
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import accelerate


def forget(folder):
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    way, folder = sys.argv[1:3]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if way == "write":
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=32000, hidden_size=1280, intermediate_size=3392, num_hidden_layers=21, num_attention_heads=20, num_key_value_heads=20, tie_word_embeddings=False)
        model = LlamaForCausalLM(config)
        print(sum(p.numel() for p in model.parameters()), "parameters")
        model.save_pretrained(folder, max_shard_size="10GB")
        return
    tokens, cold = int(sys.argv[3]), len(sys.argv) > 4
    offloaded = os.path.join(folder, "offload_peer_" + way)
    shutil.rmtree(offloaded, ignore_errors=True)
    if cold:
        forget(folder)
    begin = time.time()
    config = LlamaConfig.from_pretrained(folder)
    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(config)
    checkpoint = os.path.join(folder, "model.safetensors")
    if way == "load":
        # {"": "disk"} makes it ask safetensors for a device named disk, which fails (1.15): the head, a twelfth of the model, stays in memory.
        accelerate.load_checkpoint_and_dispatch(model, checkpoint, device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=offloaded)
    else:
        accelerate.load_checkpoint_in_model(model, checkpoint, device_map={"": "cpu"})
        if way == "cpu_offload":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        elif way == "disk_offload":
            accelerate.disk_offload(model, offloaded, execution_device=torch.device("cpu"))
    model.eval()
    load = (time.time() - begin) * 1000
    ids, ms, first = torch.tensor([[17]]), [], 0
    with torch.inference_mode():
        for i in range(tokens):
            start = time.time()
            logits = model(ids, use_cache=False).logits
            ms.append((time.time() - start) * 1000)
            if i == 0:
                first = time.time() * 1000 - started
    print(json.dumps({"contestant": "accelerate", "answer": logits[0, -1, :8].double().tolist(), "load_ms": load, "first_ms": first, "ms": ms}))
    shutil.rmtree(offloaded, ignore_errors=True)


main()
