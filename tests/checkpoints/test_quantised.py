"""8-bit floats with scales are read as the floats they stand for; other quantised models are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
from acemerge.calibration.models import model_class
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.checkpoints.quantised.scaled import dequantise
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.errors import InputError
from small_models import base_tensors, fine_tuned, write_model

FLOAT8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 5]}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


def random_weight(*shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 50).to(FLOAT8)


def random_scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) / 100 + 1e-4


@pytest.mark.parametrize("shape", [(12, 10), (13, 11), (3, 4), (2500, 6)])
def test_blocks_by_the_formula(shape: tuple[int, int]) -> None:
    """W[i, j] = Q[i, j] s[i // tall, j // wide], also where the last blocks are cut off and where rows are taken in turns."""
    weight, scale = random_weight(*shape), random_scales(-(-shape[0] // 4), -(-shape[1] // 5))
    i, j = torch.meshgrid(torch.arange(shape[0]), torch.arange(shape[1]), indexing="ij")
    expected = weight.float() * scale[i // 4, j // 5]
    assert torch.equal(dequantise(weight, scale, block=(4, 5), dtype="float32"), expected)
    assert torch.equal(dequantise(weight, scale, block=(4, 5), dtype="bfloat16"), expected.bfloat16())


@pytest.mark.parametrize("of_scale", [(), (1,), (1, 1), (12,), (12, 1)])
def test_one_scale_of_a_matrix_or_of_each_channel(of_scale: tuple[int, ...]) -> None:
    weight, scale = random_weight(12, 10), random_scales(*of_scale)
    expected = weight.float() * scale.reshape(-1, 1)
    assert torch.equal(dequantise(weight, scale, block=None, dtype="float32"), expected)


@pytest.mark.parametrize("of_scale", [(1,), (3,), (3, 1, 1), (3, 12, 1), (3, 3, 2)])
def test_stacked_matrices_have_their_own_scales(of_scale: tuple[int, ...]) -> None:
    weight, scale = random_weight(3, 12, 10), random_scales(*of_scale)
    alone = [dequantise(weight[i], scale[i] if scale.shape[0] == 3 else scale, block=(4, 5), dtype="float32") for i in range(3)]
    assert torch.equal(dequantise(weight, scale, block=(4, 5), dtype="float32"), torch.stack(alone))


def test_as_transformers_does_it() -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = random_weight(256, 384), random_scales(2, 3)
    theirs = finegrained.Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(dequantise(weight, scale, block=(128, 128), dtype="bfloat16"), theirs)


def quantise(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What an FP8 folder stores, and what it stands for in bfloat16. The matrices of layers are quantised, as people do."""
    stored, floats = {}, {}
    for name, value in tensors.items():
        if not (name.startswith("layers") and value.dim() == 2):
            stored[name] = floats[name] = value.bfloat16() if value.is_floating_point() else value
            continue
        rows, columns = value.shape
        scale = random_scales(-(-rows // 4), -(-columns // 5)) if settings is BLOCKS else random_scales(rows, 1)
        spread = scale.repeat_interleave(4, 0).repeat_interleave(5, 1)[:rows, :columns] if settings is BLOCKS else scale
        stored[name] = (value / spread).clamp(-448, 448).to(FLOAT8)
        stored[f"{name}_scale_inv" if settings is BLOCKS else f"{name}_scale"] = scale
        stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        floats[name] = (stored[name].float() * spread).bfloat16()
    return stored, floats


@pytest.mark.parametrize("settings", [BLOCKS, CHANNELS], ids=["blocks", "channels"])
def test_they_merge_as_the_floats_they_stand_for(tmp_path: Path, settings: dict[str, Any]) -> None:
    """As base and as experts. The output is a float model and says so."""
    base = base_tensors()
    for name, tensors in {"base": base, **{f"expert-{i}": fine_tuned(base, i, 0.5) for i in range(2)}}.items():
        stored, floats = quantise(tensors, settings)
        write_model(tmp_path / "8-bit" / name, stored, {"quantization_config": settings, "dtype": "bfloat16"})
        write_model(tmp_path / "floats" / name, floats, {"dtype": "bfloat16"})
    for kind in ("8-bit", "floats"):
        folder = tmp_path / kind
        acemerge.merge(folder / "base", [folder / "expert-0", folder / "expert-1"], tmp_path / f"{kind}-merged", method="ties")
    merged, expected = (load_file(tmp_path / f"{kind}-merged/model.safetensors") for kind in ("8-bit", "floats"))
    assert merged.keys() == expected.keys() == base.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert merged["layers.0.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "8-bit-merged/config.json").read_text()) == {
        "model_type": "nobody-heard-of-it",
        "dtype": "bfloat16",
    }


def test_headers_show_floats_and_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    stored, _ = quantise(base_tensors(), BLOCKS)
    model = open_checkpoint(write_model(tmp_path / "model", stored, {"quantization_config": BLOCKS}), "model")
    assert model.tensors["layers.1.weight"] == TensorHeader("bfloat16", (6, 12))
    assert "quantization_config" not in model.config
    assert model.tensors.keys() == base_tensors().keys()


def test_a_head_of_a_quantised_expert_says_that_it_is_float(tmp_path: Path) -> None:
    base = base_tensors()
    stored, _ = quantise(fine_tuned(base, 1), BLOCKS)
    expert = write_model(tmp_path / "expert", stored | {"classifier.weight": torch.ones(2, 6)}, {"quantization_config": BLOCKS})
    acemerge.merge(write_model(tmp_path / "base", base), [expert], tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/heads/expert/config.json").read_text())


def refused(tmp_path: Path, stored: Mapping[str, Tensor], settings: object) -> str:
    folder = write_model(tmp_path / "model", stored, {"quantization_config": settings})
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder, "model")
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers.0.weight_scale_inv": None}, "no scale beside it"),
        ({"layers.0.weight_scale_inv": torch.ones(2, 2)}, "float32 [2, 2], which does not fit and blocks of [4, 5]"),
        ({"layers.0.weight_scale_inv": torch.ones(3, 2, dtype=torch.uint8)}, "uint8 [3, 2], which does not fit"),
        ({"layers.0.weight": torch.ones(12, 8, dtype=torch.int8)}, "this way to quantise has no such numbers"),
    ],
)
def test_scales_that_cannot_be_understood(tmp_path: Path, change: dict[str, Tensor | None], told: str) -> None:
    stored, _ = quantise(base_tensors(), BLOCKS)
    message = refused(tmp_path, {name: value for name, value in {**stored, **change}.items() if value is not None}, BLOCKS)
    assert "tensor 'layers.0.weight'" in message
    assert told in message


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nothing beside it says for which floats it stands"),
        ({"load_in_8bit": True}, "nothing beside it says for which floats it stands"),
        ({"quant_method": "gptq", "bits": 5}, "by GPTQ to 5 bits, which acemerge does not read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "by AWQ to 4 bits, version 'gemv'; only 4 bits, gemm, is read"),
        ({"quant_method": "mxfp4"}, "to MXFP4. Give the float model"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "(compressed-tensors, format marlin-24)"),
        ({"quant_method": "something_new"}, "does not read (something_new)"),
        ("yes", "in an unknown way"),
    ],
)
def test_other_ways_are_refused_by_name(tmp_path: Path, settings: object, told: str) -> None:
    message = refused(tmp_path, {"layers.0.qweight": torch.ones(4, 4, dtype=torch.int32)}, settings)
    assert told in message
    assert "Give the float model that it was made from" in message


def test_a_quantised_expert_is_not_run_on_data(tmp_path: Path) -> None:
    stored, _ = quantise(base_tensors(), BLOCKS)
    expert = open_checkpoint(write_model(tmp_path / "model", stored, {"quantization_config": BLOCKS}), "model")
    with pytest.raises(InputError, match=r"make it a float model first: acemerge merge .* -m passthrough"):
        model_class(expert)
