"""What methods tell of the tensors they merged, from the records of a merge: the methods themselves declare it."""

from __future__ import annotations

import json
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
