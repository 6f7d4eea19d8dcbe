"""Cores: merging LoRA experts in the small space they share gives what merging the whole matrices B A gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from acemerge.methods import Context, Merged, Method, all_methods, get_method
from acemerge.numerics.frame import Factors, Sides, low_rank_factors, rounding_energy, to_cores
from largest_result import LargestResult
from reference_ace import reference_ace, well_posed

Experts = list[Factors | None]
Shape = tuple[int, int]
SHAPES: dict[str, Shape] = {"tall": (40, 16), "wide": (16, 48), "square": (24, 24), "very_wide": (6, 160)}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- experts -----------------------------------------------------------------------------------------------------------


def lora(shape: Shape, rank: int, scale: float = 1.0, seed: int = 0) -> Factors:
    """A random float32 adapter whose change has about the norm `scale`."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(shape[0], rank, generator=generator) * (scale / math.sqrt(math.prod(shape) * rank))
    return Factors(left, torch.randn(rank, shape[1], generator=generator))


def _different_ranks(shape: Shape) -> Experts:
    return [lora(shape, 4, 3.0, 0), lora(shape, 1, 1.0, 1), lora(shape, 6, 0.3, 2)]


def _shared_a(shape: Shape) -> Experts:
    one, *others = (lora(shape, 3, scale, seed) for seed, scale in enumerate((3.0, 1.0, 0.3)))
    return [one, *(Factors(other.left, one.right) for other in others)]


def _shared_b(shape: Shape) -> Experts:
    one, *others = (lora(shape, 3, scale, seed) for seed, scale in enumerate((3.0, 1.0, 0.3)))
    return [one, *(Factors(one.left, other.right) for other in others)]


def _duplicates(shape: Shape) -> Experts:
    one, other = lora(shape, 4, 2.0, 0), lora(shape, 3, 0.3, 1)
    return [one, other, one, Factors(other.left.clone(), other.right.clone())]


def _zeros(shape: Shape) -> Experts:
    """An adapter that does not target the matrix, one that was never trained, and two that were."""
    untrained = Factors(torch.zeros(shape[0], 2), lora(shape, 2, 1.0, 7).right)
    return [lora(shape, 4, 2.0, 0), None, untrained, lora(shape, 3, 0.3, 1)]


def _ranks_above_both_sides(shape: Shape) -> Experts:
    return [lora(shape, 60, 2.0, 0), lora(shape, 50, 0.3, 1)]


def _one(shape: Shape) -> Experts:
    return [lora(shape, 4, 2.0, 0)]


def _very_different_scales(shape: Shape) -> Experts:
    return [lora(shape, 3, 30.0, 0), lora(shape, 3, 1.0, 1), lora(shape, 3, 1e-3, 2)]


def _uneven_factors(shape: Shape) -> Experts:
    """B large and A small, as trained adapters have it, and the other way round."""
    one, other = lora(shape, 3, 2.0, 0), lora(shape, 4, 0.3, 1)
    return [Factors(one.left * 1e4, one.right * 1e-4), Factors(other.left * 1e-4, other.right * 1e4)]


KINDS: dict[str, Callable[[Shape], Experts]] = {
    kind.__name__.removeprefix("_"): kind
    for kind in (
        _different_ranks, _shared_a, _shared_b, _duplicates, _zeros, _ranks_above_both_sides, _one, _very_different_scales,
        _uneven_factors,
    )
}  # fmt: skip


def expand(experts: Experts, shape: Shape) -> Tensor:
    """Every B A in float64."""
    zero = torch.zeros(shape, dtype=torch.float64)
    return torch.stack([zero if e is None else e.left.double() @ e.right.double() for e in experts])


def names(experts: Experts) -> tuple[str, ...]:
    return tuple("abcdefgh"[: len(experts)])


def densely(method: Method, experts: Experts, shape: Shape, **options: Any) -> Merged:
    context = Context("layer.weight", names(experts))
    return method(expand(experts, shape), method.options(options).resolve({}), context)


def in_core(method: Method, experts: Experts, shape: Shape, **options: Any) -> Merged:
    """The method on the cores, brought back to the matrix's own coordinates."""
    chosen = method.options(options).resolve({})
    sides = method.core_sides(chosen)
    assert sides is not None
    frame, cores = to_cores(experts, shape, sides)
    merged = method(cores, chosen, Context("layer.weight", names(experts), frame=frame))
    return replace(merged, delta=frame.to_right(frame.to_left(merged.delta.double())))


def error(actual: Tensor, expected: Tensor) -> float:
    """The relative Frobenius error."""
    return float(torch.linalg.norm(actual - expected) / torch.linalg.norm(expected))


# --- the frame ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", ["both", "out", "in"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cores_lose_nothing(shape: str, kind: str, sides: Sides) -> None:
    experts = KINDS[kind](SHAPES[shape])
    frame, cores = to_cores(experts, SHAPES[shape], sides)
    whole = torch.stack([frame.to_right(frame.to_left(core)) for core in cores])
    assert error(whole, expand(experts, SHAPES[shape])) < 1e-13
    assert (frame.left is None) == (sides == "in")
    assert (frame.right is None) == (sides == "out")
    ranks = sum(expert.left.shape[1] for expert in experts if expert)
    rows, columns = SHAPES[shape]
    assert cores.shape[1] == (rows if sides == "in" else min(rows, ranks + 1))
    assert cores.shape[2] == (columns if sides == "out" else min(columns, ranks))
    for basis in (frame.left, frame.right):
        if basis is not None:
            torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64), atol=1e-13, rtol=0)
    ones = torch.ones(rows, dtype=torch.float64)
    torch.testing.assert_close(frame.to_left(frame.ones_out[:, None])[:, 0], ones, atol=1e-12, rtol=0)  # it is spanned
    assert (frame.ones_in - (frame.to_right(torch.eye(cores.shape[2]).double()).sum(1))).abs().max() < 1e-12
    for expert, core in zip(experts, cores, strict=True):
        if expert is None or not expert.left.any():
            assert not core.any()  # exactly: an expert that changed nothing has no opinion


# --- ACE ---------------------------------------------------------------------------------------------------------------

ACE = get_method("ace")


def check_ace(experts: Experts, shape: Shape, tolerance: float = 1e-8, **options: Any) -> None:
    """Equal to the plain float64 procedure on B A, in every number it reports too."""
    expected = reference_ace(expand(experts, shape).numpy(), **options)
    assert well_posed(expected), "choose another input: this comparison has no answer"
    actual = in_core(ACE, experts, shape, **options)
    assert error(actual.delta, torch.from_numpy(expected.merged)) <= tolerance
    assert actual.facts["gamma"] == pytest.approx(expected.gamma, rel=1e-9, abs=1e-12)
    assert actual.facts["branch"] == ("heterogeneous" if expected.heterogeneous else "homogeneous")
    assert actual.facts.get("refined_directions", 0) == expected.kept


@pytest.mark.parametrize("branch", ["homogeneous", "heterogeneous"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ace_in_the_core_equals_the_dense_procedure(shape: str, kind: str, branch: str) -> None:
    tau = 0.0 if branch == "heterogeneous" else 1e9
    check_ace(KINDS[kind](SHAPES[shape]), SHAPES[shape], epsilon=1e-3, tau=tau)


@pytest.mark.parametrize(("normalise", "prior", "refine"), list(product((True, False), repeat=3)))
@pytest.mark.parametrize("tau", [0.0, 1e9])
@pytest.mark.parametrize("shape", SHAPES)
def test_ace_with_each_combination_of_switches(shape: str, tau: float, normalise: bool, prior: bool, refine: bool) -> None:
    experts = _different_ranks(SHAPES[shape])
    check_ace(experts, SHAPES[shape], epsilon=1e-3, tau=tau, normalise=normalise, prior=prior, refine=refine)


@pytest.mark.parametrize("k_frac", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("epsilon", [1e-5, 1.0])
def test_ace_refines_as_many_directions(k_frac: float, epsilon: float) -> None:
    """k counts directions of the whole matrix, capped at the rank that there is."""
    for shape in SHAPES.values():
        check_ace(_different_ranks(shape), shape, epsilon=epsilon, tau=0.0, k_frac=k_frac, alpha=0.7)


@pytest.mark.parametrize("shape", [(32, 16), (16, 48), (64, 64)])
@pytest.mark.parametrize("others", ["plain", "none"])
def test_ace_with_an_expert_that_centring_removes(shape: Shape, others: str) -> None:
    """B of equal rows changes column means only: no covariance, yet an energy, and a part in the residual."""
    row = lora(shape, 1, 1.0, 5)
    constant = Factors(torch.full((shape[0], 1), 0.25), row.right)
    experts: Experts = [constant, *([lora(shape, 3, 2.0, 0), lora(shape, 2, 0.3, 1)] if others == "plain" else [])]
    if others == "none":
        merged = in_core(ACE, experts, shape, epsilon=1e-3)
        assert merged.delta.abs().max() < 1e-12
        return
    check_ace(experts, shape, epsilon=1e-3, tau=1e9)
    check_ace(experts, shape, epsilon=1e-3, tau=0.0, normalise=False)
    whole = densely(ACE, experts, shape, epsilon=1e-3, tau=0.0)  # the reference has no answer to 1 / 0
    merged = in_core(ACE, experts, shape, epsilon=1e-3, tau=0.0)
    assert error(merged.delta, whole.delta) < 1e-8
    assert merged.facts == pytest.approx(whole.facts)


def test_ace_centring_at_the_size_of_a_real_layer() -> None:
    """Rounding of a large frame is not taken for a covariance: 1 / tr_t would blow it up."""
    shape = (2048, 1024)
    row = lora(shape, 16, 1.0, 5)
    constant = Factors(torch.ones(shape[0], 16) * 0.3, row.right)
    experts: Experts = [constant, *(lora(shape, 16, 0.5 + seed, seed) for seed in range(4))]
    frame, cores = to_cores(experts, shape, "both")
    merged = ACE(cores, ACE.options({"epsilon": 1e-3, "tau": 0.0}), Context(experts=names(experts), frame=frame))
    frame, cores = to_cores(experts[1:], shape, "both")
    without = ACE(cores, ACE.options({"epsilon": 1e-3, "tau": 0.0}), Context(experts=names(experts[1:]), frame=frame))
    assert float(merged.delta.norm()) < 10 * float(without.delta.norm())


@st.composite
def adapters(draw: st.DrawFn) -> tuple[Shape, Experts]:
    """Any mixture of the kinds above."""
    shape = (draw(st.integers(2, 24)), draw(st.integers(2, 24)))
    experts: Experts = []
    for seed in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["fresh", "fresh", "same", "same A", "same B", "zero", "absent"]))
        fresh = lora(shape, draw(st.integers(1, 8)), draw(st.sampled_from([1e-2, 0.1, 0.5, 1.0, 3.0, 10.0])), seed)
        earlier = [expert for expert in experts if expert is not None]
        if kind == "absent":
            experts.append(None)
        elif kind == "zero":
            experts.append(Factors(torch.zeros_like(fresh.left), fresh.right))
        elif kind == "fresh" or not earlier:
            experts.append(fresh)
        elif kind == "same":
            experts.append(draw(st.sampled_from(earlier)))
        else:
            model = draw(st.sampled_from(earlier))
            other = lora(shape, model.left.shape[1], 1.0, seed)
            experts.append(Factors(other.left, model.right) if kind == "same A" else Factors(model.left, other.right))
    assume(any(expert is not None and bool(expert.left.any()) for expert in experts))
    return shape, experts


@given(
    drawn=adapters(),
    epsilon=st.sampled_from([1e-5, 1e-3, 1e-1]),
    tau=st.sampled_from([0.0, 0.3, 1e9]),
    k_frac=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_ace_on_any_adapters(
    drawn: tuple[Shape, Experts], epsilon: float, tau: float, k_frac: float, switches: tuple[bool, bool, bool]
) -> None:
    shape, experts = drawn
    normalise, prior, refine = switches
    options: dict[str, Any] = {
        "epsilon": epsilon,
        "tau": tau,
        "k_frac": k_frac,
        "normalise": normalise,
        "prior": prior,
        "refine": refine,
    }
    expected = reference_ace(expand(experts, shape).numpy(), **options)
    assume(well_posed(expected))
    actual = in_core(ACE, experts, shape, **options)
    assert error(actual.delta, torch.from_numpy(expected.merged)) <= 1e-7
    assert actual.facts.get("refined_directions", 0) == expected.kept


# --- every other method that merges cores ------------------------------------------------------------------------------

_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "linear": [{}, {"weights": [0.5, 2.0, -0.7]}, {"weights": [0.5, 2.0, -0.7], "normalise": False}],
    "nan": [{"norm_of": "delta"}, {"norm_of": "delta", "scope": "layer", "scale": "one"}],
    "wudi": [{"mode": "closed_form"}, {"mode": "closed_form", "rtol": 1e-9}],
    "actmat": [{}, {"rtol": 1e-9}],
    "swudi": [{}, {"keep": 0.1, "steps": 5.0}],
    "knots_ties": [{}, {"shared": "input"}, {"spectrum": "after"}],
    "core_space": [{"inner": inner} for inner in ("tsv_m", "ties", "iso_c", "ace")],
    "dc_merge": [{"density": 0.1}, {"rank": 2, "smoothing": "linear", "density": 0.05}],
    "svc": [{"inner": inner} for inner in ("task_arithmetic", "tsv_m", "knots_ties")],
    "subspace_boosting": [{"inner": inner} for inner in ("task_arithmetic", "knots_ties")],
    "ace": [{"tau": 0.0}, {"tau": 1e9}],
}
_WITH_CORE = [
    (method, options)
    for method in all_methods()
    for options in _VARIANTS.get(method.name, [{}])
    if method.core_sides(method.options(options).resolve({}))
]
_IDS = ["-".join([method.name, *map(str, options.values())]) for method, options in _WITH_CORE]
_OTHER_KINDS: dict[str, Callable[[Shape], Experts]] = {
    kind: KINDS[kind] for kind in ("different_ranks", "shared_a", "shared_b", "duplicates", "zeros", "ranks_above_both_sides")
}


@pytest.mark.parametrize("kind", _OTHER_KINDS)
@pytest.mark.parametrize(("method", "options"), _WITH_CORE, ids=_IDS)
def test_every_method_with_a_core_equals_its_dense_merge(method: Method, options: dict[str, Any], kind: str) -> None:
    for shape in SHAPES.values() if kind == "different_ranks" else (SHAPES["tall"], SHAPES["very_wide"]):
        experts = _OTHER_KINDS[kind](shape)
        if isinstance(options.get("weights"), list):
            options = {**options, "weights": [0.5, 2.0, -0.7, 0.4][: len(experts)]}
        whole, merged = densely(method, experts, shape, **options), in_core(method, experts, shape, **options)
        assert error(merged.delta, whole.delta.double()) < 1e-7, shape
        assert bool(whole.warnings) == bool(merged.warnings)


def test_which_methods_have_a_core() -> None:
    """Those that do not depend on coordinates; a new method is dense until it says otherwise."""
    found = {method.name: method.core_sides(method.options({}).resolve({})) for method in all_methods()}
    assert {name for name, sides in found.items() if sides == "both"} == {
        "ace", "ace_auto", "actmat", "average", "cart", "core_space", "dc_merge", "iso_c", "iso_cts", "larv", "linear",
        "model_stock", "multislerp", "pico", "resmerge", "star", "subspace_boosting", "svc", "swudi", "swudi_a",
        "task_arithmetic", "tsv_m",
    }  # fmt: skip
    assert {name: sides for name, sides in found.items() if sides in ("out", "in")} == {"knots_ties": "out", "pact": "out"}
    for name, options, sides in [
        ("knots_ties", {"shared": "input"}, "in"),
        ("wudi", {"mode": "closed_form"}, "both"),
        ("wudi", {"mode": "iterative"}, None),
        ("nan", {"norm_of": "delta"}, "both"),
        ("nan", {"norm_of": "weights"}, None),
        ("model_stock", {"scope": "row"}, None),
        ("multislerp", {"of": "weights"}, None),
        ("core_space", {"inner": "nan"}, None),
        ("svc", {"inner": "ties"}, None),
        ("svc", {"inner": "knots_ties"}, "out"),
    ]:
        method = get_method(name)
        assert method.core_sides(method.options(options)) == sides, (name, options)


# --- the merged core as an adapter -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_factors_at_the_merges_own_rank(shape: str) -> None:
    experts = _shared_a(SHAPES[shape])
    frame, cores = to_cores(experts, SHAPES[shape], "both")
    factors, energy = low_rank_factors(cores.sum(0), frame, None)
    total = expand(experts, SHAPES[shape]).sum(0)
    assert factors.left.shape[1] == 3  # that of the shared A, not three times as much
    assert error(factors.left @ factors.right, total) < 1e-6
    assert energy == pytest.approx(float(total.square().sum()))
    assert float(factors.left.norm()) == pytest.approx(float(factors.right.norm()))


@pytest.mark.parametrize("rank", [1, 3, 7, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_of_a_smaller_rank_are_the_nearest_matrix(shape: str, rank: int) -> None:
    """Eckart and Young: the leading singular triples."""
    experts = _different_ranks(SHAPES[shape])
    total = expand(experts, SHAPES[shape]).sum(0)
    frame, cores = to_cores(experts, SHAPES[shape], "both")
    factors, energy = low_rank_factors(cores.sum(0), frame, rank)
    U, s, Vt = np.linalg.svd(total.numpy(), full_matrices=False)
    kept = min(rank, int((s > 1e-7 * s[0]).sum()))
    nearest = torch.from_numpy((U[:, :kept] * s[:kept]) @ Vt[:kept])
    assert factors.left.shape[1] == kept
    assert error(factors.left @ factors.right, nearest) < 1e-6
    assert energy == pytest.approx(float((s[:kept] ** 2).sum()))


@pytest.mark.parametrize("name", ["ace", "task_arithmetic", "tsv_m", "iso_c", "cart"])
def test_no_whole_matrix_is_made(name: str) -> None:
    shape = (700, 900)
    method, experts = get_method(name), [lora(shape, 4, 1.0 + seed, seed) for seed in range(3)]
    with LargestResult() as record:
        frame, cores = to_cores(list(experts), shape, "both")
        merged = method(cores, method.options({}).resolve({}), Context(experts=names(list(experts)), frame=frame))
        low_rank_factors(merged.delta.double(), frame, None)
    assert 0 < record.largest <= max(shape) * 13  # a basis: the ranks and the vector of ones


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_energy_is_that_of_the_product(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    exact = Factors(*(torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((30, 4), (4, 20))))
    rounded = exact.left.to(dtype).double() @ exact.right.to(dtype).double()
    expected = float((exact.left @ exact.right - rounded).square().sum())
    assert rounding_energy(exact, dtype) == pytest.approx(expected, rel=1e-6)


def test_factors_that_a_dtype_cannot_hold_are_not_taken_for_exact() -> None:
    assert not math.isfinite(rounding_energy(Factors(torch.full((3, 1), 1e6), torch.ones(1, 3)), torch.float16))
