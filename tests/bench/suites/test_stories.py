"""A language model and its experts from llama2.c's files to a table, with few weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from acemerge.bench.data import kinds_of_text
from acemerge.bench.data.kinds_of_text import both_texts, load_texts, second_text
from acemerge.bench.data.packages import Package
from acemerge.bench.data.task import Rows, Splits, TrainedTask
from acemerge.bench.measure import next_token, run
from acemerge.bench.measure.evaluation import Part
from acemerge.bench.measure.experts import Experts, train_expert
from acemerge.bench.measure.measured_merge import merge_here
from acemerge.bench.measure.next_token import row_losses
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate, Job, Result, measure
from acemerge.bench.suites.registry import Suite, get_suite
from running import rows_in, run_command
from tiny_llama import load_sentences, package_file


def kind(name: str, first: str, second: str) -> TrainedTask:
    return TrainedTask(name, (), partial(load_sentences, first, second), "none", 160, 16, 6e-3, epochs=3, metric="loss")


KINDS = kinds_of_text.TASKS
TASKS = (kind("low", "ab", "cd"), kind("high", "ef", "gh"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """stories-6 with two tiny kinds of text, the experts of two seeds trained in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(Package, "read", lambda package, pattern: package_file())
        patch.setattr(kinds_of_text, "TASKS", TASKS)
        patch.setattr(run, "measured_merge", merge_here)
        found = get_suite("stories-6")
        base = Experts(found.domain, 0).base
        base.mkdir(parents=True)
        found.domain.write_base(base)  # type: ignore[attr-defined]
        for seed in (0, 1):
            for task in TASKS:
                train_expert(found.domain, task, seed)  # type: ignore[arg-type]
        yield found


def scores(result: Result) -> dict[str, float]:
    return {task: score.share for task, score in result.scores.items()}


@pytest.mark.parametrize(("seed", "part"), [(0, "test"), (1, "validation")])
def test_models_are_judged_between_base_and_experts(suite: Suite, seed: int, part: Part) -> None:
    base, experts, average, ace = (
        measure(Job(suite, candidate, seed, 30, part))
        for candidate in (BASE, EXPERTS, *(Candidate(name, {"method": name}) for name in ("average", "ace")))
    )
    assert scores(base) == {"low": 0.0, "high": 0.0}
    assert scores(experts) == {"low": 1.0, "high": 1.0}
    for merged in (average, ace):
        for score in merged.scores.values():
            assert 0.05 < score.share < 0.95, score
            assert 0.0 < score.variance < 0.01
            assert score.rows == 30
            assert score.others is not None  # type: ignore[union-attr]
            assert score.others["expert"] + 0.5 < score.others["base"]  # type: ignore[union-attr]


def test_methods_for_matrices_leave_the_vocabulary_at_the_base(suite: Suite, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    for method in ("ace", "average"):
        merge_here(suite.experts(0).base, suite.folders(0), tmp_path / method, {"method": method})
    places = [suite.experts(0).base, tmp_path / "ace", tmp_path / "average", *suite.folders(0).values()]
    base, ace, average, *experts = (load_file(place / "model.safetensors") for place in places)
    assert "lm_head.weight" not in ace  # it is the embedding
    assert torch.equal(ace[name], base[name])
    torch.testing.assert_close(average[name], torch.stack([expert[name] for expert in experts]).mean(0))
    assert not torch.equal(average[name], base[name])


def test_base_and_experts_are_measured_once(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(Job(suite, EXPERTS, 0, 20))
    asked: list[Any] = []

    def counted(*given: Any) -> next_token.Losses:
        asked.append(given)
        return row_losses(*given)

    monkeypatch.setattr(next_token, "row_losses", counted)
    measure(Job(suite, Candidate("average", {"method": "average"}), 0, 20))
    assert len(asked) == len(TASKS)  # the merged model alone


def test_evaluate_judges_by_the_experts(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expert = suite.experts(0).folder(TASKS[0])
    assert run_command(monkeypatch, "evaluate", expert, "--suite", "stories-6", "--limit", 30, "-o", tmp_path) == 0
    found = rows_in(tmp_path / "low-stories-6-30.json")["low"]["scores"]
    assert found["low"] == 1.0
    assert found["high"] < 0.8


def test_held_out_texts_are_not_learnt() -> None:
    train = Rows([("A", "one"), ("B", "two  words"), ("A", "held"), ("C", " "), ("D", "one")], [0, 1, 0, 1, 1])
    splits = Splits(train, Rows([("B", "held")], [1]), Rows([("C", "two words"), ("C", "three")], [0, 0]))
    found = load_texts(lambda: splits, second_text)
    assert (found.train.inputs, found.validation.inputs, found.test.inputs) == (["one"], ["held"], ["two words", "three"])
    assert found.test.labels == [0, 0]
    assert load_texts(lambda: splits, both_texts).validation.inputs == ["B held"]


def test_the_kinds_of_the_suite() -> None:
    assert [task.name for task in KINDS] == ["captions", "quiz", "tweets", "reviews", "mails", "news"]
    assert {task.metric for task in KINDS} == {"loss"}
