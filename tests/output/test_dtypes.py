"""The dtype of an output: the base's, or the one that is asked for, whatever the experts have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import model_zoo as zoo
from acemerge import merge_task_vectors
from checkpoint_files import merge, merged_tensors
from model_zoo import (
    Models,
    Tensors,
    ace_weight,
    assert_same_change,
    bitwise_equal,
    load_whole,
    mean_weight,
    read_tensors,
    rewrite,
    stacked_deltas,
)

MIXES = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
]


MATRICES = {"blocks.0.mix.weight": False, "blocks.0.widen.weight": False, "blocks.0.fold.weight": True}  # stored [in, out]?


def merged_weight(method: str, base: Tensor, experts: list[Tensor], *, transpose: bool) -> Tensor:
    """In float64."""
    if method == "ace":
        return ace_weight(base, experts, 1e-5, transpose=transpose)
    deltas = stacked_deltas(base, experts)
    if transpose:
        return base.double() + merge_task_vectors(deltas.mT, method, base=base.double().T).T
    return base.double() + merge_task_vectors(deltas, method, base=base.double())


def assert_close_to_float64(
    models: Models, found: Tensors, dtype: torch.dtype, tolerance: float, method: str = "ace_auto"
) -> None:
    """Every tensor, against the method and means on the files' values in float64."""
    base = read_tensors(models.base)
    experts = [read_tensors(path) for path in models.experts.values()]
    for name, value in base.items():
        if not value.is_floating_point():
            assert bitwise_equal(found[name], value)
            continue
        own = [expert[name] for expert in experts]
        is_matrix = name in MATRICES
        expected = merged_weight(method, value, own, transpose=MATRICES[name]) if is_matrix else mean_weight(value, own)
        assert found[name].dtype == dtype
        assert_same_change(name, found[name], expected, value, tolerance)


@pytest.mark.parametrize("method", ["ace", "ace_auto"])
@pytest.mark.parametrize(("base", "experts"), MIXES, ids=str)
def test_output_has_the_bases_dtype(tmp_path: Path, base: torch.dtype, experts: torch.dtype, method: str) -> None:
    models = zoo.build_from_shapes(tmp_path, zoo.UNKNOWN_SHAPES, base_dtype=base, expert_dtype=experts)
    tolerance = 1e-9 if base == torch.float64 else 1e-5
    assert_close_to_float64(models, merged_tensors(models, tmp_path, method=method), base, tolerance, method)


def test_experts_may_differ_in_dtype(plain: Models, tmp_path: Path) -> None:
    def cast(dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
        return lambda tensors: {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

    dtypes = {"red": torch.bfloat16, "green": torch.float16, "blue": torch.float64}
    experts = {name: rewrite(plain.experts[name], tmp_path / name, cast(dtype)) for name, dtype in dtypes.items()}
    models = Models(plain.base, experts)
    assert_close_to_float64(models, merged_tensors(models, tmp_path), torch.float32, 1e-5)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_dtype_can_be_asked_for(plain: Models, tmp_path: Path, dtype: str) -> None:
    found = merged_tensors(plain, tmp_path, dtype=dtype)
    assert_close_to_float64(plain, found, getattr(torch, dtype), 1e-5)


def test_an_asked_for_dtype_also_holds_for_kept_tensors(llama: Models, tmp_path: Path) -> None:
    found = merged_tensors(llama, tmp_path, method="ace", dtype="bfloat16")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert bitwise_equal(found["lm_head.weight"], read_tensors(llama.base)["lm_head.weight"].bfloat16())
    assert load_whole("LlamaForCausalLM", tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_only_the_dtype_of_the_config_is_edited(llama: Models, tmp_path: Path, key: str) -> None:
    base = shutil.copytree(llama.base, tmp_path / "base")
    text = (base / "config.json").read_text().replace('"dtype": "float32"', f'"{key}": "float32"')
    (base / "config.json").write_text(text)
    merge(Models(base, llama.experts), tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out" / "config.json").read_text() == text.replace(f'"{key}": "float32"', f'"{key}": "bfloat16"')
