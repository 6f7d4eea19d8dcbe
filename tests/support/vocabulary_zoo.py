"""Tiny language models with real tokenizers of the kinds there are, and experts that added tokens or number them otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from model_zoo import quiet_transformers

TEXTS = ["the cat sat on the mat", "a quick brown fox jumps over the lazy dog", "hello world, hello moon", "cats and dogs"] * 3
KINDS = ("bpe", "unigram", "wordpiece")
ROWS_BY_TOKEN = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "word_embeddings.weight", "cls.predictions.bias")


def tokenizer(kind: str, texts: Sequence[str] = TEXTS) -> Any:
    """A tokenizer trained on a few words, as transformers has it."""
    raw, trainer, special = _BUILDERS[kind]()
    raw.train_from_iterator(texts, trainer)
    if kind == "wordpiece":
        ids = [(token, raw.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def _bpe() -> tuple[Any, Any, dict[str, str]]:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False)
    return raw, trainer, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


def _unigram() -> tuple[Any, Any, dict[str, str]]:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    return raw, trainer, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


def _wordpiece() -> tuple[Any, Any, dict[str, str]]:
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=70, special_tokens=special, show_progress=False)
    names = ("pad", "unk", "cls", "sep", "mask")
    return raw, trainer, {f"{name}_token": token for name, token in zip(names, special, strict=True)}


_BUILDERS = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece}


def base(folder: Path, kind: str = "bpe", architecture: str = "llama", *, tied: bool = False, padding: int = 0) -> Path:
    """A model over the tokenizer's tokens, with so many rows more."""
    own = tokenizer(kind)
    with quiet_transformers(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = _model(architecture, len(own) + padding, tied, own)
        _add_noise(model, 0.1, seed=0)
        model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def _model(architecture: str, rows: int, tied: bool, own: Any) -> Any:
    ids = {f"{role}_token_id": getattr(own, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    if architecture == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=1, n_head=2, n_inner=24, n_positions=32, vocab_size=rows, tie_word_embeddings=tied, **ids
        )
        return transformers.GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 32, "vocab_size": rows,
    }  # fmt: skip
    if architecture == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, pad_token_id=own.pad_token_id))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=tied, **ids))


def _add_noise(model: Any, strength: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=strength)


def expert(of: Path, folder: Path, *added: str, seed: int = 1, special: bool = False, resize: bool = True) -> Path:
    """A fine-tune that added tokens as anybody does: to the tokenizer, and rows to the model."""
    with quiet_transformers(), torch.random.fork_rng():
        torch.manual_seed(seed)
        own = transformers.AutoTokenizer.from_pretrained(of)
        model = transformers.AutoModelForMaskedLM if "Masked" in _architecture(of) else transformers.AutoModelForCausalLM
        tuned = model.from_pretrained(of)
        if added:
            own.add_tokens(list(added), special_tokens=special)
            if resize:
                tuned.resize_token_embeddings(len(own), mean_resizing=False)
        _add_noise(tuned, 0.05, seed)
        tuned.save_pretrained(folder)
        own.save_pretrained(folder)
    return folder


def _architecture(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["architectures"][0])


def renumber(folder: Path, order: Sequence[int]) -> None:
    """Give the token of id order[i] the id i, in the tokenizer and in the model's rows; padding rows stay where they are."""
    new = {old: index for index, old in enumerate(order)}
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for entry in content["added_tokens"]:
        if isinstance(vocabulary, dict):
            vocabulary[entry["content"]] = entry["id"]
        elif entry["id"] == len(vocabulary):
            vocabulary.append([entry["content"], 0.0])
        entry["id"] = new[entry["id"]]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {token: new[row] for token, row in vocabulary.items()}
    else:
        content["model"]["vocab"] = [vocabulary[old] for old in order]
        content["model"]["unk_id"] = new[content["model"]["unk_id"]]
    content["added_tokens"].sort(key=lambda entry: entry["id"])
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(ROWS_BY_TOKEN):
            rows = [*order, *range(len(order), len(weights[name]))]
            weights[name] = weights[name][torch.tensor(rows)].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            settings = json.loads((folder / file).read_text())
            moved = {k: new.get(v, v) if k.endswith("_token_id") else v for k, v in settings.items()}
            (folder / file).write_text(json.dumps(moved))


def vocabulary(folder: Path) -> dict[str, int]:
    """As transformers reads it."""
    found: dict[str, int] = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rows_by_token(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Token -> its row of a tensor."""
    tensor = weights(folder)[name]
    return {token: tensor[row] for token, row in vocabulary(folder).items() if row < len(tensor)}


def merged_by_token(
    base_rows: Mapping[str, torch.Tensor], experts: Sequence[Mapping[str, torch.Tensor]], *, scale: float
) -> dict[str, torch.Tensor]:
    """What task arithmetic gives, token by token, in float64: a plain transcription. Scale 0 leaves common tokens at the base."""
    tokens = {**base_rows, **{token: row for own in experts for token, row in own.items()}}
    merged = {}
    for token in tokens:
        theirs = [own[token].double() for own in experts if token in own]
        if token in base_rows:
            start = base_rows[token].double()
            merged[token] = start + scale * sum((row - start for row in theirs), torch.zeros_like(start))
        else:
            merged[token] = sum(theirs[1:], theirs[0]) / len(theirs)
    return merged
