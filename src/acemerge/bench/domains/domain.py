"""A domain: what differs between kinds of model and data. Training, merging, evaluation and tables are the same for all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from acemerge.bench.data.task import Rows, Task

HEAD = "classifier."
"""How the names of a head's parameters begin, in every domain; `is_of_head` knows them within PEFT's wrapping too."""
_WRAPPED = "base_model.model."
"""What PEFT puts before the names of a model."""


def is_of_head(parameter: str) -> bool:
    """Whether a parameter is a part of the head, by its name.

    >>> is_of_head("classifier.bias"), is_of_head("base_model.model.classifier.modules_to_save.default.bias")
    (True, True)
    """
    return parameter.removeprefix(_WRAPPED).startswith(HEAD)


class Prepared(Protocol):
    """Rows made ready once: tokenised texts, normalised pictures."""

    @property
    def labels(self) -> Tensor:
        """[row], long; numbers for a regression."""

    @property
    def lengths(self) -> Tensor:
        """[row]: rows of like length are evaluated together; all the same for pictures."""

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """What the model takes for these rows."""


class Domain(Protocol):
    """How a model of one kind is loaded and asked."""

    @property
    def name(self) -> str:
        """A folder of the cache is called so."""

    def load(self, folder: Path) -> nn.Module:
        """A model with its head, from a folder of an expert or one that `acemerge task` wrote."""

    def prepare(self, rows: Rows) -> Prepared:
        """Make rows ready."""

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """[row, class]; [row, 1] for a regression; [row, token, class] of a language model, for each next token."""


class TrainableDomain(Domain, Protocol):
    """One whose base and experts are made here."""

    @property
    def training(self) -> Mapping[str, Any]:
        """What makes its experts what they are besides the task's numbers, as JSON reads it back; a change trains them anew."""

    def write_base(self, folder: Path) -> None:
        """Write the pretrained base as an ordinary folder that `acemerge merge` takes. The folder exists and is empty."""

    def new_expert(self, base: Path, task: Task) -> nn.Module:
        """The base with a new head; what needs a gradient is trained. Random numbers are torch's global ones."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """The inverse of `load`: config.json, model.safetensors and whatever else belongs to such a folder."""
