"""Peer of the model zoo's tests: saves small random models, and what transformers makes of them.

usage: zoo_peer.py causal|written|names|seq2seq|images|activations OUT
       zoo_peer.py outputs OUT   reads the models OUT/NAME and their inputs OUT/NAME.inputs, and writes OUT/NAME.outputs

For each KIND there is a folder OUT/KIND as save_pretrained writes it, and OUT/KIND.safetensors with inputs and logits. The config.json of the kinds of `written` are as people write them.
"""
import json
import math
import pathlib
import shutil
import sys

import torch
import torch.nn.functional as F
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers import (GPT2LMHeadModel, GPTJForCausalLM, GPTNeoXForCausalLM, LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, OPTForCausalLM, Qwen2ForCausalLM,  # noqa: F401
                          ResNetForImageClassification, T5ForConditionalGeneration, ViTForImageClassification)  # here, so that all runs share them (python_server.py)
from transformers.activations import ACT2FN

# A large range makes differences of formulas visible.
LLAMA = dict(vocab_size=50, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)
NEOX = dict(vocab_size=50, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
GPTJ = dict(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
OPT = dict(vocab_size=50, hidden_size=32, ffn_dim=56, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, init_std=0.3)

CAUSAL = {
    "smollm2": (tf.LlamaForCausalLM, tf.LlamaConfig, dict(LLAMA, tie_word_embeddings=True, rope_theta=100000.0)),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, dict(LLAMA, sliding_window=4)),
    "mistral-sharded": (tf.MistralForCausalLM, tf.MistralConfig, dict(LLAMA, sliding_window=None, head_dim=12)),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, dict(LLAMA, tie_word_embeddings=True)),
    "qwen2-windows": (tf.Qwen2ForCausalLM, tf.Qwen2Config, dict(LLAMA, use_sliding_window=True, sliding_window=3, max_window_layers=1)),
    "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig, dict(LLAMA, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2)),
    "mixtral-window": (tf.MixtralForCausalLM, tf.MixtralConfig, dict(LLAMA, num_local_experts=3, num_experts_per_tok=1, sliding_window=4)),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, dict(vocab_size=50, n_positions=32, n_embd=24, n_layer=2, n_head=3, initializer_range=0.3, bos_token_id=1, eos_token_id=2)),
    "gptj": (tf.GPTJForCausalLM, tf.GPTJConfig, dict(GPTJ, rotary_dim=4)),
    "gptj-whole": (tf.GPTJForCausalLM, tf.GPTJConfig, dict(GPTJ, rotary_dim=8, n_inner=40, activation_function="relu")),
    "gptj-tied": (tf.GPTJForCausalLM, tf.GPTJConfig, dict(GPTJ, rotary_dim=4, tie_word_embeddings=True)),
    "gpt_neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, NEOX),
    "gpt_neox-serial": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig,
                        dict(NEOX, use_parallel_residual=False, tie_word_embeddings=True, attention_bias=False,
                             rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0})),
    "gpt_neox-linear": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, dict(NEOX, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5})),
    "gpt_neox-llama3": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig,
                        dict(NEOX, rope_parameters={"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                                                    "rope_theta": 500.0, "partial_rotary_factor": 1.0})),
    "opt": (tf.OPTForCausalLM, tf.OPTConfig, OPT),
    "opt-bin": (tf.OPTForCausalLM, tf.OPTConfig, dict(OPT, enable_bias=False, tie_word_embeddings=False)),
    "opt-350m": (tf.OPTForCausalLM, tf.OPTConfig, dict(OPT, do_layer_norm_before=False, word_embed_proj_dim=20, init_std=0.2)),
}
# config.json as it is in folders that older versions or people wrote: other spellings, and fields that mean nothing. Sequences of 9 tokens and 8 generated ones are longer than the contexts.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2, 3.5, 6], "original_max_position_embeddings": 6}
WRITTEN = {
    "llama-dynamic": (tf.LlamaForCausalLM, dict(LLAMA, max_position_embeddings=6, rope_theta=500.0, rope_scaling={"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 3})),
    "llama-yarn": (tf.LlamaForCausalLM, dict(LLAMA, rope_theta=300, rope_scaling=YARN)),
    "llama-yarn-weights": (tf.LlamaForCausalLM, dict(LLAMA, original_max_position_embeddings=40, rope_scaling=dict(YARN, mscale=1.3, mscale_all_dim=0.6, beta_fast=4, beta_slow=0.5, truncate=False))),
    "llama-yarn-factor": (tf.LlamaForCausalLM, dict(LLAMA, max_position_embeddings=60, rope_scaling=dict(YARN, factor=None, attention_factor=1.7, original_max_position_embeddings=40))),
    "llama-longrope": (tf.LlamaForCausalLM, dict(LLAMA, max_position_embeddings=24, rope_scaling=LONGROPE)),
    "llama-longrope-factor": (tf.LlamaForCausalLM, dict(LLAMA, rope_scaling={}, rope_parameters=dict(LONGROPE, attention_factor=1.4, rope_theta=50.0))),
    "llama-proportional": (tf.LlamaForCausalLM, dict(LLAMA, partial_rotary_factor=0.5, rope_scaling={"rope_type": "proportional", "factor": 2.0})),
    "llama-windows": (tf.LlamaForCausalLM, dict(LLAMA, sliding_window=3, layer_types=["full_attention"] * 2, partial_rotary_factor=0.5, rope_scaling={"type": "linear", "rope_type": "default", "factor": 2.0})),
    "mistral-dynamic": (tf.MistralForCausalLM, dict(LLAMA, sliding_window=4, attention_bias=True, mlp_bias=True, layer_types=["full_attention"] * 2, max_position_embeddings=6,
                                                    rope_scaling={"type": "dynamic", "factor": 2.0})),
    "qwen2-yarn": (tf.Qwen2ForCausalLM, dict(LLAMA, rope_scaling=YARN)),
    "mixtral-longrope": (tf.MixtralForCausalLM, dict(LLAMA, head_dim=8, num_experts=3, num_experts_per_tok=2, initializer_range=0.2, rope_scaling=dict(LONGROPE, factor=3.0))),
    "gpt_neox-dynamic": (tf.GPTNeoXForCausalLM, dict(NEOX, rotary_pct=0.75, rotary_emb_base=500, max_position_embeddings=6, rope_scaling={"type": "dynamic", "factor": 4.0})),
    "gpt_neox-yarn": (tf.GPTNeoXForCausalLM, dict(NEOX, rotary_pct=0.5, rope_scaling=dict(YARN, beta_fast=2))),
    "gpt_neox-longrope": (tf.GPTNeoXForCausalLM, dict(NEOX, rotary_pct=1.0, rope_theta=3.0, rope_scaling=LONGROPE)),
    "gpt_neox-odd": (tf.GPTNeoXForCausalLM, dict(NEOX, hidden_size=48)),  # turns 3 of 12 dimensions, which makes 2 pairs
    "gpt2-names": (tf.GPT2LMHeadModel, dict(vocab_size=50, max_position_embeddings=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, initializer_range=0.3)),
    "gptj-names": (tf.GPTJForCausalLM, dict(vocab_size=50, n_embd=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=1, rotary_dim=32, initializer_range=0.3, rope_scaling={"type": "linear", "factor": 2.0})),
}
T5 = dict(vocab_size=50, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_decoder_layers=3, num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=12,
          decoder_start_token_id=0, pad_token_id=0)
# Unscaled logits of the embeddings' size would be 30.
SEQ2SEQ = {"t5": T5, "t5-fields": dict(vocab_size=50, hidden_size=32, head_dim=8, d_ff=56, num_hidden_layers=2, num_attention_heads=4, feed_forward_proj="gated-gelu", dense_act_fn="quick_gelu", initializer_factor=0.4,
                                       decoder_start_token_id=0, pad_token_id=0),
           "t5-short": dict(vocab_size=50, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_hidden_layers=1, num_heads=4, is_gated_act=True, decoder_start_token_id=0, pad_token_id=0),
           "t5-v1_1": dict(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, initializer_factor=0.4)}


def shake(model):
    """Norms and biases start neutral: then a forgotten one would not be seen."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(torch.randn_like(buffer) * 0.1)
        if name.endswith("running_var"):
            buffer.mul_(torch.rand_like(buffer) + 0.5)


def save(out, kind, model, tensors):
    folder = out / kind
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if kind.endswith("-sharded") else {}))
    if kind.endswith("-sharded"):
        assert (folder / "model.safetensors.index.json").exists()
    if kind.endswith("-bin"):
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / f"{kind}.safetensors")


def token_by_token(model, ids, mask):
    cache, parts = None, []
    for t in range(ids.shape[1]):
        output = model(input_ids=ids[:, t:t + 1], attention_mask=mask[:, :t + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1)


def save_causal(out, kind, make):
    """make(): the same model each time. Where rotary frequencies follow the length of the sequence, transformers keeps those of the longest one so far."""
    torch.manual_seed(0)
    ids = torch.randint(3, 50, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    mask[1, :2] = 0
    model = make()
    model.generation_config.eos_token_id = None
    save(out, kind, make(), {
        "input_ids": ids, "attention_mask": mask, "logits": make()(input_ids=ids).logits, "masked_logits": make()(input_ids=ids, attention_mask=mask).logits,
        "cached_logits": token_by_token(make(), ids, mask),
        "generated": model.generate(ids[1:], attention_mask=mask[1:], max_new_tokens=8, do_sample=False, pad_token_id=0)})


def made(model_class, config):
    torch.manual_seed(0)
    model = model_class(config).eval()
    shake(model)
    return model


def causal(out):
    for kind, (model_class, config_class, fields) in CAUSAL.items():
        save_causal(out, kind, lambda: made(model_class, config_class(**fields)))


def written(out):
    for kind, (model_class, fields) in WRITTEN.items():
        config = out / kind / "config.json"
        config.parent.mkdir()
        text = json.dumps(dict(fields, model_type=model_class.config_class.model_type, architectures=[model_class.__name__]))
        config.write_text(text)
        read = model_class.config_class.from_pretrained(config.parent)
        save_causal(out, kind, lambda: made(model_class, read))
        config.write_text(text)


# Other files' names of the weights: without the name of the body, as openai-community's GPT-2 does, beside what old versions saved; and a head by transformers 5's name.
NAMES = {
    "gpt2": ("transformer.", {"h.{}.attn.bias": torch.ones(1, 1, 4, 4).tril(), "h.{}.attn.masked_bias": torch.tensor(-1e4)}),
    "gptj": ("transformer.", {"h.{}.attn.bias": torch.ones(1, 1, 4, 4).tril()}),
    "gpt_neox": ("gpt_neox.", {"layers.{}.attention.bias": torch.ones(1, 1, 4, 4).tril(), "layers.{}.attention.rotary_emb.inv_freq": torch.ones(4)}),
    "opt": ("model.", {}),
    "mistral": ("model.", {"layers.{}.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    "mixtral": ("model.", {}),
    "qwen2": ("model.", {}),
}


def names(out):
    for kind, (body, besides) in NAMES.items():
        model_class, config_class, fields = CAUSAL[kind]
        save_causal(out, kind, lambda: made(model_class, config_class(**fields)))
        tensors = {name.removeprefix(body): value for name, value in load_file(out / kind / "model.safetensors").items()}
        tensors.update({name.format(i): value.clone() for name, value in besides.items() for i in range(2)})
        rename(out / kind, tensors)
        if kind == "gpt_neox":
            (out / "gpt_neox-head").mkdir()
            for name in ("config.json", "generation_config.json"):
                shutil.copy(out / kind / name, out / "gpt_neox-head" / name)
            shutil.copy(out / kind / "plain/model.safetensors", out / "gpt_neox-head/model.safetensors")
            shutil.copy(out / "gpt_neox.safetensors", out / "gpt_neox-head.safetensors")
            state = made(model_class, config_class(**fields)).state_dict()
            assert "lm_head.weight" in state and "embed_out.weight" not in state
            rename(out / "gpt_neox-head", state)


def rename(folder, tensors):
    """The folder as it was is left in it, as `plain`."""
    (folder / "plain").mkdir()
    shutil.copy(folder / "config.json", folder / "plain/config.json")
    (folder / "model.safetensors").rename(folder / "plain/model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def activations(out):
    """Whatever has no weights of its own."""
    x = torch.linspace(-12, 12, 1001)
    names = [name for name in ACT2FN if name not in ("prelu", "xielu")]
    save_file({name: ACT2FN[name](x).clone() for name in names} | {"x": x}, out / "activations.safetensors")


def seq2seq(out):
    for kind, fields in SEQ2SEQ.items():
        torch.manual_seed(0)
        model = tf.T5ForConditionalGeneration(tf.T5Config(**fields)).eval()
        shake(model)
        # Longer than relative_attention_max_distance.
        ids, decoder_ids = torch.randint(1, 50, (3, 17)), torch.randint(1, 50, (3, 15))
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        inputs = {"input_ids": ids, "decoder_input_ids": decoder_ids}
        save(out, kind, model, {**inputs, "attention_mask": mask, "logits": model(**inputs).logits, "masked_logits": model(**inputs, attention_mask=mask).logits})


def efficientnet_lite0(weights, x):
    """TensorFlow's padding, stage by stage from the table of the network; weights by the names of EfficientNet-PyTorch."""
    def convolve(name, x, stride=1, groups=1):
        weight = weights[name + ".weight"]
        kernel = weight.shape[-1]
        pad = [max(0, (math.ceil(size / stride) - 1) * stride + kernel - size) for size in (x.shape[3], x.shape[2])]
        return F.conv2d(F.pad(x, [pad[0] // 2, pad[0] - pad[0] // 2, pad[1] // 2, pad[1] - pad[1] // 2]), weight, stride=stride, groups=groups)

    def normalize(name, x):
        return F.batch_norm(x, *(weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")), eps=1e-3)

    x = F.relu6(normalize("_bn0", convolve("_conv_stem", x, 2)))
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    for i, stride in enumerate(strides):
        block = f"_blocks.{i}."
        y = x
        if i > 0:
            y = F.relu6(normalize(block + "_bn0", convolve(block + "_expand_conv", y)))
        y = F.relu6(normalize(block + "_bn1", convolve(block + "_depthwise_conv", y, stride, y.shape[1])))
        y = normalize(block + "_bn2", convolve(block + "_project_conv", y))
        x = x + y if stride == 1 and x.shape[1] == y.shape[1] else y
    x = F.relu6(normalize("_bn1", convolve("_conv_head", x))).mean((2, 3))
    return F.linear(x, weights["_fc.weight"], weights["_fc.bias"])


def random_efficientnet_lite0():
    weights = {}

    def convolution(name, inputs, outputs, kernel, norm, groups=1):
        weights[name + ".weight"] = torch.randn(outputs, inputs // groups, kernel, kernel) * (inputs // groups * kernel * kernel) ** -0.5
        weights.update({f"{norm}.weight": torch.rand(outputs) + 0.5, f"{norm}.bias": torch.randn(outputs) * 0.1, f"{norm}.running_mean": torch.randn(outputs) * 0.1,
                        f"{norm}.running_var": torch.rand(outputs) + 0.5, f"{norm}.num_batches_tracked": torch.tensor(7)})

    convolution("_conv_stem", 3, 32, 3, "_bn0")
    inputs, i = 32, 0
    for repeats, kernel, outputs in [(1, 3, 16), (2, 3, 24), (2, 5, 40), (3, 3, 80), (3, 5, 112), (4, 5, 192), (1, 3, 320)]:
        for _ in range(repeats):
            block, inner = f"_blocks.{i}.", inputs * (6 if i else 1)
            if i:
                convolution(block + "_expand_conv", inputs, inner, 1, block + "_bn0")
            convolution(block + "_depthwise_conv", inner, inner, kernel, block + "_bn1", groups=inner)
            convolution(block + "_project_conv", inner, outputs, 1, block + "_bn2")
            inputs, i = outputs, i + 1
    convolution("_conv_head", 320, 1280, 1, "_bn1")
    weights.update({"_fc.weight": torch.randn(10, 1280) * 0.03, "_fc.bias": torch.randn(10) * 0.1})
    return weights


def counted_names(weights):
    """From timm's names, which count blocks within their stages, to those of EfficientNet-PyTorch."""
    blocks = sorted({tuple(map(int, name.split(".")[1:3])) for name in weights if name.startswith("blocks.")})
    outer = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1", "classifier": "_fc"}
    expanding = {"conv_pw": "_expand_conv", "bn1": "_bn0", "conv_dw": "_depthwise_conv", "bn2": "_bn1", "conv_pwl": "_project_conv", "bn3": "_bn2"}
    plain = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    renamed = {}
    for name, value in weights.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            stage, block = map(int, parts[1:3])
            parts[:4] = ["_blocks", str(blocks.index((stage, block))), (expanding if stage else plain)[parts[3]]]
        else:
            parts[0] = outer[parts[0]]
        renamed[".".join(parts)] = value
    return renamed


def outputs(out):
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        inputs = load_file(out / f"{folder.name}.inputs")
        config = json.loads((folder / "config.json").read_text())
        if "architecture" in config:
            output = efficientnet_lite0(counted_names(load_file(folder / "model.safetensors")), inputs["pixel_values"])
        else:
            model, info = getattr(tf, config["architectures"][0]).from_pretrained(folder, output_loading_info=True)
            assert not any(info.values()), (config, info)
            assert model.dtype == torch.float32, config
            output = model.eval()(**inputs)
            output = output.logits if "logits" in output else output.last_hidden_state
        save_file({"output": output.contiguous()}, out / f"{folder.name}.outputs")


def images(out):
    labels = {"id2label": {i: str(i) for i in range(7)}}
    resnet = dict(embedding_size=8, hidden_sizes=[16, 24], depths=[2, 1], **labels)
    kinds = {
        "vit": (tf.ViTForImageClassification, tf.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56, image_size=24, patch_size=8, initializer_range=0.3, **labels)),
        "vit-wide": (tf.ViTForImageClassification, tf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=56, image_size=[24, 24], patch_size=[4, 8], qkv_bias=False, **labels)),
        "resnet": (tf.ResNetForImageClassification, tf.ResNetConfig(**resnet)),
        "resnet-basic": (tf.ResNetForImageClassification, tf.ResNetConfig(layer_type="basic", downsample_in_first_stage=True, **resnet)),
        "resnet-early": (tf.ResNetForImageClassification, tf.ResNetConfig(downsample_in_bottleneck=True, hidden_act="silu", **resnet)),
    }
    for kind, (model_class, config) in kinds.items():
        torch.manual_seed(0)
        model = model_class(config).eval()
        shake(model)
        pixels = torch.randn(2, 3, 24, 24)
        save(out, kind, model, {"pixel_values": pixels, "logits": model(pixel_values=pixels).logits})
    torch.manual_seed(0)
    weights, pixels = random_efficientnet_lite0(), torch.randn(2, 3, 33, 40)
    (out / "efficientnet_lite0").mkdir()
    save_file(weights, out / "efficientnet_lite0" / "model.safetensors", {"format": "pt"})
    (out / "efficientnet_lite0" / "config.json").write_text(json.dumps({"architecture": "tf_efficientnet_lite0", "num_classes": 10}))
    save_file({"pixel_values": pixels, "logits": efficientnet_lite0(weights, pixels).contiguous()}, out / "efficientnet_lite0.safetensors")


out = pathlib.Path(sys.argv[2])
out.mkdir(exist_ok=sys.argv[1] == "outputs")
with torch.no_grad():
    {"causal": causal, "written": written, "names": names, "seq2seq": seq2seq, "images": images, "activations": activations, "outputs": outputs}[sys.argv[1]](out)
