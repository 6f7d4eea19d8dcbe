"""A model in llama2.c's files, with few weights and few tokens, and texts of its words."""

from __future__ import annotations

import random
import struct

import torch
from torch import Tensor

from acemerge.bench.data.task import Rows, Splits, split
from acemerge.bench.domains.llama2_c import Shape

LETTERS = "abcdefgh"
WORDS = ["ab", "cd", "ef", "gh", "abcd", "efgh"]


def random_blocks(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Weights by transformers' names, all layers of a kind together, as the file has them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if "norm" in name else 0.0) + 0.3 * torch.randn(dims, generator=generator)
        for name, dims in shape.blocks.items()
    }


def weights_file(shape: Shape, blocks: dict[str, Tensor]) -> bytes:
    """Seven integers and all weights."""
    vocabulary = shape.vocabulary if shape.tied else -shape.vocabulary
    sizes = (shape.width, shape.hidden, shape.layers, shape.heads, shape.key_heads, vocabulary, shape.length)
    return struct.pack("<7i", *sizes) + b"".join(block.numpy().tobytes() for block in blocks.values())


def tokens_file(pieces: list[tuple[str, float]]) -> bytes:
    """Special tokens, bytes (as characters), then these; a space is a space."""
    special = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *((chr(byte), 0.0) for byte in range(256))]
    encoded = [(piece.encode(), score) for piece, score in [*special, *pieces]]
    entries = (struct.pack("<fi", score, len(piece)) + piece for piece, score in encoded)
    return struct.pack("<i", max(len(piece) for piece, _ in encoded)) + b"".join(entries)


def pieces() -> list[tuple[str, float]]:
    """What the words are made of, the longer the later, as training on them would find it; single letters are scored last."""
    joined = [*WORDS, *(f" {word}" for word in WORDS), " a", " e", "bc"]
    return [*((piece, -float(i)) for i, piece in enumerate(joined)), *((c, -100.0 - i) for i, c in enumerate(LETTERS + " "))]


SHAPE = Shape(width=16, hidden=24, layers=2, heads=4, key_heads=2, vocabulary=259 + len(pieces()), length=32, tied=True)


def package_file() -> bytes:
    """Weights, then tokens, as the package of the bench has them."""
    return weights_file(SHAPE, random_blocks(SHAPE)) + tokens_file(pieces())


def load_sentences(first: str, second: str) -> Splits:
    """A kind of text: two words in turn, with another one now and then."""
    generator = random.Random(first)
    texts = []
    for _ in range(300):
        words = [first, second] * generator.randrange(2, 5)
        words[generator.randrange(len(words))] = generator.choice(WORDS)
        texts.append(" ".join([generator.choice(WORDS), *words, generator.choice(WORDS)]))
    return split(Rows(texts, [0] * len(texts)), test_rows=60, validation_rows=40)
