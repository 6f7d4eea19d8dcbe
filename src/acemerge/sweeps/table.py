"""sweep.json: the points of a sweep, their folders and scores. It is also what an interrupted sweep goes on from."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.untrusted import read_bounded
from acemerge.errors import InputError, did_you_mean
from acemerge.output.whole_files import replace_file, staged_name
from acemerge.version import __version__

TABLE = "sweep.json"
_LARGEST_TABLE = 50_000_000  # bytes: tens of thousands of points


class Record(BaseModel):
    """One point."""

    settings: dict[str, Any]
    digest: str
    """Of its plan: recipe, version and inputs."""
    scores: dict[str, float | None] | None = None
    """None until it is evaluated; a score of None is not a number."""
    evaluation: str | None = None
    """What gave them."""
    warnings: int = 0
    """Of its merge; the manifest says which."""
    transient: bool = False
    """Whether its model is there to be evaluated only."""


@dataclass(frozen=True)
class Objective:
    """Which score decides, and whether the largest or the smallest is best; without a name, the first one."""

    score: str | None = None
    largest: bool = True

    def of(self, scores: Mapping[str, float | None]) -> float:
        """Larger is better; what is not a number is worst."""
        name = self.score or next(iter(scores))
        if name not in scores:
            raise InputError(f"the evaluation gave no score '{name}': {did_you_mean(name, scores)}")
        value = scores[name]
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.largest else -value


FIRST_SCORE = Objective()


class SearchRecord(BaseModel):
    """Of points that were chosen one after the other: from what, and in which order."""

    trials: int
    seed: int
    space: dict[str, str]
    tried: list[str] = Field(default_factory=list)
    """Names of points; one may have been proposed twice."""


class Reference(BaseModel):
    """What a model that is no point scores: the base, an expert, or their average."""

    digest: str
    """Of what was scored."""
    evaluation: str | None
    scores: dict[str, float | None] = Field(default_factory=dict)
    failure: str | None = None
    """Why there are none."""


class Table(BaseModel):
    """All points that were ever asked for in this folder, by their folders' names."""

    acemerge: str = __version__
    method: str = ""
    """`several`, where the points' names begin with theirs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the method, for all points alike; of several methods, by their names."""
    models: dict[str, dict[str, int]] = Field(default_factory=dict)
    """The base and the experts: their files and how long those are."""
    best: str | None = None
    search: SearchRecord | None = None
    """None of a grid."""
    references: dict[str, Reference] = Field(default_factory=dict)
    points: dict[str, Record] = Field(default_factory=dict)

    def begin(
        self, folder: Path, names: Sequence[str], method: str, options: Mapping[str, Any], models: Sequence[Checkpoint]
    ) -> None:
        """Note what all points have in common; a folder with other points that have something else in common is refused."""
        sizes = {model.name: {stamp.path.name: stamp.size for stamp in model.stamps} for model in models}
        others = [name for name in self.points if name not in names]
        as_stored = json.loads(json.dumps(dict(options), default=str))
        for what, now in {"method": method, "options": as_stored, "models": sizes}.items():
            if others and getattr(self, what) != now:
                there = f"other {what}" if what == "models" else f"{what} {getattr(self, what)}, not {now}"
                raise InputError(f"{folder}: holds {others[0]} of a sweep with {there}; choose another output")
            setattr(self, what, now)

    def write(self, folder: Path) -> None:
        """In one step: a reader sees the old table or the new."""
        with replace_file(folder / TABLE) as staged:
            staged.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def remove_if_empty(self, folder: Path) -> None:
        """A sweep that failed before anything came of it leaves no folder."""
        if _names_in(folder) <= {TABLE, staged_name(TABLE)} and not any(record.scores for record in self.points.values()):
            shutil.rmtree(folder)

    def best_of(self, names: Sequence[str], objective: Objective) -> str | None:
        """The best of those that have scores; of equal ones the first."""
        scored = [(name, self.points[name].scores) for name in names if name in self.points]
        values = {name: objective.of(scores) for name, scores in scored if scores}
        return max(values, key=lambda name: values[name], default=None)


def read_table(folder: Path) -> Table:
    """An earlier sweep's; an empty one where there is nothing. Any other folder is refused."""
    if not folder.exists() or (folder.is_dir() and _names_in(folder) <= {staged_name(TABLE)}):
        return Table()
    if not (folder / TABLE).is_file():
        raise InputError(f"{folder}: exists and is no sweep's folder ({TABLE} is not in it); choose another output")
    try:
        return Table.model_validate_json(read_bounded(folder / TABLE, _LARGEST_TABLE))
    except (OSError, ValidationError, ValueError):
        raise InputError(f"{folder / TABLE}: cannot be read; choose another output, or move this folder away") from None


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
