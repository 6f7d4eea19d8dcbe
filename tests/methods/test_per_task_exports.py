"""Each task's model of EMR, TALL masks and Twin, through the files that are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import acemerge
import model_zoo as zoo
from acemerge.output import task_models
from per_task_cases import METHODS, VARIANTS, every_method, reference_shared
from per_task_models import check_tasks, read, write
from small_models import fine_tuned, write_model


@pytest.mark.parametrize(("method", "options"), [variant for variant in VARIANTS if variant[1].get("rank_share") != 0.9])
def test_exports_follow_the_formula(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    models = write(tmp_path)
    check_tasks(models, models.merge("out", method, **options), method, **options)


@every_method
@pytest.mark.parametrize("alpha", [-0.5, 0.0, 2.0])
def test_the_root_is_the_shared_model_whatever_alpha(tmp_path: Path, method: str, alpha: float) -> None:
    models = write(tmp_path)
    output = models.merge("out", method, alpha=alpha)
    check_tasks(models, output, method, **({"alpha": alpha} if method == "twin" else {}))
    for name, found in load_file(output / "model.safetensors").items():
        if found.is_floating_point():
            taus = torch.stack([e[name] - models.base[name] for e in models.experts.values()]).double().numpy()
            expected = models.base[name].double() + alpha * torch.from_numpy(reference_shared(method, taus))
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@every_method
def test_exports_with_heads_and_other_names(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, prefix="net.", heads=True)
    check_tasks(models, models.merge("out", method), method)


@every_method
def test_exports_from_shards(tmp_path: Path, method: str) -> None:
    """The first shard holds only what nobody changed, and so has no parts."""
    models = write(tmp_path)
    output = models.merge("out", method, shard_size="1kB")
    shards = {path.name for path in output.glob("*.safetensors")}
    assert len(shards) > 3
    assert {path.name for path in (output / "tasks/e1").iterdir()} < shards
    check_tasks(models, output, method)


@every_method
def test_exports_of_transposed_tensors(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, model_type="gpt2")
    output = models.merge("out", method)
    records = {r["name"]: r for r in json.loads((output / "acemerge_manifest.json").read_text())["tensors"]}
    assert records["h.0.attn.c_attn.weight"]["orientation"] == "stored [in, out], merged as [out, in]"
    check_tasks(models, output, method)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(tmp_path: Path, method: str, dtype: torch.dtype) -> None:
    models = write(tmp_path, dtype=dtype, model_type="gpt2")
    output = models.merge("out", method)
    check_tasks(models, output, method)
    if method == "twin":
        return
    for expert, changed in models.expected(method).items():  # where the mask is 0, the base itself
        found = load_file(output.with_name(f"out-{expert}") / "model.safetensors")
        for name in models.weights():
            base = models.base[name]
            untouched = (changed[name] == base.double()) & (base.abs() > 0.01)
            assert found[name][untouched].equal(base[untouched])


@every_method
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_output_dtype(tmp_path: Path, method: str, dtype: str) -> None:
    models = write(tmp_path)
    output = models.merge("out", method, dtype=dtype)
    check_tasks(models, output, method)
    exported = load_file(tmp_path / "out-e0/model.safetensors")
    assert {w.dtype for w in exported.values() if w.is_floating_point()} == {getattr(torch, dtype)}


@every_method
def test_float64_models_keep_float64_parts(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, dtype=torch.float64)
    check_tasks(models, models.merge("out", method), method)


@every_method
def test_reading_a_tensor_twice_gives_the_same(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, dtype=torch.float64)
    model = task_models._open_task_model(models.merge("out", method), "e1")
    assert model.read("layers.0.weight").clone().equal(model.read("layers.0.weight"))


@every_method
def test_what_nobody_changed_is_the_bases_bit_for_bit(tmp_path: Path, method: str) -> None:
    models = write(tmp_path, dtype=torch.bfloat16)
    exported = acemerge.export_expert(models.merge("out", method), "e1", tmp_path / "task")
    assert load_file(exported / "model.safetensors")["frozen.weight"].equal(models.base["frozen.weight"])
    assert not any(name.startswith("frozen") for name in read(tmp_path / "out/tasks/e1"))


@every_method
def test_when_nobody_changed_anything_every_task_is_the_base(tmp_path: Path, method: str) -> None:
    models = write(tmp_path / "changed")
    write_model(tmp_path / "base", models.base)
    for name in "ab":
        write_model(tmp_path / name, models.base)
    acemerge.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], tmp_path / "out", method=method)
    exported = acemerge.export_expert(tmp_path / "out", "b", tmp_path / "task")
    zoo.assert_equal_tensors(load_file(exported / "model.safetensors"), models.base)


def test_sizes_on_disk(tmp_path: Path) -> None:
    base = {f"layers.{i}.weight": torch.randn(256, 256, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    write_model(tmp_path / "base", base)
    for i in range(2):
        write_model(tmp_path / f"e{i}", fine_tuned(base, i))
    entries, header = 3 * 256 * 256, 1_000
    for method in METHODS:
        acemerge.merge(tmp_path / "base", [tmp_path / "e0", tmp_path / "e1"], tmp_path / method, method=method)
    for method in ("emr", "tall_mask"):
        assert entries / 8 <= (tmp_path / method / "tasks/e0/model.safetensors").stat().st_size <= entries / 8 + header
        assert (tmp_path / method / "shared/model.safetensors").stat().st_size <= 4 * entries + header
    assert (tmp_path / "twin/tasks/e0/model.safetensors").stat().st_size <= 3 * 25 * (256 + 256) * 4 + header
    assert not (tmp_path / "twin/shared").exists()
    acemerge.merge(tmp_path / "base", [tmp_path / "e0"], tmp_path / "half", method="emr", dtype="bfloat16")
    assert (tmp_path / "half/shared/model.safetensors").stat().st_size <= (4 + 2) * entries + header


def test_files_of_parts_are_aligned(tmp_path: Path) -> None:
    """Every tensor of a file starts at a multiple of its element's size, whatever was written before it."""
    models = write(tmp_path)
    output = models.merge("out", "emr", dtype="bfloat16")
    acemerge.export_expert(output, "e0", tmp_path / "task")
    files = [output / "tasks/e0/model.safetensors", output / "shared/model.safetensors", tmp_path / "task/model.safetensors"]
    sizes = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "U8": 1}
    for file in files:
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        assert length % 8 == 0
        assert all(e["data_offsets"][0] % sizes[e["dtype"]] == 0 for n, e in header.items() if n != "__metadata__")
