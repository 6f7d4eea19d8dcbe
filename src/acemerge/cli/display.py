"""How plans, results and methods look on a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from acemerge.cli.adapter_display import adapter_lines, kinds_table
from acemerge.cli.tables import TensorName, error_console, name_cells, new_console, new_table
from acemerge.execute.pipeline import MergeResult
from acemerge.methods import Method
from acemerge.methods.registry import Kind
from acemerge.planning.like_layers import together
from acemerge.planning.plan import Plan, rows_told
from acemerge.planning.shares import ACTIONS, shares_told
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, computed, is_computed
from acemerge.planning.view import View
from acemerge.planning.vocabulary import Vocabulary
from acemerge.recipe.sizes import human_bytes
from acemerge.recipe.values import as_text
from acemerge.reports.facts import counts, facts_told, in_one_place, title
from acemerge.reports.page import Finding

_SCOPES = {
    "all": "every weight takes part",
    "linear": "the weights of linear layers merge, the others average",
    "blocks": "the weights of linear layers in blocks merge, the others average; what comes after the blocks stays at the base",
}
_MERGES = {
    "all": "every floating-point tensor",
    "linear": "the weights of linear layers; other tensors are {rest}",
    "blocks": "the weights of linear layers in the model's blocks; other tensors are averaged, those after the last block kept",
}


_MARKS = {"stop": "x", "caution": "!", "good": "+"}
_STYLES = {"stop": "bold red", "caution": "yellow", "good": "green"}


def print_findings(level: str, verdict: str, findings: Sequence[Finding]) -> None:
    """The summary of a report."""
    console = new_console()
    console.print()
    console.print(verdict, style=_STYLES[level])
    console.print()
    for finding in findings:
        console.print(f"{_MARKS[finding.level]} {finding.text}")
        if finding.advice:
            console.print(f"  {finding.advice}")
    console.print()


def print_plan(plan: Plan, verbose: bool) -> None:
    """The tensors' fates, like ones of all layers on one line or, with `verbose`, one by one; then the totals."""
    console = new_console()
    table = new_table("tensor", "shape", "dtype", "fate", "why", right=["shape"])
    varying = plan.varying_options
    cells = [(tensor.name, _fate_cells(plan, tensor, varying), tensor) for tensor in plan.tensors]
    lines = [(name, [tensor]) for name, _, tensor in cells] if verbose else together(cells)
    names = iter(name_cells(table, [*(name for name, _ in lines), *plan.omitted], console.width))
    for _, alike in lines:
        shape, *rest = _fate_cells(plan, alike[0], varying)
        table.add_row(next(names), f"{len(alike)} x {shape}" if len(alike) > 1 else shape, *rest)
    for original in plan.omitted.values():
        table.add_row(next(names), "", "", "tied", f"stored once, as {original}")
    console.print(table)
    _print_summary(plan, console)
    most, besides = ("at most ", ", shared/ and tasks/") if plan.per_task_methods else ("", "")
    console.print(
        f"reads {human_bytes(plan.input_bytes)}, writes {most}{human_bytes(plan.output_bytes)} in {len(plan.shards)} file(s)"
        f"{besides}, "
        f"peak memory about {human_bytes(plan.peak_memory)} beyond the program itself, about {plan.flops / 1e9:.1f} GFLOP"
    )


def _fate_cells(plan: Plan, tensor: PlannedTensor, varying: Sequence[str]) -> tuple[str, ...]:
    """Shape, dtype, fate and why."""
    shape = "x".join(map(str, tensor.output_header.shape)) or "scalar"
    how = _how(tensor, varying) if is_computed(tensor) and tensor.action == "merged" else ""
    told = ": ".join(filter(None, [tensor.reason, how]))
    return shape, tensor.written_dtype, tensor.action, "; ".join(filter(None, [told, rows_told(tensor, plan.experts)]))


def _how(tensor: ComputedTensor, varying: Sequence[str]) -> str:
    fate = tensor.fate
    core = f", in a core of rank {fate.core.rank}" if fate.core else ""
    values = "".join(f", {name}={_rounded(getattr(fate.options, name))}" for name in varying if hasattr(fate.options, name))
    return f"by {fate.method}{values}{core}" + (f", {fate.view.orientation}" if fate.view != View() else "")


def _rounded(value: Any) -> str:
    """Of an option that is not the same everywhere."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_rounded, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_summary(plan: Plan, console: Console) -> None:
    if plan.is_extraction:
        console.print(f"{plan.experts[0].name} as an adapter of {plan.base.name}, {len(plan.tensors)} tensors")
    else:
        _print_method(plan, console)
    if plan.vocabulary:
        console.print(_tokenizer(plan.vocabulary))
    if plan.heads:
        names = ", ".join(plan.experts[head.expert].name for head in plan.heads)
        console.print(f"each expert's own head goes to heads/: {names}")
    for note in plan.notes:
        console.print(f"note: {note}")


def _told_of_preset(plan: Plan) -> str:
    """What it merges, and what the method makes of the tensors that it leaves alone."""
    family, fate = plan.family, "average too" if plan.method.rest == "average all" else "stay at the base"
    kept = f"; {family.kept_in_words} {fate}" if family.kept_in_words else ""
    return f"preset {family.name}: {family.about}{kept}"


def _print_method(plan: Plan, console: Console) -> None:
    options = ", ".join(f"{name}={as_text(value)}" for name, value in plan.asked_options.items())
    counts = ", ".join(f"{plan.count(action)} {action}" for action in ACTIONS)
    tied = f", {len(plan.omitted)} tied" if plan.omitted else ""
    console.print(f"method {plan.method.name} ({options})")
    used = f"the weights and data: {plan.data.about}; no labels" if plan.data else "the weights alone"
    console.print(f"uses {used}")
    console.print(f"{_SCOPES.get(plan.method.touches) or _told_of_preset(plan)}; orientation {plan.recipe.orientation}")
    console.print(f"{len(plan.tensors) + len(plan.omitted)} tensors: {counts}{tied}")
    console.print(f"of all weights: {shares_told(plan.weights)}")
    if any(expert.changes is not None for expert in plan.experts):
        console.print(_routes(plan))


def _tokenizer(vocabulary: Vocabulary) -> str:
    """Which tokens the output has."""
    whose = {"base": "of the base", "union": "of all models, a union"}.get(vocabulary.tokenizer, f"of '{vocabulary.tokenizer}'")
    files = "" if vocabulary.roles is vocabulary.owner else f"; chat template and generation config of '{vocabulary.roles.name}'"
    return f"tokenizer {whose}: {len(vocabulary.ids)} tokens in {vocabulary.rows} rows{files}"


def _routes(plan: Plan) -> str:
    """How adapters are merged: in their low-rank core, or expanded."""
    taking_part = computed(plan.tensors)
    ranks = [tensor.fate.core.rank for tensor in taking_part if tensor.fate.core]
    parts = [f"{len(ranks)} tensors merge in the adapters' common core, of rank {max(ranks)} at most"] if ranks else []
    if len(ranks) < len(taking_part):
        parts.append(f"{len(taking_part) - len(ranks)} as whole tensors, one at a time")
    return "; ".join(parts)


def print_result(result: MergeResult, verbose: bool) -> None:
    """What was written and where; with `verbose`, how every merged tensor came out."""
    console = new_console()
    if verbose:
        _print_facts(result.tensors, console)
    _print_summary(result.plan, console)
    branches = sum((counts(record, "branch") for record in result.tensors), Counter[str]())
    if branches:
        console.print(f"{branches['heterogeneous']} of {branches.total()} merged matrices were heterogeneous")
    if result.plan.recipe.save_as == "adapter":
        if kinds := kinds_table(result.plan, result.tensors):
            console.print(kinds)
        for line in adapter_lines(result.plan, result.tensors):
            console.print(line)
    size = sum(path.stat().st_size for path in result.output.rglob("*") if path.is_file())
    console.print(f"wrote {result.output} ({human_bytes(size)})")


_ANY_WIDTH, _ROOM = 10_000, 1.25
"""Columns are not made narrower evenly: without room to spare some words are cut."""


def _print_facts(tensors: Sequence[Mapping[str, Any]], console: Console) -> None:
    """How long each merged change is, and whatever else is told of a tensor: as a table where it fits, else line by line."""
    records = [in_one_place(record) for record in tensors]
    shown = {"norm_ratio": "|M|/max|D_t|", **{fact: title(fact) for fact in facts_told(records)}}
    shown |= {
        fact: title(fact)
        for fact in ("written", "rank", "relative_error", "energy_kept")
        if any(fact in record for record in records)
    }
    table = new_table("tensor", "fate", *shown.values(), right=list(shown.values()))
    for record in records:
        table.add_row(TensorName(record["name"]), record["action"], *(_figure(record.get(fact, "")) for fact in shown))
    narrowest = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).minimum
    if narrowest * _ROOM <= console.width:
        console.print(table)
        return
    for record in records:
        told = ", ".join(f"{shown[fact]} {_figure(record[fact])}" for fact in shown if fact in record)
        console.print(Text(f"{record['name']}: {record['action']}", style="bold"))
        console.print(*([Padding(told, (0, 0, 0, 2))] if told else []), end="")


def print_warnings(warnings: Sequence[str], shown: int = 3) -> None:
    """The first few, on standard error; a cause common to many tensors would fill the screen."""
    console = error_console()
    for warning in warnings[:shown]:
        console.print(f"warning: {warning}", style="yellow")
    if len(warnings) > shown:
        console.print(f"and {len(warnings) - shown} more warnings, in acemerge_manifest.json", style="yellow")


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


KINDS: dict[Kind, str] = {
    "closed-form": "Closed form under the experts' covariances",
    "spectral": "Spectral: singular directions and frequencies of matrices",
    "entries": "Entry by entry",
    "around": "A step around another method, which -s inner=NAME names",
    "data": "Use data of every expert's task besides the weights (--data)",
    "per-task": "One model per task, not one merged model",
}


def list_methods(methods: Sequence[Method]) -> None:
    """Name and what it does, like methods together."""
    console = new_console()
    widest = max(len(method.name) for method in methods)
    for kind, heading in KINDS.items():
        alike = [method for method in methods if method.kind == kind]
        if not alike:
            continue
        console.print(f"{heading} [{kind}]", style="bold")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=widest + 2)
        table.add_column()
        for method in alike:
            table.add_row(f"  {method.name}", _in_short(method))
        console.print(table)
        console.print()
    console.print("`acemerge methods NAME` describes one: its options, which tensors it merges, its paper.")
    console.print("--kind NAME lists one of these groups, --uses weights, data or test-rows the methods that use it.")


def _in_short(method: Method) -> str:
    """The first line of its description, without its formula and what the group's title says already."""
    first = method.summary.split("\n")[0].removeprefix("Uses data. ").removeprefix("ONE MODEL PER TASK, not one merged model: ")
    first = first.removeprefix("A step before another method: ").removeprefix("A step after another method: ")
    return re.sub(r": \w+ = .*", ".", first)


_REST = {
    "average": "averaged, or kept as the model family's preset says",
    "average all": "averaged",
    "keep": "kept at the base's value",
}


def describe_method(method: Method) -> None:
    """What it does, its options, its paper."""
    console = new_console()
    console.print(f"{method.name}: {method.title}  ({method.paper})")
    console.print()
    for paragraph in method.summary.split("\n\n"):
        console.print(" ".join(paragraph.split()))  # the line breaks of the source would stand in the middle of a terminal's
        console.print()
    matrices = f"matrices; other tensors are {_REST[method.rest]}"
    what = _MERGES.get(method.touches, matrices).format(rest="averaged" if method.rest == "average" else _REST[method.rest])
    console.print(f"It merges {what}. Set an option with -s NAME=VALUE.")
    if method.uses == "data":
        console.print("It uses data besides the weights: give --data SUITE, or --data FOLDER with a file per expert.")
    if method.per_task:
        console.print("It makes one model per task, not one merged model: `acemerge task OUT EXPERT -o DIR` makes an expert's.")
    table = new_table("option", "default", "allowed", "meaning")
    for option in method.describe_options():
        table.add_row(option.name, str(option.default), option.allowed, option.meaning)
    console.print(table)


def method_json(method: Method) -> dict[str, Any]:
    """The same for machines."""
    return {
        "name": method.name,
        "title": method.title,
        "paper": method.paper,
        "summary": method.summary,
        "touches": method.touches,
        "kind": method.kind,
        "uses": method.uses,
        "test_rows": method.test_rows,
        "per_task": method.per_task,
        "options": [asdict(option) for option in method.describe_options()],
    }
