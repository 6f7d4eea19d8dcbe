"""Experts are trained once, the same by their seed, into ordinary folders."""

from __future__ import annotations

import json
from pathlib import Path

from acemerge.bench.measure.experts import TRAINED, Experts, prepare_experts, train_expert
from acemerge.bench.measure.run import EXPERTS, Job, measure
from acemerge.checkpoints.folder import open_checkpoint
from tiny_bench import DOMAIN, SUITE, TASKS


def test_experts_are_ordinary_folders_that_know_their_task(cache: Path) -> None:
    experts = Experts(SUITE.domain, 0)
    result = measure(Job(SUITE, EXPERTS, 0, 100))
    assert all(score.share > 0.9 for score in result.scores.values()), result.scores
    for task in SUITE.tasks:
        names = open_checkpoint(experts.folder(task), task.name).tensors
        assert "classifier.weight" in names
        assert json.loads((experts.folder(task) / TRAINED).read_text())["steps"] == 60
    assert not list(cache.rglob("*.partial"))


def test_training_is_deterministic_by_seed(cache: Path) -> None:
    task = TASKS[0]
    weights = Experts(SUITE.domain, 0).folder(task) / "model.safetensors"
    before = weights.read_bytes()
    train_expert(DOMAIN, task, 0)
    assert weights.read_bytes() == before
    train_expert(DOMAIN, task, 1)
    assert (Experts(SUITE.domain, 1).folder(task) / "model.safetensors").read_bytes() != before


def test_what_is_trained_is_not_trained_again(cache: Path) -> None:
    said: list[str] = []
    prepare_experts(DOMAIN, TASKS, [0], said.append)
    assert said == []
