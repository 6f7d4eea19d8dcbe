"""The points of a grid: every combination of the settings that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from acemerge.errors import InputError
from acemerge.methods import Method, Options
from acemerge.planning.plan import Plan
from acemerge.recipe.recipe import Recipe

_LONGEST_NAME = 200  # bytes; file systems take 255, and the folder of unfinished work has a longer name


@dataclass(frozen=True)
class Point:
    """One combination, and the folder that its model goes to."""

    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The settings in words.

        >>> Point({"epsilon": 1e-05, "refine": True, "weights": (0.7, 0.3)}).name
        'epsilon=1e-05,refine=true,weights=[0.7,0.3]'
        """
        return ",".join(f"{name}={_in_words(value)}" for name, value in self.settings.items())

    def recipe(self, common: Recipe) -> Recipe:
        """The recipe of this point's merge."""
        return common.model_copy(update={"options": {**common.options, **self.settings}})


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_in_words, value))}]"
    return str(value)


def make_points(method: Method, settings: Mapping[str, Sequence[Any]]) -> list[Point]:
    """The product of the settings, the last varying fastest; a value that the method does not allow is refused."""
    if not settings:
        raise InputError("a sweep varies something: give at least one --set KEY=VALUE,VALUE,...")
    for name, values in settings.items():
        if any(isinstance(value, str) and ".." in value for value in values):
            raise InputError(f"--set {name}={values[0]}: a range is for --search N, which chooses from it; a grid needs values")
    allowed = {name: allowed_values(method, name, values) for name, values in settings.items()}
    points = [Point(dict(zip(allowed, values, strict=True))) for values in product(*allowed.values())]
    for point in points:
        if len(point.name.encode()) > _LONGEST_NAME or "/" in point.name:
            raise InputError(f"--set: '{point.name}' cannot be a folder's name; put what does not vary into a recipe's options")
    return points


def allowed_values(method: Method, name: str, values: Sequence[Any]) -> list[Any]:
    """As the method's options hold them: 1 and 1.0 are the same number."""
    if not values:
        raise InputError(f"--set {name}=: give at least one value, such as --set {name}=VALUE,VALUE")
    allowed = [asdict(method.options({name: value}))[name] for value in values]
    for position, value in enumerate(allowed):
        if value in allowed[:position]:
            raise InputError(f"--set {name}: the value {_in_words(value)} is given twice; give every value once")
    return allowed


def check_distinct(points: Sequence[Point], plans: Sequence[Plan]) -> None:
    """Refuse two points that come to the same merge, such as epsilon=paper and the number that stands for."""
    names: dict[Options, str] = {}
    for point, plan in zip(points, plans, strict=True):
        if (same := names.setdefault(plan.options, point.name)) != point.name:
            raise InputError(f"--set: {same} and {point.name} are the same merge of these models; give one of them")
