"""acemerge report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import acemerge
import model_zoo
from acemerge.output.manifest import MANIFEST
from command import Command
from model_zoo import Models


@pytest.fixture
def merged_bert(models_of: Callable[..., Models], tmp_path: Path) -> Path:
    """A merge of real models, as `acemerge merge` leaves it."""
    models = models_of(model_zoo.bert)
    acemerge.merge(models.base, models.experts, tmp_path / "merged", "ace")
    return tmp_path / "merged"


def test_report_command(run: Command, merged_bert: Path, tmp_path: Path) -> None:
    code, out, err = run("report", merged_bert, "--figures", tmp_path / "figures")
    assert code == 0, err
    assert "Every tensor is accounted for" in out
    assert (tmp_path / "merged.html").is_file()
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"heterogeneity.svg", "heterogeneity.png", "changes.svg", "changes.png"} <= names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not an output of `acemerge merge`"),
        ({"exported": "red"}, "is one task's model"),
        ({"tensors": []}, "damaged, or of another version"),
        ([], "expected a JSON object"),
    ],
)
def test_report_of_something_else_is_refused(run: Command, tmp_path: Path, content: object, message: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / MANIFEST).write_text(json.dumps(content))
    code, _, err = run("report", folder)
    assert code == 2
    assert message in err
    assert not list(tmp_path.glob("*.html"))


def test_a_report_needs_its_libraries(run: Command, merged_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, _, err = run("report", merged_bert)
    assert code == 2
    assert "pip install 'acemerge[report]'" in err
