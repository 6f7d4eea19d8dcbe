"""What a search may choose from: for each option a range of numbers, or a list of values as a grid has it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from acemerge.errors import InputError
from acemerge.methods import Method
from acemerge.sweeps.points import allowed_values

_RANGE = re.compile(r"(?P<low>.+?)\.\.(?P<high>.+?)(?P<log>:log)?")
_DIGITS = 3
"""Of a number that is chosen: more would not show in a score, and make long names."""


@dataclass(frozen=True)
class Range:
    """All numbers from one to another; whole ones, if the option has whole numbers only."""

    low: float
    high: float
    log: bool = False
    """Whether a factor counts, and not a difference."""
    whole: bool = False
    each: int = 0
    """How many numbers are chosen, one for each expert; 0: one number, which is the option's value."""

    def rounded(self, value: float) -> float | int:
        """A value that can be read.

        >>> Range(1e-6, 1e-2, log=True).rounded(0.000123456)
        0.000123
        """
        if self.whole:
            return round(value)
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


Space = Mapping[str, Range | list[Any]]


def is_range(values: Any) -> bool:
    """Whether a setting is a range, `LOW..HIGH` or `LOW..HIGH:log`, alone or as the one value of a list."""
    text = values[0] if isinstance(values, list | tuple) and len(values) == 1 else values
    return isinstance(text, str) and _RANGE.fullmatch(text) is not None


def make_space(method: Method, settings: Mapping[str, Sequence[Any] | str], experts: int) -> Space:
    """Every option with what the method allows of it; a range of an option with a number per expert is one for each of them."""
    if not settings:
        raise InputError("a search varies something: give at least one --set KEY=LOW..HIGH or --set KEY=VALUE,VALUE,...")
    return {
        name: _range(method, name, values, experts) if is_range(values) else _choices(method, name, values)
        for name, values in settings.items()
    }


def _choices(method: Method, name: str, values: Sequence[Any] | str) -> list[Any]:
    allowed = allowed_values(method, name, [values] if isinstance(values, str) else values)
    return sorted_numbers(allowed) or allowed


def sorted_numbers(values: Sequence[Any]) -> list[float]:
    """In order, if they are several numbers; else nothing.

    >>> sorted_numbers([0.5, 0.1]), sorted_numbers([True, False])
    ([0.1, 0.5], [])
    """
    numbers = len(values) > 1 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return sorted(values) if numbers else []


def _range(method: Method, name: str, values: Sequence[Any] | str, experts: int) -> Range:
    text = values if isinstance(values, str) else values[0]
    match = _RANGE.fullmatch(text)
    assert match is not None
    try:
        ends = [float(match[end]) for end in ("low", "high")]
    except ValueError:
        raise InputError(f"--set {name}={text}: write a range as LOW..HIGH or LOW..HIGH:log, such as 1e-6..1e-2:log") from None
    (low, each), (high, _) = (_as_held(method, name, end) for end in ends)
    if not low < high or not math.isfinite(high - low):
        raise InputError(f"--set {name}={text}: the first end must be smaller than the second")
    if match["log"] and low <= 0:
        raise InputError(f"--set {name}={text}: a logarithmic range is of positive numbers")
    return Range(low, high, bool(match["log"]), isinstance(low, int), experts if each else 0)


def _as_held(method: Method, name: str, value: float) -> tuple[float | int, bool]:
    """As the method's options hold it, and whether they hold one for each expert; refused, if they do not allow it."""
    whole = int(value) if value.is_integer() else value
    held = asdict(method.options({name: whole}))[name]
    if each := isinstance(held, tuple) and len(held) == 1:
        held = held[0]
    if isinstance(held, bool) or not isinstance(held, int | float):
        raise InputError(f"--set {name}: is no number, so it has no range; give values, --set {name}=VALUE,VALUE")
    return held, each
