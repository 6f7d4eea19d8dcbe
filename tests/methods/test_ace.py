"""ACE-Merging on one tensor: agreement with the float64 transcription, and facts that follow from the definition."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from ace_cases import BRANCHES, NORMS, SHAPES, Norms, error, experts, low_rank_experts, with_norms
from acemerge import merge_task_vectors
from reference_ace import ReferenceMerge, reference_ace, well_posed

SWITCHES = list(product((True, False), repeat=3))
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The matrices are tiny: on a busy machine more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def merge(task_vectors: Tensor, **options: Any) -> Tensor:
    return merge_task_vectors(task_vectors, method="ace", **options)


def reference(task_vectors: Tensor, **options: Any) -> ReferenceMerge:
    return reference_ace(task_vectors.double().numpy(), **options)


def check(task_vectors: Tensor, **options: Any) -> ReferenceMerge:
    """Compare with the reference on the very numbers given to the merge, in both precisions."""
    for dtype, tolerance in TOLERANCE.items():
        given_vectors = task_vectors.to(dtype)
        expected = reference(given_vectors, **options)
        assert well_posed(expected), "choose another input: this comparison has no answer"
        actual = merge(given_vectors, **options)
        assert actual.dtype == dtype
        assert actual.shape == task_vectors.shape[1:]
        assert error(actual, torch.from_numpy(expected.merged)) <= tolerance
    return expected


# Agreement with the reference


@pytest.mark.parametrize(("decay", "epsilon"), [(0.0, 1e-6), (1.0, 1e-3), (2.0, 1.0), (2.0, 1e-6)])
@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_on_shapes_branches_spectra_and_epsilons(shape: str, norms: Norms, decay: float, epsilon: float) -> None:
    expected = check(experts(3, *SHAPES[shape], norms, decay=decay), epsilon=epsilon, k_frac=0.5)
    assert expected.heterogeneous == (norms == "different")
    assert expected.kept == (min(SHAPES[shape]) // 2 if norms == "different" else 0)


@pytest.mark.parametrize("tasks", range(1, 9))
@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", ["square", "dual", "tall"])
def test_agrees_for_each_number_of_experts(shape: str, norms: Norms, tasks: int) -> None:
    expected = check(experts(tasks, *SHAPES[shape], norms, decay=1.0, seed=tasks), epsilon=1e-5)
    assert expected.heterogeneous == (norms == "different" and tasks > 1)


@pytest.mark.parametrize("epsilon", [1e-5, 4e-2])
@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize(("tasks", "rows", "cols"), [(4, 192, 256), (2, 128, 512)], ids=["primal", "dual"])
def test_agrees_at_realistic_size_and_magnitude(tasks: int, rows: int, cols: int, norms: Norms, epsilon: float) -> None:
    task_vectors = experts(tasks, rows, cols, norms, decay=1.0)
    assert 1e-3 < task_vectors.abs().median() < 1e-2
    check(task_vectors, epsilon=epsilon)


@pytest.mark.parametrize(("normalise", "prior", "refine"), SWITCHES)
@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", ["square", "dual", "tall"])
def test_agrees_for_each_combination_of_switches(shape: str, norms: Norms, normalise: bool, prior: bool, refine: bool) -> None:
    options = {"normalise": normalise, "prior": prior, "refine": refine}
    check(experts(3, *SHAPES[shape], norms, decay=1.0), epsilon=1e-3, k_frac=0.5, **options)


def test_each_switch_changes_the_heterogeneous_merge() -> None:
    task_vectors = experts(3, 24, 24, "different", decay=1.0)
    full = merge(task_vectors, epsilon=1e-3)
    for switch in ("normalise", "prior", "refine"):
        assert error(merge(task_vectors, epsilon=1e-3, **{switch: False}), full) > 1e-3


def test_only_the_prior_changes_the_homogeneous_merge() -> None:
    task_vectors = experts(3, 24, 24, "similar", decay=1.0)
    full = merge(task_vectors, epsilon=1e-3)
    assert torch.equal(merge(task_vectors, epsilon=1e-3, normalise=False), full)
    assert torch.equal(merge(task_vectors, epsilon=1e-3, refine=False), full)
    assert error(merge(task_vectors, epsilon=1e-3, prior=False), full) > 1e-3


@pytest.mark.parametrize("k_frac", [0.05, 0.3, 0.58, 0.7, 1.0])
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("shape", [(50, 50), (50, 170)], ids=["primal", "dual"])
def test_agrees_for_tau_and_k_frac(shape: tuple[int, int], tau: float, k_frac: float) -> None:
    expected = check(experts(3, *shape, "different", decay=1.0), epsilon=1e-3, tau=tau, k_frac=k_frac)
    assert expected.heterogeneous == (tau < 100)
    # 0.58 * 50 is 28.999999999999996 in floating point: the floor is of the decimal that was written, 29.
    assert expected.kept == ({0.05: 2, 0.3: 15, 0.58: 29, 0.7: 35, 1.0: 50}[k_frac] if tau < 100 else 0)


@pytest.mark.parametrize("alpha", [-0.5, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("norms", BRANCHES)
def test_alpha_scales_the_merge(norms: Norms, alpha: float) -> None:
    task_vectors = experts(3, 24, 40, norms)
    check(task_vectors, epsilon=1e-3, alpha=alpha)
    assert error(merge(task_vectors, epsilon=1e-3, alpha=alpha), alpha * merge(task_vectors, epsilon=1e-3)) <= 1e-12


def test_alpha_zero_is_no_change() -> None:
    assert torch.equal(merge(experts(3, 8, 9, "different"), alpha=0.0), torch.zeros(8, 9, dtype=torch.float64))


@pytest.mark.parametrize("tau", [0.0, 1e9])
@pytest.mark.parametrize(
    ("norms", "epsilon"),
    [([1e-3, 2e-3, 5e-3], 1e-5), ([1e-2, 1.0, 30.0], 1e-4), ([20.0, 90.0, 300.0], 1e-2)],
    ids=["tiny", "mixed", "huge"],
)
@pytest.mark.parametrize("shape", ["square", "dual", "tall"])
def test_agrees_far_from_unit_norm(shape: str, norms: list[float], epsilon: float, tau: float) -> None:
    expected = check(with_norms(experts(3, *SHAPES[shape], "similar", decay=1.0), norms), epsilon=epsilon, tau=tau)
    assert expected.heterogeneous == (tau == 0)


@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", ["square", "dual", "tall"])
def test_agrees_when_column_means_dominate(shape: str, norms: Norms) -> None:
    task_vectors = experts(3, *SHAPES[shape], "similar", decay=1.0)
    shifted = task_vectors + 20 * task_vectors.mean(dim=1, keepdim=True)
    check(with_norms(shifted, torch.linspace(*NORMS[norms], 3).tolist()), epsilon=1e-4)


@given(
    tasks=st.integers(1, 8),
    rows=st.integers(2, 24),
    cols=st.integers(2, 48),
    norms=st.sampled_from(BRANCHES),
    decay=st.floats(0, 2),
    log_epsilon=st.floats(-6, 0),
    k_frac=st.floats(0, 1),
    switches=st.sampled_from(SWITCHES),
    seed=st.integers(0, 2**20),
)
def test_agrees_on_arbitrary_problems(
    tasks: int,
    rows: int,
    cols: int,
    norms: Norms,
    decay: float,
    log_epsilon: float,
    k_frac: float,
    switches: tuple[bool, bool, bool],
    seed: int,
) -> None:
    task_vectors = experts(tasks, rows, cols, norms, decay=decay, seed=seed)
    options: dict[str, Any] = dict(zip(("normalise", "prior", "refine"), switches, strict=True))
    options |= {"epsilon": 10**log_epsilon, "k_frac": k_frac}
    for dtype in TOLERANCE:
        assume(well_posed(reference(task_vectors.to(dtype), **options)))
    check(task_vectors, **options)


# Low-rank task vectors


@pytest.mark.parametrize("k_frac", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("shape", [(40, 40), (40, 200), (120, 40)], ids=["square", "wide", "tall"])
def test_refinement_stops_at_the_rank_of_low_rank_experts(shape: tuple[int, int], rank: int, k_frac: float) -> None:
    expected = check(low_rank_experts(2, *shape, rank), epsilon=1e-3, k_frac=k_frac)
    assert expected.heterogeneous
    assert expected.kept == min(round(40 * k_frac), 2 * rank)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
@pytest.mark.parametrize(("shared", "rank_of_fused"), [("A", 2), ("B", 3)])  # the columns of F may also use the ones vector
@pytest.mark.parametrize("shape", [(40, 40), (40, 200), (120, 40)], ids=["square", "wide", "tall"])
def test_refinement_stops_at_the_rank_of_experts_sharing_a_factor(
    shape: tuple[int, int], shared: str, rank_of_fused: int, epsilon: float
) -> None:
    expected = check(low_rank_experts(3, *shape, rank=2, shared=shared), epsilon=epsilon)
    assert expected.heterogeneous
    assert expected.kept == rank_of_fused


@pytest.mark.parametrize("shape", [(4, 4), (5, 5), (5, 8), (8, 5)])
def test_refinement_stops_at_the_rank_of_tiny_experts(shape: tuple[int, int]) -> None:
    for seed in range(6):
        task_vectors = low_rank_experts(3, *shape, rank=2, shared="A", seed=seed)
        assert check(task_vectors, epsilon=1e-3, tau=0.0, k_frac=1.0).kept == 2


@pytest.mark.parametrize("shape", [(40, 40), (40, 200), (120, 40)], ids=["square", "wide", "tall"])
def test_float32_rounding_of_a_low_rank_expert_is_not_rank(shape: tuple[int, int]) -> None:
    exact = low_rank_experts(2, *shape, rank=2) * (1 / 3)  # thirds: float32 storage adds noise of full rank
    expected = reference(exact, epsilon=1e-3)
    assert well_posed(expected)
    assert (expected.heterogeneous, expected.kept) == (True, 4)
    assert error(merge(exact.float(), epsilon=1e-3), torch.from_numpy(expected.merged)) <= 1e-4


@pytest.mark.parametrize("norms", BRANCHES)
def test_merge_of_low_rank_experts_stays_in_their_row_space(norms: Norms) -> None:
    task_vectors = with_norms(low_rank_experts(2, 30, 50, rank=2), torch.linspace(*NORMS[norms], 2).tolist())
    _, _, row_space = torch.linalg.svd(torch.cat(tuple(task_vectors)), full_matrices=False)
    merged = merge(task_vectors, epsilon=1e-3)
    assert error(merged @ row_space[:4].T @ row_space[:4], merged) <= 1e-8


# Experts that did not change the tensor


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", ["square", "dual", "tall"])
def test_zero_expert_is_left_out(shape: str, norms: Norms, position: int) -> None:
    others = experts(3, *SHAPES[shape], norms)
    with_zero = torch.cat((others[:position], torch.zeros_like(others[:1]), others[position:]))
    check(with_zero, epsilon=1e-3)
    assert error(merge(with_zero, epsilon=1e-3), merge(others, epsilon=1e-3)) <= 1e-12


def test_one_changed_expert_among_zeros_is_merged_alone() -> None:
    one = experts(1, 12, 20, "different")
    with_zeros = torch.cat((torch.zeros(3, 12, 20, dtype=torch.float64), one))
    check(with_zeros, epsilon=1e-3, tau=0.0)
    assert error(merge(with_zeros, epsilon=1e-3), merge(one, epsilon=1e-3)) <= 1e-12


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_zero_experts_merge_to_exactly_zero(dtype: torch.dtype, tasks: int) -> None:
    merged = merge(torch.zeros(tasks, 5, 7, dtype=dtype))
    assert merged.dtype == dtype
    assert torch.equal(merged, torch.zeros(5, 7, dtype=dtype))


# The branch


def test_branch_switches_at_gamma_with_sample_variance() -> None:
    task_vectors = with_norms(experts(2, 24, 30, "similar"), [1.5, 3.0])
    gamma = reference(task_vectors, epsilon=1e-3).gamma
    above, below, population = (check(task_vectors, epsilon=1e-3, tau=factor * gamma) for factor in (1.001, 0.999, 0.501))
    # With two experts the population variance is half the sample variance: it would stay below 0.501 gamma.
    assert (above.heterogeneous, below.heterogeneous, population.heterogeneous) == (False, True, True)
    assert error(torch.from_numpy(above.merged), torch.from_numpy(below.merged)) > 0.1


def test_gamma_uses_the_uncentred_task_vectors() -> None:
    centred = experts(2, 24, 30, "similar")
    centred -= centred.mean(dim=1, keepdim=True)
    columns = torch.linspace(-1, 1, 30, dtype=torch.float64)
    task_vectors = centred + torch.tensor([0.0, 2.0], dtype=torch.float64)[:, None, None] * columns
    tau = 0.1
    assert reference(centred, epsilon=1e-3).gamma < tau
    assert check(task_vectors, epsilon=1e-3, tau=tau).gamma > tau


def test_equality_of_gamma_and_tau_is_homogeneous() -> None:
    one = experts(1, 12, 20, "different")
    signs = torch.where(torch.arange(20) % 3 == 0, -1.0, 1.0).double()
    equal_energies = torch.cat((one, one * signs))
    for task_vectors in (one, equal_energies):
        expected = check(task_vectors, epsilon=1e-3, tau=0.0)
        assert (expected.gamma, expected.heterogeneous) == (0.0, False)


@pytest.mark.parametrize("tau", [1e9, math.inf])
def test_huge_tau_never_normalises_or_refines(tau: float) -> None:
    task_vectors = with_norms(experts(3, 24, 30, "similar"), [0.01, 1.0, 50.0])
    plain = merge(task_vectors, epsilon=1e-3, normalise=False, refine=False, tau=tau)
    assert torch.equal(merge(task_vectors, epsilon=1e-3, tau=tau), plain)
    assert not check(task_vectors, epsilon=1e-3, tau=tau).heterogeneous


# Facts that follow from the definition


@given(order=st.permutations(range(5)), norms=st.sampled_from(BRANCHES), shape=st.sampled_from(sorted(SHAPES)))
def test_order_of_experts_does_not_matter(order: list[int], norms: Norms, shape: str) -> None:
    task_vectors = experts(5, *SHAPES[shape], norms, decay=1.0)
    assert error(merge(task_vectors[order], epsilon=1e-3), merge(task_vectors, epsilon=1e-3)) <= 1e-8


@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotating_outputs_about_the_ones_vector_commutes(shape: str, norms: Norms) -> None:
    rows, cols = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    frame = torch.randn(rows, rows, generator=generator, dtype=torch.float64)
    frame[:, 0] = 1.0
    frame = torch.linalg.qr(frame).Q  # the first axis is the ones vector, up to sign and length
    turn = torch.eye(rows, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(torch.randn(rows - 1, rows - 1, generator=generator, dtype=torch.float64)).Q
    rotation = frame @ turn @ frame.T
    task_vectors = experts(3, rows, cols, norms, decay=1.0)
    assert well_posed(reference(task_vectors, epsilon=1e-3, k_frac=0.5))
    merged = merge(task_vectors, epsilon=1e-3, k_frac=0.5)
    assert error(merge(rotation @ task_vectors, epsilon=1e-3, k_frac=0.5), rotation @ merged) <= 1e-8


@pytest.mark.parametrize("shape", SHAPES)
def test_one_expert_formula(shape: str) -> None:
    rows, cols = SHAPES[shape]
    task_vectors = experts(1, rows, cols, "similar", decay=1.0)
    C = task_vectors[0] - task_vectors[0].mean(dim=0)
    S = C.T @ C
    S_reg = S + 1e-3 * torch.eye(cols, dtype=torch.float64)
    c = S.mean(dim=0)
    expected = C @ S_reg @ torch.linalg.inv(S_reg + c.expand(cols, cols))
    assert error(merge(task_vectors, epsilon=1e-3), expected) <= 1e-8


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_identical_experts_without_prior_merge_to_the_centred_expert(shape: str, copies: int) -> None:
    one = experts(1, *SHAPES[shape], "different", decay=2.0)
    for dtype, tolerance in TOLERANCE.items():
        task_vectors = one.to(dtype).repeat(copies, 1, 1)
        centred = task_vectors[0].double() - task_vectors[0].double().mean(dim=0)
        assert error(merge(task_vectors, epsilon=1e-6, prior=False), centred) <= tolerance


@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums_before_refinement_are_zero(shape: str, norms: Norms) -> None:
    task_vectors = experts(3, *SHAPES[shape], norms, decay=1.0) + 0.01
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-10)):
        P = merge(task_vectors.to(dtype), epsilon=1e-5, refine=False).double()
        assert torch.linalg.norm(P.sum(dim=0)) <= tolerance * math.sqrt(P.shape[0]) * torch.linalg.norm(P)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 40.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_homogeneous_scaling_law(shape: str, scale: float) -> None:
    task_vectors = experts(3, *SHAPES[shape], "different", decay=1.0)
    scaled = merge(scale * task_vectors, epsilon=1e-3 * scale**2, tau=1e9)
    assert error(scaled, scale * merge(task_vectors, epsilon=1e-3, tau=1e9)) <= 1e-8


@pytest.mark.parametrize("scale", [1e-3, 0.3, 40.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_heterogeneous_scaling_law_without_prior(shape: str, scale: float) -> None:
    options: dict[str, Any] = {"tau": 0.0, "prior": False, "k_frac": 0.5}
    task_vectors = experts(3, *SHAPES[shape], "different", decay=1.0)
    scaled = merge(scale * task_vectors, epsilon=1e-3 * scale**2, **options)
    assert error(scaled, scale * merge(task_vectors, epsilon=1e-3, **options)) <= 1e-8


@pytest.mark.parametrize("shape", SHAPES)
def test_infinite_epsilon_limit_of_the_homogeneous_branch(shape: str) -> None:
    task_vectors = experts(3, *SHAPES[shape], "similar")
    centred = task_vectors - task_vectors.mean(dim=1, keepdim=True)
    assert error(merge(task_vectors, epsilon=1e9), centred.mean(dim=0)) <= 1e-7


@pytest.mark.parametrize("shape", SHAPES)
def test_infinite_epsilon_limit_of_the_heterogeneous_branch(shape: str) -> None:
    task_vectors = experts(3, *SHAPES[shape], "different")
    centred = task_vectors - task_vectors.mean(dim=1, keepdim=True)
    weight = 1 / centred.square().sum(dim=(1, 2), keepdim=True)
    expected = (weight * centred).sum(dim=0) / weight.sum()
    assert error(merge(task_vectors, epsilon=1e9, refine=False), expected) <= 1e-7


@pytest.mark.parametrize("shape", SHAPES)
def test_k_frac_below_one_direction_gives_the_unrefined_merge(shape: str) -> None:
    task_vectors = experts(3, *SHAPES[shape], "different")
    unrefined = merge(task_vectors, epsilon=1e-3, refine=False)
    for k_frac in (0.0, 0.99 / min(SHAPES[shape])):
        assert torch.equal(merge(task_vectors, epsilon=1e-3, k_frac=k_frac), unrefined)


# Options, types and side effects


@pytest.mark.parametrize("norms", BRANCHES)
def test_defaults_are_those_of_the_paper(norms: Norms) -> None:
    task_vectors = experts(3, 24, 40, norms)
    defaults = merge(task_vectors)
    assert error(defaults, torch.from_numpy(reference(task_vectors, epsilon=1e-5).merged)) <= 1e-8
    assert torch.equal(merge(task_vectors, epsilon="paper"), defaults)
    explicit = merge(task_vectors, epsilon=1e-5, tau=0.3, k_frac=0.3, alpha=1.0, normalise=True, prior=True, refine=True)
    assert torch.equal(explicit, defaults)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_input_is_not_mutated_and_result_is_deterministic(shape: str, norms: Norms, dtype: torch.dtype) -> None:
    task_vectors = experts(3, *SHAPES[shape], norms).to(dtype)
    before = task_vectors.clone()
    first, second = merge(task_vectors), merge(task_vectors)
    assert torch.equal(task_vectors, before)
    assert torch.equal(first, second)
    assert first.untyped_storage().data_ptr() != task_vectors.untyped_storage().data_ptr()


@pytest.mark.parametrize("norms", BRANCHES)
def test_strided_input_is_accepted(norms: Norms) -> None:
    task_vectors = experts(3, 24, 30, norms)
    strided = task_vectors.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    check(strided, epsilon=1e-3)


@pytest.mark.parametrize("norms", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_in_bfloat16_out(shape: str, norms: Norms) -> None:
    task_vectors = experts(3, *SHAPES[shape], norms, decay=1.0).to(torch.bfloat16)
    expected = reference(task_vectors, epsilon=1e-3, k_frac=0.5)
    assert well_posed(expected)
    merged = merge(task_vectors, epsilon=1e-3, k_frac=0.5)
    assert merged.dtype == torch.bfloat16
    assert error(merged, torch.from_numpy(expected.merged)) <= 2**-8  # the rounding of the result, and nothing worse
