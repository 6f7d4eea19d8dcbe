"""Small models with tokenizers that differ, and outputs compared token by token: two tools may number new tokens differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ADDED = {
    "words-chat": ["<|im_start|>", "<|im_end|>"],
    "words-tool": ["<|tool|>"],
    "words-turned": [],
    "words-end": ["<|im_end|>"],
}
BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")


def make_models_with_words(folder: Path) -> None:
    """A base and fine-tunes of it, each with rows for its own tokens."""
    raw = _tokenizer()
    _save(raw, folder / "words")
    base = _model(len(raw.get_vocab()))
    base.save_pretrained(folder / "words")
    for name, added in ADDED.items():
        own = _turned(raw) if name == "words-turned" else Tokenizer.from_str(raw.to_str())
        own.add_special_tokens(added)
        _save(own, folder / name)
        _fine_tune(base, raw, own).save_pretrained(folder / name)


def _tokenizer() -> Tokenizer:
    raw, letters = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer, raw.decoder = letters, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=letters.alphabet(), special_tokens=["<s>", "</s>"])
    raw.train_from_iterator(["hello world, hello cat, hello hat"], trainer)
    return raw


def _turned(raw: Tokenizer) -> Tokenizer:
    """The same tokens, all but the special ones numbered the other way round."""
    content = json.loads(raw.to_str())
    plain = sorted(content["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {token["content"] for token in content["added_tokens"]}
    tokens = [token for token, _ in plain if token not in special]
    numbers = [number for token, number in plain if token not in special]
    content["model"]["vocab"] |= dict(zip(reversed(tokens), numbers, strict=True))
    return Tokenizer.from_str(json.dumps(content))


def _save(raw: Tokenizer, folder: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def _model(rows: int) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=False, dtype="float32", **sizes))


def _fine_tune(base: LlamaForCausalLM, raw: Tokenizer, own: Tokenizer) -> LlamaForCausalLM:
    """The base's weights with noise, its rows where the tokenizer now has their tokens, and rows of chance for new tokens."""
    vocabulary = own.get_vocab()
    model = _model(len(vocabulary))
    values = base.state_dict()
    for name in BY_TOKEN:
        rows = torch.randn(len(vocabulary), values[name].shape[1]) * 0.02
        for token, row in raw.get_vocab().items():
            rows[vocabulary[token]] = values[name][row]
        values[name] = rows
    model.load_state_dict({name: value + 0.003 * torch.randn_like(value) for name, value in values.items()})
    return model


def by_token(ours: Path, theirs: Path, base: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Three models' tensors with rows in the order of their tokens' text, then padding; zeros where the base lacks a token."""
    tokens = sorted(_vocabulary(theirs))
    if tokens != sorted(_vocabulary(ours)):
        raise SystemExit(f"{ours} and {theirs} have different tokens")
    found = []
    for folder in (ours, theirs, base):
        vocabulary, tensors = _vocabulary(folder), load_file(folder / "model.safetensors")
        for name in BY_TOKEN:
            rows = [tensors[name][vocabulary[token]] if token in vocabulary else None for token in tokens]
            absent = torch.zeros(tensors[name].shape[1])
            padding = tensors[name][len(vocabulary) :] if folder != base else tensors[name][:0]
            tensors[name] = torch.cat([torch.stack([absent if row is None else row for row in rows]), padding])
        found.append(tensors)
    shape = found[1][BY_TOKEN[0]].shape
    for name in BY_TOKEN:
        missing = shape[0] - len(found[2][name])
        found[2][name] = torch.cat([found[2][name], torch.zeros(missing, shape[1])])
    return found[0], found[1], found[2]


def _vocabulary(folder: Path) -> dict[str, int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
