"""Passthrough: the one expert's weights, scaled if asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import acemerge
from acemerge.errors import InputError
from small_models import write_models


def test_the_expert_comes_out(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    acemerge.merge(models.base, models.experts[:1], tmp_path / "out", method="passthrough")
    expert, found = (load_file(folder / "model.safetensors") for folder in (models.experts[0], tmp_path / "out"))
    for name, value in found.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expert[name])


def test_weights_are_scaled_whole(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    acemerge.merge(models.base, models.experts[:1], tmp_path / "out", method="passthrough", scale=-2.0)
    acemerge.merge(models.base, [models.base], tmp_path / "own", method="passthrough", scale=-2.0)
    for folder, original in ((tmp_path / "out", models.experts[0]), (tmp_path / "own", models.base)):
        before, found = load_file(original / "model.safetensors"), load_file(folder / "model.safetensors")
        torch.testing.assert_close(found["layers.0.weight"], -2.0 * before["layers.0.weight"])


def test_one_expert_only(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    with pytest.raises(InputError, match="takes exactly 1 expert"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method="passthrough")
    with pytest.raises(InputError, match="passthrough takes exactly 1 expert, not 2"):
        acemerge.merge_task_vectors(torch.zeros(2, 3, 3), method="passthrough")
