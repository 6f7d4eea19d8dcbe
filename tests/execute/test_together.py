"""Small tensors are merged at once, and give the bytes of one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import acemerge
from acemerge.execute import shard, together
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor
from interruption import one_by_one
from small_models import Models, tree


@pytest.mark.parametrize("method", ["ace", "emr", "dare_ties"])
def test_tensors_merged_at_once_give_the_bytes_of_one_by_one(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "one", method=method)
    both, threads = Barrier(2), set()

    def at_once(*arguments: Any) -> MergedTensor:
        if get_ident() not in threads:
            threads.add(get_ident())
            both.wait(timeout=60)
        return merge_tensor(*arguments)

    monkeypatch.setattr(together, "_DEVICES", ("cpu",))
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(at_once))
    acemerge.merge(models.base, models.experts, tmp_path / "all", method=method, threads=2)
    assert len(threads) == 2
    assert tree(tmp_path / "all") == tree(tmp_path / "one")


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_tensors_at_once_are_neighbours_and_no_larger_than_a_large_one(sizes: list[int], entries: int) -> None:
    planned: Any = [(SimpleNamespace(header=SimpleNamespace(elements=size)),) for size in sizes]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(together, "_ENTRIES", entries)
        groups = together.together(planned, torch.device("cuda"))
        alone = together.together(planned, torch.device("cpu"))
    assert [row for group in groups for row in group] == planned
    assert alone == [[row] for row in planned]
    totals = [sum(row[0].header.elements for row in group) for group in groups]
    assert all(total <= entries or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    assert all(total + group[0][0].header.elements > entries for total, group in zip(totals, groups[1:], strict=False)), (
        "they would have fitted"
    )


def test_a_stream_of_its_own_waits_for_what_was_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @contextmanager
    def inside(stream: Any) -> Iterator[None]:
        done.append(f"in the stream of {stream.device}")
        yield
        done.append("out of it")

    def make_stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(device=device, wait_stream=lambda other: done.append(f"wait for {other}"))

    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default of {device}")
    monkeypatch.setattr(torch.cuda, "stream", inside)
    with together.own_stream(torch.device("cuda:1")):
        done.append("work")
    assert done == ["wait for the default of cuda:1", "in the stream of cuda:1", "work", "out of it"]
