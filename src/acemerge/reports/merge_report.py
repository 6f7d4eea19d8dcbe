"""The report of a merge, from the manifest beside its output: what happened to every tensor."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from acemerge.layer_names import depths, kinds_in_order, layers_of
from acemerge.output.adapter_writer import ROUNDED_TO_FLOAT32
from acemerge.output.manifest import Manifest, TensorRecord
from acemerge.planning.shares import ACTIONS, shares_told
from acemerge.recipe.values import as_text
from acemerge.reports.facts import counts, facts_told, title
from acemerge.reports.figure import Figure
from acemerge.reports.layer_figures import (
    Point,
    depth_figure,
    expert_by_layer_figure,
    heterogeneity_figure,
    regulariser_figure,
)
from acemerge.reports.page import Column, Finding, Page, Provenance, Table, gravest_first, verdict_of

_ADAPTER_COLUMNS = (
    Column("rank", "rank", "of the factors written", ".0f"),
    Column("error", "error", "relative error of cutting the rank", ".1e"),
    Column("kept", "energy kept", "share of the change that the factors hold", ".3f"),
)
_FEW = 10
"""Words to choose from."""
_AGAIN = "acemerge merge acemerge.yaml -o again"
"""From the recipe that is in every output."""
_WHERE = "where the models are; acemerge.yaml is in the merged folder"
LOST = 0.05
"""Relative error of a truncated adapter that deserves a look."""


def merge_page(account: Manifest) -> Page:
    """What to show of it."""
    found = findings(account)
    level = verdict_of(found)
    counts = Counter(tensor.action for tensor in account.tensors)
    fates = ", ".join(f"{counts[action]} {action}" for action in ACTIONS)
    warnings = sum(len(tensor.warnings) for tensor in account.tensors)
    told = f" {warnings} warning{'s' if warnings > 1 else ''}." if warnings else " No warnings." if level == "good" else ""
    return Page(
        kind="acemerge: report of a merge",
        title=f"{account.base} merged by {account.method}",
        lead=f"Experts: {', '.join(account.experts)}.",
        level=level,
        verdict=f"Every tensor is accounted for: {fates}.{told}",
        findings=found,
        facts=_facts(account),
        figures=figures(account),
        table=tensor_table(account),
        provenance=Provenance(_AGAIN, account.versions or {"acemerge": account.acemerge}, account.inputs, _WHERE),
        commands={"Check that the files are still those that were written, in the merged folder": "acemerge verify ."},
        details=_details(account),
    )


def _facts(account: Manifest) -> dict[str, str]:
    options = ", ".join(f"{name}={as_text(value)}" for name, value in account.options.items())
    facts = {"method": f"{account.method} ({options})", "preset": account.family, "orientation": account.orientation}
    facts["of all weights"] = shares_told(account.weights)
    if account.saved_as == "adapter":
        facts["written as"] = "one LoRA adapter"
    if ranks := _ranks_written(account):
        facts["ranks written"] = f"{ranks[0]:g} to {ranks[-1]:g}" if len(ranks) > 1 else f"{ranks[0]:g}"
    if account.heads:
        facts["heads kept apart"] = ", ".join(account.heads)
    if account.omitted:
        facts["tied, stored once"] = str(len(account.omitted))
    return facts


def findings(account: Manifest) -> list[Finding]:
    """What is worth knowing, the gravest first."""
    found = [*_warned(account), *_truncation(account), *_left_out(account), *_branches(account), *_inactive(account)]
    found += [Finding("caution", note[:1].upper() + note[1:] + ".") for note in (*account.notes, *account.cautions)]
    return gravest_first(found)


def _warned(account: Manifest) -> Iterator[Finding]:
    """One for each cause, with the first tensor that has it: warnings that differ in numbers and names only are one."""
    causes: dict[str, list[str]] = {}
    for tensor in account.tensors:
        for warning in tensor.warnings:
            causes.setdefault(re.sub(r"'[^']*'|[\d.]+", "", warning), []).append(warning)
    for first, *others in causes.values():
        more = f" {len(others)} more tensors like this one: see Details." if others else ""
        yield Finding("caution", f"{first[:1].upper()}{first[1:]}.{more}")


def _branches(account: Manifest) -> Iterator[Finding]:
    branches = sum((counts(tensor.to_json(), "branch") for tensor in account.merged), Counter[str]())
    if count := branches["heterogeneous"]:
        told = f"{count} of {branches.total()} matrices were heterogeneous"
        yield Finding("good", f"{told}: there ACE weighed experts equally and refined the spectrum.")
    elif branches:
        yield Finding("good", f"None of the {branches.total()} matrices was heterogeneous: ACE kept the experts' own strength.")


def _truncation(account: Manifest) -> Iterator[Finding]:
    """What cutting an adapter's rank, or writing it in half precision, lost."""
    errors = [(tensor.number("relative_error") or 0.0, tensor) for tensor in account.tensors]
    cut = [(error, tensor) for error, tensor in errors if error > ROUNDED_TO_FLOAT32]
    if not cut:
        return
    worst, tensor = max(cut, key=lambda entry: entry[0])
    overall = f"{account.relative_error:.1%} over all tensors, " if account.relative_error is not None else ""
    rank = tensor.number("rank")
    text = f"The adapter lacks {overall}{worst:.1%} of '{tensor.name}' at most, which has rank {rank} (relative error)."
    grave = max(worst, account.relative_error or 0) > LOST
    if grave:
        advice = "Give a larger rank, or none, and no half precision."
        yield Finding("caution", text, advice, f"{_AGAIN} --rank {2 * round(rank or 1)}")
    else:
        yield Finding("good", text)


def _left_out(account: Manifest) -> Iterator[Finding]:
    """What full fine-tunes changed and the adapter has no place for."""
    share = account.energy.get("left_out", 0.0)
    if share:
        text = f"{share:.1%} of the change, by its energy, is left out of the adapter: norms, biases, embeddings and the like."
        yield Finding("caution" if share > LOST**2 else "good", text, "They can be written whole.", f"{_AGAIN} --save-rest")


def _inactive(account: Manifest) -> Iterator[Finding]:
    untouched = [tensor for tensor in account.merged if tensor.number("active_experts") == 0]
    if untouched:
        yield Finding("good", f"{len(untouched)} tensors were changed by no expert and are the base's, bit for bit.")
    for expert in account.experts:
        norms = [norm for tensor in account.merged for name, norm in _task_norms(tensor) if name == expert]
        if norms and not any(norms):
            yield Finding(
                "caution", f"Expert '{expert}' changed nothing that was merged.", "Leave it out.", _without(account, expert)
            )


def _without(account: Manifest, expert: str) -> str:
    """The same merge of the other experts."""
    others = [name for name in account.experts if name != expert]
    settings = [word for name, value in account.options.items() for word in ("-s", f"{name}={as_text(value)}")]
    return (
        shlex.join(["acemerge", "merge", account.base, *others, "-m", account.method, *settings, "-o", "again"]) if others else ""
    )


def _task_norms(tensor: TensorRecord) -> Iterable[tuple[str, float]]:
    norms = tensor.numbers("task_norms")
    return zip(tensor.experts, norms, strict=True) if len(norms) == len(tensor.experts) else ()


def figures(account: Manifest) -> list[Figure]:
    """Those for which the manifest has numbers."""
    place = depths(tensor.name for tensor in account.tensors)

    def points(fact: str) -> Iterator[Point]:
        return ((tensor.kind, place[tensor.name], tensor.number(fact)) for tensor in account.merged)

    found = []
    if isinstance(tau := account.options.get("tau"), int | float):
        found += heterogeneity_figure(points("gamma"), float(tau))
    found += depth_figure(
        "lengths", "How long the merged change is",
        "The length of the merged change over that of the longest task vector, by layer and kind of matrix. A long change is "
        "neither good nor bad by itself.",
        points("norm_ratio"), "|M| / max |D|",
    )  # fmt: skip
    if "epsilon" in account.options:
        found += regulariser_figure(points("ridge_share"), as_text(account.options["epsilon"]))
    found += _rank_figure(account, points("rank"))
    return [*found, *_energy_figure(account, place)]


def _rank_figure(account: Manifest, points: Iterable[Point]) -> list[Figure]:
    """Where they differ. Only of an adapter: a method may tell of ranks of its own, which nothing was written with."""
    if len(_ranks_written(account)) < 2:
        return []
    caption = (
        "The rank of the factors written for each matrix of the adapter, by layer and kind: the mean where there are several."
    )
    return depth_figure("ranks", "Which ranks the adapter has", caption, points, "rank")


def _ranks_written(account: Manifest) -> list[float]:
    ranks = {rank for tensor in account.tensors if (rank := tensor.number("rank")) is not None}
    return sorted(ranks) if account.saved_as == "adapter" else []


def _energy_figure(account: Manifest, place: Mapping[str, int | None]) -> list[Figure]:
    places = layers_of(place[tensor.name] for tensor in account.tensors if tensor.numbers("task_norms"))
    lengths = [[_length(account, expert, layer, place) for layer in places] for expert in account.experts]
    whole = [math.hypot(*(value or 0 for value in row)) for row in lengths]
    told = "; ".join(f"{expert} {length:.3g}" for expert, length in zip(account.experts, whole, strict=True))
    return expert_by_layer_figure(
        "changes", "How far each expert moved in each layer",
        "The length of each expert's change over the merged and averaged tensors of a layer. Empty: not changed.",
        f"A table of experts by layers. Over all layers: {told}.", account.experts, places, lengths,
    )  # fmt: skip


def _length(account: Manifest, expert: str, layer: int | None, place: Mapping[str, int | None]) -> float | None:
    own = [tensor for tensor in account.tensors if place[tensor.name] == layer]
    return math.hypot(*(norm for tensor in own for name, norm in _task_norms(tensor) if name == expert)) or None


def tensor_table(account: Manifest) -> Table:
    """A row for each tensor."""
    place = depths(tensor.name for tensor in account.tensors)
    facts = facts_told([tensor.to_json() for tensor in account.tensors])
    columns = [
        Column("name", "tensor", "name in the base"),
        Column("kind", "kind", "kind of layer", choices=kinds_in_order(tensor.kind for tensor in account.tensors)),
        Column("depth", "layer", "counted from 0", ".0f"),
        Column("shape", "shape", "as stored"),
        Column("fate", "fate", "what was done", choices=sorted({tensor.action for tensor in account.tensors})),
        Column("why", "by, or why", "the method, or the reason for not merging it"),
        *(_fact_column(fact, meaning, [tensor.told(fact) for tensor in account.tensors]) for fact, meaning in facts.items()),
        Column("norm", "|M|", "length of the merged change", ".3g"),
        Column("ratio", "|M|/max|D|", "over that of the longest task vector", ".2f"),
        *(_ADAPTER_COLUMNS if account.saved_as == "adapter" else ()),
        *(Column(f"norm {e}", f"|D| {e}", f"length of {e}'s change", ".3g") for e in account.experts),
        Column("warnings", "warnings", "how many", ".0f"),
    ]  # fmt: skip
    records = [
        {**{fact: tensor.told(fact) for fact in facts}, **_record(tensor, place[tensor.name])} for tensor in account.tensors
    ]
    one_each = {column.key: column for column in columns}.values()  # a method may tell of a rank, which is not the one written
    filled = [column for column in one_each if any(record.get(column.key) not in (None, "") for record in records)]
    return Table("Choose a heading to sort by it; hold the pointer over it for its meaning.", filled, records)


def _fact_column(fact: str, meaning: str, values: Sequence[Any]) -> Column:
    """Numbers as numbers; words that repeat themselves can be chosen from."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        whole = all(isinstance(value, int) for value in known)
        return Column(fact, title(fact), meaning, ".0f" if whole else ".3g")
    words = sorted({str(value) for value in known})
    return Column(fact, title(fact), meaning, choices=words if len(words) <= _FEW else ())


def _record(tensor: TensorRecord, depth: int | None) -> dict[str, str | float | None]:
    route = f", {tensor.route}" if tensor.route else ""
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "depth": depth,
        "shape": "x".join(map(str, tensor.shape)) or "scalar",
        "fate": tensor.action,
        "why": tensor.reason or f"{tensor.method}{route}",
        "norm": tensor.number("norm"),
        "ratio": tensor.number("norm_ratio"),
        "rank": tensor.number("rank"),
        "error": tensor.number("relative_error"),
        "kept": tensor.number("energy_kept"),
        **{f"norm {expert}": norm for expert, norm in _task_norms(tensor)},
        "warnings": len(tensor.warnings) or None,
    }


def _details(account: Manifest) -> dict[str, str]:
    details = {
        "Options": yaml.safe_dump({"method": account.method, "options": account.options}, sort_keys=False),
        "Warnings": "\n".join(warning for tensor in account.tensors for warning in tensor.warnings),
        "Tensors of experts that went nowhere": _listing(account.unused),
        "Heads": _listing(account.heads),
    }
    return {title: text for title, text in details.items() if text}


def _listing(named: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f"{expert}: {', '.join(names)}" for expert, names in named.items() if names)
