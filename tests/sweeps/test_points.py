"""The points of a grid, and every mistake in it told in one sentence before any work."""

from pathlib import Path
from typing import Any

import pytest

import acemerge
from acemerge.errors import InputError
from acemerge.methods import get_method
from acemerge.recipe.arguments import parse_lists
from acemerge.sweeps.points import make_points
from running import run_command
from small_models import Models


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-m", "ace", "--set", "epsilonn=1"], "method 'ace' has no option 'epsilonn': did you mean 'epsilon'?"),
        (["-m", "ace", "--set", "epsilon=1e-5,lots"], "epsilon='lots' is not allowed: it must be"),
        (["-m", "ace", "--set", "epsilon="], "a value is empty"),
        (["-m", "ace", "--set", "epsilon=1e-5,,1e-4"], "a value is empty"),
        (["-m", "ace", "--set", "epsilon"], "write it as KEY=VALUE,VALUE"),
        (["-m", "ace", "--set", "epsilon=1e-5,0.00001"], "--set epsilon: the value 1e-05 is given twice"),
        (["-m", "ace", "--set", "epsilon=paper,1e-5"], "epsilon=paper and epsilon=1e-05 are the same merge"),
        (["-m", "ace", "--set", "epsilon=1", "--set", "epsilon=2"], "--set epsilon: is given twice"),
        (["-m", "ace", "--set", "dtype=float16,float32"], "not an option of a method; use --dtype"),
        (["--set", "tau=1", "-m", "ties"], "method 'ties' has no option 'tau'"),
        (["-m", "ace", "--set", "tau=1", "--keep", "bset"], "did you mean 'best'?"),
        (["-m", "ace", "--set", "tau=1", "--evaluate", "no-such-command-here"], "there is no such command"),
        (["-m", "ace", "--set", "tau=1", "--maximise", "a", "--minimise", "b"], "one score decides"),
        (["-m", "ace", "--set", "tau=1", "--minimise", "loss"], "--minimise loss: nothing gives scores; add --evaluate"),
        (["-m", "ace", "--set", "tau=1", "--dtype", "int8"], "dtype"),
    ],
)
def test_refusals(models: Models, tmp_path: Path, monkeypatch: Any, capsys: Any, flags: list[str], message: str) -> None:
    assert run_command(monkeypatch, "sweep", *models.arguments, "-o", tmp_path / "grid", *flags) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("grid*"))


def test_nothing_to_vary(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a sweep varies something"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {})
    with pytest.raises(InputError, match="give at least one value"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"tau": []}, "ace")


def test_names_and_values() -> None:
    points = make_points(get_method("linear"), parse_lists(["weights=[0.7,0.3],equal", "alpha=1,0.5"]))
    assert [point.name for point in points] == [
        "weights=[0.7,0.3],alpha=1.0", "weights=[0.7,0.3],alpha=0.5", "weights=equal,alpha=1.0", "weights=equal,alpha=0.5",
    ]  # fmt: skip
