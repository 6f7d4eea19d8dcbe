"""Tiny bases of every family with LoRA adapters on them, all made by peft itself; and what peft makes of them when it merges."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from model_zoo import Tensors, quiet_transformers

_SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_TEXT: dict[str, Any] = {**_SIZES, "vocab_size": 40, "max_position_embeddings": 20}


@cache
def _config(family: str) -> Any:
    if family == "gpt2":
        return transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_inner=24, vocab_size=40, n_positions=12,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
    if family == "llama":
        return transformers.LlamaConfig(**_TEXT, num_key_value_heads=1)
    if family == "bert":
        return transformers.BertConfig(**_TEXT)
    if family == "roberta":
        return transformers.RobertaConfig(**_TEXT, bos_token_id=0, pad_token_id=1, eos_token_id=2)
    assert family == "vit"
    return transformers.ViTConfig(**_SIZES, image_size=8, patch_size=4)


def family_of(class_name: str) -> str:
    return next(f for f in ("gpt2", "llama", "roberta", "bert", "vit") if class_name.lower().startswith(f))


def write_base(folder: Path, class_name: str, *, seed: int = 0) -> Path:
    """A base with random weights, biases and norms included."""
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, class_name)(_config(family_of(class_name)))
        _move(model.parameters(), 0.05, seed)
        model.save_pretrained(folder)
    return folder


def write_adapter(
    base: Path,
    folder: Path,
    class_name: str,
    *,
    seed: int = 1,
    strength: float = 0.1,
    config: Callable[..., Any] = peft.LoraConfig,
    labels: int | None = None,
    safe: bool = True,
    **settings: Any,
) -> Path:
    """An adapter with seeded random values in everything that it trains."""
    settings = {"r": 4, **settings} if config is peft.LoraConfig else settings
    with quiet(), torch.random.fork_rng():
        model = load(base, class_name, labels)
        torch.manual_seed(seed)
        model = peft.get_peft_model(model, config(**settings))
        _move((p for p in model.parameters() if p.requires_grad), strength, seed)
        model.save_pretrained(folder, safe_serialization=safe)
    return folder


def expand(base: Path, adapter: Path, folder: Path, class_name: str, labels: int | None = None) -> Path:
    """The full model that peft's merge_and_unload makes of an adapter."""
    with quiet():
        peft_model(base, adapter, class_name, labels).merge_and_unload().save_pretrained(folder)
    return folder


def peft_model(base: Path, adapter: Path, class_name: str, labels: int | None = None) -> Any:
    return peft.PeftModel.from_pretrained(load(base, class_name, labels), str(adapter))


def load(folder: Path, class_name: str, labels: int | None = None) -> Any:
    """A copy of the folder's model, which takes a fifth of the time of reading it again."""
    return copy.deepcopy(_read(folder, class_name, labels))


@lru_cache(maxsize=32)
def _read(folder: Path, class_name: str, labels: int | None) -> Any:
    settings = {} if labels is None else {"num_labels": labels}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # a head that the folder lacks is made here
        return getattr(transformers, class_name).from_pretrained(folder, **settings)


def _move(parameters: Iterator[torch.nn.Parameter], strength: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=strength)


@contextmanager
def quiet() -> Iterator[None]:
    """peft warns of Conv1D, tied weights and copied embeddings while it builds: nothing that a test is about."""
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- a base and some adapters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Zoo:
    """A base, adapters for it, and the full models that peft expands them to, by the adapters' names."""

    base: Path
    class_name: str
    adapters: dict[str, Path]
    full: dict[str, Path]

    @property
    def folders(self) -> list[Path]:
        return [self.base, *self.adapters.values()]


LORAS: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": {
        "math": {"r": 2, "target_modules": "all-linear", "strength": 0.3},
        "code": {"r": 3, "target_modules": ["q_proj", "v_proj"]},
        "chat": {"r": 1, "target_modules": ["q_proj", "up_proj", "down_proj"], "lora_alpha": 3},
    },
    "GPT2LMHeadModel": {
        "red": {"r": 2, "target_modules": ["c_attn", "c_proj"]},
        "green": {"r": 3, "target_modules": ["c_attn", "c_fc"], "strength": 0.3, "use_rslora": True},
    },
    "ViTModel": {
        "cars": {"r": 2, "target_modules": ["q_proj", "fc1", "projection"]},
        "birds": {"r": 3, "target_modules": ["q_proj", "o_proj", "projection"], "strength": 0.3},
    },
}


def build(root: Path, class_name: str, loras: Mapping[str, Mapping[str, Any]] | None = None) -> Zoo:
    """A base with its adapters, and their expansions."""
    base = write_base(root / "base", class_name)
    adapters, full = {}, {}
    for seed, (name, settings) in enumerate((loras or LORAS[class_name]).items(), 1):
        adapters[name] = write_adapter(base, root / name, class_name, **{"seed": seed, **settings})
        full[name] = expand(base, adapters[name], root / "full" / name, class_name)
    return Zoo(base, class_name, adapters, full)


# --- changing an adapter's files ---------------------------------------------------------------------------------------


def read_factors(adapter: Path) -> Tensors:
    return load_file(adapter / "adapter_model.safetensors")


def write_factors(adapter: Path, factors: Tensors) -> None:
    save_file({n: t.contiguous() for n, t in factors.items()}, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


def read_settings(adapter: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    return settings


def change_settings(adapter: Path, **changes: Any) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps({**read_settings(adapter), **changes}))


def copy_adapter(adapter: Path, target: Path, change: Callable[[Tensors], Tensors] = lambda factors: factors) -> Path:
    """A copy with its factors changed."""
    shutil.copytree(adapter, target)
    write_factors(target, change(read_factors(adapter)))
    return target
