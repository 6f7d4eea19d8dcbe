"""A base that becomes, for each query, the merge of the adapters that the query is near to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.calibration.layout import all_tensors
from acemerge.calibration.models import load_model
from acemerge.checkpoints.families import align_names
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import InputError
from acemerge.routing.index import Index, Opened, left_out, open_models, read_index
from acemerge.routing.weights import sparse_weights

Embed = Callable[[Any], Any]
"""From a query to its vector: a tensor, an array or a list of numbers."""
Weights = tuple[tuple[str, float], ...]
"""By the adapters' names, in their order."""


class RoutedModel:
    """`model` is the one module there is: `merge_for` changes its weights in place, so one query at a time.

    Weights that have been merged lately are kept, each with a copy of every tensor that adapters change.
    """

    def __init__(self, index: Index, opened: Opened, model: nn.Module, embed: Embed | None, cache: int) -> None:
        self.model = model
        self._index, self._opened, self._embed = index, opened, embed
        self._tensors = _tensors_of(model, opened)
        self._base = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        self._kept: OrderedDict[Weights, dict[str, Tensor]] = OrderedDict()
        self._most = cache
        self._merged: Weights = ()
        self.merges = 0
        """How many have been computed."""

    def weights(self, query: Any) -> dict[str, float]:
        """How much each adapter counts, the most first, those that do not count left out; empty for the base alone."""
        kernel = self._index.record.kernel
        found = sparse_weights(self._vector(query), self._index.centroids, kernel.beta, kernel.tau, kernel.top)
        counting = {name: w for name, w in zip(self._index.record.adapters, found.tolist(), strict=True) if w > 0}
        return dict(sorted(counting.items(), key=lambda pair: -pair[1]))

    def merge_for(self, query: Any) -> nn.Module:
        """The model with the query's adapters merged in."""
        return self.merge(self.weights(query))

    def __call__(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """What the model answers to these inputs, merged for the query."""
        model = self.merge_for(query)
        with torch.inference_mode():
            return model(*args, **kwargs)

    @torch.no_grad()
    def merge(self, weights: Mapping[str, float]) -> nn.Module:
        """The model with adapters merged in by these weights: W0 + sum_k w_k (W_k - W0)."""
        for name in weights:
            if name not in self._opened.adapters:
                raise InputError(f"{self._index.file}: has no adapter '{name}'; it has {', '.join(self._opened.adapters)}")
        key = tuple(sorted(weights.items()))
        if key == self._merged:
            return self.model
        values = self._kept.pop(key, None) if key else self._base
        if values is None:
            values, self.merges = self._compute(key), self.merges + 1
        for name, tensor in self._tensors.items():
            tensor.copy_(values.get(name, self._base[name]))
        self._merged = key
        if key and self._most:
            self._kept[key] = values
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return self.model

    def _compute(self, weights: Weights) -> dict[str, Tensor]:
        """Of the tensors that these adapters change; in at least float32, rounded once."""
        values: dict[str, Tensor] = {}
        for expert, weight in weights:
            adapter = self._opened.adapters[expert]
            for name in adapter.tensors.keys() & self._base.keys():
                base = self._base[name]
                wide = base.to(torch.promote_types(base.dtype, torch.float32))
                values[name] = torch.add(values.get(name, wide), self._change(adapter, name, wide), alpha=weight)
        return {name: value.to(self._base[name].dtype) for name, value in values.items()}

    def _change(self, adapter: Any, name: str, base: Tensor) -> Tensor:
        """W_k - W0, of one tensor."""
        change = adapter.changes.get(name)
        made: Tensor = change.expand(base.cpu()) if change is not None else adapter.read(name).to(base.dtype) - base.cpu()
        return made.to(base)

    def _vector(self, query: Any) -> Tensor:
        """The query's embedding; a tensor is one already."""
        given = query if isinstance(query, Tensor) or self._embed is None else self._embed(query)
        try:
            vector = torch.as_tensor(given, dtype=torch.float64).detach().cpu().flatten()
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"the query is {type(query).__name__}, not a vector; load the index with embed=, a function that makes it one"
            ) from None
        size = self._index.centroids.shape[1]
        if len(vector) != size or not torch.isfinite(vector).all():
            raise InputError(
                f"{self._index.file}: a query's vector has {size} finite numbers, as the centroids; found {len(vector)}. Embed "
                "queries as the rows were that the centroids are made of"
            )
        return vector


def load_routed(
    index: str | Path,
    *,
    model: nn.Module | None = None,
    embed: Embed | None = None,
    cache: int = 4,
    offline: bool = False,
) -> RoutedModel:
    """The model of an index: the base, loaded by transformers unless `model` is given, and every adapter's change at hand.

    `embed` makes a vector of a query, in the same way as the centroids were made; without it, queries are vectors. `cache` is how
    many merges are kept.
    """
    if cache < 0:
        raise InputError(f"cache={cache}: give how many merges to keep, 0 or more")
    found = read_index(Path(index))
    sources = {name: found.find(place, offline) for name, place in found.record.adapters.items()}
    opened = open_models(found.find(found.record.base, offline), sources)
    return RoutedModel(found, opened, model if model is not None else load_model(opened.base), embed, cache)


def _tensors_of(model: nn.Module, opened: Opened) -> dict[str, Tensor]:
    """The model's own tensor for each one of the base's that an adapter changes, by the base's name."""
    inside = all_tensors(model)
    headers = {name: TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in inside.items()}
    aligned = {stored: name for stored, name in align_names(headers, opened.base.tensors).items() if name in headers}
    found: dict[str, Tensor] = {}
    for adapter in opened.adapters.values():
        for stored in adapter.tensors.keys() - set(left_out(adapter)) - found.keys():
            name = aligned.get(stored)
            if name is None or headers[name].shape != opened.base.tensors[stored].shape:
                raise InputError(
                    f"adapter {adapter.where}: changes '{stored}', which {type(model).__name__} does not hold as base "
                    f"{opened.base.where} stores it; give the base's own model"
                )
            found[stored] = inside[name]
    return found
