"""Why a tensor has its fate: a cause that code can ask for, and the sentence that people read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Why(Enum):
    """Every cause there is, with its words; `{}` stands for what it is about, such as a rule's pattern."""

    METHOD = ""
    """The method is for such tensors: nothing to explain."""
    RULE = "rule '{}'"
    NOT_WEIGHTS = "{} values are not weights"
    CONSTANT = "a constant, not a weight"
    TASK_HEAD = "a task head; each expert's own is in heads/"
    TASK_HEAD_BY_RULE = "rule '{}': a task head; each expert's own is in heads/"
    TASK_HEAD_AVERAGED = "a task head, averaged as asked"
    TASK_HEAD_LEFT = "a task head, left at the base as asked"
    ABSENT = "no expert has it"
    UNCHANGED = "no adapter changes it"
    KEPT_BY_PRESET = "preset '{}' leaves it at the base"
    NOT_LINEAR_BY_PRESET = "preset '{}' does not take it for a linear map"
    NOT_LINEAR = "not a linear map, by its name"
    ROUTER = "a router, which chooses among experts"
    NOT_A_MATRIX = "{}-D, not a matrix"
    VECTOR = "a matrix with one row or column is a vector"
    AFTER_BLOCKS = "after the last block: left at the base"
    BEFORE_BLOCKS = "before the first block"
    UNUSED = "not used by the experts' models"
    NOT_A_LINEAR_LAYER = "not the weight of a linear layer"


@dataclass(frozen=True)
class Reason:
    """A cause, and what it is about.

    >>> str(Reason(Why.RULE, "*.bias"))
    "rule '*.bias'"
    """

    why: Why
    about: str = ""

    def __str__(self) -> str:
        """As people read it; empty if there is nothing to explain."""
        return self.why.value.format(self.about)

    @property
    def is_task_head(self) -> bool:
        """Whether each expert keeps its own beside the output."""
        return self.why in (Why.TASK_HEAD, Why.TASK_HEAD_BY_RULE)
