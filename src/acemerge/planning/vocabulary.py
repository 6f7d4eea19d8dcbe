"""Whose tokens the output has, and where every model keeps the row of each.

Rows of embeddings and output layers are lined up by token, never by number: a fine-tune may have added tokens, and a tokenizer
that was made anew has others under the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.checkpoints.vocabulary_tensors import vocabulary_axes
from acemerge.planning.fates import ExpertTensor
from acemerge.planning.rows import NOWHERE, LinedUp, OutputRows, TakenRows, as_rows
from acemerge.recipe.recipe import TokenSource

Ids = Mapping[str, int]


@dataclass(frozen=True)
class Difference:
    """Of an expert's vocabulary from the base's."""

    moved: tuple[str, ...]
    """Tokens that both have, under other ids."""
    added: tuple[str, ...]
    """That the base lacks, in the order of the expert's ids."""
    lacking: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.moved or self.added or self.lacking)


def difference(base: Ids, expert: Ids) -> Difference:
    """What is not the same.

    >>> difference({"a": 0, "b": 1, "c": 2}, {"b": 0, "a": 1, "<x>": 2})
    Difference(moved=('b', 'a'), added=('<x>',), lacking=('c',))
    """
    in_order = sorted(expert, key=lambda token: expert[token])
    return Difference(
        tuple(token for token in in_order if base.get(token, expert[token]) != expert[token]),
        tuple(token for token in in_order if token not in base),
        tuple(token for token in base if token not in expert),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The output's, beside those of the models."""

    tokenizer: str
    """Whose: base, union, or an expert's name."""
    base: Checkpoint
    experts: tuple[Checkpoint, ...]
    owner: Checkpoint
    """Whose tokenizer files the output gets; of a union, the base's, with more tokens."""
    roles: Checkpoint
    """Whose chat template, special tokens and generation config it gets."""
    base_ids: Ids
    expert_ids: tuple[Ids, ...]
    """The base's of experts that say nothing else."""
    unknown: frozenset[int]
    """Experts that say nothing, or nothing that can be read: with other rows than the base they cannot be lined up."""
    ids: Ids
    """The output's."""
    base_rows: int
    rows: int
    """Of the output's embeddings."""
    axes: Mapping[str, int]
    """The base's tensors with a row for every token -> the axis along which these lie."""
    token_sources: Mapping[str, TokenSource] = field(default_factory=dict)
    chat_template: str | None = None
    """The text of one, instead of the models'."""
    _maps: dict[tuple[int, int, int], Tensor | None] = field(default_factory=dict, init=False, repr=False)
    _outputs: dict[tuple[object, ...], OutputRows | None] = field(default_factory=dict, init=False, repr=False)
    """Found once: a vocabulary has many tokens, and a sweep many plans."""

    @property
    def is_union(self) -> bool:
        """Whether the output's tokenizer is made of several."""
        return self.tokenizer == "union"

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Of each expert's vocabulary from the base's."""
        return tuple(difference(self.base_ids, ids) if ids is not self.base_ids else _NONE for ids in self.expert_ids)

    def ids_of(self, model: Checkpoint) -> Ids:
        """A model's own."""
        pairs = zip(self.experts, self.expert_ids, strict=True)
        return self.base_ids if model is self.base else next(ids for expert, ids in pairs if expert is model)

    def fits(self, model: Checkpoint) -> bool:
        """Whether the ids of a model's tokens are right in the output."""
        own = self.ids_of(model)
        return own is self.ids or all(self.ids.get(token) == row for token, row in own.items())

    def is_as_output(self, expert: int) -> bool:
        """Whether an expert has the output's vocabulary, token for token."""
        return self.expert_ids[expert] is self.ids or not difference(self.ids, self.expert_ids[expert])

    @cached_property
    def record(self) -> dict[str, Any]:
        """For the manifest."""
        named = zip(self.experts, self.differences, strict=True)
        everything = [dict(ids) for ids in (self.ids, self.base_ids, *self.expert_ids)]
        return {
            "tokenizer": self.tokenizer,
            "files_from": self.roles.name,
            "tokens": len(self.ids),
            "rows": self.rows,
            "experts": {
                expert.name: {"moved": len(own.moved), "added": len(own.added), "lacking": len(own.lacking)}
                for expert, own in named
            },
            "sha256": hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest(),
        }

    # -- an expert's rows in the base's order

    def lined_up(self, expert: int, name: str, theirs: TensorHeader) -> LinedUp | None:
        """How an expert's tensor is read; None if its rows are the base's already, or are no tokens'."""
        ours, axis = self.base.tensors[name], self.axes.get(name)
        if axis is None or len(theirs.shape) != len(ours.shape) or self.experts[expert].changes is not None:
            return None
        if expert in self.unknown:
            return None
        key = (expert, ours.shape[axis], theirs.shape[axis])
        if key not in self._maps:
            self._maps[key] = self._line_up(*key)
        found = self._maps[key]
        return None if found is None else LinedUp(found, axis)

    def _line_up(self, expert: int, ours: int, theirs: int) -> Tensor | None:
        own = self.expert_ids[expert]
        if own is self.base_ids and ours == theirs:
            return None
        found = as_rows(_find(self.base_ids, own, ours, theirs))
        return None if ours == theirs and torch.equal(found, torch.arange(ours)) else found

    # -- the output's rows

    def output_rows(self, name: str, header: TensorHeader, sources: Sequence[ExpertTensor]) -> OutputRows | None:
        """What is written of a tensor whose rows are tokens'; None if it has the merged tensor's rows as they are."""
        axis = self.axes.get(name)
        if axis is None:
            return None
        key = (name, *((source.expert, source.name) for source in sources))
        if key not in self._outputs:
            self._outputs[key] = self._find_output_rows(name, header, axis, sources)
        return self._outputs[key]

    def _find_output_rows(self, name: str, header: TensorHeader, axis: int, sources: Sequence[ExpertTensor]) -> OutputRows | None:
        ours = header.shape[axis]
        size = self.rows + ours - self.base_rows  # an output layer may have other padding than the embeddings
        rows = _find(self.ids, self.base_ids, size, ours)
        taken, zero = _Taken({None: name, **{source.expert: source.name for source in sources if source.name}}), []
        for token, row in _with_row(self.ids, size).items():
            asked = self.token_sources.get(token)
            if rows[row] != NOWHERE and not (asked and asked.force):
                continue
            rows[row] = NOWHERE
            if asked and asked.source == "zero":
                zero.append(row)
            elif asked:
                self._take(asked.token or token, [asked.source], row, axis, taken)
            else:
                self._take(token, self._full_models, row, axis, taken)
        found = as_rows(rows)
        if size == ours and not zero and not taken.rows and torch.equal(found, torch.arange(ours)):
            return None
        return OutputRows(found, taken.all(), as_rows(zero), axis)

    @cached_property
    def _full_models(self) -> list[str]:
        """Experts with rows of their own, by name; an adapter has none."""
        return [expert.name for expert in self.experts if expert.changes is None]

    def _take(self, token: str, models: Sequence[str], row: int, axis: int, taken: _Taken) -> None:
        """From every one of these models that has a row for the token."""
        for expert, name in taken.names.items():
            model, ids = (self.base, self.base_ids) if expert is None else (self.experts[expert], self.expert_ids[expert])
            theirs = ids.get(token, NOWHERE) if ("base" if expert is None else model.name) in models else NOWHERE
            if NOWHERE < theirs < model.tensors[name].shape[axis]:
                taken.add(expert, theirs, row)

    def head_rows(self, expert: int, name: str, header: TensorHeader) -> OutputRows | None:
        """The same of a tensor that is an expert's own and has a row for each of its tokens, such as an output layer."""
        model, own = self.experts[expert], self.expert_ids[expert]
        axis = vocabulary_axes(model, model.config).get(name)
        if axis is None or self.is_as_output(expert):
            return None
        return OutputRows(as_rows(_find(self.ids, own, self.rows, header.shape[axis])), (), as_rows([]), axis)


class _Taken:
    """Rows that models give, by model; `names` are their names of the tensor."""

    def __init__(self, names: Mapping[int | None, str]) -> None:
        self.names = names
        self.rows: dict[int | None, tuple[list[int], list[int]]] = {}

    def add(self, expert: int | None, row: int, to: int) -> None:
        rows, places = self.rows.setdefault(expert, ([], []))
        rows.append(row)
        places.append(to)

    def all(self) -> tuple[TakenRows, ...]:
        return tuple(TakenRows(e, self.names[e], as_rows(rows), as_rows(to)) for e, (rows, to) in self.rows.items())


def _with_row(ids: Ids, rows: int) -> dict[str, int]:
    """The tokens that a tensor has a row for: a tokenizer may know more than the model."""
    return {token: row for token, row in ids.items() if row < rows}


def _find(ids: Ids, others: Ids, rows: int, other_rows: int) -> list[int]:
    """For each row, the other vocabulary's row of the same token; of padding, the same row if it is padding there too."""
    named = {*ids.values(), *others.values()}
    found = [row if row < other_rows and row not in named else NOWHERE for row in range(rows)]
    for token, row in _with_row(ids, rows).items():
        place = others.get(token, other_rows)
        found[row] = place if place < other_rows else NOWHERE
    return found


_NONE = Difference((), (), ())
