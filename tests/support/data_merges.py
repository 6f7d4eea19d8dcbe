"""Merges that use data, of tiny real models, and the same done by hand with whole activations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import acemerge
import model_zoo
from acemerge.cli.app import main
from acemerge.methods import all_methods
from model_zoo import Models

DATA_METHODS = [method.name for method in all_methods() if method.uses == "data"]


QUICK: dict[str, dict[str, Any]] = {
    "adamerging": {"steps": 3, "batch_size": 4, "learning_rate": 0.02},
    "mingle": {"steps": 3, "batch_size": 4, "learning_rate": 0.02, "directions": 4},
}


FAMILIES: dict[str, Callable[[Path], Models]] = {"bert": model_zoo.bert, "gpt2": model_zoo.gpt2, "vit": model_zoo.vit}


ModelsAndRows = Callable[..., tuple[Models, Path]]
every_family = pytest.mark.parametrize("family", FAMILIES)


every_data_method = pytest.mark.parametrize("method", DATA_METHODS)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def manifest(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "acemerge_manifest.json").read_text())
    return content


def load(folder: Path) -> Any:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder).eval()


def rows_of(rows: Path, expert: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in load_file(rows / f"{expert}.safetensors").items() if name != "labels"}


# --- by hand -----------------------------------------------------------------------------------------------------------
def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def real_inputs(x: Tensor, mask: Tensor | None) -> Tensor:
    return (x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x.reshape(-1, x.shape[-1])).double()


def inputs_by_layer(model: Any, mask: Tensor | None, *arguments: Any, **named: Any) -> dict[str, Tensor]:
    """Everything that every linear layer gets while the model is called, whole."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[name] = real_inputs(given[0], mask)

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linear_layers(model).items()]
    with torch.no_grad():
        model(*arguments, **named)
    for handle in handles:
        handle.remove()
    return seen


def regmean_by_hand(layers: list[nn.Module], inputs: list[Tensor], a: float) -> Tensor:
    """As stored: W = (sum W_t H_t)(sum H_t)^-1, or (sum H_t)^-1 (sum H_t W_t) for [in, out]."""
    H = []
    for x in inputs:
        G = x.T @ x / len(x)
        H.append(a * G + (1 - a) * G.diag().diag())
    inverse: Tensor = torch.linalg.inv(torch.stack(H).sum(0))
    weights: list[Tensor] = [layer.get_parameter("weight").detach().double() for layer in layers]
    if isinstance(layers[0], Conv1D):
        return inverse @ torch.stack([h @ w for h, w in zip(H, weights, strict=True)]).sum(0)
    return torch.stack([w @ h for h, w in zip(H, weights, strict=True)]).sum(0) @ inverse


def merged_model(output: Path, expert: str) -> Any:
    return acemerge.load_expert_head(output, expert)


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    error = float((found.detach().double() - expected).abs().max())
    assert error <= 2e-3 * float(expected.abs().max()), f"{what}: off by {error:.3g}"
