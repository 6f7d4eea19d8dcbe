"""Points chosen by their scores: a search finds what a grid finds, goes on where it stopped, and says the same again."""

import json
import math
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from acemerge.sweeps.search import Proposals, SearchOptions
from acemerge.sweeps.space import Range, make_space
from acemerge.sweeps.table import TABLE
from command import Command
from small_models import Models
from sweeping import count_merges, names_in

optuna = pytest.importorskip("optuna")

SPACE = {"epsilon": "1e-6..1e-1:log", "alpha": "0.5..2", "refine": [True, False]}


def peak(settings: Mapping[str, Any]) -> float:
    """At epsilon = 1e-4, alpha = 1.4, without refinement."""
    off = ((math.log10(settings["epsilon"]) + 4) / 3) ** 2 + (settings["alpha"] - 1.4) ** 2 + 0.2 * settings["refine"]
    return float(1 - off)


def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    manifest = json.loads((folder / "acemerge_manifest.json").read_text())
    assert {name: manifest["options"][name] for name in settings} == dict(settings)  # the model is that of its settings
    return {"score": peak(settings), "cost": 1.0}


def search(models: Models, output: Path, trials: int = 18, **more: Any) -> acemerge.SweepResult:
    chosen = {"evaluate": evaluate, **more}
    return acemerge.sweep(models.base, models.experts, output, SPACE, "ace", search=trials, **chosen)


def test_a_search_beats_a_grid_of_more_points(models: Models, tmp_path: Path) -> None:
    result = search(models, tmp_path / "found")
    grid = [
        peak({"epsilon": 10.0**e, "alpha": a, "refine": r})
        for e in (-6, -5, -3, -2, -1) for a in (0.5, 0.8, 1.1, 1.7, 2.0) for r in (True, False)
    ]  # fmt: skip
    assert result.best is not None
    best = result.best.scores["score"]
    assert best is not None
    assert best > max(grid)
    assert len(result.points) <= 18 < len(grid)
    assert names_in(tmp_path / "found") == sorted([result.best.folder.name if result.best.folder else "", TABLE])
    assert all(1e-6 <= point.settings["epsilon"] <= 1e-1 and 0.5 <= point.settings["alpha"] <= 2 for point in result.points)


def test_the_same_seed_says_the_same_and_another_does_not(models: Models, tmp_path: Path) -> None:
    first, again = (search(models, tmp_path / name, 8).points for name in ("first", "again"))
    assert [point.settings for point in first] == [point.settings for point in again]
    other = search(models, tmp_path / "other", 8, seed=1).points
    assert [point.settings for point in first] != [point.settings for point in other]


def test_an_interrupted_search_goes_on(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(models, tmp_path / "whole", 9)
    seen: list[Mapping[str, Any]] = []

    def failing(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        if len(seen) == 6:
            raise KeyboardInterrupt
        seen.append(settings)
        return evaluate(folder, settings)

    failing.__qualname__, failing.__module__ = evaluate.__qualname__, evaluate.__module__
    with pytest.raises(KeyboardInterrupt):
        search(models, tmp_path / "out", 9, evaluate=failing)
    result = search(models, tmp_path / "out", 9)
    assert [point.settings for point in result.points] == [point.settings for point in whole.points]
    merges = count_merges(monkeypatch)
    assert search(models, tmp_path / "out", 9).best == result.best  # a finished one does nothing
    assert merges == []
    assert len(search(models, tmp_path / "out", 11).points) >= len(result.points)


GRID: dict[str, list[Any]] = {"epsilon": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2], "alpha": [1.5, 1.0, 0.75], "refine": [True, False]}


def tried(trials: int) -> list[tuple[Any, ...]]:
    """The points that a search of the grid tries, scored without a merge."""
    proposals, found = Proposals(make_space(get_method("ace"), GRID, 2), SearchOptions(trials)), []
    while asked := proposals.next():
        proposals.tell([peak(point.settings) for point in asked])
        found += [tuple(point.settings.values()) for point in asked]
    return found


def test_a_point_that_comes_up_again_costs_no_trial() -> None:
    assert len(set(tried(20))) == len(tried(20)) == 20
    assert len(set(tried(33))) == 30  # all that there are


def test_the_best_of_a_grid_in_half_of_its_points() -> None:
    best = max(product(*GRID.values()), key=lambda values: peak(dict(zip(GRID, values, strict=True))))
    assert best in tried(15)


def test_a_score_that_is_no_number_teaches_nothing(models: Models, tmp_path: Path) -> None:
    def sometimes(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        return {"score": math.nan if settings["refine"] else peak(settings)}

    result = search(models, tmp_path / "out", 8, evaluate=sometimes)
    assert result.best is not None
    assert not result.best.settings["refine"]


def test_the_command_with_a_scoring_command_and_a_page(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "score.py"
    script.write_text(
        "import json, sys, pathlib\n"
        "options = json.loads((pathlib.Path(sys.argv[1]) / 'acemerge_manifest.json').read_text())['options']\n"
        "print(json.dumps({'accuracy': -(options['alpha'] - 1.3) ** 2, 'loss': (options['alpha'] - 1.3) ** 2}))\n"
    )
    command, out = Command(monkeypatch, capsys), tmp_path / "out"
    given = [*models.arguments, "-o", out, "-m", "task_arithmetic", "--set", "alpha=0..3", "--search", 7]
    scored = ["--evaluate", f"{sys.executable} {script}", "--minimise", "loss", "--report"]
    code, told, error = command("sweep", *given, *scored)
    assert code == 0, error
    assert "7/7 alpha=" in error
    assert told.splitlines()[1].split()[:2] == ["trial", "alpha"]
    table = json.loads((out / TABLE).read_text())
    assert table["search"]["space"] == {"alpha": "0..3"}
    assert len(table["search"]["tried"]) == 7
    assert abs(table["points"][table["best"]]["settings"]["alpha"] - 1.3) < 0.3
    page = (out / "search.html").read_text()
    assert "How the search went" in page
    assert page.count("<svg") >= 1
    assert "Every trial" in page
    models_told = " ".join(path.name for path in (models.base, *models.experts))
    repeated = f"acemerge sweep {models_told} -m task_arithmetic --set alpha=0..3 --search 7 --seed 0 --evaluate "
    best = table["points"][table["best"]]["settings"]["alpha"]
    for shown in (repeated, f"acemerge merge {models_told} -m task_arithmetic -s alpha={best} -o best"):
        assert shown in page
    assert page.count('title="blake3:') == len(models.experts) + 1
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alpha": "0..1:log"}, "positive numbers"),
        ({"alpha": "2..1"}, "the first end must be smaller"),
        ({"alpha": "a..b"}, "write a range as LOW..HIGH"),
        ({"refine": "0..1"}, "refine"),
        ({"tau": "-5..1"}, "tau"),
        ({"nonsense": "0..1"}, "nonsense"),
        ({}, "varies something"),
    ],
)
def test_spaces_that_make_no_sense(settings: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_space(get_method("ace"), settings, 2)


def test_ranges_and_lists() -> None:
    space = make_space(get_method("ace"), {"epsilon": "1e-6..1e-2:log", "alpha": ["1..2"], "k_frac": [0.1, 0.3]}, 2)
    assert space == {"epsilon": Range(1e-6, 1e-2, log=True), "alpha": Range(1.0, 2.0), "k_frac": [0.1, 0.3]}


def test_a_range_of_an_option_with_a_number_per_expert_is_one_for_each() -> None:
    space = make_space(get_method("linear"), {"weights": "0.1..1", "alpha": [1.0]}, 3)
    assert space == {"weights": Range(0.1, 1.0, each=3), "alpha": [1.0]}
    proposals, found = Proposals(space, SearchOptions(16)), []
    while asked := proposals.next():
        points = [point.settings["weights"] for point in asked]
        assert all(len(weights) == 3 and all(0.1 <= w <= 1 for w in weights) for weights in points)
        proposals.tell([1 - abs(w[0] - 0.9) - abs(w[1] - 0.2) - abs(w[2] - 0.5) for w in points])
        found += points
    assert len(set(found)) == 16
    first, second, third = max(found, key=lambda w: 1 - abs(w[0] - 0.9) - abs(w[1] - 0.2) - abs(w[2] - 0.5))
    assert abs(first - 0.9) + abs(second - 0.2) + abs(third - 0.5) < 0.25


def test_weights_of_experts_are_searched_for(models: Models, tmp_path: Path) -> None:
    def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        merged = json.loads((folder / "acemerge_manifest.json").read_text())["options"]["weights"]
        assert list(settings["weights"]) == merged
        return {"score": -sum((w - 0.5 * i) ** 2 for i, w in enumerate(merged))}

    asked: dict[str, Any] = {"evaluate": evaluate, "search": 9, "report": True}
    result = acemerge.sweep(models.base, models.experts, tmp_path / "found", {"weights": "0.05..1"}, "linear", **asked)
    assert result.best is not None
    assert len(result.best.settings["weights"]) == len(models.experts)
    again = acemerge.sweep(models.base, models.experts, tmp_path / "found", {"weights": "0.05..1"}, "linear", **asked)
    assert again.best is not None
    assert list(again.best.settings["weights"]) == list(result.best.settings["weights"])


def test_what_a_search_needs(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="goes by scores"):
        acemerge.sweep(models.base, models.experts, tmp_path / "out", SPACE, "ace", search=5)
    with pytest.raises(InputError, match="at least two trials"):
        search(models, tmp_path / "out", 1)
    with pytest.raises(InputError, match="a range is for --search"):
        acemerge.sweep(models.base, models.experts, tmp_path / "out", {"alpha": ["1..2"]})
    assert not (tmp_path / "out").exists()
