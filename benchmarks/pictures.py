"""The pictures of the docs, drawn from what is measured and from what is checked: docs/pictures/*.svg.

    python benchmarks/pictures.py

results.svg comes from docs/results/*.json, storeys.svg from the contract of layers in pyproject.toml. A test compares them with
what this script draws. They follow the reader's light or dark scheme, and their letters are large enough for a phone.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"

STYLE = """<style>
text { font: 20px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2328 }
.card { fill: #ffffff; stroke: #d1d9e0 }
.head { font-weight: 600 }
.faint { fill: #59636e }
.small { font-size: 17px }
.best { font-weight: 700 }
.other { fill: #b6bec8 }
.ace { fill: #2f6fd0 }
.average { fill: #d9822b }
.experts { fill: none; stroke: #59636e; stroke-dasharray: 4 3 }
.storey { fill: #eef2f7; stroke: #b6bec8 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .card { fill: #0d1117; stroke: #3d444d }
  .faint { fill: #9198a1 }
  .other { fill: #4d5661 }
  .ace { fill: #4c8df0 }
  .average { fill: #c4732a }
  .experts { stroke: #9198a1 }
  .storey { fill: #1b222c; stroke: #4d5661 }
}
</style>"""

SUITES = {"text-8": "8 text experts", "vision-8": "8 vision experts", "lora-text-8": "8 LoRA experts"}
METHODS = ("ace_auto", "ace", "tsv_m", "cart", "iso_cts", "task_arithmetic", "average")
NAMES_WIDTH, PANEL, BAR, ROW, TOP = 172, 228, 156, 30, 84


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A drawing on a card, which is as light or dark as the letters on it need."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            STYLE,
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, style: str = "") -> str:
    """One line of text, by its left end."""
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


@dataclass(frozen=True)
class Score:
    """Accuracy in percent, the mean over a suite's tasks and sets of experts, and its standard error."""

    mean: float
    error: float


def scores(suite: str) -> dict[str, Score]:
    """Every row of a suite's table."""
    table: dict[str, Any] = json.loads((ROOT / "docs" / "results" / f"ace_auto-{suite}.json").read_text(encoding="utf-8"))
    return {row["row"]: Score(100 * row["average"], 100 * row["standard_error"]) for row in table["rows"]}


def results() -> str:
    """Bars of every method that was measured on all three suites, with the experts' own accuracy as their frame."""
    parts = [text(20, TOP + (row + 0.72) * ROW, name, "head" if name == "ace_auto" else "") for row, name in enumerate(METHODS)]
    for column, (suite, words) in enumerate(SUITES.items()):
        parts += _panel(NAMES_WIDTH + 16 + column * PANEL, words, scores(suite))
    foot = TOP + len(METHODS) * ROW
    parts += [
        text(20, foot + 32, "Accuracy in percent of one merged model, mean over tasks, one set of experts;", "faint small"),
        text(20, foot + 56, "default options. Dashed: the experts, each on its own task. Bold: the best and", "faint small"),
        text(20, foot + 80, "what is within its standard error.", "faint small"),
    ]
    return picture(NAMES_WIDTH + 3 * PANEL + 24, foot + 98, "Accuracy of merged models by method, on three suites", parts)


def _panel(left: float, words: str, found: Mapping[str, Score]) -> list[str]:
    experts, best = found["experts"].mean, max((found[name] for name in METHODS), key=lambda score: score.mean)
    parts = [text(left, 34, words, "head"), text(left, 62, f"experts {experts:.1f}", "faint small")]
    for row, name in enumerate(METHODS):
        mean, y = found[name].mean, TOP + row * ROW
        style = {"ace_auto": "ace", "average": "average"}.get(name, "other")
        parts += [
            f'<rect class="{style}" x="{left}" y="{y + 4}" width="{BAR * mean / experts:.1f}" height="{ROW - 8}"/>',
            f'<rect class="experts" x="{left}" y="{y + 4}" width="{BAR}" height="{ROW - 8}"/>',
            text(left + BAR + 8, y + 0.72 * ROW, f"{mean:.1f}", "best" if mean >= best.mean - best.error else ""),
        ]
    return parts


STOREYS = {
    "what you use": {"cli": "verbs, flags", "testing": "for methods", "api": "the same from Python"},
    "what it is for": {
        "bench": "suites, experts, metrics, tables",
        "sweeps": "many settings",
        "diagnosis": "before a merge",
    },
    "carrying out": {
        "execute": "pipeline, engines, shards",
        "calibration": "what is measured on data",
        "reports": "pages and charts",
        "output": "the folder that is written",
        "tensors": "one tensor, from files to its value",
    },
    "deciding": {
        "planning": "every decision, from headers",
        "methods": "one file each, pure functions",
        "recipe": "what can be asked for, and how to run it",
    },
    "ground": {
        "adapters": "LoRA as low-rank changes",
        "checkpoints": "files, formats, families",
        "numerics": "matrices, no files",
        "errors": "",
    },
}
WIDTH, LABELS, HEIGHT = 760, 150, 33


def storeys() -> str:
    """A box for each folder, those above resting on those below."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    parts, y, last = [], 16, ""
    for floor in floors:
        names = floor.split(" | ")
        group = next((group for group, folders in STOREYS.items() if names[0] in folders), last)
        if group != last:
            y += 8
            parts.append(text(18, y + 21, group, "faint small"))
        parts += _floor(y, names, STOREYS[group])
        y, last = y + HEIGHT, group
    parts.append(text(18, y + 26, "A storey imports only what is below it; import-linter checks it.", "faint small"))
    return picture(WIDTH, y + 42, "The folders of src/acemerge as storeys, the command line on top", parts)


def _floor(y: float, names: Sequence[str], words: Mapping[str, str]) -> list[str]:
    parts, width = [], (WIDTH - LABELS - 16) / len(names)
    for column, name in enumerate(names):
        x = LABELS + column * width
        parts += [
            f'<rect class="storey" x="{x:g}" y="{y:g}" width="{width - 3:g}" height="{HEIGHT - 3}" rx="4"/>',
            text(x + 10, y + 21, name, "head"),
            text(x + 160 - 32 * (len(names) - 1), y + 21, words.get(name, ""), "faint small"),
        ]
    return parts


DRAWINGS = {"results.svg": results, "storeys.svg": storeys}


def main() -> None:
    """Write them all."""
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
