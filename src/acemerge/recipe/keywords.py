"""The keywords of a call as a recipe and how it is to be run: fields, run options and a method's options side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from acemerge.recipe.recipe import Recipe, make_recipe
from acemerge.recipe.run_options import RunOptions

_OF_RECIPE = frozenset(Recipe.model_fields)
_OF_RUN = frozenset(field.name for field in fields(RunOptions))


def sort_keywords(origin: str, keywords: Mapping[str, Any]) -> tuple[Recipe, RunOptions]:
    """What is neither a recipe's field nor about the run is an option of the method. Quiet unless told otherwise.

    >>> recipe, run = sort_keywords("here", {"base": "a", "experts": ["b"], "threads": 2, "epsilon": 1e-3})
    >>> recipe.options, run.threads
    ({'epsilon': 0.001}, 2)
    """
    of_recipe = {name: value for name, value in keywords.items() if name in _OF_RECIPE}
    of_run = {name: value for name, value in keywords.items() if name in _OF_RUN}
    of_method = {name: value for name, value in keywords.items() if name not in _OF_RECIPE | _OF_RUN}
    recipe = make_recipe({**of_recipe, "options": {**(keywords.get("options") or {}), **of_method}}, origin)
    return recipe, RunOptions(**{"quiet": True, **of_run})
