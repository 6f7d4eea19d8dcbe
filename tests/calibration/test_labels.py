"""Labels of rows: by number, or by the names that the expert's config has for its classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from acemerge.calibration.labels import read_labels
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint
from acemerge.errors import InputError
from model_zoo import Models


@pytest.fixture
def red(models: Models) -> Checkpoint:
    folder = models.experts["red"]
    config = json.loads((folder / "config.json").read_text())
    names = {"bad": 0, "good": 1, "fair": 2}
    config |= {"label2id": names, "id2label": {str(number): name for name, number in names.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder, "red")


def written(folder: Path, *labels: Any) -> Path:
    rows = [{"text": "w", **({"label": label} if label is not ... else {})} for label in labels]
    file = folder / "red.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_numbers_and_names_may_be_mixed(red: Checkpoint, tmp_path: Path) -> None:
    labels = read_labels(written(tmp_path, 2, "bad", "good", 0), red, red)
    assert labels is not None
    assert labels.tolist() == [2, 0, 1, 0]


def test_no_labels(red: Checkpoint, tmp_path: Path) -> None:
    assert read_labels(written(tmp_path, ..., ...), red, red) is None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((0, ..., 1), "row 2 has no 'label'"),
        (("bad", "god"), "row 2: the expert has no class 'god': did you mean 'good'"),
        ((0, True), "row 2: 'label' must be a class's name, or its number from 0, found True"),
        ((0, 1.5), "row 2: 'label' must be"),
        ((0, 3), "has label 3, but expert 'red' .* has 3 classes, numbered from 0"),
    ],
)
def test_wrong_labels(labels: tuple[Any, ...], message: str, red: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_labels(written(tmp_path, *labels), red, red)
