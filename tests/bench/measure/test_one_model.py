"""acemerge evaluate on a suite whose experts are trained here."""

from __future__ import annotations

from pathlib import Path

import pytest

import acemerge
from acemerge.bench.measure import run
from acemerge.bench.measure.experts import Experts
from acemerge.bench.measure.measured_merge import merge_here
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate, Job, measure
from running import rows_in, run_command
from tiny_bench import SUITE, TASKS


def test_evaluate_gives_what_the_bench_gives(
    trained: Experts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {task.name: trained.folder(task) for task in TASKS}
    acemerge.merge(trained.base, folders, tmp_path / "merged", "ace")
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
    assert capsys.readouterr().err
    monkeypatch.setattr("acemerge.bench.measure.evaluation._SECONDS_BETWEEN_LINES", -1)
    assert run_command(monkeypatch, "evaluate", folders["second"], *where, "--tasks", "second", "-q") == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    headings = next(line for line in quiet.out.splitlines() if line.split()[:1] == ["model"])
    assert headings.split() == ["model", "second", "average", "±"]
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
