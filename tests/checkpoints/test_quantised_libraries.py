"""What libraries have quantised is read as the floats that they make of it themselves, to the bit.

The samples in `quantised_by_libraries.json` hold a small weight as a library stores it, and what the same library's own
dequantisation gave for it on a CPU: bitsandbytes and compressed-tensors by their functions, auto-gptq and autoawq by their plain
torch code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint
from acemerge.checkpoints.quantised import packed, weights
from acemerge.errors import InputError
from acemerge.planning.estimates import KEPT_OF_MADE
from small_models import write_model

SAMPLES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("quantised_by_libraries.json").read_text())


def tensor(said: Mapping[str, Any]) -> Tensor:
    content = torch.frombuffer(bytearray(base64.b64decode(said["bytes"])), dtype=torch.uint8)
    return content.view(getattr(torch, said["dtype"])).reshape(said["shape"])


def stored(sample: Mapping[str, Any], name: str = "x") -> dict[str, Tensor]:
    return {f"{name}.{own.removeprefix('x.')}": tensor(said) for own, said in sample["stored"].items()}


def write(folder: Path, sample: Mapping[str, Any], tensors: Mapping[str, Tensor], **config: object) -> Checkpoint:
    settings = {"quantization_config": sample["settings"], "dtype": sample["dtype"]}
    return open_checkpoint(write_model(folder, tensors, settings | config), "model")


def sample_of(method: str, **settings: object) -> dict[str, Any]:
    wanted = {"quant_method": method, **settings}
    return next(sample for sample in SAMPLES if wanted.items() <= sample["settings"].items())


@pytest.mark.parametrize("at_once", [1, 1_000_000])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["made_by"].replace(" ", "-"))
def test_as_the_library_does_it(tmp_path: Path, sample: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_NUMBERS_AT_ONCE", at_once)
    expected = tensor(sample["floats"])
    model = write(tmp_path / "model", sample, stored(sample) | {"x.bias": torch.ones(3)})
    assert list(model.tensors) == ["x.weight", "x.bias"] or list(model.tensors) == ["x.bias", "x.weight"]
    header = model.tensors["x.weight"]
    assert (header.dtype, header.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
    assert header.made
    assert torch.equal(model.read("x.weight"), expected)
    assert torch.equal(model.read("x.bias"), torch.ones(3))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["made_by"].replace(" ", "-"))
def test_parts_that_are_missing_or_do_not_fit(tmp_path: Path, sample: dict[str, Any]) -> None:
    whole = stored(sample)
    optional = ("weight_format", "g_idx", "_zero_point", "nested_absmax", "_packed")
    needed = [name for name in whole if not name.endswith(optional)]
    for name in needed:
        for changed in ({}, {name: torch.ones(5, 3, dtype=whole[name].dtype)}):
            left = {own: value for own, value in whole.items() if own != name} | changed
            with pytest.raises(InputError, match="Give the float model"):
                write(tmp_path / f"{name}-{len(changed)}", sample, left)


def test_groups_beyond_the_scales(tmp_path: Path) -> None:
    sample = sample_of("gptq")
    for number, wrong in enumerate((-1, 2)):
        tensors = stored(sample)
        tensors["x.g_idx"] = torch.where(tensors["x.g_idx"] == 1, wrong, tensors["x.g_idx"]).int()
        model = write(tmp_path / str(number), sample, tensors)
        with pytest.raises(InputError, match=r"tensor 'x\.weight' of .*: inputs belong to groups beyond the 2 that have a scale"):
            model.read("x.weight")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_matrices_of_gpt2_are_turned_as_its_files_have_them(tmp_path: Path, method: str) -> None:
    """All of these ways store [out, in]; GPT-2's own files [in, out]."""
    sample = sample_of(method)
    model = write(tmp_path / "model", sample, stored(sample, "h.0.attn.c_proj"), model_type="gpt2")
    assert torch.equal(model.read("h.0.attn.c_proj.weight"), tensor(sample["floats"]).T)
    assert model.tensors["h.0.attn.c_proj.weight"].shape == tuple(reversed(sample["floats"]["shape"]))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_unpacking_undoes_packing(bits: int) -> None:
    numbers = torch.randint(0, 2**bits, (3, 37), generator=torch.Generator().manual_seed(bits))
    streams = ["".join(f"{int(number):0{bits}b}"[::-1] for number in row) for row in numbers]
    length = -(-37 * bits // 32)
    words = torch.tensor(
        [[int(s.ljust(length * 32, "0")[32 * i : 32 * i + 32][::-1], 2) for i in range(length)] for s in streams]
    )
    signed = torch.where(words >= 2**31, words - 2**32, words).int()
    assert torch.equal(packed.unpacked(signed, bits, 37), numbers)


def test_they_merge_as_their_floats(tmp_path: Path) -> None:
    """The plan counts the floats that the base's weights are made into."""
    sample = sample_of("awq")
    layers = [f"layers.{number}" for number in range(3)]
    floats = {f"{layer}.weight": tensor(sample["floats"]).contiguous() for layer in layers}
    quantised = {name: value for layer in layers for name, value in stored(sample, layer).items()}
    base = write_model(tmp_path / "base", quantised, {"quantization_config": sample["settings"], "dtype": "float16"})
    write_model(tmp_path / "floats", floats, {"dtype": "float16"})
    experts = [
        write_model(tmp_path / f"expert-{number}", {name: value * (1 + number / 100) for name, value in floats.items()})
        for number in (1, 2)
    ]
    result = acemerge.merge(base, experts, tmp_path / "out", method="tsv_m")
    expected = acemerge.merge(tmp_path / "floats", experts, tmp_path / "expected", method="tsv_m")
    assert result.plan.count("merged") == expected.plan.count("merged") == 3
    assert result.plan.peak_memory == expected.plan.peak_memory + KEPT_OF_MADE * 2 * floats["layers.0.weight"].numel()
    merged, wanted = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "expected/model.safetensors")
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[name], wanted[name]) for name in wanted)


def test_floats_are_made_once_and_not_to_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    sample, make = sample_of("awq"), packed._awq

    def counted(*parts: Tensor, dtype: str) -> Tensor:
        made.append(1)
        return make(*parts, dtype=dtype)

    monkeypatch.setattr(packed, "_awq", counted)
    model = write(tmp_path / "model", sample, stored(sample, "a") | stored(sample, "b"))
    ahead = model.mapped("a.weight")
    assert [(part.dtype, tuple(part.shape)) for part in ahead] == [
        (part.dtype, tuple(part.shape)) for part in stored(sample).values()
    ]
    assert not made
    first = model.read("a.weight")
    assert model.read("a.weight") is first
    assert len(made) == 1
    assert model.read("b.weight") is not first
    assert len(made) == 2
