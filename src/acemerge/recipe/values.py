"""An option's value that is not the same everywhere: by layer, by a tensor's name, or for each expert.

    0.5                                             everywhere
    {by_layer: [0, 0.5, 1]}                         0 in the first layer, 0.5 half way, 1 in the last; 0:0.5:1 on a command line
    [{match: '*mlp*', value: 0.3}, {value: 1}]      the first whose pattern covers the tensor's name
    {math: 0.7, code: 0.3}                          one for each expert

A value inside of these may be one of these again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from acemerge.errors import InputError, did_you_mean

BY_LAYER = "by_layer"
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_GRADIENT = re.compile(rf"{_NUMBER}(:{_NUMBER})+")


@dataclass(frozen=True)
class Place:
    """Where a value is asked for."""

    tensor: str
    depth: float
    """0 in the first layer and outside of layers, 1 in the last."""


def varies(value: Any) -> bool:
    """Whether it is more than one plain value."""
    return isinstance(value, Mapping) or is_list_of_rules(value)


def values_at(options: Mapping[str, Any], place: Place, experts: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """The options of one tensor, which these experts have; `known` are all of the recipe's, in order."""
    return {name: _value_at(name, value, place, experts, known) for name, value in options.items()}


def _value_at(option: str, value: Any, place: Place, experts: Sequence[str], known: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        if BY_LAYER in value:
            return between(_stops(option, value), place.depth)
        return _for_each(option, value, place, experts, known)
    if is_list_of_rules(value):
        inner = _first_that_matches(option, value, place)
        return _value_at(option, inner, place, experts, known)
    return value


def between(stops: Sequence[float], depth: float) -> float:
    """Linear between stops at equal distances.

    >>> between([0, 0.5, 1], 0.25), between([0.2], 0.7)
    (0.25, 0.2)
    """
    scaled = depth * (len(stops) - 1)
    before = min(int(scaled), len(stops) - 1)
    after = min(before + 1, len(stops) - 1)
    share = scaled - before
    return (1 - share) * stops[before] + share * stops[after]


def _stops(option: str, value: Mapping[str, Any]) -> list[float]:
    stops = value[BY_LAYER]
    numbers = isinstance(stops, list) and stops and all(isinstance(stop, int | float) and stop is not True for stop in stops)
    if not numbers or len(value) > 1:
        raise InputError(f"option '{option}': write values by layer as {{{BY_LAYER}: [0, 0.5, 1]}}, numbers only; given: {value}")
    return [float(stop) for stop in stops]


def _for_each(option: str, value: Mapping[str, Any], place: Place, experts: Sequence[str], known: Sequence[str]) -> list[Any]:
    for name in value:
        if name not in known:
            raise InputError(
                f"option '{option}' has a value for '{name}', but there is no such expert: {did_you_mean(str(name), known)}"
            )
    for name in known:
        if name not in value:
            raise InputError(f"option '{option}' has values for single experts, but none for '{name}'; give one for each")
    return [_value_at(option, value[name], place, experts, known) for name in experts]


def is_list_of_rules(value: Any) -> bool:
    """Whether it is a value by name."""
    return isinstance(value, list) and bool(value) and all(isinstance(rule, Mapping) for rule in value)


def _first_that_matches(option: str, rules: Sequence[Mapping[str, Any]], place: Place) -> Any:
    for rule in rules:
        if "value" not in rule or not rule.keys() <= {"match", "value"}:
            raise InputError(f"option '{option}': write its rules as {{match: PATTERN, value: VALUE}}; given: {dict(rule)}")
        if fnmatchcase(place.tensor, rule.get("match", "*")):
            return rule["value"]
    raise InputError(
        f"option '{option}' has no value for tensor '{place.tensor}': none of its patterns covers it; end with {{value: VALUE}}"
    )


# --- as text -----------------------------------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    """As a command line takes it.

    >>> as_text({"by_layer": [0, 0.5, 1]}), as_text({"a": 0.5, "b": 1})
    ('0:0.5:1', '{"a": 0.5, "b": 1}')
    """
    if isinstance(value, Mapping) and value.keys() == {BY_LAYER}:
        return ":".join(f"{stop:g}" for stop in value[BY_LAYER])
    return json.dumps(value) if varies(value) else str(value)


def from_text(text: str) -> Any:
    """The value that a command line gives, if it is one that varies; otherwise None.

    >>> from_text("0:0.5:1"), from_text('{"a": 0.5}'), from_text("0.5")
    ({'by_layer': [0.0, 0.5, 1.0]}, {'a': 0.5}, None)
    """
    if _GRADIENT.fullmatch(text):
        return {BY_LAYER: [float(stop) for stop in text.split(":")]}
    if text.startswith(("{", "[{")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise InputError(f"{text}: cannot be read as JSON: {error}") from None
    return None
