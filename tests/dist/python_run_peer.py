"""Peer of python_run_test.cpp: runs of Accelerate that C++ goes on with, and that go on from where C++ has stopped.

usage: python_run_peer.py first FOLDER   two ranks train each MODEL_STRATEGY for STEPS steps; in FOLDER/MODEL_STRATEGY config.json, the losses of all steps and `python`, the run after HALF of them
       python_run_peer.py back FOLDER    goes on from FOLDER/MODEL_STRATEGY/ours, saved one step before the end, and compares

Accelerate doesn't shard on the CPU, so that the functions that its save_state and load_state call are called, with what they need of an Accelerator.
"""
import json
import os
import pathlib
import random
import sys
from types import SimpleNamespace

import accelerate.utils.fsdp_utils  # noqa: F401  like those below, once for all ranks
import numpy
import torch
import torch._dynamo  # noqa: F401
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.checkpointing import load_accelerator_state, load_custom_state, save_accelerator_state, save_custom_state
from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from python_ranks import in_ranks  # noqa: E402

STEPS, HALF, TOKENS, BATCH, RANKS = 6, 3, 6, 2, 2


def made(kind, strategy):
    torch.manual_seed(1)
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, max_position_embeddings=8))
    # FSDP 2 saves both names of a head that is the embeddings.
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=strategy == "ddp"))


def loss_of(kind, model, rows):
    ids = rows[:, :TOKENS]
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits, rows[:, TOKENS]) if kind == "bert" else F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Progress:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Sharded:
    """What Accelerate does under FSDP 2."""

    def __init__(self, accelerator, model, optimizer, scheduler, progress):
        self.rank, self.model, self.optimizer, self.scheduler, self.progress = dist.get_rank(), model, optimizer, scheduler, progress
        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        self.accelerator = SimpleNamespace(num_processes=RANKS, process_index=self.rank, is_main_process=self.rank == 0, is_fsdp2=True, wait_for_everyone=dist.barrier)

    def save_state(self, folder):
        save_fsdp_model(self.plugin, self.accelerator, self.model, folder, 0)
        save_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, folder, 0)
        save_accelerator_state(folder, [], [], [self.scheduler], [], self.rank, 0)
        save_custom_state(self.progress, folder, 0)
        dist.barrier()

    def load_state(self, folder):
        load_fsdp_model(self.plugin, self.accelerator, self.model, folder, 0)
        load_fsdp_optimizer(self.plugin, self.accelerator, self.optimizer, self.model, folder, 0)
        load_accelerator_state(folder, [], [], [self.scheduler], [], self.rank)
        load_custom_state(self.progress, folder, 0)

    def backward(self, loss):
        loss.backward()


def train(base, kind, strategy, back):
    folder, rank = f"{base}/{kind}_{strategy}", dist.get_rank()
    model = made(kind, strategy)
    if not back and rank == 0:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    accelerator = Accelerator(cpu=True)
    if strategy == "fsdp2":
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, 2 * RANKS * STEPS)
    rows = [torch.tensor([(7 * i + 3 * t) % 20 for t in range(TOKENS)] + [i % 2]) for i in range(STEPS * BATCH * RANKS)]
    # With a generator of its own a loader draws nothing from the one that dropout draws from.
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, generator=torch.Generator())
    progress = Progress()
    if strategy == "ddp":
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        accelerator.register_for_checkpointing(progress)
        run = accelerator
    else:
        loader = accelerator.prepare(loader)
        run = Sharded(accelerator, model, optimizer, scheduler, progress)
    model.train()
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(90 + rank if back else 10 + rank)
    random.gauss(0, 1), numpy.random.randn()  # which keep the second number of a pair
    if back:
        run.load_state(f"{folder}/ours")
        assert progress.steps == STEPS - 1, progress.steps
    losses = []
    for batch in accelerator.skip_first_batches(loader, progress.steps):
        loss = loss_of(kind, model, batch)
        run.backward(loss)
        optimizer.step()
        for _ in range(1 if strategy == "ddp" else RANKS):  # as often as an accelerated one steps
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.steps += 1
        if not back and progress.steps == HALF:
            run.save_state(f"{folder}/python")
    draws = [random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand()]
    file = f"{folder}/losses_{rank}.json"
    if not back:
        json.dump({"losses": losses, "draws": draws}, open(file, "w"))
        return
    whole = json.load(open(file))
    assert len(losses) == 1 and abs(losses[0] - whole["losses"][-1]) < 1e-5, (kind, strategy, losses, whole)
    assert draws == whole["draws"], ("Python's own generators", draws, whole)


def train_all(base, back):
    for kind in ("gpt2", "bert"):
        for strategy in ("ddp", "fsdp2"):
            os.makedirs(f"{base}/{kind}_{strategy}", exist_ok=True)
            train(base, kind, strategy, back)


if __name__ == "__main__":
    in_ranks(RANKS, train_all, sys.argv[2], sys.argv[1] == "back")
