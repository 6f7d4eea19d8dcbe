"""The same inputs give the same bytes, however the work is cut: threads, shards, interruptions, points of a sweep."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import acemerge
from acemerge.execute import shard
from acemerge.output.manifest import MANIFEST
from interruption import one_by_one, stop_at
from random_models import Case, cases
from small_models import Models, tree


@contextmanager
def written(case: Case) -> Iterator[tuple[Path, Models]]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name), case.write(Path(name) / "models")


def tensors_in(folder: Path) -> Mapping[str, Any]:
    """What the manifest says of every tensor (hash, fate, what the method told), but not in which file it is."""
    tensors = json.loads((folder / MANIFEST).read_text())["tensors"]
    return {tensor["name"]: {what: told for what, told in tensor.items() if what not in ("name", "shard")} for tensor in tensors}


@settings(max_examples=6)
@given(cases)
def test_threads(case: Case) -> None:
    with written(case) as (folder, models):
        one, two, four = (tree(case.merge(models, folder / str(count), threads=count)) for count in (1, 2, 4))
    assert one == two == four


@settings(max_examples=6)
@example(Case(((12, 8), (12, 13)), torch.float32, 2, "ace", 0), "2kB")  # two shards, or one
@given(cases, st.sampled_from(["2kB", "5GB"]))
def test_sizes_of_shards(case: Case, size: str) -> None:
    with written(case) as (folder, models):
        one, other = (tensors_in(case.merge(models, folder / each, shard_size=each)) for each in ("1kB", size))
    assert one == other


@settings(max_examples=6)
@given(cases, st.data())
def test_an_interrupted_merge(case: Case, data: st.DataObject) -> None:
    with written(case) as (folder, models):
        whole = tree(case.merge(models, folder / "whole"))
        name = f"layers.{data.draw(st.integers(0, len(case.shapes) - 1))}.weight"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at(name, [])))
            with pytest.raises(KeyboardInterrupt):
                case.merge(models, folder / "out")
        assert tree(case.merge(models, folder / "out")) == whole


@settings(max_examples=6)
@given(cases)
def test_the_point_of_a_sweep(case: Case) -> None:
    """ACE's points share what they have in common, so that theirs are the same up to rounding: test_points_are_merges.py."""
    assume(not case.method.startswith("ace"))
    with written(case) as (folder, models):
        alone = tree(case.merge(models, folder / "alone", alpha=0.5))
        alphas = {"alpha": [0.5, 1.5]}
        acemerge.sweep(models.base, models.experts, folder / "grid", alphas, case.method, shard_size="1kB", threads=1, quiet=True)
        assert tree(folder / "grid/alpha=0.5") == alone
