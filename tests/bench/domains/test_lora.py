"""LoRA adapters as experts, on a tiny model: training, loading, merging, measuring."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import acemerge
from acemerge.bench.domains.domain import is_of_head
from acemerge.bench.domains.lora import Lora, LoraDomain
from acemerge.bench.measure import run
from acemerge.bench.measure.experts import Experts, prepare_experts, train_expert
from acemerge.bench.measure.measured_merge import merge_here
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate, Job, measure
from acemerge.bench.suites.registry import Suite
from acemerge.output.task_models import export_expert
from acemerge.planning.tensor import is_computed
from tiny_bench import TASKS as FULL_TASKS
from tiny_bench import TinyDomain

LORA = Lora(rank=4, alpha=8, targets=("query", "key", "value", "dense"))
DOMAIN = LoraDomain("tiny-lora", TinyDomain(layers=1), LORA)
TASKS = tuple(replace(task, learning_rate=1e-2, epochs=2) for task in FULL_TASKS)
SUITE = Suite("tiny-lora-3", DOMAIN, TASKS)
TARGETS = 6
"""The matrices of its one layer."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    """Three adapters, in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        prepare_experts(DOMAIN, TASKS, [0], lambda said: None, workers=1)
        yield Experts(DOMAIN, 0)


def test_experts_are_adapters_with_a_head_and_know_their_task(experts: Experts) -> None:
    for task in TASKS:
        names = set(load_file(experts.folder(task) / "adapter_model.safetensors"))
        assert len(names) == 2 * TARGETS + 2
        assert {name for name in names if "lora_" not in name} == {f"base_model.model.classifier.{p}" for p in ("weight", "bias")}
        assert not (experts.folder(task) / "model.safetensors").exists()
    result = measure(Job(SUITE, EXPERTS, 0, 100))
    assert all(score.share > 0.9 for score in result.scores.values()), result.scores


def test_only_factors_and_head_are_trained(experts: Experts) -> None:
    model = DOMAIN.new_expert(experts.base, TASKS[0])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * TARGETS + 2
    assert all("lora_" in name or is_of_head(name) for name in trained)


def test_each_task_starts_from_factors_of_its_own_the_same_by_seed(experts: Experts) -> None:
    def factors(task: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        named = DOMAIN.new_expert(experts.base, TASKS[task]).named_parameters()
        return next(parameter for name, parameter in named if "lora_A" in name)

    assert torch.equal(factors(0, 0), factors(0, 0))
    assert not torch.equal(factors(0, 0), factors(1, 0))
    assert not torch.equal(factors(0, 0), factors(0, 1))


def test_training_is_deterministic(experts: Experts) -> None:
    weights = experts.folder(TASKS[0]) / "adapter_model.safetensors"
    before = weights.read_bytes()
    train_expert(DOMAIN, TASKS[0], 0)
    assert weights.read_bytes() == before


def test_every_target_merges_in_the_core_and_heads_are_each_experts_own(experts: Experts, tmp_path: Path) -> None:
    plan = acemerge.merge(experts.base, SUITE.folders(0), tmp_path / "merged").plan
    cores = [tensor.fate.core for tensor in plan.tensors if is_computed(tensor)]
    assert [core and core.rank for core in cores] == [3 * LORA.rank] * TARGETS
    for task in TASKS:
        head = load_file(tmp_path / "merged/heads" / task.name / "head.safetensors")
        own = load_file(experts.folder(task) / "adapter_model.safetensors")
        assert torch.equal(head["classifier.weight"], own["base_model.model.classifier.weight"])


def test_a_merge_of_one_adapter_answers_as_the_adapter_does(experts: Experts, tmp_path: Path) -> None:
    task = TASKS[0]
    acemerge.merge(experts.base, [experts.folder(task)], tmp_path / "merged", "task_arithmetic", alpha=1.0)
    merged = DOMAIN.load(export_expert(tmp_path / "merged", task.name, tmp_path / "task")).eval()
    batch = DOMAIN.prepare(task.load().test).batch(torch.arange(20))
    expert = DOMAIN.load(experts.folder(task)).eval()
    with torch.inference_mode():
        assert torch.allclose(DOMAIN.logits(merged, batch), DOMAIN.logits(expert, batch), atol=1e-5)


def test_merges_are_measured_with_the_experts_heads(experts: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measured_merge", merge_here)
    base = measure(Job(SUITE, BASE, 0, 100))
    for method in ("average", "task_arithmetic", "tsv_m", "ace"):
        found = measure(Job(SUITE, Candidate(method, {"method": method}), 0, 100))
        assert found.average > base.average, method


def test_another_rank_trains_anew_and_is_another_result(experts: Experts) -> None:
    job = Job(SUITE, EXPERTS, 0, 100)
    before, kept = experts.identity(TASKS), job.file
    said: list[str] = []
    prepare_experts(DOMAIN, TASKS, [0], said.append, workers=1)
    assert said == [], "what is trained is not trained again"
    shutil.copytree(experts.folder(TASKS[0]), experts.base.parent / "kept")
    prepare_experts(replace(DOMAIN, lora=replace(LORA, rank=2)), TASKS[:1], [0], said.append, workers=1)
    assert "training 1 experts" in said[0]
    assert experts.identity(TASKS) != before
    assert job.file != kept
    shutil.rmtree(experts.folder(TASKS[0]))
    (experts.base.parent / "kept").rename(experts.folder(TASKS[0]))
