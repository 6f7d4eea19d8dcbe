"""The search's candidates are what the registered methods do, so that what was chosen there is what ships."""

from typing import Any

import pytest
import torch

from acemerge import merge_task_vectors
from acemerge.planning.view import View
from scripts import load_script
from spectral_cases import error, experts, gaussian, low_rank


@pytest.fixture(scope="module")
def search() -> Any:
    return load_script("benchmarks/search_candidates.py")


def changes(search: Any, label: str, task_vectors: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    layer = search.Layer("w", View(), base.float(), task_vectors.float())
    (candidate,) = (candidate for candidate in search.CANDIDATES if candidate.label == label)
    (M,) = candidate.changes([search.decompose(search.DIRECTIONS[candidate.directions](layer), layer)])
    return torch.as_tensor(M)


def test_labels_are_unique_and_directions_known(search: Any) -> None:
    labels = [candidate.label for candidate in search.CANDIDATES]
    assert len(labels) == len(set(labels))
    assert {candidate.directions for candidate in search.CANDIDATES} <= set(search.DIRECTIONS)


@pytest.mark.parametrize("length", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("kind", ["full", "low rank"])
def test_the_chosen_candidate_is_ace_auto(search: Any, kind: str, length: float) -> None:
    task_vectors = experts(4, 20, 16) if kind == "full" else low_rank(4, 20, 16, rank=2)
    base = gaussian(20, 16, seed=5) * length
    found = changes(
        search, "on the average: beyond; p 0.25; at most 0.08 of the base's strongest by rank to 1", task_vectors, base
    )
    assert error(found, merge_task_vectors(task_vectors.float(), method="ace_auto", base=base.float())) <= 1e-4


@pytest.mark.parametrize("method", ["ace", "tsv_m", "iso_cts"])
def test_a_method_as_it_is(search: Any, method: str) -> None:
    task_vectors = experts(3, 20, 16)
    found = changes(search, f"{method}; p 1; as it is", task_vectors, gaussian(20, 16))
    assert error(found, merge_task_vectors(task_vectors.float(), method=method)) <= 1e-4


def test_the_mean_is_averaging(search: Any) -> None:
    task_vectors = experts(3, 20, 16)
    assert error(changes(search, "mean", task_vectors, gaussian(20, 16)), task_vectors.mean(0)) <= 1e-5
