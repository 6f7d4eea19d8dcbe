"""NaN and infinite values: refused with model, tensor and count wherever they are; by request they go through, with a warning."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.errors import MergeError
from child import command, in_child
from small_models import Models, base_tensors, fine_tuned, write_model, write_models

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def edit(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def put(value: float, count: int) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.view(-1)[:count].fill_(value)


@pytest.mark.parametrize("method", ["ace", "average", "ties", "emr", "breadcrumbs", "tsv_m"])
@pytest.mark.parametrize("role", ["base", "expert-1"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_merged_and_averaged_tensors(models: Models, tmp_path: Path, method: str, role: str, value: float) -> None:
    """Whole-model methods look at every tensor before they merge the first: they name it too."""
    edit(tmp_path / role, "layers.1.weight", put(value, 3))
    with pytest.raises(MergeError, match=rf"'{role}' .*has 3 NaN or infinite values in 'layers\.1\.weight'.*--allow-nonfinite"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", method=method)
    assert not list(tmp_path.glob("out*"))


def test_every_model_is_named(models: Models, tmp_path: Path) -> None:
    edit(models.base, "layers.0.weight", put(NAN, 1))
    edit(models.experts[2], "layers.0.weight", put(INF, 2))
    with pytest.raises(MergeError, match=r"'base' .* has 1 NaN .*; 'expert-2' .* has 2 NaN"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")


def test_kept_tensors(models: Models, tmp_path: Path) -> None:
    edit(models.base, "embed.weight", put(NAN, 4))
    keep = [{"match": "embed.*", "do": "keep"}]
    with pytest.raises(MergeError, match=r"tensor 'embed\.weight': 'base' .* has 4 NaN or infinite values"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", tensors=keep)
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", tensors=keep, allow_nonfinite=True)
    assert any("embed.weight': 'base'" in warning for warning in result.warnings)


def test_kept_tensors_that_a_dtype_cannot_hold(models: Models, tmp_path: Path) -> None:
    edit(models.base, "embed.weight", put(1e6, 1))
    keep = [{"match": "embed.*", "do": "keep"}]
    with pytest.raises(MergeError, match="the base's value is too large for float16"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", tensors=keep, dtype="float16")


def test_a_merged_value_that_a_dtype_cannot_hold(models: Models, tmp_path: Path) -> None:
    for folder in (models.base, *models.experts):
        edit(folder, "layers.0.weight", lambda tensor: tensor.mul_(1e6))
    with pytest.raises(MergeError, match=r"not finite in float16; the inputs are finite, so try .* --dtype float32"):
        acemerge.merge(models.base, models.experts, tmp_path / "out", dtype="float16")
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", dtype="float16", allow_nonfinite=True)
    assert any("not finite in float16" in warning for warning in result.warnings)


@pytest.mark.parametrize("method", ["ace", "ties", "emr"])
def test_by_request_such_a_tensor_is_averaged(models: Models, tmp_path: Path, method: str) -> None:
    edit(models.experts[1], "layers.1.weight", put(NAN, 3))
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", method=method, allow_nonfinite=True)
    assert any("has 3 NaN" in warning and "It is averaged, not merged" in warning for warning in result.warnings)
    assert not any("--allow-nonfinite" in warning for warning in result.warnings)
    merged = load_file(tmp_path / "out/model.safetensors")
    experts = [load_file(expert / "model.safetensors")["layers.1.weight"] for expert in models.experts]
    torch.testing.assert_close(merged["layers.1.weight"], torch.stack(experts).mean(0), equal_nan=True, rtol=0, atol=1e-6)
    assert int(merged["layers.1.weight"].isnan().sum()) == 3
    assert all(weight.isfinite().all() for name, weight in merged.items() if name != "layers.1.weight")
    assert "allow_nonfinite: true" in (tmp_path / "out/acemerge.yaml").read_text()


def test_the_other_tensors_come_out_as_without_it(models: Models, tmp_path: Path) -> None:
    """A whole-model threshold is not spoiled by a tensor that is not finite."""
    keep = [{"match": "layers.1.*", "do": "keep"}]
    acemerge.merge(models.base, models.experts, tmp_path / "sound", method="ties", tensors=keep)
    edit(models.experts[1], "layers.1.weight", put(NAN, 3))
    acemerge.merge(models.base, models.experts, tmp_path / "out", method="ties", allow_nonfinite=True)
    sound, found = (load_file(tmp_path / name / "model.safetensors") for name in ("sound", "out"))
    assert all(found[name].equal(weight) for name, weight in sound.items() if name != "layers.1.weight")


def test_heads(models: Models, tmp_path: Path) -> None:
    tensors = load_file(models.experts[0] / "model.safetensors") | {"classifier.weight": torch.full((2, 8), NAN)}
    save_file(tensors, models.experts[0] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"'classifier\.weight' of expert 'expert-0'.* has 16 NaN or infinite values"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    acemerge.merge(models.base, models.experts, tmp_path / "out", allow_nonfinite=True)


def test_constants_with_infinities_are_no_fault(tmp_path: Path) -> None:
    mask = {"mask": torch.full((4, 4), -INF).triu(1)}
    write_model(tmp_path / "base", base_tensors() | mask)
    write_model(tmp_path / "expert", fine_tuned(base_tensors(), 1) | mask)
    for method in ("ace", "ties"):
        acemerge.merge(tmp_path / "base", [tmp_path / "expert"], tmp_path / method, method=method)
        assert load_file(tmp_path / method / "model.safetensors")["mask"].equal(mask["mask"])


def test_the_command(models: Models, tmp_path: Path) -> None:
    edit(models.experts[1], "layers.1.weight", put(NAN, 3))
    merge = ["merge", *models.arguments, "-o", str(tmp_path / "out")]
    ended = in_child(lambda: command(*merge))
    assert (ended.code, "has 3 NaN or infinite values" in ended.err) == (1, True)
    ended = in_child(lambda: command(*merge, "--allow-nonfinite"))
    assert (ended.code, "has 3 NaN or infinite values" in ended.err) == (0, True)


def test_an_error_advises_what_there_is(models: Models, tmp_path: Path) -> None:
    edit(models.experts[1], "layers.1.weight", put(NAN, 3))
    with pytest.raises(MergeError, match=r"leave out that model, or pass --allow-nonfinite to insist$"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    with pytest.raises(MergeError, match=r"leave out that model$"):
        acemerge.diagnose(models.base, models.experts)
