"""Every point of a sweep is what a merge of its own would write, in one pass over the experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.errors import MergeError
from acemerge.methods import Method, all_methods
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor
from acemerge.sweeps.table import TABLE
from acemerge.tensors import computing
from acemerge.tensors.task_vectors import load_task_vectors
from lora_zoo import Zoo, build
from running import run_command
from small_models import Models, write_models
from sweeping import GRID, check_as_merged_alone, names_in


def test_every_point_is_what_a_merge_writes(models: Models, tmp_path: Path) -> None:
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", GRID, "ace", shard_size="1kB")
    assert len(result.points) == 8
    assert result.best is None
    assert result.points[0].settings == {"epsilon": 1e-5, "tau": 0.0, "k_frac": 0.1}
    assert result.points[0].folder == tmp_path / "grid" / "epsilon=1e-05,tau=0.0,k_frac=0.1"
    assert names_in(tmp_path / "grid") == sorted([TABLE, *(point.folder.name for point in result.points if point.folder)])
    for number, point in enumerate(result.points):
        alone = acemerge.merge(
            models.base, models.experts, tmp_path / f"alone-{number}", "ace", shard_size="1kB", **point.settings
        )
        assert point.folder is not None
        check_as_merged_alone(point.folder, alone.output)
        assert point.warnings == sum(len(tensor["warnings"]) for tensor in alone.tensors)


@pytest.mark.parametrize("method", [m for m in all_methods() if m.uses == "weights"], ids=lambda m: m.name)
def test_every_method_and_its_alpha(method: Method, tmp_path: Path) -> None:
    models = write_models(tmp_path, method.experts or 3)
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"alpha": [0.5, 1.0]}, method.name)
    for point in result.points:
        alone = acemerge.merge(
            models.base, models.experts, tmp_path / str(point.settings["alpha"]), method.name, **point.settings
        )
        assert point.folder is not None
        check_as_merged_alone(point.folder, alone.output)
        assert not method.per_task or (point.folder / "tasks").is_dir()


@pytest.mark.parametrize(("method", "settings"), [("ties", {"keep": [0.1, 0.2, 0.3]}), ("ace", GRID)])
def test_the_experts_are_read_as_often_as_for_one_merge(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, settings: dict[str, list[Any]]
) -> None:
    """ties makes passes over the whole model first: as many for three points as for one."""
    reads: list[str] = []

    def counted(plan: Plan, planned: ComputedTensor, device: torch.device) -> Any:
        reads.append(planned.name)
        return load_task_vectors(plan, planned, device)

    monkeypatch.setattr(computing, "load_task_vectors", counted)
    first: dict[str, Any] = {name: values[0] for name, values in settings.items()}
    acemerge.merge(models.base, models.experts, tmp_path / "one", method, **first)
    of_one = list(reads)
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", settings, method)
    assert reads == 2 * of_one


def test_thresholds_of_the_whole_model(models: Models, tmp_path: Path) -> None:
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"keep": [0.1, 0.2, 0.3]}, "ties")
    for point in result.points:
        alone = acemerge.merge(models.base, models.experts, tmp_path / str(point.settings["keep"]), "ties", **point.settings)
        assert point.folder is not None
        check_as_merged_alone(point.folder, alone.output)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return build(tmp_path_factory.mktemp("zoo"), "LlamaForCausalLM")


@pytest.mark.parametrize("save_as", ["adapter", "model"])
def test_adapters(zoo: Zoo, tmp_path: Path, save_as: str) -> None:
    settings = {"epsilon": [1e-4, 1e-2], "tau": [0.0, 9.0]}
    result = acemerge.sweep(zoo.base, zoo.adapters, tmp_path / "grid", settings, "ace", save_as=save_as)
    for number, point in enumerate(result.points):
        alone = acemerge.merge(zoo.base, zoo.adapters, tmp_path / str(number), "ace", save_as=save_as, **point.settings)
        assert point.folder is not None
        if save_as == "model":
            check_as_merged_alone(point.folder, alone.output)
            continue
        assert names_in(point.folder) == names_in(alone.output)
        expected, found = (load_file(place / "adapter_model.safetensors") for place in (alone.output, point.folder))
        assert found.keys() == expected.keys()
        for A, B in ((name, name.replace("lora_A", "lora_B")) for name in expected if "lora_A" in name):
            torch.testing.assert_close(found[B] @ found[A], expected[B] @ expected[A], rtol=1e-4, atol=1e-6)


def test_a_recipes_fixed_options_and_rules_hold(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {
        "base": str(models.base), "experts": [str(e) for e in models.experts], "method": "ace",
        "options": {"k_frac": 0.5}, "tensors": [{"match": "embed.*", "do": "keep"}],
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert run_command(monkeypatch, "sweep", tmp_path / "recipe.yaml", "-o", tmp_path / "grid", "--set", "tau=0,1", "-q") == 0
    for tau in ("0.0", "1.0"):
        manifest = json.loads((tmp_path / "grid" / f"tau={tau}" / "acemerge_manifest.json").read_text())
        assert manifest["options"]["k_frac"] == 0.5
        assert next(t["action"] for t in manifest["tensors"] if t["name"] == "embed.weight") == "kept"


def test_nan_in_an_input_stops_all_points_and_leaves_no_folder(models: Models, tmp_path: Path) -> None:
    tensors = load_file(models.experts[0] / "model.safetensors")
    tensors["layers.0.weight"][0, 0] = torch.nan
    save_file(tensors, models.experts[0] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"1 NaN or infinite values in 'layers\.0\.weight'"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", GRID, "ace")
    assert not list(tmp_path.glob("grid*"))
