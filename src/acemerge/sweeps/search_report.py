"""A search as a page: its history, drawn and as a table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from acemerge.output.input_hashes import Hashes
from acemerge.recipe.values import as_text
from acemerge.reports.charts import Line, Panel, lines
from acemerge.reports.figure import Figure
from acemerge.reports.page import Column, Page, Provenance, Table
from acemerge.sweeps.table import Objective, SearchRecord
from acemerge.sweeps.table import Table as SweepTable
from acemerge.version import versions


def search_page(table: SweepTable, objective: Objective, arguments: Sequence[str], inputs: Hashes) -> Page:
    """What was tried, in order, and what came of it; `arguments` are the models, as others know them."""
    search = table.search
    assert search is not None
    best = table.points[table.best].scores if table.best else None
    score = objective.score or next(iter(best or {}), "score")
    told = f"{score} {best[score]:.4g}" if best and best.get(score) is not None else "no score"
    return Page(
        kind="acemerge: report of a search",
        title=f"{len(search.tried)} trials of {table.method}",
        lead=f"Models: {', '.join(table.models)}.",
        level="good",
        verdict=f"The best is {table.best}: {told}.",
        findings=[],
        facts={"chosen from": "; ".join(f"{name}={values}" for name, values in search.space.items()), "seed": str(search.seed)},
        figures=_figures(table, search, score, objective),
        table=_history(table, search),
        provenance=Provenance(_command(table, search, arguments), versions(), inputs, _WHERE),
        commands={"Merge at the best point, where these models are": _best(table, arguments)} if table.best else {},
    )


_WHERE = "where these models are; sweep.json has every setting and score, and the command that gave them"


def _command(table: SweepTable, search: SearchRecord, arguments: Sequence[str]) -> str:
    varied = [word for name, values in search.space.items() for word in ("--set", f"{name}={values}")]
    fixed = [word for name, value in table.options.items() for word in ("--set", f"{name}={as_text(value)}")]
    rest = ["--search", str(search.trials), "--seed", str(search.seed), "--evaluate", "python your_score.py", "-o", "search"]
    return shlex.join(["acemerge", "sweep", *arguments, "-m", table.method, *varied, *fixed, *rest])


def _best(table: SweepTable, arguments: Sequence[str]) -> str:
    settings = {**table.options, **table.points[table.best or ""].settings}
    words = [word for name, value in settings.items() for word in ("-s", f"{name}={as_text(value)}")]
    return shlex.join(["acemerge", "merge", *arguments, "-m", table.method, *words, "-o", "best"])


def _figures(table: SweepTable, search: SearchRecord, score: str, objective: Objective) -> list[Figure]:
    scores = [((table.points[name].scores or {}).get(score)) for name in search.tried]
    drawn = [(trial, value) for trial, value in enumerate(scores, 1) if value is not None]
    if not drawn:
        return []
    trials, values = [trial for trial, _ in drawn], [value for _, value in drawn]
    so_far = list(accumulate(values, max if objective.largest else min))
    panel = Panel(
        {"this trial": Line(trials, values, "o"), "the best so far": Line(trials, so_far)},
        x_label="trial", y_label=score, whole_x=True,
    )  # fmt: skip
    caption = f"The score '{score}' of every trial, and the best until then. Chance decides the first third, at most eight."
    alternative = f"Lines over trials: {score} from {min(values):.4g} to {max(values):.4g}; the best at the end {so_far[-1]:.4g}."
    return [Figure("history", "How the search went", caption, alternative, partial(lines, [panel]))]


def _history(table: SweepTable, search: SearchRecord) -> Table:
    options = list(search.space)
    scores = list(dict.fromkeys(name for point in table.points.values() for name in point.scores or {}))
    columns = [
        Column("trial", "trial", "in which order", ".0f"),
        *(Column(f"option {name}", name, "as it was chosen") for name in options),
        *(Column(f"score {name}", name, "what the evaluation gave", ".4g") for name in scores),
    ]
    records: list[dict[str, str | float | None]] = []
    for trial, name in enumerate(search.tried, 1):
        point = table.points[name]
        own = {f"score {score}": value for score, value in (point.scores or {}).items()}
        records.append({"trial": trial, **{f"option {key}": str(point.settings.get(key)) for key in options}, **own})
    return Table("Choose a heading to sort by it.", columns, records, "trial")
