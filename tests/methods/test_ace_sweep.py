"""ACE at many settings of a tensor at once: every point is what a merge of its own gives."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ace_cases import BRANCHES, SHAPES, Norms, error, experts, low_rank_experts
from acemerge.methods import Context, Merged, Options, get_method
from acemerge.methods.ace import AceOptions
from acemerge.methods.shared_routes import find_route, merge_at_points
from acemerge.numerics.frame import Factors, to_cores
from reference_ace import reference_ace, well_posed

ACE = get_method("ace")
EPSILONS, TAUS, K_FRACS = (1e-6, 1e-3, 1.0), (0.0, 0.3, 1e9), (0.0, 0.3, 1.0)


def sweep(task_vectors: Tensor, grid: list[AceOptions], context: Context | None = None) -> list[Merged]:
    """The results in the grid's order; each point exactly once."""
    context = context or Context(experts=tuple(map(str, range(len(task_vectors)))))
    found: dict[int, Merged] = {}
    for points, merged in merge_at_points(ACE, task_vectors, grid, [context] * len(grid)):
        kept = Merged(merged.delta.clone(), merged.facts)
        merged.delta.fill_(torch.nan)  # the caller may do so, and no other point may notice
        for point in points:
            assert point not in found
            found[point] = kept
    return [found[point] for point in range(len(grid))]


def check(task_vectors: Tensor, grid: list[AceOptions], context: Context | None = None) -> None:
    """Against merges one by one."""
    before = task_vectors.clone()
    for own, merged in zip(grid, sweep(task_vectors, grid, context), strict=True):
        alone = ACE(task_vectors, own, context)
        assert merged.delta.dtype == alone.delta.dtype
        assert merged.facts.keys() == alone.facts.keys()
        assert merged.facts["branch"] == alone.facts["branch"]
        assert merged.facts["precision"] == alone.facts["precision"]
        assert merged.facts.get("refined_directions") == alone.facts.get("refined_directions")
        assert merged.facts["ridge_share"] == pytest.approx(alone.facts["ridge_share"], rel=1e-12)
        if well_posed(reference(task_vectors, own)):
            assert error(merged.delta, alone.delta) <= 1e-9
            torch.testing.assert_close(
                merged.delta.float(), alone.delta.float(), rtol=1e-6, atol=1e-7 * float(alone.delta.abs().max())
            )
    assert task_vectors.equal(before)


def reference(task_vectors: Tensor, options: AceOptions) -> Any:
    names = ("epsilon", "tau", "k_frac", "alpha", "normalise", "prior", "refine")
    return reference_ace(task_vectors.double().numpy(), **{name: getattr(options, name) for name in names})


@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_grid_agrees_with_merges_one_by_one(shape: str, norms: Norms) -> None:
    """Every pair of two options' values, in nine points."""
    grid = [AceOptions(epsilon=EPSILONS[i], tau=TAUS[j], k_frac=K_FRACS[(i + j) % 3]) for i, j in product(range(3), repeat=2)]
    check(experts(3, *SHAPES[shape], norms, decay=1.0), grid)


@given(
    tasks=st.integers(1, 5),
    rows=st.integers(2, 24),
    columns=st.integers(2, 40),
    norms=st.sampled_from(BRANCHES),
    decay=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    frozen=st.booleans(),
    seed=st.integers(0, 100),
    points=st.lists(
        st.builds(
            AceOptions,
            epsilon=st.sampled_from([1e-5, 1e-3, 0.1]),
            tau=st.sampled_from([0.0, 0.3, 5.0]),
            k_frac=st.sampled_from([0.1, 0.5, 0.9]),
            normalise=st.booleans(),
            prior=st.booleans(),
            refine=st.booleans(),
            alpha=st.sampled_from([0.5, 1.0]),
        ),
        min_size=2,
        max_size=8,
    ),
)  # fmt: skip
def test_any_points_agree_with_merges_one_by_one(
    tasks: int, rows: int, columns: int, norms: Norms, decay: float, dtype: torch.dtype, frozen: bool, seed: int,
    points: list[AceOptions],
) -> None:  # fmt: skip
    task_vectors = experts(tasks, rows, columns, norms, decay=decay, seed=seed).to(dtype)
    if frozen and tasks > 1:
        task_vectors[0] = 0
    check(task_vectors, points)


def test_agrees_with_the_transcription() -> None:
    task_vectors = experts(4, 20, 30, "different", decay=1.0)
    grid = [AceOptions(epsilon=e, k_frac=k) for e, k in product(EPSILONS, (0.2, 0.5))]
    for own, merged in zip(grid, sweep(task_vectors, grid), strict=True):
        assert error(merged.delta, torch.from_numpy(reference(task_vectors, own).merged)) <= 1e-8


def test_low_rank_experts_refine_no_more_directions_than_there_are() -> None:
    check(low_rank_experts(3, 24, 32, 2), [AceOptions(epsilon=1e-4, tau=0.0, k_frac=k) for k in (0.1, 0.5, 1.0)])


def test_in_the_core_of_adapters() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = [
        Factors(torch.randn(30, 3, generator=generator) * 2.0**t, torch.randn(3, 40, generator=generator)) for t in range(3)
    ]
    frame, cores = to_cores(factors, (30, 40), "both")
    context = Context(experts=("a", "b", "c"), frame=frame)
    grid = [AceOptions(epsilon=e, tau=tau, k_frac=k) for e, tau, k in product((1e-3, 1.0), (0.0, 9.0), (0.1, 0.2))]
    for own, merged in zip(grid, sweep(cores, grid, context), strict=True):
        assert error(merged.delta, ACE(cores, own, context).delta) <= 1e-9


@pytest.mark.parametrize("shape", [(520, 520), (520, 700), (700, 520)])
def test_float32_where_a_merge_works_in_it(shape: tuple[int, int]) -> None:
    """Each point in the precision of a merge of its own, and as near to float64 as that has to be."""
    task_vectors = experts(3, *shape, "different", decay=0.5).float()
    points = [(1e-9, 0.0, 0.1), (1e-9, 9.0, 0.6), (1e-3, 0.0, 0.1), (1e-3, 0.0, 0.6), (1e-3, 9.0, 0.1)]
    grid = [AceOptions(epsilon=e, tau=tau, k_frac=k) for e, tau, k in points]
    swept = sweep(task_vectors, grid)
    assert {merged.facts["precision"] for merged in swept} == {"float32", "float64"}
    for own, merged in zip(grid, swept, strict=True):
        alone = ACE(task_vectors, own)
        assert merged.delta.dtype == alone.delta.dtype
        assert merged.facts["precision"] == alone.facts["precision"]
        assert error(merged.delta, ACE(task_vectors.double(), own).delta) <= 1e-4


def test_nobody_changed_anything() -> None:
    results = sweep(torch.zeros(3, 6, 4), [AceOptions(epsilon=1e-3), AceOptions(epsilon=1e-5)])
    assert all(not merged.delta.any() and merged.facts == {"active_experts": 0} for merged in results)


def test_settings_that_come_to_the_same_are_merged_once() -> None:
    """tau on one side of gamma; k_frac and the refinement where nothing is refined; k_frac with the same k."""
    task_vectors = experts(3, 20, 20, "different")  # gamma > 0.3
    context = Context(experts=("a", "b", "c"))

    def results(*grid: Options) -> int:
        return len(list(merge_at_points(ACE, task_vectors, grid, [context] * len(grid))))

    assert results(AceOptions(epsilon=1e-3, tau=0.1), AceOptions(epsilon=1e-3, tau=0.2)) == 1
    assert results(AceOptions(epsilon=1e-3, tau=9.0, k_frac=0.1), AceOptions(epsilon=1e-3, tau=9.0, k_frac=0.5)) == 1
    assert results(AceOptions(epsilon=1e-3, k_frac=0.31), AceOptions(epsilon=1e-3, k_frac=0.32)) == 1
    assert results(AceOptions(epsilon=1e-3, tau=0.1), AceOptions(epsilon=1e-3, tau=9.0)) == 2
    assert results(AceOptions(epsilon=1e-3), AceOptions(epsilon=1e-3, alpha=0.5)) == 2


def test_covariances_are_formed_once_for_both_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    from acemerge.numerics.covariance import Experts

    formed = 0
    original = Experts._covariance

    def counted(self: Experts, t: int) -> Tensor:
        nonlocal formed
        formed += 1
        return original(self, t)

    monkeypatch.setattr(Experts, "_covariance", counted)
    grid = [AceOptions(epsilon=e, tau=tau) for e, tau in product(EPSILONS, (0.0, 9.0))]
    sweep(experts(3, 20, 10, "different"), grid)
    assert formed == 3  # one per expert


def test_one_point_is_a_merge() -> None:
    task_vectors, own = experts(3, 20, 20, "different").float(), AceOptions(epsilon=1e-3)
    [merged] = sweep(task_vectors, [own])
    assert merged.delta.equal(ACE(task_vectors, own).delta)


def test_a_method_without_a_shared_route_is_merged_point_by_point() -> None:
    method = get_method("task_arithmetic")
    assert find_route(method.name) is None
    task_vectors = torch.arange(24.0).reshape(2, 3, 4)
    grid = [method.options({"alpha": alpha}) for alpha in (0.5, 1.0, 0.5)]
    found = list(merge_at_points(method, task_vectors, grid, [Context(experts=("a", "b"))] * 3))
    assert [points for points, _ in found] == [[0, 2], [1]]
    assert all(merged.delta.equal(method(task_vectors, grid[points[0]]).delta) for points, merged in found)
