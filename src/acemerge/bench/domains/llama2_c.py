"""Models of llama2.c as transformers' own: one file of float32 weights without names, and one of scored tokens."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
"""Tokens 0, 1 and 2. The next 256 are single bytes, for what is no token."""
_BYTES = range(3, 3 + 256)
_SPACE = "▁"
"""How SentencePiece writes a space; llama2.c writes the space itself."""


@dataclass(frozen=True)
class Shape:
    """The header of a file of weights, with all that follows from it."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    length: int
    tied: bool
    """Whether the output layer is the embedding."""

    @classmethod
    def read(cls, content: bytes) -> Shape:
        """Seven integers; a vocabulary below zero says that there is an output layer of its own."""
        width, hidden, layers, heads, key_heads, vocabulary, length = struct.unpack_from("<7i", content)
        return cls(width, hidden, layers, heads, key_heads, abs(vocabulary), length, tied=vocabulary > 0)

    @property
    def head(self) -> int:
        """Numbers in the query of one head."""
        return self.width // self.heads

    @property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Everything in the file, in its order. Those that begin with a dot are in every layer."""
        keys, each, mlp = self.head * self.key_heads, self.layers, (self.hidden, self.width)
        return {
            "model.embed_tokens.weight": (self.vocabulary, self.width),
            ".input_layernorm.weight": (each, self.width),
            ".self_attn.q_proj.weight": (each, self.width, self.width),
            ".self_attn.k_proj.weight": (each, keys, self.width),
            ".self_attn.v_proj.weight": (each, keys, self.width),
            ".self_attn.o_proj.weight": (each, self.width, self.width),
            ".post_attention_layernorm.weight": (each, self.width),
            ".mlp.gate_proj.weight": (each, *mlp),
            ".mlp.down_proj.weight": (each, *mlp[::-1]),
            ".mlp.up_proj.weight": (each, *mlp),
            "model.norm.weight": (self.width,),
            "angles": (2, self.length, self.head // 2),
            **({} if self.tied else {"lm_head.weight": (self.vocabulary, self.width)}),
        }

    def config(self) -> Any:
        """As transformers wants it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.hidden, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.key_heads, max_position_embeddings=self.length,
            rms_norm_eps=1e-5, tie_word_embeddings=self.tied, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip


def read_weights(content: bytes) -> tuple[Shape, dict[str, Tensor], bytes]:
    """The shape, the weights by transformers' names, and the bytes that follow them."""
    shape = Shape.read(content)
    weights: dict[str, Tensor] = {}
    place = struct.calcsize("<7i")
    for name, dims in shape.blocks.items():
        count = torch.Size(dims).numel()
        block = torch.frombuffer(bytearray(content[place : place + 4 * count]), dtype=torch.float32).reshape(dims)
        place += 4 * count
        if name.startswith("."):
            for layer, value in enumerate(block):
                turned = name.endswith(("q_proj.weight", "k_proj.weight"))
                weights[f"model.layers.{layer}{name}"] = _halves(value, shape.head) if turned else value.clone()
        elif name != "angles":  # transformers computes them
            weights[name] = block
    return shape, weights, content[place:]


def _halves(weight: Tensor, head: int) -> Tensor:
    """llama2.c rotates neighbours (0, 1), (2, 3), ... of a head's numbers; transformers the first half against the second."""
    return weight.reshape(-1, head // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_tokens(content: bytes) -> list[tuple[str, float]]:
    """Every token with its score, as SentencePiece writes it. Older files have characters where bytes are: those go by place."""
    place, found = struct.calcsize("<i"), []  # the first number is the length of the longest token
    while place < len(content):
        score, length = struct.unpack_from("<fi", content, place)
        place += struct.calcsize("<fi")
        found.append((content[place : place + length].decode().replace(" ", _SPACE), score))
        place += length
    special = [UNKNOWN, BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(len(_BYTES)))]
    return [(name, score) for name, (_, score) in zip(special, found, strict=False)] + found[len(special) :]


def make_tokenizer(tokens: list[tuple[str, float]], longest: int) -> Any:
    """Byte-pair encoding that joins, as llama2.c does, the neighbours that make the token of the highest score."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, (token, _) in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocabulary, _merges(tokens, vocabulary), unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    inner.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, pad_token=UNKNOWN, model_max_length=longest
    )


def _merges(tokens: list[tuple[str, float]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the highest score first."""
    ways = []
    for token, score in tokens[_BYTES.stop :]:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ways += [(-score, left, right) for left, right in halves if left in vocabulary and right in vocabulary]
    return [(left, right) for _, left, right in sorted(ways, key=lambda way: way[0])]
