"""mergekit's methods and their parameters as ours.

A parameter may be given for one model, for a slice or for all; it is a number, a gradient over the layers, or a list of values
by parts of tensors' names. All of these become values of ours (`recipe.values`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from acemerge.checkpoints.untrusted import shortened
from acemerge.recipe.values import BY_LAYER, is_list_of_rules
from acemerge.recipe.yaml_lines import Key

Refuse = Callable[[Key, str], NoReturn]
Base = Literal["apart", "first", "either", "among"]
"""apart: changes of the base are joined. first: it is the first of the models. either: apart if it is given. among: like any."""
_NOTHING = object()


@dataclass(frozen=True)
class Setting:
    """Parameters as they stand in one place of the file."""

    values: Mapping[str, Any]
    key: Key


@dataclass
class Parameters:
    """All that a file says of one slice's parameters, asked for by mergekit's names."""

    method: str
    experts: tuple[str, ...]
    per_model: Mapping[str, Setting]
    globally: Sequence[Setting]
    base_given: bool
    refuse: Refuse
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._asked: set[str] = set()

    def value(self, name: str, default: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
        """One for all models."""
        self._asked.add(name)
        for setting in self.per_model.values():
            if name in setting.values:
                self.refuse((*setting.key, name), f"'{name}' is the same for all models here; give it once, under 'parameters'")
        return self._chain(name, self.globally, default, change)

    def constant(self, name: str, default: Any) -> Any:
        """The same in all layers too."""
        value = self.value(name, default)
        if isinstance(value, dict | list):
            place = next(setting for setting in self.globally if name in setting.values)
            self.refuse((*place.key, name), f"'{name}' must be one value; give the same in all layers")
        return value

    def for_each(self, name: str, default: Any = _NOTHING, change: Callable[[Any], Any] = lambda value: value) -> Any:
        """One for each expert; one for all, if they are plain and equal."""
        self._asked.add(name)
        found = {}
        for expert in self.experts:
            own = [self.per_model[expert]] if expert in self.per_model else []
            without = 0.0 if default is _NOTHING and not own else default  # a slice that leaves it out asks for no value
            given = self._chain(name, [*own, *self.globally], without, change)
            if given is _NOTHING:
                key = self.per_model[expert].key
                self.refuse(key, f"method '{self.method}' needs a '{name}' for '{expert}'")
            found[expert] = given
        first = next(iter(found.values()))
        return first if not isinstance(first, dict | list) and all(value == first for value in found.values()) else found

    def same_for_all(self, name: str, default: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
        """Given for each model in mergekit, one for all here."""
        found = self.for_each(name, default, change)
        if isinstance(found, dict) and BY_LAYER not in found:
            own = next(setting for setting in self.per_model.values() if name in setting.values)
            self.refuse((*own.key, name), f"'{name}' must be the same for all models here")
        return found

    def ignored(self, name: str, why: str) -> None:
        """What makes no difference to the result."""
        self._asked.add(name)
        if any(name in setting.values for setting in (*self.globally, *self.per_model.values())):
            self.note(f"{name}: {why}")

    def check_all_asked(self) -> None:
        """mergekit ignores what it does not know. Here it is refused."""
        for setting in (*self.per_model.values(), *self.globally):
            for name in setting.values:
                if name not in self._asked:
                    known = ", ".join(sorted(self._asked)) or "none"
                    self.refuse((*setting.key, name), f"method '{self.method}' has no parameter '{name}'. Known: {known}")

    def of_the_one(self, name: str, default: Any) -> Any:
        """Of the only model."""
        self._asked.add(name)
        [setting] = self.per_model.values()
        return self._chain(name, [setting, *self.globally], default, lambda value: value)

    def others(self) -> dict[str, Any]:
        """All that were not asked for, under their own names."""
        settings = [*self.per_model.values(), *self.globally]
        names = dict.fromkeys(name for setting in settings for name in setting.values if name not in self._asked)
        per_model = {name for setting in self.per_model.values() for name in setting.values}
        return {name: self.for_each(name) if name in per_model else self.value(name, None) for name in names}

    def _chain(self, name: str, settings: Sequence[Setting], default: Any, change: Callable[[Any], Any]) -> Any:
        """The first place that has a value; patterns that leave tensors open go on to the next."""
        result = default if default is _NOTHING else change(default) if default is not None else None
        for setting in reversed(settings):
            if name in setting.values:
                result = self._value(setting.values[name], (*setting.key, name), change, result)
        return result

    def _changed(self, given: Any, key: Key, change: Callable[[Any], Any]) -> Any:
        try:
            return change(given)
        except (TypeError, ValueError, OverflowError) as error:
            name = next(part for part in reversed(key) if isinstance(part, str))
            bounds = f" {error}" if isinstance(error, _OutOfBoundsError) else ""
            self.refuse(key, f"'{name}' must be a number{bounds}; given: {shortened(repr(given))}")

    def _value(self, given: Any, key: Key, change: Callable[[Any], Any], otherwise: Any) -> Any:
        if isinstance(given, dict):
            given = [given]
        if not isinstance(given, list):
            return self._changed(given, key, change)
        if given and all(isinstance(stop, int | float) and not isinstance(stop, bool) for stop in given):
            return {BY_LAYER: [self._changed(stop, key, change) for stop in given]}  # what changes values is linear
        if not given or not all(map(_is_rule, given)):
            self.refuse(key, f"write it as a number, numbers by layer, or values with filters; given: {given}")
        rules: list[dict[str, Any]] = []
        for index, rule in enumerate(given):
            value = self._value(rule["value"], (*key, index), change, None)
            part = rule.get("filter")
            if part in (None, "*"):
                return [*rules, {"value": value}] if rules else value
            rules.append({"match": f"*{_escaped(str(part))}*", "value": value})
        if otherwise is _NOTHING or otherwise is None:
            self.refuse(key, "its filters leave tensors without a value; end with a value that has no filter")
        return [*rules, *(otherwise if is_list_of_rules(otherwise) else [{"value": otherwise}])]


class _OutOfBoundsError(ValueError):
    """Says between what a number must lie."""


def _is_rule(given: Any) -> bool:
    return isinstance(given, dict) and "value" in given and given.keys() <= {"value", "filter"}


def _escaped(part: str) -> str:
    """A part of a name as a shell-style pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in part)


# --- one method each ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Translation:
    """Of one of mergekit's methods."""

    method: str
    base: Base
    make: Callable[[Parameters], dict[str, Any]]

    def options(self, parameters: Parameters) -> dict[str, Any]:
        """Of ours; refuses what is left over."""
        options = self.make(parameters)
        parameters.check_all_asked()
        return options


_NO_MASKS = "saves memory in mergekit; here there is no mask to store, and the result is the same"


def _number(given: Any) -> float:
    """YAML takes 1e-3, which has no point, for a text."""
    return given if isinstance(given, int | float) else float(given)


def _share(given: Any) -> float:
    share = float(given)
    if not 0 < share <= 1:
        raise _OutOfBoundsError("above 0, at most 1")
    return share


def _weights(parameters: Parameters) -> Any:
    """A weight for each expert, also where it is the same for all."""
    found = parameters.for_each("weight", change=_number)
    return found if isinstance(found, dict) and BY_LAYER not in found else dict.fromkeys(parameters.experts, found)


def _linear(parameters: Parameters) -> dict[str, Any]:
    weights, normalised = _weights(parameters), parameters.constant("normalize", True)
    plain = all(isinstance(weight, int | float) for weight in weights.values())
    if not normalised and not (plain and abs(sum(weights.values()) - 1) < 1e-9):
        _refuse_normalise(parameters, "weights that do not sum to 1 would scale the whole model; drop it, or use task_arithmetic")
    return {"weights": weights}


def _refuse_normalise(parameters: Parameters, why: str) -> NoReturn:
    place = next((setting for setting in parameters.globally if "normalize" in setting.values), parameters.globally[-1])
    parameters.refuse((*place.key, "normalize"), f"normalize: {why}")


def _scale(parameters: Parameters) -> dict[str, Any]:
    parameters.ignored("int8_mask", _NO_MASKS)
    return {"alpha": parameters.value("lambda", 1.0)}


def _task_arithmetic(parameters: Parameters) -> dict[str, Any]:
    parameters.ignored("density", "task_arithmetic does not look at it, in mergekit either")
    parameters.ignored("rescale", "task_arithmetic does not look at it, in mergekit either")
    options = {"weights": _weights(parameters), **_scale(parameters)}
    if parameters.constant("normalize", False):
        _refuse_normalise(parameters, "true is 'merge_method: linear' with the base left out of the models")
    return options


def _elected(parameters: Parameters, normalised: bool) -> dict[str, Any]:
    return {"weights": _weights(parameters), "merge": "mean" if parameters.constant("normalize", normalised) else "sum"}


def _summed(parameters: Parameters) -> dict[str, Any]:
    if parameters.constant("normalize", False):
        _refuse_normalise(parameters, "true divides by the sum of the weights; divide the weights themselves")
    return {"weights": _weights(parameters)}


def _no_rescale(parameters: Parameters) -> None:
    if parameters.constant("rescale", False):
        place = next(setting for setting in parameters.globally if "rescale" in setting.values)
        parameters.refuse((*place.key, "rescale"), f"rescale: {parameters.method} keeps what it trims to as it is; drop it")


def _rescaled(parameters: Parameters) -> dict[str, Any]:
    return {"rescale": "l1" if parameters.constant("rescale", True) else "none"}


def _dropped(density: Any) -> float:
    return round(1 - _share(density), 12)


def _ties(parameters: Parameters) -> dict[str, Any]:
    _no_rescale(parameters)
    keep = parameters.for_each("density", 1.0, _share)
    return {**_elected(parameters, True), "keep": keep, "scope": "tensor", **_scale(parameters)}


def _dare(parameters: Parameters) -> dict[str, Any]:
    return {"drop": parameters.for_each("density", 1.0, _dropped), **_rescaled(parameters), **_scale(parameters)}


def _dare_linear(parameters: Parameters) -> dict[str, Any]:
    return {**_summed(parameters), **_dare(parameters)}


def _dare_ties(parameters: Parameters) -> dict[str, Any]:
    return {**_elected(parameters, False), **_dare(parameters), "keep": 1.0, "scope": "tensor"}


def _outliers(parameters: Parameters) -> dict[str, Any]:
    """mergekit leaves a tensor alone at density 1, outliers too."""
    _no_rescale(parameters)
    keep, outliers = parameters.for_each("density", 1.0, _share), parameters.same_for_all("gamma", 0.01)
    return {"keep": keep, "outliers": 0.0 if keep == 1.0 else outliers, **_scale(parameters)}


def _breadcrumbs(parameters: Parameters) -> dict[str, Any]:
    return {**_summed(parameters), **_outliers(parameters), "scope": "tensor"}


def _breadcrumbs_ties(parameters: Parameters) -> dict[str, Any]:
    return {**_elected(parameters, False), **_outliers(parameters)}


def _magprune(parameters: Parameters) -> dict[str, Any]:
    """mergekit leaves a tensor alone at density 1, whatever epsilon is."""
    drop = parameters.for_each("density", 1.0, _dropped)
    window = parameters.same_for_all("epsilon", 0.15, lambda epsilon: 2 * epsilon)
    return {"drop": drop, "window": 0.0 if drop == 0 else window, **_rescaled(parameters), **_scale(parameters)}


def _della(parameters: Parameters) -> dict[str, Any]:
    if not parameters.constant("normalize", True):
        _refuse_normalise(parameters, "della averages the agreeing entries; drop it, or use della_linear")
    return {"weights": _weights(parameters), **_magprune(parameters)}


def _della_linear(parameters: Parameters) -> dict[str, Any]:
    normalised = bool(parameters.constant("normalize", False))
    return {"weights": _weights(parameters), "normalise": normalised, **_magprune(parameters)}


def _nuslerp(parameters: Parameters) -> dict[str, Any]:
    by_row, flat = parameters.constant("nuslerp_row_wise", False), parameters.constant("nuslerp_flatten", True)
    scope = "tensor" if flat else "column" if by_row else "row"
    return {"weights": _weights(parameters), "scope": scope, "of": "changes" if parameters.base_given else "weights"}


def _multislerp(parameters: Parameters) -> dict[str, Any]:
    parameters.ignored("eps", "of divisions in float32; here they are made in float64")
    normalised = bool(parameters.constant("normalize_weights", True))
    return {"weights": _weights(parameters), "normalise": normalised, "of": "changes" if parameters.base_given else "weights"}


def _karcher(parameters: Parameters) -> dict[str, Any]:
    return {"iterations": parameters.constant("max_iter", 10), "tolerance": parameters.constant("tol", 1e-5)}


def _slerp(parameters: Parameters) -> dict[str, Any]:
    t = parameters.value("t", None)
    if t is None:
        parameters.refuse(parameters.globally[-1].key, "method 'slerp' needs a 't' under 'parameters'")
    return {"t": t}


def _model_stock(parameters: Parameters) -> dict[str, Any]:
    return {"scope": "row" if parameters.constant("filter_wise", False) else "tensor"}


def _sce(parameters: Parameters) -> dict[str, Any]:
    parameters.ignored("int8_mask", _NO_MASKS)
    return {"select": parameters.value("select_topk", 1.0)}


def _nearswap(parameters: Parameters) -> dict[str, Any]:
    t = parameters.value("t", None)
    if t is None:
        parameters.refuse(parameters.globally[-1].key, "method 'nearswap' needs a 't' under 'parameters'")
    return {"t": t}


def _ram(parameters: Parameters) -> dict[str, Any]:
    return {"epsilon": parameters.value("epsilon", 1e-5)}


def _ram_plus(parameters: Parameters) -> dict[str, Any]:
    return {
        **_ram(parameters), "strength": parameters.value("r", 0.1), "limit": parameters.value("alpha", 0.2), "scope": "tensor"
    }  # fmt: skip


def _passthrough(parameters: Parameters) -> dict[str, Any]:
    if len(parameters.per_model) != 1:
        key = next(iter(parameters.per_model.values())).key
        parameters.refuse(key, "method 'passthrough' takes one model in each slice, or one alone")
    return {"scale": parameters.of_the_one("scale", 1.0)}


def _of_our_own(parameters: Parameters) -> dict[str, Any]:
    """`merge_method: ace` in the place of mergekit's: what only mergekit's methods know is left out, and said to be."""
    for name in ("weight", "density", "gamma", "normalize", "rescale", "int8_mask"):
        parameters.ignored(name, f"not used: method '{parameters.method}' has no such option")
    alpha = parameters.value("lambda", None)
    return {**parameters.others(), **({} if alpha is None else {"alpha": alpha})}


TRANSLATIONS = {
    "linear": Translation("linear", "among", _linear),
    "slerp": Translation("slerp", "first", _slerp),
    "nuslerp": Translation("nuslerp", "either", _nuslerp),
    "multislerp": Translation("multislerp", "either", _multislerp),
    "karcher": Translation("karcher", "among", _karcher),
    "task_arithmetic": Translation("task_arithmetic", "apart", _task_arithmetic),
    "ties": Translation("ties", "apart", _ties),
    "dare_linear": Translation("dare_task_arithmetic", "apart", _dare_linear),
    "dare_ties": Translation("dare_ties", "apart", _dare_ties),
    "breadcrumbs": Translation("breadcrumbs", "apart", _breadcrumbs),
    "breadcrumbs_ties": Translation("breadcrumbs_ties", "apart", _breadcrumbs_ties),
    "della": Translation("della", "apart", _della),
    "della_linear": Translation("della_linear", "apart", _della_linear),
    "model_stock": Translation("model_stock", "apart", _model_stock),
    "sce": Translation("sce", "apart", _sce),
    "nearswap": Translation("nearswap", "apart", _nearswap),
    "arcee_fusion": Translation("arcee_fusion", "apart", lambda parameters: {}),  # noqa: ARG005
    "ram": Translation("ram", "apart", _ram),
    "ramplus_tl": Translation("ram_plus", "apart", _ram_plus),
    "passthrough": Translation("passthrough", "among", _passthrough),
}
"""Of every method of mergekit's."""


def translation_of(method: str) -> Translation:
    """Of mergekit's, or of ours under its own name."""
    return TRANSLATIONS.get(method) or Translation(method, "apart", _of_our_own)
