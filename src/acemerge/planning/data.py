"""What a plan needs to know of the data that some methods use. `calibration` has it; the plan is handed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from acemerge.methods import Method
from acemerge.planning.fates import Action, ExpertTensor
from acemerge.planning.reasons import Reason
from acemerge.planning.tensor import PlannedTensor
from acemerge.recipe.recipe import Recipe


class PlannedData(Protocol):
    """Which data it is."""

    @property
    def about(self) -> str:
        """For people; without a local path."""

    @property
    def record(self) -> dict[str, Any]:
        """The same for the manifest, with what tells it from other data of that name."""


class ExpertLayers(Protocol):
    """What the modules of the experts' models say about their tensors, for methods that go by layers."""

    def fate(self, method: Method, sources: Sequence[ExpertTensor]) -> tuple[Action, Reason]:
        """Merged, averaged or kept, of a tensor that experts have, and why."""

    def stored_in_out(self, sources: Sequence[ExpertTensor]) -> bool:
        """Of a linear layer's weight, whether the files hold it [in, out]."""

    def problems(self, recipe: Recipe, tensors: Sequence[PlannedTensor]) -> list[str]:
        """What the methods that go by layers cannot do."""
