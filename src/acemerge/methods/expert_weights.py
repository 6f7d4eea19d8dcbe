"""One weight per expert as an option: a list in a recipe or in Python, `0.7,0.3` on the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from acemerge.errors import InputError


def split_text(given: Any) -> Any:
    """Text with numbers and commas as a list, one number as a list of one; anything else as it is.

    >>> split_text("0.7, 0.3")
    ['0.7', ' 0.3']
    """
    if isinstance(given, str) and given != "equal":
        return given.strip("[]() ").split(",")
    return [given] if isinstance(given, int | float) else given


def split_list(given: Any) -> Any:
    """Text with commas as a list; anything else, one number too, as it is.

    >>> split_list("0.2,0.5"), split_list(0.2)
    (['0.2', '0.5'], 0.2)
    """
    return given.strip("[]() ").split(",") if isinstance(given, str) and "," in given else given


ExpertWeights = Annotated[
    Literal["equal"] | tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    BeforeValidator(split_text),
    Field(description="one weight per expert, in the experts' order, such as 0.7,0.3; 'equal': 1 each"),
]
NonNegativeWeights = Annotated[
    Literal["equal"] | tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...],
    BeforeValidator(split_text),
    Field(description="one weight per expert, in the experts' order, such as 0.7,0.3; 'equal': 1 each"),
]


Each = Sequence[float] | float


def each_expert(value: Each, experts: int) -> tuple[float, ...]:
    """A number for each of the experts: one for all, or one each.

    >>> each_expert(0.2, 2), each_expert((0.2, 0.5), 2)
    ((0.2, 0.2), (0.2, 0.5))
    """
    return (float(value),) * experts if isinstance(value, int | float) else tuple(value)


def check_each(name: str, value: Each, experts: int) -> None:
    """Refuse numbers that are neither one for all experts nor one per expert."""
    if not isinstance(value, int | float) and len(value) != experts:
        raise InputError(
            f"{name}={list(value)} are {len(value)} numbers for {experts} experts; give one for all, or one per expert"
        )


def check_count(weights: Literal["equal"] | tuple[float, ...], experts: int, name: str = "weights") -> None:
    """Refuse weights that are not one per expert."""
    if weights != "equal" and len(weights) != experts:
        raise InputError(f"{name}={list(weights)} are {len(weights)} numbers for {experts} experts; give one per expert")


def refuse_zero_sum(method: str, weights: Literal["equal"] | tuple[float, ...], fix: str = "give other weights") -> None:
    """Refuse weights that cannot be divided by their sum."""
    # The sum of decimal fractions that cancel, such as 0.1 + 0.2 - 0.3, is not exactly 0 in floating point.
    if weights != "equal" and abs(math.fsum(weights)) <= 1e-9 * math.fsum(map(abs, weights)):
        raise InputError(f"method '{method}': weights={list(weights)} sum to 0 and cannot be normalised; {fix}")


def weight_each(
    weights: Literal["equal"] | tuple[float, ...], experts: Sequence[str], tensor: str, name: str = "weights"
) -> tuple[float, ...]:
    """The weights in the order of this tensor's experts; refused unless there is exactly one for each."""
    if weights == "equal":
        return (1.0,) * len(experts)
    if len(weights) != len(experts):
        given = f"{name}={list(weights)} are {len(weights)} numbers for {len(experts)} experts ({', '.join(experts)})"
        raise InputError(
            f"tensor '{tensor}': {given}; give one per expert (a tensor that some experts lack needs a recipe rule with "
            f"{name} of its own)"
        )
    return tuple(weights)
