"""What can become of a tensor of the base: merged by the method, averaged, kept at the base's value, or copied as no weight.

A tensor that is stored under two names has no fate of its own under the second: see `Plan.omitted`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from acemerge.methods import Options
from acemerge.numerics.frame import Sides
from acemerge.planning.reasons import Reason
from acemerge.planning.rows import LinedUp
from acemerge.planning.view import View

Action = Literal["merged", "averaged", "kept", "copied"]
Setting = tuple[str, Options]
"""A method's name and its options."""


@dataclass(frozen=True)
class ExpertTensor:
    """Where one expert keeps its version of a tensor; without a name, the expert is an adapter that leaves it as it is."""

    expert: int
    name: str | None
    rows: LinedUp | None = None
    """How its rows are put in the base's order, if they are not in it."""


@dataclass(frozen=True)
class Core:
    """Adapters are merged in their common low-rank core, on these sides; the sum of their ranks."""

    sides: Sides
    rank: int


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of a tensor, and why."""

    action: ClassVar[Action]
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Computed(Fate):
    """A method makes it from the experts' values."""

    method: str
    options: Options
    view: View
    experts: tuple[ExpertTensor, ...]
    core: Core | None = None
    """None: merged as whole matrices."""
    in_pieces: bool = False
    """The method is elementwise, and the experts store the tensor whole: on a CPU it is merged a piece at a time."""

    @property
    def setting(self) -> Setting:
        """By which statistics are found."""
        return self.method, self.options


@dataclass(frozen=True, kw_only=True)
class Merged(Computed):
    """By the method that was asked for."""

    action: ClassVar[Action] = "merged"


@dataclass(frozen=True, kw_only=True)
class Averaged(Computed):
    """Not what the method is for."""

    action: ClassVar[Action] = "averaged"


@dataclass(frozen=True, kw_only=True)
class Kept(Fate):
    """The base's value."""

    action: ClassVar[Action] = "kept"


@dataclass(frozen=True, kw_only=True)
class Copied(Fate):
    """The base's value, of what is no weight."""

    action: ClassVar[Action] = "copied"


def experts_of(fate: Fate) -> tuple[ExpertTensor, ...]:
    """Those that take part."""
    return fate.experts if isinstance(fate, Computed) else ()
