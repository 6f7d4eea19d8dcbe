"""What methods tell of the tensors they merged, from the records of a merge: the methods themselves declare it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from acemerge.errors import InputError
from acemerge.methods import get_method

_COMMON = {"active_experts": "how many experts changed it"}


def facts_told(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Every fact that is told of any of these tensors -> what it means, in the order in which methods declare them."""
    found: dict[str, str] = {}
    for record in records:
        for fact, meaning in _facts_of(record):
            # Of matrices that were merged apart, it is told of each, or of all in the middle and at the ends.
            names = [name for name in record if name == fact or name.startswith((f"{fact} of block ", f"{fact} of blocks, "))]
            found |= {name: meaning for name in names if record[name] is not None and name not in found}
    return found


_OF_BLOCKS = re.compile(r"(?P<fact>.+) of block(?: \d+|s, (?P<what>.+))")
_SUMMARY = ("least", "median", "most")


def in_one_place(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with each fact under its own name, also where it is told of every matrix of a stack: as far as they go apart.

    >>> in_one_place({"gamma of block 0": 0.1, "gamma of block 1": 0.25, "branch of blocks, high": 3})
    {'gamma': '0.1 to 0.25', 'branch': '3 high'}
    """
    whole = {name: value for name, value in record.items() if not _OF_BLOCKS.fullmatch(name)}
    stacked = {name: _far_apart(numbers) for name, numbers in _numbers_of_blocks(record).items()}
    counted = {name: _listed(words) for name in _facts_of_blocks(record) - stacked.keys() if (words := counts(record, name))}
    return {**whole, **stacked, **counted}


def counts(record: Mapping[str, Any], fact: str) -> Counter[str]:
    """How many matrices of a tensor have which word for a fact: one has it, or each of a stack's."""
    found = Counter([str(record[fact])] if record.get(fact) is not None else [])
    for name, value in record.items():
        told = _OF_BLOCKS.fullmatch(name)
        if told and told["fact"] == fact:
            found.update({told["what"]: value} if told["what"] else [str(value)])
    return found


def _facts_of_blocks(record: Mapping[str, Any]) -> set[str]:
    return {told["fact"] for name in record if (told := _OF_BLOCKS.fullmatch(name))}


def _numbers_of_blocks(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of those facts that are numbers, every one that is told."""
    found: dict[str, list[float]] = {}
    for name, value in record.items():
        told = _OF_BLOCKS.fullmatch(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if told and is_number and told["what"] in (None, *_SUMMARY):
            found.setdefault(told["fact"], []).append(value)
    return found


def _far_apart(numbers: Iterable[float]) -> str:
    ends = dict.fromkeys(f"{end:.3g}" for end in (min(numbers), max(numbers)))
    return " to ".join(ends)


def _listed(words: Counter[str]) -> str:
    return next(iter(words)) if len(words) == 1 and words.total() == 1 else ", ".join(f"{n} {word}" for word, n in words.items())


def title(fact: str) -> str:
    """As a heading."""
    return fact.replace("_", " ")


def _facts_of(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """All that its method may tell, each expert's one by one."""
    method = record.get("method")
    declared = _declared(method, json.dumps(record.get("options") or {})) if method else {}
    for fact, meaning in {**_COMMON, **declared}.items():
        if "{expert}" in fact:
            for expert in record.get("experts") or ():
                yield fact.replace("{expert}", expert), meaning.replace("{expert}", expert)
        else:
            yield fact, meaning


@cache
def _declared(name: str, options: str) -> Mapping[str, str]:
    try:
        method = get_method(name)
        return method.declared_facts(method.options(json.loads(options)))
    except InputError:  # of another version, or of a package that is not installed here
        return {}
