"""How an adapter that was written looks on a terminal: what it holds of the change, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from acemerge.cli.tables import new_table
from acemerge.output.adapter_writer import ROUNDED_TO_FLOAT32, overall_error
from acemerge.output.kept_change import KindOfTensor, kinds_of_change, shares_of_change
from acemerge.planning.plan import Plan

_WRITTEN = {"factors": "as factors", "value": "whole", "left out": "left out"}


def adapter_lines(plan: Plan, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Its rank, its error and, of full fine-tunes, how much of the change is in it."""
    ranks = [record["rank"] for record in records if "relative_error" in record]
    error = overall_error(records)
    told = plan.recipe.rank or plan.recipe.energy or error > ROUNDED_TO_FLOAT32
    lost = f"relative error {error:.2e} over all tensors" if told else "with nothing cut off"
    lines = [f"an adapter of rank {max(ranks, default=0)} at most, {lost}"]
    if not _of_full_models(plan):
        return lines
    shares = shares_of_change(records)
    told_shares = [
        f"{shares['factors']:.1%} in factors",
        *([f"{shares['saved']:.1%} saved whole"] if shares["saved"] else []),
        f"{shares['cut']:.1%} cut off by the rank",
        f"{shares['left_out']:.1%} left out",
    ]
    lines.append(f"of the change's energy: {', '.join(told_shares)}")
    if shares["left_out"] and not plan.recipe.save_rest:
        lines.append("--save-rest writes norms, biases, embeddings and the like into the adapter too, whole")
    return lines


def kinds_table(plan: Plan, records: Sequence[Mapping[str, Any]]) -> Table | None:
    """Of full fine-tunes: what became of each kind of tensor."""
    if not _of_full_models(plan):
        return None
    table = new_table(
        "kind", "tensors", "written", "rank", "energy kept", "of the change", right=["tensors", "rank", "of the change"]
    )
    for group in kinds_of_change(records):
        rank, kept = _range(group, "rank", "{:.0f}"), _range(group, "energy_kept", "{:.1%}")
        table.add_row(group.kind, str(len(group.records)), _WRITTEN[group.written], rank, kept, f"{group.share:.2%}")
    return table


def _of_full_models(plan: Plan) -> bool:
    return any(expert.changes is None for expert in plan.experts)


def _range(group: KindOfTensor, fact: str, form: str) -> str:
    found = group.range_of(fact)
    if found is None:
        return ""
    least, most = (form.format(value) for value in found)
    return least if least == most else f"{least} to {most}"
