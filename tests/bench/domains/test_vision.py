"""The vision domain on a tiny model and tiny pictures: training, merging, heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import acemerge
from acemerge.bench.domains import tiny_vit
from acemerge.bench.domains.tiny_vit import TinyViT
from acemerge.bench.domains.vision import VisionDomain
from acemerge.bench.measure.evaluation import evaluate
from acemerge.bench.measure.experts import Experts, train_expert
from acemerge.bench.suites.registry import Suite
from tiny_vision import SMALL, TASKS


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    """A small random base and two experts, in a cache of their own."""
    domain = VisionDomain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        trained = Experts(domain, 0)
        torch.manual_seed(0)
        TinyViT(SMALL).save(trained.base)
        for task in TASKS:
            train_expert(domain, task, 0)
        yield trained


def test_experts_learn_and_leave_batch_norms_alone(experts: Experts) -> None:
    base = tiny_vit.load(experts.base).state_dict()
    for task in TASKS:
        model = experts.domain.load(experts.folder(task))
        assert evaluate(experts.domain, model, experts.domain.prepare(task.load().test)).share > 0.9
        changed = {name for name, tensor in model.state_dict().items() if name in base and not torch.equal(tensor, base[name])}
        assert not any(".bn." in name for name in changed)
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} - changed == {
            "classifier.weight",
            "classifier.bias",
        }


def test_the_same_seed_gives_the_same_bytes(experts: Experts) -> None:
    weights = experts.folder(TASKS[0]) / "model.safetensors"
    before = weights.read_bytes()
    train_expert(VisionDomain(), TASKS[0], 0)
    assert weights.read_bytes() == before


def test_the_plan_merges_matrices_and_averages_the_rest(experts: Experts, tmp_path: Path) -> None:
    plan = acemerge.merge(experts.base, [experts.folder(task) for task in TASKS], tmp_path / "merged").plan
    fates = {tensor.name: tensor.action for tensor in plan.tensors}
    matrices = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")
    for name, fate in fates.items():
        assert fate == ("merged" if name.endswith(matrices) else "copied" if name.endswith("tracked") else "averaged"), name
    assert list(fates.values()).count("merged") == 12
    assert [len(head.tensors) for head in plan.heads] == [2, 2]


@pytest.mark.parametrize(
    ("method", "options"),
    [("regmean", {}), ("regmean_plusplus", {}), ("fisher", {"rows": 20}), ("adamerging", {"steps": 5, "learning_rate": 0.02})],
)
def test_methods_that_use_data_take_the_suites_rows(
    experts: Experts, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    """A model with stages, convolutions and batch norms, that transformers does not know."""
    folders = {task.name: experts.folder(task) for task in TASKS}
    suite = Suite("bright-2", experts.domain, TASKS)
    result = acemerge.merge(experts.base, folders, tmp_path / "merged", method=method, data=suite, **options)
    merged = [tensor.name for tensor in result.plan.tensors if tensor.action == "merged"]
    if result.plan.method.touches != "all":
        assert len(merged) == 12, "the linear layers"
    for task in TASKS:
        model = experts.domain.load(acemerge.export_expert(tmp_path / "merged", task.name, tmp_path / task.name))
        assert evaluate(experts.domain, model, experts.domain.prepare(task.load().test)).share > 0.7


@pytest.mark.parametrize("method", ["average", "ace", "tsv_m", "emr"])
def test_a_merged_folder_gives_a_model_for_each_task(experts: Experts, tmp_path: Path, method: str) -> None:
    folders = {task.name: experts.folder(task) for task in TASKS}
    acemerge.merge(experts.base, folders, tmp_path / "merged", method=method)
    for task in TASKS:
        folder = acemerge.export_expert(tmp_path / "merged", task.name, tmp_path / task.name)
        model = experts.domain.load(folder)
        own = experts.domain.load(experts.folder(task)).state_dict()
        assert torch.equal(model.state_dict()["classifier.weight"], own["classifier.weight"])
        assert evaluate(experts.domain, model, experts.domain.prepare(task.load().test)).share > 0.7
