"""Peer of the BERT tests: what transformers makes of the same weights and inputs.

usage: bert_peer.py hidden FOLDER OUT          runs BertModel on a padded batch; OUT holds inputs and outputs
       bert_peer.py tiny FOLDER OUT            saves a small random classifier to FOLDER; OUT holds inputs, logits and gradients
       bert_peer.py logits FOLDER INPUTS OUT   loads a folder that was saved in C++; OUT holds its logits
"""
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel


def hidden(folder, out):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["This is an example sentence", "A much longer one, which makes the first need padding.", "Two"], ["with a pair", "or not", ""], padding=True, return_tensors="pt")
    with torch.no_grad():
        result = BertModel.from_pretrained(folder).eval()(**batch)
    save_file({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "token_type_ids": batch["token_type_ids"],
               "last_hidden_state": result.last_hidden_state, "pooler_output": result.pooler_output}, out)


def tiny(folder, out):
    torch.manual_seed(0)
    # The name of the activation is in the folder's name; a large range makes differences of formulas visible.
    config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=16, hidden_act=folder.rsplit("-", 1)[1],
                        initializer_range=0.5, id2label={0: "no", 1: "yes", 2: "maybe"}, label2id={"no": 0, "yes": 1, "maybe": 2}, classifier_dropout=0.25)
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    ids = torch.randint(0, 50, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    types = torch.randint(0, 2, (3, 9))
    result = model(input_ids=ids, attention_mask=mask, token_type_ids=types, labels=torch.tensor([0, 2, 1]))
    result.loss.backward()
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "logits": result.logits.detach()}
    tensors.update({f"grad.{name}": p.grad for name, p in model.named_parameters()})
    save_file({k: v.contiguous() for k, v in tensors.items()}, out)


def logits(folder, inputs, out):
    model, info = BertForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert type(AutoModelForSequenceClassification.from_pretrained(folder)) is BertForSequenceClassification
    assert model.config.id2label == {0: "no", 1: "yes", 2: "maybe"} and model.config.num_labels == 3, model.config
    assert model.dtype == torch.float32 and model.config.problem_type == "single_label_classification"
    with torch.no_grad():
        save_file({"logits": model.eval()(**load_file(inputs)).logits}, out)


{"hidden": hidden, "tiny": tiny, "logits": logits}[sys.argv[1]](*sys.argv[2:])
