"""A suite of the bench's own kind that trains in seconds and downloads nothing: a tiny BERT, and sentences of random words."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acemerge.bench.data.task import Rows, Splits, TrainedTask, split
from acemerge.bench.domains.text import PreparedTexts, TextDomain
from acemerge.bench.suites.registry import Suite

WORDS = 24


class TinyDomain(TextDomain):
    """The text domain with a random base of few layers; rows are lists of word numbers already."""

    name = "tiny"

    def __init__(self, layers: int = 2) -> None:
        self.layers = layers

    def write_base(self, folder: Path) -> None:
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=self.layers, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=16,
        )  # fmt: skip
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)

    def save(self, model: nn.Module, folder: Path) -> None:
        saved: Any = model
        saved.save_pretrained(folder)

    def prepare(self, rows: Rows) -> PreparedTexts:
        words = [list(row) for row in rows.inputs]
        return PreparedTexts(words, [[0] * len(row) for row in words], torch.tensor(rows.labels))


def load_which_word(one: int, other: int) -> Splits:
    """Does the sentence hold the one word or the other?"""
    generator = random.Random(one)
    rows: list[tuple[int, ...]] = []
    for index in range(500):
        words = [generator.randrange(12, WORDS) for _ in range(generator.randrange(3, 9))]
        words[generator.randrange(len(words))] = one if index % 2 else other
        rows.append(tuple(words))
    return split(Rows(rows, [index % 2 for index in range(500)]), test_rows=100, validation_rows=40)


def _task(name: str, one: int, other: int) -> TrainedTask:
    return TrainedTask(name, ("other", "one"), partial(load_which_word, one, other), "none", 320, 16, 1e-3, epochs=3)


DOMAIN = TinyDomain()
TASKS = (_task("first", 1, 2), _task("second", 3, 4), _task("third", 5, 6))
SUITE = Suite("tiny-3", DOMAIN, TASKS)
