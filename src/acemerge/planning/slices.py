"""Models put together from runs of layers (frankenmerges): each model as if its layers lay where the output wants them.

The planner then sees ordinary checkpoints: layer 20 of the output is layer 20 of every one of them. A run that leaves the base
out is measured against the first model it names: with the method `passthrough`, its layers come out as they are, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.quantised.eight_bits import StoredInEightBits
from acemerge.errors import PreflightError, did_you_mean
from acemerge.recipe.recipe import Slice

BASE = "base"
_LAYER = re.compile(r"(?P<stack>(?:[^.\d][^.]*\.)*)(?P<number>\d+)\.(?P<rest>.+)")
_BEFORE_LAYERS = re.compile(r"embed|\bwte\b|\bwpe\b|\bshared\b")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""What configs call the number of layers."""
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers")
"""What configs say of each layer in a list."""


class _Stack:
    """A model's layers by number, and what lies outside of them."""

    def __init__(self, model: Checkpoint) -> None:
        self.model = model
        self.layers: dict[int, dict[str, str]] = {}
        self.outside: list[str] = []
        found = {name: _LAYER.fullmatch(name) for name in model.tensors}
        stacks = {match["stack"]: None for match in found.values() if match}
        self.prefix = self._the_one(list(stacks), found)
        for name, match in found.items():
            if match and match["stack"] == self.prefix:
                self.layers.setdefault(int(match["number"]), {})[match["rest"]] = name
            else:
                self.outside.append(name)

    def _the_one(self, stacks: list[str], found: Mapping[str, re.Match[str] | None]) -> str:
        """The stack that is cut: the only one, or the one that the config counts."""
        count = next((self.model.config[key] for key in _COUNTS if key in self.model.config), None)
        if len(stacks) > 1:
            numbers = {s: {m["number"] for m in found.values() if m and m["stack"] == s} for s in stacks}
            stacks = [stack for stack in stacks if len(numbers[stack]) == count]
        if len(stacks) != 1:
            names = ", ".join(f"'{stack}*'" for stack in stacks) or "none"
            raise PreflightError([f"slices: {self.model.where} must have one stack of layers; found: {names}"])
        return stacks[0]


def arrange(slices: Sequence[Slice], base: Checkpoint, experts: Sequence[Checkpoint]) -> tuple[Checkpoint, list[Checkpoint]]:
    """Base and experts with their layers where the slices want them."""
    adapters = [expert.name for expert in experts if expert.changes is not None]
    if adapters:
        raise PreflightError([f"slices: '{name}' is an adapter; merge it into its base first" for name in adapters])
    stacks = {BASE: _Stack(base), **{expert.name: _Stack(expert) for expert in experts}}
    _check(slices, stacks)
    arranged = [_rearranged(stacks[BASE], slices, [(stacks[name], first) for name, first in map(_reference, slices)])]
    for expert in experts:
        mine = [(stacks[expert.name], own.layers[expert.name][0]) if expert.name in own.layers else None for own in slices]
        arranged.append(_rearranged(stacks[expert.name], slices, mine))
    return replace(arranged[0], config_changes={**base.config_changes, **_config_changes(base.config, slices)}), arranged[1:]


def _reference(each: Slice) -> tuple[str, int]:
    """The model that a slice is measured against, and its first layer: the base, or the first one named."""
    name = BASE if BASE in each.layers else next(iter(each.layers))
    return name, each.layers[name][0]


def slice_of_each(names: Sequence[str], slices: Sequence[Slice]) -> dict[str, tuple[int, float]]:
    """Name in the arranged base -> which slice it belongs to, and how deep in it: 0 in its first layer, 1 in its last."""
    bounds = [(index, offset, own.length) for index, own in enumerate(slices) for offset in range(own.length)]
    found = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match and int(match["number"]) < len(bounds):
            index, offset, length = bounds[int(match["number"])]
            found[name] = (index, offset / (length - 1) if length > 1 else 1.0)
        else:
            found[name] = (0 if _BEFORE_LAYERS.search(name) else len(slices) - 1, 0.0)
    return found


_Run = tuple[_Stack, int]
"""The stack that a slice's layers come from, and the first of them."""


def _rearranged(own: _Stack, slices: Sequence[Slice], runs: Sequence[_Run | None]) -> Checkpoint:
    """A model whose layers are these runs of its own or of others; None: it has none of a slice's layers."""
    places = {name: (model, theirs) for name, model, theirs in _places(own, slices, runs)}
    return replace(
        own.model,
        tensors={name: model.tensors[theirs] for name, (model, theirs) in places.items()},
        read=lambda name: places[name][0].read(places[name][1]),
        made_of=lambda name: places[name][0].mapped(places[name][1]),
        tied={copy: original for copy, original in own.model.tied.items() if copy in places and original in places},
        eight_bits=_in_eight_bits(own, places),
    )


def _in_eight_bits(own: _Stack, places: Mapping[str, tuple[Checkpoint, str]]) -> StoredInEightBits | None:
    """How each is stored in the model that it comes from, if its own model stores any so."""
    if own.model.eight_bits is None:
        return None
    stored = {name: (model.eight_bits, theirs) for name, (model, theirs) in places.items()}
    weights = {name: eight.weights[theirs] for name, (eight, theirs) in stored.items() if eight and theirs in eight.weights}
    return replace(own.model.eight_bits, weights=weights)


def _places(own: _Stack, slices: Sequence[Slice], runs: Sequence[_Run | None]) -> Iterator[tuple[str, Checkpoint, str]]:
    """(name there, model, name in the model), in the order of a file."""
    before = [name for name in own.outside if _BEFORE_LAYERS.search(name)]
    yield from _outside(own, before, runs[0])
    number = 0
    for each, run in zip(slices, runs, strict=True):
        for offset in range(each.length):
            if run is not None:
                stack, first = run
                yield from ((f"{own.prefix}{number}.{r}", stack.model, name) for r, name in stack.layers[first + offset].items())
            number += 1
    yield from _outside(own, [name for name in own.outside if name not in before], runs[-1])


def _outside(own: _Stack, names: Sequence[str], run: _Run | None) -> Iterator[tuple[str, Checkpoint, str]]:
    """What comes before the layers is the first slice's, what comes after them the last one's."""
    if run is not None:
        model = run[0].model
        yield from ((name, model if name in model.tensors else own.model, name) for name in names)


def _check(slices: Sequence[Slice], stacks: Mapping[str, _Stack]) -> None:
    """Names and numbers, all problems at once; then that neighbours fit."""
    problems = []
    for number, each in enumerate(slices):
        for name, (start, end) in each.layers.items():
            if name not in stacks:
                problems.append(f"slices.{number}: there is no model '{name}': {did_you_mean(name, stacks)}")
            elif end > (count := len(stacks[name].layers)):
                problems.append(f"slices.{number}: '{name}' has layers 0 to {count - 1}, but [{start}, {end}] asks for {end - 1}")
    widths = {name: stack.model.config.get("hidden_size", stack.model.config.get("n_embd")) for name, stack in stacks.items()}
    used = [name for name in stacks if any(name in own.layers for own in slices)]
    if len({widths[name] for name in used} - {None}) > 1:
        told = ", ".join(f"'{name}' {widths[name]}" for name in used)
        problems.append(f"slices: one layer's output is the next one's input, but the models are not equally wide: {told}")
    if problems:
        raise PreflightError(problems)


def _config_changes(config: Mapping[str, Any], slices: Sequence[Slice]) -> dict[str, Any]:
    """The number of layers, and lists with an entry for each."""
    key = next((key for key in _COUNTS if key in config), None)
    if key is None:
        return {}
    total, before = sum(own.length for own in slices), config[key]
    changes: dict[str, Any] = {key: total}
    order = [_reference(own)[1] + offset for own in slices for offset in range(own.length)]
    for name in _BY_LAYER:
        listed = config.get(name)
        if isinstance(listed, list) and len(listed) == before and max(order) < before:
            changes[name] = [listed[layer] for layer in order]
    return changes
