"""What a merge of adapters writes: heads, plans, recipes, the same bytes again; interrupted and without whole matrices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import acemerge
import lora_zoo
from acemerge.execute import shard
from acemerge.output.task_models import export_expert
from acemerge.output.verify import verify_output
from adapter_merging import Dense, merge
from command import Command
from interruption import one_by_one, stop_at
from largest_result import LargestResult
from lora_zoo import Zoo
from model_zoo import file_hashes, read_tensors

_HEADS = {
    "BertForSequenceClassification": ("BertModel", ["query", "value"]),
    "RobertaForSequenceClassification": ("RobertaForMaskedLM", ["query", "dense"]),
    "GPT2ForSequenceClassification": ("GPT2LMHeadModel", ["c_attn"]),
    "ViTForImageClassification": ("ViTModel", ["q_proj"]),
}


LABELS = {"red": 3, "green": 5}


@pytest.mark.parametrize("class_name", _HEADS)
def test_heads_of_adapters(class_name: str, tmp_path: Path) -> None:
    """Classifiers with heads of their own: any task's model from the dense output, and from the adapter output."""
    base_class, targets = _HEADS[class_name]
    base = lora_zoo.write_base(tmp_path / "base", base_class)
    adapters, full = {}, {}
    saved: dict[str, Any] = {"modules_to_save": ["classifier"]} if class_name.startswith("ViT") else {"task_type": "SEQ_CLS"}
    for seed, (name, labels) in enumerate(LABELS.items(), 1):
        settings = {"r": seed + 1, "target_modules": targets, **saved}
        adapters[name] = lora_zoo.write_adapter(base, tmp_path / name, class_name, seed=seed, labels=labels, **settings)
        full[name] = lora_zoo.expand(base, adapters[name], tmp_path / "full" / name, class_name, labels)
    acemerge.merge(base, adapters, tmp_path / "dense")
    acemerge.merge(base, adapters, tmp_path / "adapter", save_as="adapter")
    acemerge.merge(base, full, tmp_path / "expanded")
    for name, labels in LABELS.items():
        model = acemerge.load_expert_head(tmp_path / "dense", name)
        expected = acemerge.load_expert_head(tmp_path / "expanded", name).state_dict()
        assert type(model).__name__ == class_name
        assert model.config.num_labels == labels
        found = model.state_dict()
        assert all((found[key] - expected[key]).abs().max() < 1e-5 for key in expected)
        export_expert(tmp_path / "dense", name, tmp_path / f"dense-{name}")
        with lora_zoo.quiet():
            again = lora_zoo.load(tmp_path / f"dense-{name}", class_name).state_dict()
        assert all(again[key].equal(found[key]) for key in found)
        export_expert(tmp_path / "adapter", name, tmp_path / f"adapter-{name}")
        with lora_zoo.quiet():
            wrapped = lora_zoo.peft_model(base, tmp_path / f"adapter-{name}", class_name, labels).merge_and_unload()
        task = wrapped.state_dict()
        assert all((task[key] - found[key]).abs().max() < 1e-5 for key in found if "pooler" not in key)
        heads = [key for key in found if "classifier" in key or "score" in key]
        assert heads
        assert all(task[key].equal(found[key]) for key in heads)
    for output in ("dense", "adapter", "dense-red", "adapter-green"):
        assert not verify_output(tmp_path / output).problems


def test_task_on_an_adapter_output(llama: Zoo, tmp_path: Path, command: Command) -> None:
    merge(llama, tmp_path / "out", save_as="adapter")
    code, _, err = command("task", tmp_path / "out", "math", "-o", tmp_path / "math")
    assert code == 2
    assert "holds no heads; the merged adapter itself serves every task" in err
    with pytest.raises(acemerge.InputError, match="an adapter, not a model; `acemerge task`"):
        acemerge.load_expert_head(tmp_path / "out", "math")
    assert not (tmp_path / "math").exists()


def test_plan_says_which_route(llama: Zoo, command: Command) -> None:
    models = [llama.base, *llama.adapters.values()]
    code, out, _ = command("plan", *models)
    assert code == 0
    assert "in a core of rank 6" in out
    assert "14 tensors merge in the adapters' common core, of rank 6 at most" in out
    _, out, _ = command("plan", *models, "-m", "ties")
    assert "14 as whole tensors, one at a time" in out
    routes = {t["route"] for t in json.loads(command("plan", *models, "--json")[1])["tensors"] if "route" in t}
    assert routes == {f"core of rank {rank}" for rank in (2, 3, 5, 6)}
    _, out, _ = command("plan", *models, "--as", "adapter", "--json")
    assert json.loads(out)["saved_as"] == "adapter"
    assert json.loads(out)["totals"]["output_bytes"] < 40_000  # factors, not the model


@pytest.mark.parametrize("save_as", ["model", "adapter"])
def test_the_same_bytes_twice_and_inputs_untouched(save_as: str, llama: Zoo, tmp_path: Path) -> None:
    before = [file_hashes(folder) for folder in llama.folders]
    for name in ("one", "two"):
        merge(llama, tmp_path / name, save_as=save_as)
    assert file_hashes(tmp_path / "one") == file_hashes(tmp_path / "two")
    assert [file_hashes(folder) for folder in llama.folders] == before


@pytest.mark.parametrize("save_as", ["model", "adapter"])
def test_verify(save_as: str, llama: Zoo, tmp_path: Path, command: Command) -> None:
    merge(llama, tmp_path / "out", save_as=save_as)
    code, out, _ = command("verify", tmp_path / "out")
    assert code == 0
    assert "whole" in out
    weights = tmp_path / "out" / ("model.safetensors" if save_as == "model" else "adapter_model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, err = command("verify", tmp_path / "out")
    assert code == 1
    assert f"{weights.name}: its content has changed" in err


def test_the_written_recipe_makes_the_same_adapter(llama: Zoo, tmp_path: Path, command: Command) -> None:
    merge(llama, tmp_path / "out", save_as="adapter", rank=2)
    recipe = llama.base.parent / "again.yaml"  # beside the models, whose names it uses
    shutil.copyfile(tmp_path / "out/acemerge.yaml", recipe)
    code, _, err = command("merge", recipe, "-o", tmp_path / "again")
    assert code == 0, err
    assert file_hashes(tmp_path / "again") == file_hashes(tmp_path / "out")


def test_overwrite_turns_a_model_into_an_adapter_and_back(llama: Zoo, dense: Dense, tmp_path: Path) -> None:
    merge(llama, tmp_path / "adapter", save_as="adapter")
    merge(llama, tmp_path / "out")
    with pytest.raises(acemerge.InputError, match="already exists"):
        merge(llama, tmp_path / "out", save_as="adapter")
    merge(llama, tmp_path / "out", save_as="adapter", overwrite=True)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "adapter")
    merge(llama, tmp_path / "out", overwrite=True)
    assert file_hashes(tmp_path / "out") == file_hashes(dense("ace"))


def test_an_output_that_is_an_input_is_refused(llama: Zoo, tmp_path: Path) -> None:
    math = shutil.copytree(llama.adapters["math"], tmp_path / "math")
    before = file_hashes(math)
    with pytest.raises(acemerge.InputError):
        merge(llama, math, experts={"math": math, "code": llama.adapters["code"]}, overwrite=True)
    assert file_hashes(math) == before


def test_an_interrupted_merge_of_adapters_goes_on(llama: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge(llama, tmp_path / "whole", shard_size=4000)
    calls: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("model.layers.1.mlp.gate_proj.weight", calls)))
        with pytest.raises(KeyboardInterrupt):
            merge(llama, tmp_path / "out", shard_size=4000)
    assert not (tmp_path / "out").exists()
    again: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("nothing", again)))
        merge(llama, tmp_path / "out", shard_size=4000)
    assert 0 < len(again) < len(read_tensors(llama.base))  # finished shards are not done again
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "whole")


def test_a_changed_adapter_starts_over(llama: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {name: shutil.copytree(adapter, tmp_path / name) for name, adapter in llama.adapters.items()}
    with monkeypatch.context() as patch:
        patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("model.layers.1.mlp.gate_proj.weight", [])))
        with pytest.raises(KeyboardInterrupt):
            merge(llama, tmp_path / "out", experts=experts, shard_size=4000)
    lora_zoo.change_settings(experts["math"], lora_alpha=16)  # twice the scale; the weights' file is the same
    merge(llama, tmp_path / "out", experts=experts, shard_size=4000)
    merge(llama, tmp_path / "fresh", experts=experts, shard_size=4000)
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


def test_an_interrupted_adapter_output(llama: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("acemerge.execute.shard.merge_to_factors_at_points", interrupted)
        with pytest.raises(KeyboardInterrupt):
            merge(llama, tmp_path / "out", save_as="adapter")
    assert not (tmp_path / "out").exists()
    merge(llama, tmp_path / "out", save_as="adapter")
    merge(llama, tmp_path / "fresh", save_as="adapter")
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


def wide_models(root: Path, rank: int = 4) -> tuple[Path, dict[str, Path]]:
    """One layer far larger than its adapters, without transformers."""
    shapes = {"up": (900, 700), "down": (700, 900), "square": (800, 800)}
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    (root / "base").mkdir(parents=True)
    save_file({f"layers.0.{n}.weight": noise(*s) for n, s in shapes.items()}, root / "base/model.safetensors")
    adapters = {}
    for name in ("one", "two", "three"):
        adapters[name] = root / name
        adapters[name].mkdir()
        modules = {f"base_model.model.layers.0.{n}": s for n, s in shapes.items()}
        A = {f"{module}.lora_A.weight": noise(rank, columns) for module, (_, columns) in modules.items()}
        B = {f"{module}.lora_B.weight": noise(rows, rank) for module, (rows, _) in modules.items()}
        lora_zoo.write_factors(adapters[name], {**A, **B})
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(shapes)}
        (adapters[name] / "adapter_config.json").write_text(json.dumps(settings))
    return root / "base", adapters


@pytest.mark.parametrize("name", ["ace", "tsv_m"])
@pytest.mark.parametrize("rank", [None, 2])
def test_no_whole_matrix_is_made_for_an_adapter(name: str, rank: int | None, tmp_path: Path) -> None:
    base, adapters = wide_models(tmp_path)
    with LargestResult() as record:
        acemerge.merge(base, adapters, tmp_path / "adapter", name, save_as="adapter", rank=rank)
    assert 0 < record.largest <= 900 * (3 * 4 + 1)
    with LargestResult() as record:
        acemerge.merge(base, adapters, tmp_path / "dense", name)
    assert record.largest >= 700 * 900  # the record sees such matrices where there are any
