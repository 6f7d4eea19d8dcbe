"""Whether a recipe asks for data, and whether its methods use any."""

from __future__ import annotations

from collections.abc import Sequence

from acemerge.adapters.settings import EXPAND
from acemerge.calibration.registry import measurement_of
from acemerge.checkpoints.folder import Checkpoint
from acemerge.errors import InputError, PreflightError
from acemerge.methods import all_methods, get_method
from acemerge.methods.registry import needs_data
from acemerge.recipe.recipe import Recipe

WHAT_TO_GIVE = (
    "one of the bench's suites, such as text-8, or a folder with a file per expert, <expert>.jsonl or <expert>.safetensors"
)


def check_data_asked(recipe: Recipe) -> None:
    """Methods that use data refuse to do without, and the others to take it: nothing is data-free that is not.

    A method for which nothing is measured is found out here too, before any work.
    """
    using = methods_using_data(recipe)
    if using and recipe.data is None:
        raise InputError(f"{needs_data(using[0])}; pass --data with {WHAT_TO_GIVE}")
    for name in using:
        measurement_of(name)
    if not using and recipe.data is not None:
        known = ", ".join(method.name for method in all_methods() if method.uses == "data")
        raise InputError(
            f"--data {recipe.data}: method '{recipe.method}' uses the weights alone; leave --data out, or choose one of {known}"
        )


def check_experts_can_run(recipe: Recipe, experts: Sequence[Checkpoint]) -> None:
    """An adapter is no model that could be run."""
    name = methods_using_data(recipe)[0]
    adapters = [expert for expert in experts if expert.changes is not None]
    if adapters:
        raise PreflightError(
            f"method '{name}' runs every expert's model on data, and expert {expert.where} is an adapter. {EXPAND}"
            for expert in adapters
        )


def methods_using_data(recipe: Recipe) -> list[str]:
    """The recipe's methods that do, those of its rules included."""
    named = [recipe.method, *(rule.method for rule in recipe.tensors if rule.method)]
    return [name for name in named if get_method(name).uses == "data"]
