"""--heads: what becomes of task heads, above all those of experts that were trained for the same labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import acemerge
from acemerge.errors import PreflightError
from small_models import base_tensors, fine_tuned, write_model

LABELS = {"id2label": {"0": "cat", "1": "dog"}}


@pytest.fixture
def soup(tmp_path: Path) -> tuple[Path, list[Path]]:
    base = base_tensors() | {"classifier.weight": torch.zeros(2, 6), "classifier.bias": torch.zeros(2)}
    experts = [write_model(tmp_path / f"e{i}", fine_tuned(base, i), LABELS) for i in range(2)]
    return write_model(tmp_path / "base", base, LABELS), experts


def test_the_same_labels_are_noted_and_the_base_keeps_its_head(soup: tuple[Path, list[Path]], tmp_path: Path) -> None:
    result = acemerge.merge(*soup, tmp_path / "out")
    (note,) = (note for note in result.plan.notes if "same labels" in note)
    assert "--heads average" in note
    assert not load_file(tmp_path / "out/model.safetensors")["classifier.weight"].any()
    assert {path.name for path in (tmp_path / "out/heads").iterdir()} == {"e0", "e1"}


def test_other_labels_are_no_soup(soup: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, (first, _) = soup
    other = write_model(tmp_path / "other", load_file(first / "model.safetensors"), {"id2label": {"0": "good", "1": "bad"}})
    assert not any("same labels" in note for note in acemerge.plan(base, [first, other]).notes)


def test_averaged_heads(soup: tuple[Path, list[Path]], tmp_path: Path) -> None:
    acemerge.merge(*soup, tmp_path / "out", heads="average")
    heads = [load_file(expert / "model.safetensors")["classifier.weight"] for expert in soup[1]]
    merged = load_file(tmp_path / "out/model.safetensors")["classifier.weight"]
    torch.testing.assert_close(merged, (heads[0] + heads[1]) / 2)
    assert not (tmp_path / "out/heads").exists()


def test_the_base_s_head_alone(soup: tuple[Path, list[Path]], tmp_path: Path) -> None:
    acemerge.merge(*soup, tmp_path / "out", heads="keep")
    assert not load_file(tmp_path / "out/model.safetensors")["classifier.weight"].any()
    assert not (tmp_path / "out/heads").exists()


def test_heads_that_do_not_fit_are_refused(soup: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, (first, _) = soup
    tensors = load_file(first / "model.safetensors") | {"classifier.weight": torch.zeros(3, 6), "classifier.bias": torch.zeros(3)}
    wider = write_model(tmp_path / "wider", tensors)
    with pytest.raises(PreflightError, match=r"1 problem found.*\n.*have no 'classifier.\w+', 'classifier.\w+' of the same"):
        acemerge.plan(base, [first, wider], heads="average")
    write_model(tmp_path / "headless", base_tensors())
    with pytest.raises(PreflightError, match=r"1 problem found.*\n.*--heads average: the base and the experts have no"):
        acemerge.plan(tmp_path / "headless", soup[1], heads="average")
