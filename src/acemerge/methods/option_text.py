"""An option of a method in words: name, default, what is allowed and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

Fact = float | int | str | bool


@dataclass(frozen=True)
class DescribedOption:
    """One option as a person reads it."""

    name: str
    default: Fact
    allowed: str
    meaning: str


def describe_option(name: str, hint: Any, default: Fact) -> DescribedOption:
    """From its type hint, with what pydantic knows of it."""
    schema = TypeAdapter(hint).json_schema()
    return DescribedOption(name, default, _allowed(schema), schema.get("description", ""))


def _allowed(schema: Mapping[str, Any]) -> str:
    """The values a JSON schema admits, in words.

    >>> _allowed({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
    'a number > 0 and <= 1'
    >>> _allowed({"type": "array", "items": {"type": "number"}})
    'a list, each entry a number'
    """
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    if schema["type"] == "array":
        return f"a list, each entry {_allowed(schema['items'])}"
    names = {"number": "a number", "integer": "a whole number", "boolean": "true or false", "string": "text"}
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = " and ".join(f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema)
    return f"{names[schema['type']]} {bounds}".strip()
