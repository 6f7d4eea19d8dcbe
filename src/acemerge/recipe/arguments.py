"""The arguments of a command line as a recipe; options are written KEY=VALUE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from acemerge.errors import InputError
from acemerge.recipe.mergekit import convert, is_mergekit
from acemerge.recipe.recipe import COMMAND_LINE, DEFAULT_METHOD, Recipe, make_recipe, read_recipe
from acemerge.recipe.values import from_text


def recipe_from(models: list[str], settings: list[str], flags: dict[str, Any]) -> tuple[Recipe, Path]:
    """The recipe that the arguments describe, and the folder its paths are relative to. Flags override a file's fields."""
    options = parse_settings(settings)
    if len(models) == 1 and models[0].endswith((".yaml", ".yml")):
        path = Path(models[0])
        fields, origin = read_recipe(path), models[0]
        if is_mergekit(fields):
            fields = convert(fields, path)
        if not isinstance(fields.get("options") or {}, dict):
            raise InputError(f"{origin}: options: write them as a mapping of names to values")
        relative_to = path.parent
        # The file's options belong to its method.
        same_method = flags.get("method") in (None, fields.get("method", DEFAULT_METHOD))
        options = {**(fields.get("options") or {}), **options} if same_method else options
    elif len(models) == 1:
        raise InputError(f"{models[0]}: give a base and at least one expert, or one recipe file that ends in .yaml")
    else:
        fields, origin, relative_to = {"base": models[0], "experts": models[1:]}, COMMAND_LINE, Path()
    refuse_flags(options)
    return make_recipe({**fields, **flags, "options": options}, origin), relative_to


def refuse_flags(options: Iterable[str]) -> None:
    """What is not an option of a method but a flag of its own."""
    for name in options:
        if name in ("orientation", "fused", "preset", "dtype", "missing", "data", "tokenizer"):
            raise InputError(f"-s {name}: not an option of a method; use --{name}")


def parse_settings(settings: Sequence[str], flag: str = "-s") -> dict[str, Any]:
    """Names and values.

    >>> parse_settings(["epsilon=1e-3", "refine=false"])
    {'epsilon': 0.001, 'refine': False}
    """
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"{flag} {setting}: write it as KEY=VALUE, such as epsilon=1e-5")
        if (name := name.strip()) in options:
            raise InputError(f"{flag} {name}: is given twice; give it once")
        options[name] = parse_value(value.strip())
    return options


def parse_lists(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Names and the values of each; a value that has commas itself is in brackets.

    >>> parse_lists(["epsilon=1e-3,1e-2", "weights=[0.7,0.3],[0.5,0.5]"])
    {'epsilon': [0.001, 0.01], 'weights': ['[0.7,0.3]', '[0.5,0.5]']}
    """
    lists: dict[str, list[Any]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        values = [value.strip() for value in re.split(r",(?![^\[]*\])", text)]
        if not equals or not name:
            raise InputError(f"--set {setting}: write it as KEY=VALUE,VALUE,..., such as epsilon=1e-5,1e-4")
        if "" in values:
            raise InputError(f"--set {setting}: a value is empty; write it as KEY=VALUE,VALUE,..., such as epsilon=1e-5,1e-4")
        if name in lists:
            raise InputError(f"--set {name}: is given twice; write all its values in one, {name}=VALUE,VALUE,...")
        lists[name] = [parse_value(value) for value in values]
    refuse_flags(lists)
    return lists


def weights_text(given: str) -> str:
    """`--weights` as the value of an option.

    >>> weights_text("0.7,0.3"), weights_text("math=0.7,code=0.3")
    ('0.7,0.3', '{"math": 0.7, "code": 0.3}')
    """
    if "=" not in given:
        return given
    named = {}
    for part in given.split(","):
        expert, equals, weight = part.rpartition("=")
        value = parse_value(weight.strip()) if equals else None
        if isinstance(value, str | bool | None) or expert.strip() in named:
            raise InputError(f"--weights {given}: write it as EXPERT=NUMBER,EXPERT=NUMBER, each expert once")
        named[expert.strip()] = value
    return json.dumps(named)


def parse_value(text: str) -> Any:
    """true, false, a decimal number, a value that varies, or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    varying = from_text(text)
    return text if varying is None else varying
