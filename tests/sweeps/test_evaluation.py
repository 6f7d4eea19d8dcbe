"""Points that are evaluated: the best model stays, whoever scores it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import acemerge
from acemerge.errors import InputError, MergeError
from acemerge.sweeps.table import TABLE
from running import run_command
from small_models import Models
from sweeping import ALPHAS, check_as_merged_alone, distance_from_base, names_in


@pytest.mark.parametrize("at_once", [None, 1, 2])
def test_the_best_model_is_kept(models: Models, tmp_path: Path, at_once: int | None) -> None:
    output = tmp_path / "grid"
    result = acemerge.sweep(models.base, models.experts, output, ALPHAS, evaluate=distance_from_base(models), at_once=at_once)
    assert result.best is not None
    assert result.best.settings == {"alpha": 2.0}
    assert names_in(output) == ["alpha=2.0", TABLE]
    lengths = [point.scores["length"] for point in result.points]
    assert lengths[1] == pytest.approx(4 * lengths[0])  # type: ignore[operator]
    stored = json.loads((output / TABLE).read_text())
    assert stored["best"] == "alpha=2.0"
    assert stored["points"]["alpha=0.5"]["scores"] == result.points[0].scores
    assert acemerge.merge(models.base, models.experts, tmp_path / "alone", alpha=2.0)
    check_as_merged_alone(output / "alpha=2.0", tmp_path / "alone")


@pytest.mark.parametrize(("keep", "left"), [("all", ["alpha=0.5", "alpha=1.0", "alpha=2.0"]), ("none", [])])
def test_all_or_no_models_can_be_kept(models: Models, tmp_path: Path, keep: str, left: list[str]) -> None:
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=distance_from_base(models), keep=keep)
    assert names_in(tmp_path / "grid") == [*left, TABLE]


def test_the_smallest_of_another_score_can_decide(models: Models, tmp_path: Path) -> None:
    evaluate = distance_from_base(models)
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=evaluate, minimise="alpha")
    assert result.best is not None
    assert result.best.settings == {"alpha": 0.5}


def test_no_more_models_than_asked_for_are_on_the_disk(models: Models, tmp_path: Path) -> None:
    seen: list[int] = []

    def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        score = -settings["alpha"]  # a reference has no settings
        seen.append(len([path for path in folder.parent.iterdir() if path.is_dir()]))
        return {"score": score}

    alphas = {"alpha": [0.1 * i for i in range(1, 8)]}
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", alphas, evaluate=evaluate, at_once=2)
    assert len(seen) == 7
    assert max(seen) <= 3  # two, and the best so far


def test_models_written_to_stay_are_not_removed_by_a_later_evaluation(models: Models, tmp_path: Path) -> None:
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS)
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=lambda folder, settings: {"score": 1.0})
    assert names_in(tmp_path / "grid") == ["alpha=0.5", "alpha=1.0", "alpha=2.0", TABLE]


def test_what_is_not_a_number_is_worst(models: Models, tmp_path: Path) -> None:
    scores = {0.5: float("nan"), 2.0: -1.0, 1.0: float("nan")}
    result = acemerge.sweep(
        models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=lambda folder, settings: scores[settings["alpha"]]
    )
    assert result.best is not None
    assert result.best.settings == {"alpha": 2.0}
    assert result.points[0].scores == {"score": None}


@pytest.mark.parametrize("given", ["good", {}, {"a": "b"}, {1: 2.0}, None, [0.5], {"a": True}])
def test_scores_that_are_none_are_refused(models: Models, tmp_path: Path, given: Any) -> None:
    with pytest.raises(MergeError, match=r"the evaluation of alpha=0\.5"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=lambda folder, settings: given)


def test_the_deciding_score_must_be_there(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no score 'lenght': did you mean 'length'"):
        acemerge.sweep(
            models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=distance_from_base(models), maximise="lenght"
        )


SCORE = """
import json, sys
print("some words")
manifest = json.load(open(sys.argv[1] + "/acemerge_manifest.json"))
print(json.dumps({"closeness": -abs(manifest["options"]["alpha"] - 1)}))
"""


@pytest.mark.parametrize("place", ["", " {}"])
def test_a_command_evaluates(models: Models, tmp_path: Path, monkeypatch: Any, capsys: Any, place: str) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    evaluate = f"{sys.executable} {tmp_path / 'score.py'}{place}"
    arguments = [*models.arguments, "-o", tmp_path / "grid", "--set", "alpha=0.5,1,2", "--evaluate", evaluate]
    assert run_command(monkeypatch, "sweep", *arguments) == 0
    shown = capsys.readouterr()
    assert "best: alpha=1.0" in shown.out
    assert "3/3 alpha=2.0: closeness -1" in shown.err
    assert names_in(tmp_path / "grid") == ["alpha=1.0", TABLE]
    assert run_command(monkeypatch, "sweep", *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["best"]["settings"] == {"alpha": 1.0}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit(3)", "ended with code 3"),
        ("print('hello')", "its last line is 'hello', not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_command_that_fails(models: Models, tmp_path: Path, monkeypatch: Any, capsys: Any, script: str, message: str) -> None:
    (tmp_path / "score.py").write_text(script)
    evaluate = f"{sys.executable} {tmp_path / 'score.py'}"
    arguments = [*models.arguments, "-o", tmp_path / "grid", "--set", "alpha=0.5,1", "--evaluate", evaluate, "-q"]
    assert run_command(monkeypatch, "sweep", *arguments) == 1
    assert message in capsys.readouterr().err
