"""What points are compared with: the scores of the base, of each expert and of plain averaging, each measured once.

By rows of each expert's task it is the experts, each on its own, and plain averaging.

A model that cannot be scored leaves a row that says so; none of them is ever the best, and none is kept.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acemerge.errors import InputError, disk_failed, first_line, printable
from acemerge.execute.pipeline import Executor
from acemerge.output.existing import holds_merge
from acemerge.output.staging import withdraw
from acemerge.planning.plan import Plan
from acemerge.recipe.recipe import Recipe
from acemerge.sweeps.evaluation import Evaluate, checked_scores, describe_evaluation
from acemerge.sweeps.row_scores import RowScores
from acemerge.sweeps.table import Reference, Table

_AVERAGED = "reference,average"


@dataclass(frozen=True)
class References:
    """The references of a sweep; `table` says which are measured."""

    output: Path
    plans: Sequence[Plan]
    table: Table
    executor: Executor
    evaluate: Evaluate

    def score_inputs(self) -> None:
        """The base and the experts, in the folders where they are; an adapter is its own folder."""
        sources, hashes = self.executor.scene.sources, self.executor.hashes.all()
        if isinstance(self.evaluate, RowScores):  # each expert knows its own task's rows only
            if not self._is_known("experts", digest := _digest(hashes)):
                self._score("experts", digest, self.evaluate.of_experts)
            return
        given = [sources.base, *sources.experts]
        for number, (source, name) in enumerate(zip(given, sources.names, strict=True)):
            row = f"expert {name}" if number else "base"
            digest = _digest(hashes[name])
            if source.adapter is not None:
                self._note(
                    row, Reference(digest=digest, evaluation=None, failure="a model with an adapter has no folder of its own")
                )
            elif not self._is_known(row, digest):
                self._score(row, digest, partial(self.evaluate, source.path, {}))

    def score_average(self, recipe: Recipe) -> None:
        """Plain averaging, in a folder that is removed afterwards; not if a point is that already."""
        folder = self.output / _AVERAGED
        averaging: dict[str, Any] = {"method": "average", "options": {}, "data": None, "tensors": [], "slices": []}
        try:
            plan = self.executor.scene.plans([recipe.model_copy(update=averaging)])[0]
        except InputError as error:
            if disk_failed(error):
                raise
            self._note("average", Reference(digest="", evaluation=None, failure=first_line(error)))
            return
        if any(point.method.name == "average" and point.options == plan.options for point in self.plans):
            self.table.references.pop("average", None)
            self.table.write(self.output)
            return
        if not self._is_known("average", plan.digest):
            if not holds_merge(folder, plan, self.executor.hashes.all()):
                withdraw(folder)
                self.executor.merge([plan], [folder])
            self._score("average", plan.digest, partial(self.evaluate, folder, {}))
        withdraw(folder)

    def _is_known(self, row: str, digest: str) -> bool:
        """A failure too: another command, function or model asks again."""
        known = self.table.references.get(row)
        return known is not None and known.digest == digest and known.evaluation == describe_evaluation(self.evaluate)

    def _score(self, row: str, digest: str, score: Callable[[], Mapping[str, float] | float]) -> None:
        evaluation = describe_evaluation(self.evaluate)
        try:
            scores = checked_scores(score(), f"the evaluation of {row}")
        except Exception as error:  # whatever a function or a command of the user's meets there: a row says so
            if disk_failed(error):  # which is not the model's fault, and would be noted for good
                raise
            told = f"{type(error).__name__}: {first_line(error)}"
            self._note(row, Reference(digest=digest, evaluation=evaluation, failure=told))
        else:
            self._note(row, Reference(digest=digest, evaluation=evaluation, scores=scores))

    def _note(self, row: str, reference: Reference) -> None:
        self.table.references[row] = reference
        self.table.write(self.output)
        if reference.failure and not self.executor.scene.run.quiet:
            print(printable(f"reference {row}: not scored, {reference.failure}"), file=sys.stderr, flush=True)


def score_references(references: References | None, recipe: Recipe) -> None:
    """All of them, as far as they are not."""
    if references:
        references.score_inputs()
        references.score_average(recipe)


def _digest(of: Any) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True, default=dict).encode()).hexdigest()
