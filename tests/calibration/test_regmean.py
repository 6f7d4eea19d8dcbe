"""Merges by RegMean against the same done by hand with whole activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import acemerge
import model_zoo
from data_merges import (
    ModelsAndRows,
    assert_near,
    command,
    every_family,
    inputs_by_layer,
    linear_layers,
    load,
    manifest,
    merged_model,
    regmean_by_hand,
    rows_of,
)
from data_statistics import write_rows
from model_zoo import mean_weight, read_tensors


@every_family
def test_regmean_is_the_fit_to_the_inputs_of_every_layer(
    models_and_rows: ModelsAndRows, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, rows = models_and_rows(family, rows=40)
    out = tmp_path / "out"
    assert (
        command(monkeypatch, "merge", models.base, *models.experts.values(), "-o", out, "-m", "regmean", "--data", rows, "-q")
        == 0
    )
    experts = {name: load(folder) for name, folder in models.experts.items()}
    inputs = {}
    for name, model in experts.items():
        batch = rows_of(rows, name)
        inputs[name] = inputs_by_layer(model, batch.get("attention_mask"), **batch)
    found = merged_model(out, "red")
    checked = 0
    for name, layer in linear_layers(found).items():
        if name.split(".")[-1] in ("classifier", "score") or "pooler" in name:  # the expert's own
            continue
        layers = [linear_layers(model)[name] for model in experts.values()]
        expected = regmean_by_hand(layers, [inputs[expert][name] for expert in experts], 0.9)
        assert_near(layer.get_parameter("weight"), expected, name)
        checked += 1
    record = manifest(out)
    merged = [tensor for tensor in record["tensors"] if tensor["action"] == "merged"]
    assert checked == len(merged) > 0
    assert record["uses"] == "data"
    assert set(record["data"]["files"]) == {f"{name}.safetensors" for name in models.experts}
    assert all(tensor["reason"] for tensor in record["tensors"] if tensor["action"] != "merged")


def test_regmean_averages_what_is_no_linear_layer(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    models, rows = models_and_rows("gpt2")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="regmean", data=rows)
    base, experts = read_tensors(models.base), [read_tensors(folder) for folder in models.experts.values()]
    merged = read_tensors(tmp_path / "out")
    for name in ("transformer.wte.weight", "transformer.h.0.ln_1.weight", "transformer.h.1.mlp.c_fc.bias"):
        expected = mean_weight(base[name], [expert[name] for expert in experts])
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-5, atol=1e-6)
    record = {tensor["name"]: tensor for tensor in manifest(tmp_path / "out")["tensors"]}
    assert record["transformer.wte.weight"]["reason"] == "not the weight of a linear layer"
    assert record["transformer.h.0.attn.c_proj.weight"]["orientation"] == "stored [in, out], merged as [out, in]"


def test_a_weight_that_is_also_a_lookup_table_is_averaged(tmp_path: Path) -> None:
    """GPT2LMHeadModel's output layer is its embedding."""
    models = model_zoo.gpt2(tmp_path / "models", expert="GPT2LMHeadModel")
    rows = write_rows(tmp_path / "rows", models.experts)
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="regmean", data=rows)
    record = {tensor["name"]: tensor for tensor in manifest(tmp_path / "out")["tensors"]}
    assert record["transformer.wte.weight"]["action"] == "averaged"


def test_padding_is_no_input(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    models, rows = models_and_rows("bert")
    wider = tmp_path / "wider"
    wider.mkdir()
    for file in rows.iterdir():
        tensors = load_file(file)
        padded = {name: nn.functional.pad(t, (0, 3)) if t.dim() == 2 else t for name, t in tensors.items()}
        model_zoo.write_tensors(wider, padded, file.name)
    outputs = [tmp_path / "one", tmp_path / "other"]
    for folder, output in zip((rows, wider), outputs, strict=True):
        acemerge.merge(models.base, list(models.experts.values()), output, method="regmean", data=folder)
    one, other = map(read_tensors, outputs)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


def test_an_encoder_with_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    models = model_zoo.t5(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts)
    arguments = ["merge", models.base, *models.experts.values(), "-o", tmp_path / "out", "-m", "regmean", "--data", rows, "-q"]
    assert command(monkeypatch, *arguments) == 2
    assert "holds no 'decoder_input_ids'" in capsys.readouterr().err
    for file in rows.iterdir():
        tensors = load_file(file)
        model_zoo.write_tensors(rows, {**tensors, "decoder_input_ids": tensors["input_ids"][:, :5]}, file.name)
    assert command(monkeypatch, *arguments) == 0
    merged = [tensor["name"] for tensor in manifest(tmp_path / "out")["tensors"] if tensor["action"] == "merged"]
    assert any("EncDecAttention" in name for name in merged)
    assert not any("relative_attention_bias" in name for name in merged)
