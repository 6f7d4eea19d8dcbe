"""The bench's whole path, from training to tables, on a tiny suite that needs no download."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from acemerge.bench.measure import run
from acemerge.bench.measure.experts import Experts
from acemerge.bench.measure.measured_merge import merge_here
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate, Job, measure, measure_all
from acemerge.bench.tables.tables import Row, Table
from tiny_bench import SUITE


def test_bench_merges_evaluates_and_keeps_results(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts and ACE in processes of their own, as for a user; the rest in this one, which starts sooner."""
    merges = [Candidate(name, {"method": name}) for name in ("ace", "emr", "regmean")]
    jobs = [Job(SUITE, candidate, 0, 60) for candidate in (EXPERTS, BASE, *merges)]
    said: list[str] = []
    experts, ace = measure_all([jobs[0], jobs[2]], said.append, workers=1)
    assert len(said) == 1 + 2
    monkeypatch.setattr(run, "measured_merge", merge_here)
    base, emr, regmean = (measure(job) for job in (jobs[1], *jobs[3:]))
    results = [experts, base, ace, emr, regmean]
    assert ace.average > base.average
    assert emr.average > base.average
    assert regmean.average > base.average
    assert ace.merge is not None
    assert ace.merge.options["epsilon"] == 1e-5, "what 'paper' stands for is made explicit"
    assert experts.merge is None

    said.clear()
    assert measure_all(jobs, said.append) == results
    assert said == [], "the second time, results come from where they were kept"

    table = Table(
        "tiny", {"suite": SUITE.name}, tuple(Row(j.candidate, (r,), (experts,)) for j, r in zip(jobs, results, strict=True))
    )
    assert [row["row"] for row in json.loads(table.to_json())["rows"]] == ["experts", "base", "ace", "emr", "regmean"]
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert float(lines[0]["normalised_average"]) == 1.0
    assert lines[3]["per_task"] == "True"
    assert [line["uses"] for line in lines] == ["weights"] * 4 + ["data"]
    shared, apart = table.to_markdown().split("One model per task")
    assert "| ace |" in shared
    assert "| regmean (uses data) |" in shared
    assert "| emr |" not in shared
    assert "| emr |" in apart
    assert "epsilon=1e-05" in apart, "hyper-parameters are stated"


def test_results_depend_on_everything_that_changes_them(cache: Path) -> None:
    jobs = [
        Job(SUITE, Candidate("a", {"method": "ace"}), 0, 60),
        Job(SUITE, Candidate("a", {"method": "ace", "tau": 0.1}), 0, 60),
        Job(SUITE, Candidate("a", {"method": "ties"}), 0, 60),
        Job(SUITE, Candidate("a", {"method": "ace"}), 0, 61),
        Job(SUITE, Candidate("a", {"method": "ace"}), 0, 60, "validation"),
    ]
    assert len({job.file for job in jobs}) == len(jobs)
    same = Job(SUITE, Candidate("b", {"method": "ace", "tau": 0.3}), 0, 60)
    assert same.file == jobs[0].file, "a default written out is the same request"


def test_scores_of_a_part_are_kept_apart(trained: Experts) -> None:
    whole, part = (Job(SUITE, EXPERTS, 0, 60), Job(SUITE, EXPERTS, 0, 60, "validation"))
    assert measure(whole).scores != measure(part).scores
    assert whole.file != part.file
