"""What holds for every method that uses data, on tiny real models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
import model_zoo
from acemerge.calibration.run import ExpertModel
from acemerge.methods import get_method
from data_merges import (
    DATA_METHODS,
    QUICK,
    ModelsAndRows,
    command,
    every_data_method,
    every_family,
    load,
    manifest,
    merged_model,
)
from data_statistics import write_rows
from model_zoo import read_tensors


@every_data_method
def test_half_precision_in_is_half_precision_out(models_and_rows: ModelsAndRows, method: str, tmp_path: Path) -> None:
    models, rows = models_and_rows("vit", rows=4)
    for folder in models.folders:
        model_zoo.write_tensors(folder, {name: t.bfloat16() for name, t in read_tensors(folder).items()})
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method=method, data=rows, **QUICK.get(method, {})
    )
    for tensor in read_tensors(tmp_path / "out").values():
        assert tensor.dtype == torch.bfloat16
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("method", ["regmean_plusplus", "adamerging"])
def test_rules_hold_for_the_model_that_is_measured(
    models_and_rows: ModelsAndRows, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While measuring, a tensor that a rule keeps has the base's value, one that is averaged the mean."""
    models, rows = models_and_rows("bert")
    kept, averaged = "bert.encoder.layer.0.intermediate.dense.weight", "bert.encoder.layer.0.output.dense.weight"
    rules = [{"match": kept, "do": "keep"}, {"match": averaged, "do": "average"}]
    seen: dict[str, Tensor] = {}
    install = ExpertModel.install

    def watched(self: ExpertModel, name: str, value: Tensor) -> None:
        seen[name] = value
        install(self, name, value)

    monkeypatch.setattr(ExpertModel, "install", watched)
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method, data=rows, tensors=rules, **QUICK.get(method, {})
    )
    merged = read_tensors(tmp_path / "out")
    assert seen[kept].equal(read_tensors(models.base)[kept])
    assert seen[averaged].equal(merged[averaged])


@pytest.mark.parametrize("method", ["regmean", "regmean_plusplus", "fisher"])
def test_equal_experts_give_that_expert(models_and_rows: ModelsAndRows, method: str, tmp_path: Path) -> None:
    models, rows = models_and_rows("bert")
    red = models.experts["red"]
    copies = {name: model_zoo.rewrite(red, tmp_path / name, lambda tensors: tensors) for name in ("green", "blue")}
    acemerge.merge(models.base, {"red": red, **copies}, tmp_path / "out", method=method, data=rows)
    found, expected = merged_model(tmp_path / "out", "red").state_dict(), load(red).state_dict()
    for name in expected:
        if "pooler" not in name:  # after the blocks
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["regmean", "regmean_plusplus"])
def test_a_language_model(method: str, tmp_path: Path) -> None:
    models = model_zoo.llama(tmp_path / "models", tied=False)
    rows = write_rows(tmp_path / "rows", models.experts)
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method=method, data=rows)
    fates = {tensor["name"]: tensor["action"] for tensor in manifest(tmp_path / "out")["tensors"]}
    assert fates["model.layers.1.mlp.down_proj.weight"] == "merged"
    assert fates["lm_head.weight"] == ("merged" if method == "regmean" else "kept")
    assert fates["model.embed_tokens.weight"] == "averaged"


@every_data_method
@every_family
def test_whole_models_come_out_whole_and_the_same_again(
    models_and_rows: ModelsAndRows, method: str, family: str, tmp_path: Path
) -> None:
    models, rows = models_and_rows(family, rows=4)
    options = QUICK.get(method, {})
    for output in ("one", "two"):
        acemerge.merge(models.base, list(models.experts.values()), tmp_path / output, method=method, data=rows, **options)
    base, merged = read_tensors(models.base), read_tensors(tmp_path / "one")
    assert {name: (t.dtype, t.shape) for name, t in merged.items()} == {name: (t.dtype, t.shape) for name, t in base.items()}
    assert all(torch.isfinite(tensor).all() for tensor in merged.values() if tensor.is_floating_point())
    assert model_zoo.file_hashes(tmp_path / "one") == model_zoo.file_hashes(tmp_path / "two")
    assert "from their weights and data of their tasks (files of rows; no labels)" in (tmp_path / "one" / "README.md").read_text()
    assert "data: rows" in (tmp_path / "one" / "acemerge.yaml").read_text()
    assert str(tmp_path) not in (tmp_path / "one" / "acemerge_manifest.json").read_text()


@every_data_method
def test_what_was_measured_is_kept_and_made_again_when_anything_changes(
    models_and_rows: ModelsAndRows, method: str, tmp_path: Path, cache: Path
) -> None:
    models, rows = models_and_rows("bert", rows=4)

    def merge(output: str) -> set[str]:
        acemerge.merge(
            models.base, list(models.experts.values()), tmp_path / output, method=method, data=rows, **QUICK.get(method, {})
        )
        return {path.name for path in cache.rglob("*.safetensors")}

    first_files = merge("one")
    assert first_files
    assert merge("two") == first_files
    tensors = load_file(rows / "red.safetensors")
    tensors["input_ids"][0, 0] = 39 if tensors["input_ids"][0, 0] != 39 else 38
    model_zoo.write_tensors(rows, tensors, "red.safetensors")
    assert merge("three") > first_files
    for path in cache.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:40])  # a damaged file is measured again
    merge("four")
    model_zoo.assert_equal_tensors(read_tensors(tmp_path / "four"), read_tensors(tmp_path / "three"))


@every_data_method
def test_a_single_expert(models_and_rows: ModelsAndRows, method: str, tmp_path: Path) -> None:
    models, rows = models_and_rows("vit")
    red = models.experts["red"]
    acemerge.merge(models.base, [red], tmp_path / "out", method=method, data=rows, **QUICK.get(method, {}))
    found, expected = read_tensors(tmp_path / "out"), read_tensors(red)
    inner = [name for name in found if ".layer." in name and found[name].dim() == 2]
    assert inner
    learnt = method in ("adamerging", "mingle")  # how much of the expert comes in
    for name in inner if not learnt else []:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_methods_say_what_they_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert DATA_METHODS == ["adamerging", "fisher", "mingle", "regmean", "regmean_plusplus"]
    assert command(monkeypatch, "methods", "--json") == 0
    listed = {record["name"]: record["uses"] for record in json.loads(capsys.readouterr().out)}
    assert {name for name, uses in listed.items() if uses == "data"} == set(DATA_METHODS)
    assert command(monkeypatch, "methods", "fisher") == 0
    assert "It uses data besides the weights" in capsys.readouterr().out
    assert get_method("ace").uses == "weights"
