"""The points of a grid: every combination of the settings that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from acemerge.errors import InputError
from acemerge.methods import Method, Options, get_method
from acemerge.planning.plan import Plan
from acemerge.recipe.recipe import Recipe

_LONGEST_NAME = 200  # bytes; file systems take 255, and the folder of unfinished work has a longer name


@dataclass(frozen=True)
class Point:
    """One combination, and the folder that its model goes to."""

    settings: Mapping[str, Any]
    method: str | None = None
    """Where a sweep has several: then the name begins with it."""

    @property
    def name(self) -> str:
        """The settings in words.

        >>> Point({"epsilon": 1e-05, "refine": True, "weights": (0.7, 0.3)}).name
        'epsilon=1e-05,refine=true,weights=[0.7,0.3]'
        >>> Point({"epsilon": 1e-05}, "ace").name
        'ace,epsilon=1e-05'
        """
        settings = [f"{name}={_in_words(value)}" for name, value in self.settings.items()]
        return ",".join([self.method, *settings] if self.method else settings)

    def recipe(self, common: Recipe) -> Recipe:
        """The recipe of this point's merge."""
        return common.model_copy(update={"options": {**common.options, **self.settings}})


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_in_words, value))}]"
    return str(value)


@dataclass(frozen=True)
class Grid:
    """A method, as a recipe has it, and the values of its options."""

    recipe: Recipe
    settings: Mapping[str, Sequence[Any]]


def split_settings(methods: Sequence[str], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each method's own: METHOD.KEY is for that one, KEY for all that have the option. One method alone takes all as they are.

    >>> split_settings(["ace", "average"], {"ace.epsilon": [1e-5], "alpha": [1, 2]})
    [{'epsilon': [1e-05], 'alpha': [1, 2]}, {'alpha': [1, 2]}]
    """
    if len(methods) == 1:
        return [dict(settings)]
    for position, name in enumerate(methods):
        if name in methods[:position]:
            raise InputError(f"-m {name}: is given twice; give every method once, and all its values in --set {name}.KEY=...")
    known = {name: [option.name for option in get_method(name).describe_options()] for name in methods}
    split: dict[str, dict[str, Any]] = {name: {} for name in methods}
    for key, values in settings.items():
        for method, option in _meant(key, known):
            if option in split[method]:
                raise InputError(f"--set {method}.{option}: is given twice, once without its method; give it once")
            split[method][option] = values
    return list(split.values())


def _meant(key: str, known: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """The methods that a key is for, and its name there."""
    prefix, dot, option = key.partition(".")
    if not dot:
        having = [(method, key) for method, options in known.items() if key in options]
        if not having:
            listed = "; ".join(f"{method} has {', '.join(options)}" for method, options in known.items())
            raise InputError(f"--set {key}: none of the methods has this option: {listed}")
        return having
    if prefix not in known:
        raise InputError(f"--set {key}: '{prefix}' is none of the methods given with -m: {', '.join(known)}")
    get_method(prefix).options({option: None} if option not in known[prefix] else {})  # says what it has instead
    return [(prefix, option)]


def make_points(method: Method, settings: Mapping[str, Sequence[Any]], *, named: bool = False) -> list[Point]:
    """The product of the settings, the last varying fastest; a value that the method does not allow is refused.

    Named by the method too, where there are several; such a one may also stand alone, with its defaults.
    """
    if not settings and not named:
        raise InputError("a sweep varies something: give at least one --set KEY=VALUE,VALUE,...")
    for name, values in settings.items():
        if any(isinstance(value, str) and ".." in value for value in values):
            raise InputError(f"--set {name}={values[0]}: a range is for --search N, which chooses from it; a grid needs values")
    allowed = {name: allowed_values(method, name, values) for name, values in settings.items()}
    own = method.name if named else None
    points = [Point(dict(zip(allowed, values, strict=True)), own) for values in product(*allowed.values())]
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
    names: dict[tuple[str, Options], str] = {}
    for point, plan in zip(points, plans, strict=True):
        if (same := names.setdefault((plan.method.name, plan.options), point.name)) != point.name:
            raise InputError(f"--set: {same} and {point.name} are the same merge of these models; give one of them")
