"""Merges by RegMean++, step by step as the paper has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from model_zoo import read_tensors


def parts_of(model: Any, family: str) -> tuple[nn.Module, nn.ModuleList, Callable[..., Tensor]]:
    """What comes before the blocks, the blocks, and how the first block's inputs are made."""
    if family == "bert":
        return model.bert.embeddings, model.bert.encoder.layer, lambda b: model.bert.embeddings(input_ids=b["input_ids"])
    if family == "vit":
        return model.vit.embeddings, model.vit.layers, lambda b: model.vit.embeddings(b["pixel_values"])
    body = model.transformer
    positions = torch.arange(7)
    return body.wte, body.h, lambda b: body.wte(b["input_ids"]) + body.wpe(positions)


def first(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@every_family
@torch.no_grad()
def test_regmean_plusplus_is_regmean_behind_the_merged_blocks(
    models_and_rows: ModelsAndRows, family: str, tmp_path: Path
) -> None:
    """Step by step as the paper has it, keeping every block's inputs Z_t."""
    models, rows = models_and_rows(family, rows=40, padded=False)
    out = tmp_path / "out"
    acemerge.merge(models.base, list(models.experts.values()), out, method="regmean_plusplus", data=rows)
    batches = {name: rows_of(rows, name) for name in models.experts}
    experts = {name: load(folder) for name, folder in models.experts.items()}
    trunk = load(models.experts["red"])
    means = {n: torch.stack([dict(e.named_parameters())[n] for e in experts.values()]).mean(0)
             for n, p in trunk.named_parameters() if p.shape == dict(experts["blue"].named_parameters())[n].shape}  # fmt: skip
    for name, parameter in trunk.named_parameters():
        if name in means:
            parameter.copy_(means[name])
    _, merged_blocks, embed = parts_of(trunk, family)
    Z = {name: embed(batch) for name, batch in batches.items()}
    found = merged_model(out, "red")
    for index, block in enumerate(merged_blocks):
        seen, layers = {}, {}
        for name, model in experts.items():
            own = parts_of(model, family)[1][index]
            seen[name] = inputs_by_layer(own, None, Z[name])
            layers[name] = linear_layers(own)
        for layer, module in linear_layers(block).items():
            weight = regmean_by_hand([layers[n][layer] for n in experts], [seen[n][layer] for n in experts], 0.95)
            module.get_parameter("weight").copy_(weight)
            theirs = linear_layers(parts_of(found, family)[1][index])[layer].get_parameter("weight")
            assert_near(theirs, weight, f"block {index} {layer}")
        Z = {name: first(block(z)) for name, z in Z.items()}


def test_regmean_plusplus_keeps_what_comes_after_the_blocks(models_and_rows: ModelsAndRows, tmp_path: Path) -> None:
    models, rows = models_and_rows("gpt2")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="regmean_plusplus", data=rows)
    base, merged = read_tensors(models.base), read_tensors(tmp_path / "out")
    assert merged["transformer.ln_f.weight"].equal(base["transformer.ln_f.weight"])
    record = {tensor["name"]: tensor for tensor in manifest(tmp_path / "out")["tensors"]}
    assert record["transformer.ln_f.weight"]["reason"] == "after the last block: left at the base"
    assert record["transformer.wpe.weight"]["action"] == "averaged"


def test_models_with_two_stacks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = model_zoo.clip(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts)
    arguments = ["merge", models.base, *models.experts.values(), "-o", tmp_path / "out", "-m", "regmean_plusplus", "--data", rows]
    assert command(monkeypatch, *arguments) == 2
    assert "needs one stack of blocks" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
