"""Several methods in one sweep, and what their points are compared with."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import acemerge
from acemerge.errors import InputError
from acemerge.sweeps.table import TABLE
from command import Command
from small_models import Models, tree
from sweeping import ALPHAS, count_merges, names_in

METHODS = ("ace", "tsv_m", "average")
SETTINGS: dict[str, list[Any]] = {"ace.epsilon": [1e-5], "tsv_m.alpha": [0.5, 1.0]}
NAMES = ["ace,epsilon=1e-05", "average", "tsv_m,alpha=0.5", "tsv_m,alpha=1.0"]


def size(folder: Path, settings: Mapping[str, Any]) -> float:
    return float(settings.get("alpha", 0.7))


def test_every_point_has_the_bytes_of_a_merge(models: Models, tmp_path: Path, run: Command) -> None:
    flags = ("-m", "ace", "-m", "tsv_m", "-m", "average", "-s", "ace.epsilon=1e-5", "-s", "tsv_m.alpha=0.5,1")
    assert run("sweep", *models.arguments, "-o", tmp_path / "grid", *flags)[0] == 0
    assert names_in(tmp_path / "grid") == sorted([*NAMES, TABLE])
    for name in NAMES:
        method, _, setting = name.partition(",")
        options = ("-s", setting) if setting else ()
        assert run("merge", *models.arguments, "-o", tmp_path / name, "-m", method, *options)[0] == 0
        weights = "model.safetensors"
        assert (tmp_path / "grid" / name / weights).read_bytes() == (tmp_path / name / weights).read_bytes()
        assert tree(tmp_path / "grid" / name).keys() == tree(tmp_path / name).keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-s", "ties.keep=0.1"], "'ties' is none of the methods given with -m: ace, average"),
        (["-s", "keep=0.1"], "--set keep: none of the methods has this option: ace has"),
        (["-s", "average.epsilon=1"], "method 'average' has no option 'epsilon'"),
        (["-s", "alpha=1", "-s", "ace.alpha=2"], "--set ace.alpha: is given twice"),
        (["-m", "ace"], "-m ace: is given twice"),
        (["-s", "ace.epsilon=paper,1e-5"], "ace,epsilon=paper and ace,epsilon=1e-05 are the same merge"),
        (["--search", "3", "--evaluate", "true"], "--search: chooses settings of one method"),
    ],
)
def test_refusals(models: Models, tmp_path: Path, run: Command, flags: list[str], message: str) -> None:
    code, _, err = run("sweep", *models.arguments, "-o", tmp_path / "grid", "-m", "ace", "-m", "average", *flags)
    assert (code, message in err) == (2, True), err
    assert not list(tmp_path.glob("grid*"))


def test_a_method_that_does_not_fit_is_found_before_any_work(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="slerp"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {}, ["average", "slerp"])
    assert not (tmp_path / "grid").exists()


def test_an_option_without_a_method_is_for_those_that_have_it(models: Models, tmp_path: Path) -> None:
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"epsilon": [1e-5, 1e-3]}, ["ace", "average"])
    assert [(point.method, dict(point.settings)) for point in result.points] == [
        ("ace", {"epsilon": 1e-5}), ("ace", {"epsilon": 1e-3}), ("average", {}),
    ]  # fmt: skip


def test_the_best_of_all_methods_stays_and_more_are_added(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    output = tmp_path / "grid"
    first = acemerge.sweep(models.base, models.experts, output, SETTINGS, METHODS, evaluate=size)
    assert first.best is not None
    assert (first.best.method, first.best.folder) == ("tsv_m", output / "tsv_m,alpha=1.0")
    assert names_in(output) == [TABLE, "tsv_m,alpha=1.0"]
    merges = count_merges(monkeypatch)
    again = acemerge.sweep(models.base, models.experts, output, SETTINGS, METHODS, evaluate=size)
    assert (again, merges) == (first, [])
    more = {**SETTINGS, "ties.alpha": [2.0]}
    result = acemerge.sweep(models.base, models.experts, output, more, [*METHODS, "ties"], evaluate=size)
    assert names_in(output) == [TABLE, "ties,alpha=2.0"]
    assert (len(result.points), set(merges)) == (5, {1})


def test_references_are_scored_once_and_kept(models: Models, tmp_path: Path) -> None:
    asked: list[str] = []

    def name_length(folder: Path, settings: Mapping[str, Any]) -> float:
        asked.append(folder.name)
        return 100.0 - float(settings.get("alpha", 0.0))

    results = [
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=name_length, keep="all") for _ in range(2)
    ]
    assert len(asked) == len(set(asked)) == 3 + 5
    rows = ["base", "expert expert-0", "expert expert-1", "expert expert-2", "average"]
    assert [list(result.references) for result in results] == [rows, rows]
    assert results[0].best is not None
    assert results[0].best.settings == {"alpha": 0.5}  # the references score more
    assert names_in(tmp_path / "grid") == ["alpha=0.5", "alpha=1.0", "alpha=2.0", TABLE]
    stored = json.loads((tmp_path / "grid" / TABLE).read_text())
    assert stored["references"]["base"]["scores"] == {"score": 100.0}
    assert list(stored) == ["acemerge", "method", "options", "models", "best", "search", "references", "points"]
    assert list(stored["points"]["alpha=0.5"]) == ["settings", "digest", "scores", "evaluation", "warnings", "transient"]


def test_averaging_that_is_a_point_is_no_reference(models: Models, tmp_path: Path) -> None:
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", {}, ["ace", "average"], evaluate=size)
    assert "average" not in result.references
    assert "base" in result.references


def test_a_reference_that_cannot_be_scored_has_a_row(models: Models, tmp_path: Path, run: Command) -> None:
    script = "import sys; sys.exit(3) if 'expert-1' in sys.argv[1] else print(0.5)"
    (tmp_path / "score.py").write_text(script)
    evaluate = f"{sys.executable} {tmp_path / 'score.py'}"
    arguments = (*models.arguments, "-o", tmp_path / "grid", "-s", "alpha=0.5,1", "--evaluate", evaluate)
    code, out, err = run("sweep", *arguments)
    assert code == 0
    assert "reference expert expert-1: not scored" in err
    [row] = [line for line in out.splitlines() if "expert expert-1" in line]
    assert "not scored" in row
    told = json.loads(run("sweep", *arguments, "--json")[1])["references"]
    assert "ended with code 3" in told["expert expert-1"]["failure"]
    assert told["base"] == {"scores": {"score": 0.5}, "failure": None}
