"""The bench's whole path, from training to tables, on a tiny suite that needs no download."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import acemerge
from acemerge.bench.analyses.premise import measure_premise, premise_table
from acemerge.bench.analyses.profile import profile, profile_table
from acemerge.bench.analyses.variants import ANALYSES
from acemerge.bench.data.task import Rows, split
from acemerge.bench.measure.compare import default_methods
from acemerge.bench.measure.experts import TRAINED, Experts, prepare_experts, shuffled_batches, train_expert
from acemerge.bench.measure.metrics import Accuracy
from acemerge.bench.measure.run import BASE, EXPERTS, Candidate, Job, Result, measure, measure_all
from acemerge.bench.suites import registry as suites
from acemerge.bench.suites.paper import PAPER_SUITES
from acemerge.bench.tables.tables import Row, Table
from acemerge.calibration.batches import batches_of_like_length
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.cli import bench as command
from acemerge.cli.app import main
from acemerge.cli.bench import SUITES
from acemerge.methods import all_methods
from tiny_bench import DOMAIN, SUITE, TASKS


def say(message: str) -> None:
    """Nothing."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache in which the tiny experts have been trained, in this process."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(folder))
        experts = Experts(SUITE.domain, 0)
        experts.base.mkdir(parents=True)
        DOMAIN.write_base(experts.base)
        for task in TASKS:
            train_expert(DOMAIN, task, 0)
        yield folder


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


def test_bench_merges_evaluates_and_keeps_results(cache: Path) -> None:
    """In processes of their own, as for a user."""
    merges = [Candidate(name, {"method": name}) for name in ("ace", "emr", "regmean")]
    jobs = [Job(SUITE, candidate, 0, 60) for candidate in (EXPERTS, BASE, *merges)]
    said: list[str] = []
    results = measure_all(jobs, said.append, workers=1)
    experts, base, ace, emr, regmean = results
    assert len(said) == 1 + len(jobs)
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


def test_premise_sees_the_inputs_of_every_merged_layer(cache: Path) -> None:
    found = measure_premise(SUITE, 0, 40, say)
    matrices = {a.tensor for a in found}
    assert len(matrices) == 12
    assert len(found) == 12 * 3
    assert all(0 < a.own <= 1 and 0 < a.identity <= 1 for a in found)
    # Inputs of a task are at least as near to its own weight change as to a matrix that knows nothing, on the whole.
    assert sum(a.own for a in found) > sum(a.identity for a in found)
    assert len(premise_table(found, "task")) == 4


def test_profile_matches_a_merge(cache: Path, tmp_path: Path) -> None:
    experts = Experts(SUITE.domain, 0)
    folders = {task.name: experts.folder(task) for task in SUITE.tasks}
    result = acemerge.merge(experts.base, folders, tmp_path / "merged")
    gammas = {record["name"]: record["gamma"] for record in result.tensors if record["action"] == "merged"}
    found = profile(SUITE, 0)
    assert {tensor.name: tensor.gamma for tensor in found.matrices} == pytest.approx(gammas)
    homogeneous = [tensor.spectra for tensor in found.matrices if not tensor.heterogeneous and tensor.spectra]
    assert all(spectra.plain == spectra.merged for spectra in homogeneous), "nothing is refined there"
    assert len(profile_table(found)) == 1 + 6


def test_a_table_takes_means_over_seeds() -> None:
    def result(seed: int, a: int, b: int) -> Result:
        return Result(seed, {"a": Accuracy(a, 100), "b": Accuracy(b, 200)}, None)

    experts = (result(0, 80, 100), result(1, 90, 100))
    row = Row(Candidate("x", {"method": "ace"}), (result(0, 40, 100), result(1, 45, 50)), experts)
    assert row.score("a") == pytest.approx(0.425)
    assert row.average == pytest.approx((0.4 + 0.5 + 0.45 + 0.25) / 4)
    assert row.normalised == pytest.approx((0.5 + 1.0 + 0.5 + 0.5) / 4)
    by_rows = ((0.24 / 100 + 0.25 / 200) + (0.2475 / 100 + 0.1875 / 200)) / 2 / 4
    by_seeds = ((0.45 - 0.4) ** 2 + (0.35 - 0.4) ** 2) / 1 / 2
    assert row.standard_error == pytest.approx((by_rows + by_seeds) ** 0.5)


def test_batches_hold_every_row_once() -> None:
    lengths = torch.randint(1, 60, (500,), generator=torch.Generator().manual_seed(0))
    for batches in (list(batches_of_like_length(lengths)), shuffled_batches(lengths, 16, torch.Generator().manual_seed(0))):
        assert sorted(torch.cat(batches).tolist()) == list(range(500))


def test_splits_keep_test_rows_out_of_training() -> None:
    rows = Rows(["Same  words", "same words", "b", "c", "d", "e", "f"], [0, 0, 1, 1, 0, 1, 0])
    splits = split(rows, Rows(["SAME WORDS", "new", "new"], [0, 1, 1]), validation_rows=2)
    assert splits.test.inputs == ["new"]
    assert len(splits.validation) == 2
    assert not set(splits.train.inputs) & set(splits.validation.inputs)
    again = split(rows, test_rows=3, validation_rows=1)
    assert again == split(rows, test_rows=3, validation_rows=1)
    assert not {" ".join(text.lower().split()) for text in again.test.inputs} & {t.lower() for t in again.train.inputs}


def test_commands_and_suites_go_together() -> None:
    assert set(SUITES) == set(suites._SUITES)
    assert set(command.PAPER_SUITES) == set(PAPER_SUITES)
    assert set(command.ANALYSES) == set(ANALYSES)
    names = {task.name for name in SUITES for task in suites.get_suite(name).tasks if name.startswith("text")}
    assert len(names) == 14
    without_data = {method.name for method in all_methods() if method.uses == "weights"}
    assert set(default_methods(8)) == without_data - {"slerp"}
    for candidates in (make() for make in ANALYSES.values()):
        assert len({candidate.label for candidate in candidates}) == len(candidates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "text-8", "--methods", "ace,tsvm"], "there is no method 'tsvm': did you mean 'tsv_m'?"),
        (["bench", "ablation", "--suite", "text-9"], "there is no suite 'text-9': did you mean 'text-8'?"),
        (["bench", "third-party", "--suite", "gpt2-6"], "use text-8, text-14 or a vision suite"),
        (["demo", "--ask", "Hello", "-o", "nowhere"], "run `acemerge demo` first"),
    ],
)
def test_mistakes_are_told_before_any_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["acemerge", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
