"""`acemerge evaluate` on a suite whose experts are trained here, metrics, and the paper's numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import acemerge
from acemerge.bench.domains.heads import prompts_of
from acemerge.bench.measure import run
from acemerge.bench.measure.experts import Experts, train_expert
from acemerge.bench.measure.measured_merge import merge_here
from acemerge.bench.measure.metrics import Accuracy, Estimate, score_answers
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate, Job, measure
from acemerge.bench.suites import registry as suites
from acemerge.bench.tables.paper import paper_rows, paper_tables
from acemerge.cli.bench import PAPER_SUITES
from acemerge.methods import all_methods
from running import rows_in, run_command
from tiny_bench import DOMAIN, SUITE, TASKS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(suites._SUITES, SUITE.name, (lambda name, count: SUITE, 3))
        experts = Experts(DOMAIN, 0)
        experts.base.mkdir(parents=True)
        DOMAIN.write_base(experts.base)
        for task in TASKS:
            train_expert(DOMAIN, task, 0)
        yield experts


def test_evaluate_gives_what_the_bench_gives(trained: Experts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {task.name: trained.folder(task) for task in TASKS}
    acemerge.merge(trained.base, folders, tmp_path / "merged")
    where = ["--suite", SUITE.name, "--limit", 60, "-o", tmp_path]
    monkeypatch.setattr(run, "measured_merge", merge_here)
    bench = {c.label: measure(Job(SUITE, c, 0, 60)) for c in (BASE, EXPERTS, Candidate("ace", {"method": "ace"}))}
    shares = {label: {task: score.share for task, score in result.scores.items()} for label, result in bench.items()}
    assert run_command(monkeypatch, "evaluate", tmp_path / "merged", *where, "--with-experts") == 0
    merged = rows_in(tmp_path / "merged-tiny-3-60.json")
    assert merged["merged"]["scores"] == shares["ace"]
    assert merged["merged"]["share_of_expert"]["first"] == shares["ace"]["first"] / shares["experts"]["first"]
    assert run_command(monkeypatch, "evaluate", trained.base, *where) == 0
    assert rows_in(tmp_path / "base-tiny-3-60.json")["base"]["scores"] == shares["base"]
    assert run_command(monkeypatch, "evaluate", folders["second"], *where, "--tasks", "second") == 0
    assert rows_in(tmp_path / "second-tiny-3-second-60.json")["second"]["scores"]["second"] == shares["experts"]["second"]


def test_mistakes_are_told_before_any_work(
    trained: Experts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--suite", SUITE.name, "--models", tmp_path], "trains its own experts on data from packages; leave --models out"),
        (["--suite", SUITE.name, "--tasks", "frist"], "did you mean 'first'?"),
        (["--suite", "gpt2-glu"], "did you mean 'gpt2-glue'?"),
        (["--suite", "gpt2-glue", "--models", tmp_path / "none"], "no such folder"),
        (["--suite", "gpt2-glue", "--models", tmp_path], "has no base or gpt2 with weights in it; put openai-community/gpt2"),
        (["--suite", "roberta-base-glue"], "needs --data with a folder that holds test.json"),
        (["--suite", "clip-vit-b32-8", "--tasks", "mnist"], "openai/clip-vit-base-patch32: no such folder here, and as a hub id"),
    ):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert run_command(monkeypatch, "evaluate", trained.base, *arguments, "-o", tmp_path / "out") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_scores_of_a_part_are_kept_apart(trained: Experts) -> None:
    whole, part = (Job(SUITE, EXPERTS, 0, 60), Job(SUITE, EXPERTS, 0, 60, "validation"))
    assert measure(whole).scores != measure(part).scores
    assert whole.file != part.file


def test_standard_errors_match_the_spread_over_samples() -> None:
    """Of an accuracy by its formula, and of other metrics about as wide as they really scatter."""
    generator = np.random.default_rng(0)
    found, spread = [], []
    for _ in range(20):
        labels = generator.integers(2, size=400)
        answers = np.where(generator.random(400) < 0.8, labels, 1 - labels)
        score = score_answers("matthews", labels, answers)
        assert isinstance(score, Estimate)
        found.append(score.share)
        spread.append(score.standard_error)
    assert statistics.fmean(spread) == pytest.approx(statistics.stdev(found), rel=0.25)
    assert score_answers("accuracy", np.array([1, 0, 1]), np.array([1, 1, 1])) == Accuracy(2, 3)
    assert score_answers("pearson_and_spearman", np.arange(50.0), np.zeros(50)).share == 0.0
    assert score_answers("matthews", np.ones(50), np.ones(50)).share == 0.0


def test_the_papers_tables_belong_to_our_suites_tasks_and_methods() -> None:
    tables = paper_tables()
    assert set(tables) == set(PAPER_SUITES) - {"gpt2-glue-mm"}
    known = {"base", "experts", *(method.name for method in all_methods())}
    for suite, found in tables.items():
        assert set(found["main"]) - known <= {"fisher", "regmean"}
        if suite.startswith("clip"):
            assert all(prompts_of(task).classes for task in found["tasks"])
            assert len(found["tasks"]) == int(suite.rsplit("-", 1)[1])
    assert tables["gpt2-glue"]["main"]["ace"]["raw"]["average"] == 74.1
    assert tables["clip-vit-l14-20"]["main"]["ace"]["raw"]["average"] == 89.49
    some = paper_rows("gpt2-glue", "main", ["cola", "rte"])["ace"]
    assert some == {"raw": {"cola": 70.3, "rte": 62.5}}, "an average over other tasks is left out"


def test_the_papers_averages_are_means_of_its_tasks() -> None:
    """But for three, which the paper has so."""
    odd = []
    for suite, found in paper_tables().items():
        for row, kinds in found["main"].items():
            for scores in kinds.values():
                tasks = [scores[task] for task in found["tasks"] if task in scores]
                whole = len(tasks) == len(found["tasks"]) and "average" in scores
                if whole and abs(statistics.fmean(tasks) - scores["average"]) > 0.051:
                    odd.append((suite, row))
    assert odd == [("roberta-base-glue", "base"), ("roberta-base-glue", "dare_ties"), ("roberta-large-glue", "wudi")]
