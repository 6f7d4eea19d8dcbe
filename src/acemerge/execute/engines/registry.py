"""What an engine is, and which there are: one file each in this package, found by its name and imported when it is asked for."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from acemerge.errors import InputError, did_you_mean
from acemerge.execute.opening import Scene
from acemerge.execute.passes import Gathered
from acemerge.output.staging import Staging
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress
from acemerge.recipe.run_options import RunOptions


@dataclass(frozen=True)
class Work:
    """Plans that differ in their method's options alone, each with the folder that it is staged in."""

    plans: Sequence[Plan]
    stagings: Sequence[Staging]
    gathered: Mapping[int, Gathered]
    """What the methods' passes found, for each plan with something left to do."""
    shards: Mapping[str, Sequence[int]]
    """What is left to do: the shards, and of which plans."""


class Engine(Protocol):
    """Carries out shards. Each is written for all plans at once and then told to their stagings."""

    @property
    def device(self) -> torch.device:
        """Where passes over the whole model compute."""

    def at_once(self, plan: Plan) -> int:
        """How many shards may be under way at a time."""

    def problems(self, plans: Sequence[Plan]) -> list[str]:
        """What is lacking for these, besides room on the disk."""

    def run(self, work: Work, progress: Progress) -> None:
        """Do it all."""


class EngineFile(Protocol):
    """What a file of this package offers."""

    def check(self, run: RunOptions) -> None:
        """Refuse, before any work, an engine that is not installed or does not go with the other options."""

    def open_engine(self, scene: Scene) -> AbstractContextManager[Engine]:
        """The engine, for one run."""


def engine_names() -> list[str]:
    """All of them."""
    package = importlib.import_module(__package__)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "registry")


def get_engine(name: str) -> EngineFile:
    """The engine of that name."""
    if name not in (names := engine_names()):
        raise InputError(f"--engine {name}: there is no such engine; {did_you_mean(name, names)}")
    return cast(EngineFile, importlib.import_module(f"{__package__}.{name}"))
