"""Progress fits the terminal and counts work, not bytes."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import acemerge
from acemerge.planning.plan import Plan
from acemerge.planning.progress import LiveProgress, PlainProgress, Tally, tell_steps
from small_models import fine_tuned, write_model


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """An embedding with half of the bytes, which is averaged, and matrices, which are merged."""
    base = {"embed_tokens.weight": torch.zeros(8 * 64, 64), "model.layers.0.some.quite.long.name.weight": torch.zeros(64, 64)}
    base |= {f"model.layers.{i}.mlp.weight": torch.zeros(64, 64) for i in range(1, 8)}
    write_model(tmp_path / "base", base, {"model_type": "bert"})
    experts = [write_model(tmp_path / f"e{i}", fine_tuned(base, i), {"model_type": "bert"}) for i in range(2)]
    rules = [{"match": "embed*", "do": "average"}]
    return acemerge.plan(tmp_path / "base", experts, tensors=rules)


def test_a_large_tensor_that_is_averaged_is_little_of_the_work(plan: Plan) -> None:
    embedding, *matrices = plan.tensors
    tally = Tally(plan)
    tally.advance(embedding)
    assert tally.done_bytes == tally.bytes / 2
    assert tally.share < 0.35
    for matrix in matrices:
        tally.advance(matrix)
    assert tally.share == pytest.approx(1)


def test_time_left_counts_work_beyond_the_plan(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    embedding, *matrices = plan.tensors
    own = Tally(plan)
    progress = PlainProgress(plan, {matrix.name: own.work for matrix in matrices})
    clock = 31.0
    progress.advance(embedding)
    said = re.search(r"1/9 tensors, .* (\d+) s left", capsys.readouterr().err)
    assert said is not None
    assert int(said[1]) > 31 * len(matrices)  # by bytes it would be another 31 s


def test_a_long_pass_before_the_first_tensor_says_how_long_it_takes(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    passed = []
    for step in tell_steps(PlainProgress(plan), "pass 1", {"large": 3.0, "small": 1.0, "last": 1.0}):
        passed.append(step)
        clock += 60 if step == "large" else 20
    assert passed == ["large", "small", "last"]
    assert capsys.readouterr().err == "pass 1: 1/3 tensors, about 40 s left of it\n"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_bar_is_one_line(plan: Plan, width: int) -> None:
    progress = LiveProgress(plan)
    progress.advance(plan.tensors[0])
    progress.advance(plan.tensors[1])
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as shown:
        console.print(progress.bar.get_renderable())
    (line,) = shown.get().splitlines()
    assert len(line) <= width
    assert line.startswith("2/9 tensors")
    assert ("model.layers.0" in line) == (width > 60)
