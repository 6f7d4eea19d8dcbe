"""--dtype fp8: matrices as 8-bit floats with scales, as the inputs have them, or in blocks of 128."""

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
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.checkpoints.quantised.eight_bits import EightBits
from acemerge.checkpoints.quantised.scaled import dequantise
from acemerge.errors import PreflightError
from small_models import base_tensors, fine_tuned, write_model

FLOAT8 = torch.float8_e4m3fn
WEIGHTS = {"num_bits": 8, "type": "float", "dynamic": False}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "observer": "memoryless"}


def of_compressed_tensors(**weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": STATIC}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [4, 5]}
KINDS = {
    "blocks": (FP8, EightBits("_scale_inv", (3, 2), (4, 5))),
    "tensor": (of_compressed_tensors(strategy="tensor"), EightBits("_scale", (1,), None, "bfloat16")),
    "channel": (of_compressed_tensors(strategy="channel"), EightBits("_scale", (12, 1), None, "bfloat16")),
}
NAME = "layers.0.weight"


def quantised(tensors: Mapping[str, Tensor], kind: EightBits) -> dict[str, Tensor]:
    """Only one matrix is stored in 8 bits."""
    numbers, scales = kind.quantised(tensors[NAME])
    floats = {name: value.bfloat16() for name, value in tensors.items() if name != NAME}
    module = NAME.removesuffix("weight")
    own = {NAME: numbers, NAME + kind.suffix: scales.to(getattr(torch, kind.scale_dtype)), f"{module}input_scale": torch.ones(1)}
    return floats | own


def write_models(folder: Path, kind: str) -> tuple[Path, list[Path]]:
    settings, eight = KINDS[kind]
    base = base_tensors()
    config = {"quantization_config": settings, "dtype": "bfloat16"}
    models = {"base": base, **{f"expert-{i}": fine_tuned(base, i, 0.1) for i in range(2)}}
    paths = [write_model(folder / name, quantised(tensors, eight), config) for name, tensors in models.items()]
    return paths[0], paths[1:]


@pytest.mark.parametrize("shape", [(12, 10), (13, 11), (256, 3)])
@pytest.mark.parametrize("block", [(4, 5), (1, 4), (128, 2)])
def test_numbers_and_scales_by_the_formula(shape: tuple[int, int], block: tuple[int, int]) -> None:
    """The largest number of a block becomes the largest float of 8 bits, and every number is rounded to the nearest."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    value[:4, :4] = 0
    rows, columns = (-(-size // own) for size, own in zip(shape, block, strict=True))
    numbers, scales = EightBits("_scale", (rows, columns), block).quantised(value)
    for i in range(rows):
        for j in range(columns):
            own = value[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale = own.abs().max() / 448 if own.any() else torch.tensor(1.0)
            assert scales[i, j] == scale
            assert torch.equal(
                numbers[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].float(),
                (own / scale).clamp(-448, 448).to(FLOAT8).float(),
            )


@pytest.mark.parametrize("scales", [(1,), (), (3,), (3, 1, 1), (3, 12, 1), (3, 3, 2)])
def test_a_stack_as_its_matrices(scales: tuple[int, ...]) -> None:
    value = torch.randn(3, 12, 10, generator=torch.Generator().manual_seed(2))
    numbers, found = EightBits("_scale", scales, (4, 5)).quantised(value)
    assert tuple(found.shape) == scales
    back = dequantise(numbers, found, block=(4, 5), dtype="float32")
    assert float((back - value).abs().max()) <= float(value.abs().max()) / 2**4
    if len(scales) == 3:
        alone = [EightBits("_scale", scales[1:], (4, 5)).quantised(matrix) for matrix in value]
        assert torch.equal(numbers.float(), torch.stack([each.float() for each, _ in alone]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_stored_as_the_inputs_are(tmp_path: Path, kind: str) -> None:
    """Its floats are the merged ones rounded once; its config says how; every account of it holds."""
    base, experts = write_models(tmp_path, kind)
    acemerge.merge(base, experts, tmp_path / "out", method="task_arithmetic", dtype="fp8")
    acemerge.merge(base, experts, tmp_path / "exact", method="task_arithmetic", dtype="float32")
    stored, exact = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "exact/model.safetensors")
    numbers, scales = KINDS[kind][1].quantised(exact[NAME])
    assert torch.equal(stored[NAME].float(), numbers.float())
    assert torch.equal(stored[NAME + KINDS[kind][1].suffix], scales)
    assert stored.keys() == load_file(base / "model.safetensors").keys() - {"layers.0.input_scale"}
    assert stored["layers.1.weight"].dtype == torch.bfloat16
    assert not acemerge.verify(tmp_path / "out").problems
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    settings = config["quantization_config"]
    if kind == "blocks":
        assert settings == FP8 | {"activation_scheme": "dynamic"}
    else:
        assert settings["config_groups"]["group_0"]["input_activations"] == STATIC | {"dynamic": True, "observer": None}
    again = open_checkpoint(tmp_path / "out", "out")
    assert again.read(NAME).dtype == torch.bfloat16
    torch.testing.assert_close(again.read(NAME).float(), exact[NAME], rtol=0.07, atol=0.02)


def test_8_bits_into_8_bits_are_the_same_numbers(tmp_path: Path) -> None:
    base, _ = write_models(tmp_path, "channel")
    acemerge.merge(base, [base], tmp_path / "out", method="passthrough", dtype="fp8")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(before[NAME].float(), after[NAME].float())
    torch.testing.assert_close(after[f"{NAME}_scale"], before[f"{NAME}_scale"].float(), rtol=0.01, atol=0)


def test_an_expert_shows_how_a_float_base_is_written(tmp_path: Path) -> None:
    _, experts = write_models(tmp_path, "blocks")
    base = write_model(tmp_path / "float", base_tensors(), {"dtype": "float32"})
    acemerge.merge(base, experts, tmp_path / "out", dtype="fp8", method="average")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [4, 5]
    assert load_file(tmp_path / "out/model.safetensors")[NAME].dtype == FLOAT8


def refusal(base: Path, experts: list[Path], **options: Any) -> str:
    with pytest.raises(PreflightError) as caught:
        acemerge.plan(base, experts, dtype="fp8", **options)
    return str(caught.value)


def test_what_cannot_be_written_so(tmp_path: Path) -> None:
    base, experts = write_models(tmp_path, "blocks")
    assert "method 'emr' makes one model per task, whose parts are of floats" in refusal(base, experts, method="emr")
    assert "an adapter has no scales" in refusal(base, experts, method="average", save_as="adapter", rank=2)
    floats = [write_model(tmp_path / f"float-{i}", fine_tuned(base_tensors(), i)) for i in range(3)]
    assert "no model is stored in 8-bit floats" in refusal(floats[0], floats[1:], method="average")


def test_a_float_language_model_in_blocks_that_transformers_loads(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Linear layers made of whole blocks, and nothing else; the config names the others."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=256, intermediate_size=160, **sizes)).bfloat16()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.01)
    model.save_pretrained(tmp_path / "expert")
    acemerge.merge(tmp_path / "base", [tmp_path / "expert"], tmp_path / "out", dtype="fp8", method="average")
    ours = open_checkpoint(tmp_path / "out", "out")
    assert ours.eight_bits is not None
    assert {name.split(".")[-2] for name in ours.eight_bits.weights} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    skipped = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {name.split(".")[-1] for name in skipped} == {"lm_head", "embed_tokens", "gate_proj", "up_proj", "down_proj"}
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert all(torch.equal(loaded.state_dict()[name], ours.read(name)) for name in ours.tensors)
