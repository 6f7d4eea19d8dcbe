"""The experts of a tiny suite, trained once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from acemerge.bench.measure.experts import Experts, train_expert
from acemerge.bench.suites import registry as suites
from tiny_bench import DOMAIN, SUITE, TASKS


@pytest.fixture(scope="session")
def cache_with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the tiny experts have been trained, in this process; only for copies."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(folder))
        experts = Experts(DOMAIN, 0)
        experts.base.mkdir(parents=True)
        DOMAIN.write_base(experts.base)
        for task in TASKS:
            train_expert(DOMAIN, task, 0)
    return folder


@pytest.fixture(scope="module")
def cache(cache_with_experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tests of a module share results, and no others."""
    folder = tmp_path_factory.mktemp("results") / "cache"
    shutil.copytree(cache_with_experts, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACEMERGE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def trained(cache: Path) -> Iterator[Experts]:
    """The tiny suite as one of the bench's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suites._SUITES, SUITE.name, (lambda name, count: SUITE, 3))
        yield Experts(DOMAIN, 0)
