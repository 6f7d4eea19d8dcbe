"""Models of a Llama's shapes, of any size, written one tensor at a time in bfloat16."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.numerics.threads import torch_at_rest
from acemerge.output.writer import write_safetensors

BASE_SPREAD, CHANGE_SPREAD = 0.02, 0.002
_NOISE_ELEMENTS = 2**23 + 9  # odd, so that the rows of a matrix do not repeat one another


@dataclass(frozen=True)
class Llama:
    """How large, and how many experts."""

    layers: int = 14
    hidden: int = 1536
    inner: int = 4096
    vocabulary: int = 32_000
    experts: int = 4

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes on disk, in the order in which transformers saves them."""
        d, inner = self.hidden, self.inner
        yield "lm_head.weight", (self.vocabulary, d)
        yield "model.embed_tokens.weight", (self.vocabulary, d)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (d,)
            yield f"{layer}.mlp.down_proj.weight", (d, inner)
            yield f"{layer}.mlp.gate_proj.weight", (inner, d)
            yield f"{layer}.mlp.up_proj.weight", (inner, d)
            yield f"{layer}.post_attention_layernorm.weight", (d,)
            for name in "koqv":
                yield f"{layer}.self_attn.{name}_proj.weight", (d, d)
        yield "model.norm.weight", (d,)

    @property
    def elements(self) -> int:
        """Of one model."""
        return sum(prod(shape) for _, shape in self.tensors())

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(prod(shape) for _, shape in self.tensors())

    @property
    def expert_names(self) -> list[str]:
        """Their folders."""
        return [f"expert-{i}" for i in range(1, self.experts + 1)]

    @property
    def config(self) -> dict[str, object]:
        """What config.json says."""
        heads = self.hidden // 64
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers, "num_attention_heads": heads,
            "num_key_value_heads": heads, "vocab_size": self.vocabulary, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def describe(self) -> str:
        """In a few words."""
        return f"base and {self.experts} experts of {2 * self.elements / 1e9:.2f} GB each in bfloat16"


def add_shapes(parser: argparse.ArgumentParser, default: Llama | None = None) -> None:
    """A flag for every size."""
    for name, value in asdict(default or Llama()).items():
        parser.add_argument(f"--{name}", type=int, default=value)


def shapes_of(given: argparse.Namespace) -> Llama:
    """What the flags say."""
    return Llama(**{field.name: getattr(given, field.name) for field in fields(Llama)})


def warm(folder: Path) -> None:
    """Bring every model into the page cache."""
    for path in sorted(folder.glob("*/model.safetensors")):
        with path.open("rb") as file:
            while file.read(2**24):
                pass


def write_models(llama: Llama, folder: Path) -> None:
    """A base of random weights and experts that are the base with noise added, each a little stronger than the one before."""
    noise = torch.randn(_NOISE_ELEMENTS, generator=torch.Generator().manual_seed(0))
    headers = [(name, TensorHeader("bfloat16", shape)) for name, shape in llama.tensors()]
    for expert, name in enumerate(["base", *llama.expert_names]):
        target = folder / name
        target.mkdir(parents=True)
        (target / "config.json").write_text(json.dumps(llama.config, indent=1))
        with torch_at_rest():  # shared by torch's threads, these small sums take ten times as long where other programs run
            write_safetensors(target / "model.safetensors", headers, _values(llama, expert, noise))


def _values(llama: Llama, expert: int, noise: Tensor) -> Iterator[Tensor]:
    """A model's tensors, of its number alone (0 is the base): slices of one long piece of noise, each from a place of its own."""
    places = torch.Generator().manual_seed(1)
    for _, shape in llama.tensors():
        starts = torch.randint(len(noise), (llama.experts + 1,), generator=places).tolist()
        value = _slice(noise, starts[0], prod(shape)).mul_(BASE_SPREAD)
        if expert:
            strength = CHANGE_SPREAD * (1 + expert / llama.experts)
            value = value.bfloat16().float().add_(_slice(noise, starts[expert], prod(shape)), alpha=strength)
        yield value.bfloat16().reshape(shape)


def _slice(noise: Tensor, start: int, length: int) -> Tensor:
    """As many numbers of the noise from that place on, beginning again where it ends."""
    piece = torch.empty(length)
    filled = 0
    while filled < length:
        count = min(length - filled, len(noise) - start)
        piece[filled : filled + count] = noise[start : start + count]
        filled, start = filled + count, 0
    return piece
