"""Merges by Fisher information against a loop over rows and classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import acemerge
import model_zoo
from data_merges import ModelsAndRows, assert_near, command, every_family, load, manifest, merged_model, rows_of
from data_statistics import write_rows
from model_zoo import read_tensors


@every_family
def test_fisher_is_the_average_weighted_by_row_and_class(models_and_rows: ModelsAndRows, family: str, tmp_path: Path) -> None:
    """Against a loop over rows and classes: sum_y p_y (d log p_y)^2, scaled to a root mean square of 1."""
    models, rows = models_and_rows(family, rows=4)
    out = tmp_path / "out"
    acemerge.merge(models.base, list(models.experts.values()), out, method="fisher", data=rows)
    found = {name: p.detach().double() for name, p in merged_model(out, "red").named_parameters()}
    total: dict[str, Tensor] = {}
    weighted: dict[str, Tensor] = {}
    shared = [name for name in found if name.split(".")[0] not in ("classifier", "score") and "pooler" not in name]
    for expert, folder in models.experts.items():
        model = load(folder)
        parameters = {name: p for name, p in model.named_parameters() if name in shared}
        F = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        batch = rows_of(rows, expert)
        for row in range(4):
            log_p = model(**{name: t[row : row + 1] for name, t in batch.items()}).logits[0].log_softmax(0)
            for y in range(len(log_p)):
                gradients = torch.autograd.grad(log_p[y], list(parameters.values()), retain_graph=True)
                for name, gradient in zip(parameters, gradients, strict=True):
                    F[name] += float(log_p[y].detach().exp()) * gradient.double().square() / 4
        scale = (sum(f.numel() for f in F.values()) / sum(float(f.square().sum()) for f in F.values())) ** 0.5
        for name, f in F.items():
            weight = (f * scale).clamp_min(1e-6)
            total[name] = total.get(name, 0) + weight
            weighted[name] = weighted.get(name, 0) + weight * parameters[name].detach().double()
    for name in shared:
        assert_near(found[name], weighted[name] / total[name], name)


@pytest.mark.parametrize("form", ["sampled", "summed_gradient"])
def test_the_other_forms_run_and_are_on_record(models_and_rows: ModelsAndRows, form: str, tmp_path: Path) -> None:
    models, rows = models_and_rows("bert")
    for output in ("one", "two"):
        acemerge.merge(
            models.base, list(models.experts.values()), tmp_path / output, method="fisher", data=rows, form=form, rows=6
        )
    assert manifest(tmp_path / "one")["options"]["form"] == form
    model_zoo.assert_equal_tensors(read_tensors(tmp_path / "one"), read_tensors(tmp_path / "two"))


def test_a_model_that_answers_for_every_token(tmp_path: Path) -> None:
    """A language model of 40 words: exact is 7 x 39 passes a row, sampled one."""
    models = model_zoo.gpt2(tmp_path / "models", expert="GPT2LMHeadModel")
    rows = write_rows(tmp_path / "rows", models.experts)
    for form in ("exact", "sampled"):
        out = tmp_path / form
        acemerge.merge(models.base, list(models.experts.values()), out, method="fisher", data=rows, form=form, rows=2)
        assert all(torch.isfinite(tensor).all() for tensor in read_tensors(out).values())


def test_scaled_experts_are_measured_where_they_are_averaged(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    """Dynamic Fisher: the same as plain Fisher of experts that were written with so much of their change, T times as far."""
    models, rows = models_and_rows("bert", rows=3)
    scales = [0.3, 1.0, 0.7][: len(models.experts)]
    base, moved = read_tensors(models.base), {}
    for scale, (name, folder) in zip(scales, models.experts.items(), strict=True):
        shutil.copytree(folder, tmp_path / "moved" / name)
        own = read_tensors(folder)
        lerped = {t: torch.lerp(base[t], v, scale) if t in base and v.shape == base[t].shape else v for t, v in own.items()}
        lerped |= {t: v for t, v in own.items() if t.startswith("classifier")}
        save_file(lerped, tmp_path / "moved" / name / "model.safetensors", metadata={"format": "pt"})
        moved[name] = tmp_path / "moved" / name
    keywords: dict[str, Any] = {"method": "fisher", "data": rows}
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", scales=scales, **keywords)
    acemerge.merge(models.base, list(moved.values()), tmp_path / "expected", **keywords)
    found, expected = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "expected")
    plain = tmp_path / "plain"
    acemerge.merge(models.base, list(models.experts.values()), plain, **keywords)
    for name, tensor in found.items():
        assert_near(tensor, expected[name], name)
    assert not all(tensor.allclose(found[name], rtol=1e-3) for name, tensor in read_tensors(plain).items())


def test_dynamic_fisher_is_a_search_by_labelled_rows(
    models_and_rows: ModelsAndRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of the page."""
    pytest.importorskip("optuna")
    models, rows = models_and_rows("bert", rows=4)
    asked = ["-m", "fisher", "--data", rows, "--search", 4, "-s", "scales=0..1", "-s", "alpha=2", "-s", "rows=3", "--rows", rows]
    assert command(monkeypatch, "sweep", models.base, *models.experts.values(), "-o", tmp_path / "found", *asked) == 0
    table = json.loads((tmp_path / "found" / "sweep.json").read_text())
    tried = [point["settings"] for point in table["points"].values()]
    assert len(tried) == 4
    assert all(len(settings["scales"]) == len(models.experts) and settings["alpha"] == 2 for settings in tried)
    [kept] = [folder for folder in (tmp_path / "found").iterdir() if folder.is_dir()]
    assert manifest(kept)["options"]["scales"] == table["points"][kept.name]["settings"]["scales"]
