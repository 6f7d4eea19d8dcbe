"""The suites by name: which tasks, and which domain they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from acemerge.bench.domain import Domain
from acemerge.bench.task import Task
from acemerge.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Suite:
    """Tasks whose experts are merged together."""

    name: str
    domain: Domain
    tasks: tuple[Task, ...]


def _text(name: str, count: int) -> Suite:
    from acemerge.bench.text import TextDomain
    from acemerge.bench.text_tasks import TASKS

    return Suite(name, TextDomain(), TASKS[:count])


def _gpt2(name: str, count: int) -> Suite:
    from acemerge.bench.gpt2 import TASKS, Gpt2Domain

    return Suite(name, Gpt2Domain(), TASKS[:count])


def _vision(name: str, count: int) -> Suite:
    from acemerge.bench.vision import VisionDomain
    from acemerge.bench.vision_tasks import TASKS

    return Suite(name, VisionDomain(), TASKS[:count])


_SUITES: dict[str, tuple[Callable[[str, int], Suite], int]] = {
    "text-8": (_text, 8),
    "text-14": (_text, 14),
    "gpt2-6": (_gpt2, 6),
    "vision-8": (_vision, 8),
    "vision-14": (_vision, 14),
    "vision-20": (_vision, 20),
}


def get_suite(name: str) -> Suite:
    """The suite of that name."""
    if name not in _SUITES:
        raise InputError(f"there is no suite '{name}': {did_you_mean(name, _SUITES)}")
    make, count = _SUITES[name]
    return make(name, count)
