"""One weight per expert: how weights are given, checked and explained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import acemerge
from acemerge.cli.app import main
from acemerge.errors import InputError
from acemerge.methods import get_method
from elementwise_cases import random_tasks, run, small_model
from small_models import write_models


@pytest.mark.parametrize("name", ["linear", "della"])
def test_weights_must_be_one_per_expert(name: str) -> None:
    with pytest.raises(
        InputError, match=r"'w': weights=\[0.7, 0.3\] are 2 numbers for 3 experts \(a, b, c\); give one per expert"
    ):
        run(name, random_tasks(3, 5, 4), weights=(0.7, 0.3))


def test_a_tensor_that_an_expert_lacks_needs_weights_of_its_own() -> None:
    base, experts = small_model()
    del experts["b"]["embed.weight"]
    merge: Callable[..., dict[str, Tensor]] = acemerge.merge_state_dicts
    with pytest.raises(InputError, match=r"are 3 numbers for 2 experts; give one per expert for 'embed\.weight'"):
        merge(base, experts, method="linear", missing="skip", weights=[1, 2, 3])
    rule = {"match": "embed.weight", "options": {"weights": [1, 3]}}
    merged = merge(base, experts, method="linear", missing="skip", tensors=[rule], weights=[1, 2, 3])
    expected = (experts["a"]["embed.weight"] + 3 * experts["c"]["embed.weight"]) / 4
    torch.testing.assert_close(merged["embed.weight"], expected)


@pytest.mark.parametrize("given_weights", ["0.7,0.3", " 0.7 , 3e-1 ", "[0.7, 0.3]", [0.7, "0.3"], (0.7, 0.3)])
def test_weights_as_text_or_list(given_weights: Any) -> None:
    options = get_method("linear").options({"weights": given_weights})
    assert vars(options)["weights"] == (0.7, 0.3)
    assert hash(options) == hash(get_method("linear").options({"weights": [0.7, 0.3]}))


@pytest.mark.parametrize("bad", ["a,b", "0.7;0.3", "1,nan", [1, float("inf")], {"a": 1}, "", "1,,2", None])
def test_bad_weights_are_explained_once(bad: Any) -> None:
    with pytest.raises(InputError) as caught:
        get_method("linear").options({"weights": bad})
    assert str(caught.value) == (
        f"method 'linear': weights={bad!r} is not allowed: it must be 'equal' or a list, each entry a number"
    )


def test_options_that_are_lists_are_described() -> None:
    described = {option.name: option for option in get_method("della").describe_options()}
    assert described["weights"].allowed == "'equal' or a list, each entry a number >= 0"
    assert described["weights"].default == "equal"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()


@pytest.mark.parametrize("text", ["3,1", "[3, 1]"])
def test_weights_on_the_command_line_and_in_the_recipe_it_writes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = write_models(tmp_path, experts=2)
    out = tmp_path / "out"
    command(monkeypatch, "merge", *models.arguments, "-o", out, "-q", "-m", "linear", "-s", f"weights={text}")
    recipe = yaml.safe_load((out / "acemerge.yaml").read_text())
    assert recipe["options"]["weights"] == [3.0, 1.0]
    first, second = (load_file(folder / "model.safetensors") for folder in models.experts)
    merged = load_file(out / "model.safetensors")
    torch.testing.assert_close(merged["embed.weight"], 0.75 * first["embed.weight"] + 0.25 * second["embed.weight"])
    (tmp_path / "again.yaml").write_text((out / "acemerge.yaml").read_text())
    command(monkeypatch, "merge", tmp_path / "again.yaml", "-o", tmp_path / "again", "-q")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
