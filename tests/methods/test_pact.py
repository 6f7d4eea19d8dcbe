"""PACT against its transcription, on top of several methods, and what its filter keeps away from."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acemerge import merge_state_dicts
from acemerge.errors import InputError
from acemerge.methods import Context, Merged, get_method
from acemerge.methods.pact import PactOptions, filtered
from acemerge.numerics.frame import Factors, to_cores
from frontier_references import reference_pact_bases, reference_pact_filter
from spectral_cases import deltas, error, every_shape, experts, gaussian, merge, rotation, run, small_model
from spectral_references import reference_ties, reference_tsv_m


def on(base: Tensor, task_vectors: Tensor, **options: Any) -> Merged:
    method = get_method("pact")
    names = tuple(map(str, range(len(task_vectors))))
    return method(task_vectors, method.options(options).resolve({}), Context("layer.weight", names, base))


def names_of(task_vectors: Tensor) -> tuple[str, ...]:
    return tuple(map(str, range(len(task_vectors))))


@pytest.mark.parametrize("options", [{}, {"rewritten": 2}, {"base_share": 0.3, "rewritten": 3}, {"rewritten": 0}], ids=str)
@pytest.mark.parametrize("tasks", [2, 3, 5])
@every_shape
def test_the_filter_agrees(shape: tuple[int, int], tasks: int, options: dict[str, Any]) -> None:
    task_vectors, W0 = experts(tasks, *shape), gaussian(*shape, seed=7)
    context = Context("layer.weight", names_of(task_vectors), W0)
    actual = filtered(task_vectors, context, PactOptions(**options))
    expected = reference_pact_filter(task_vectors.numpy(), W0.numpy(), **options)
    assert float((actual - torch.from_numpy(expected)).norm()) <= 1e-8 * float(task_vectors.norm())


def test_inner_methods_merge_what_is_left() -> None:
    task_vectors, W0 = experts(3, 12, 30), gaussian(12, 30, seed=7)
    left = reference_pact_filter(task_vectors.numpy(), W0.numpy())
    assert error(on(W0, task_vectors).delta, 0.3 * left.sum(0)) <= 1e-8
    assert error(on(W0, task_vectors, inner="tsv_m").delta, reference_tsv_m(left)) <= 1e-8


@given(seed=st.integers(0, 1000), tasks=st.integers(2, 4), rewritten=st.integers(0, 4), base_share=st.floats(0.1, 0.5))
def test_nobody_reads_what_the_others_rely_on(seed: int, tasks: int, rewritten: int, base_share: float) -> None:
    task_vectors, W0 = experts(tasks, 8, 40, seed=seed), gaussian(8, 40, seed=seed + 1)
    options = PactOptions(base_share=base_share, rewritten=rewritten)
    left = filtered(task_vectors, Context("layer.weight", names_of(task_vectors), W0), options)
    relied = reference_pact_bases(task_vectors.numpy(), W0.numpy(), base_share=base_share, rewritten=rewritten)
    for j in range(tasks):
        assert left[j].norm() <= task_vectors[j].norm() * (1 + 1e-12)
        for t in range(tasks):
            if t != j and relied[t].size:
                assert np.linalg.norm(left[j].numpy() @ relied[t]) <= 1e-8 * float(task_vectors[j].norm())


def test_of_two_experts_the_basis_by_qr_is_the_same() -> None:
    """The release's way, which fills a basis up with arbitrary directions from three experts on."""
    task_vectors, W0 = experts(2, 9, 30), gaussian(9, 30, seed=7)
    left = filtered(task_vectors, Context("layer.weight", names_of(task_vectors), W0), PactOptions(rewritten=3))
    relied = reference_pact_bases(task_vectors.numpy(), W0.numpy(), rewritten=3)
    for j, other in ((0, 1), (1, 0)):
        S, _ = np.linalg.qr(relied[other])
        expected = task_vectors[j].numpy() - task_vectors[j].numpy() @ S @ S.T
        np.testing.assert_allclose(left[j].numpy(), expected, atol=1e-9)


@given(seed=st.integers(0, 1000))
def test_rotated_outputs_rotate_the_merge(seed: int) -> None:
    task_vectors, W0 = experts(3, 9, 30), gaussian(9, 30, seed=7)
    Q = rotation(9, seed)
    assert error(on(Q @ W0, Q @ task_vectors).delta, Q @ on(W0, task_vectors).delta) <= 1e-8


def test_one_expert_relies_on_nobody() -> None:
    tau, W0 = experts(1, 9, 12), gaussian(9, 12, seed=7)
    merged = on(W0, tau)
    assert error(merged.delta, 0.3 * tau[0]) <= 1e-12
    assert merged.facts["kept_share"] == 1.0


def test_directions_that_nobody_relies_on_are_not_taken_for_an_orthonormal_basis_filled_up() -> None:
    """With 8 experts a QR of what they rely on is square, and would remove everything."""
    task_vectors, W0 = experts(8, 24, 96), gaussian(24, 96, seed=7)
    assert float(on(W0, task_vectors, rewritten=2).facts["kept_share"]) > 0.3


def test_without_a_base_nothing_is_filtered() -> None:
    task_vectors = experts(3, 9, 12)
    merged = run("pact", task_vectors)
    assert error(merged.delta, 0.3 * task_vectors.sum(0)) <= 1e-12
    assert merged.warnings == ("no base weights are at hand: nothing is filtered",)


def test_adapters_in_their_core_on_the_output_side() -> None:
    generator = torch.Generator().manual_seed(0)
    factors: list[Factors | None] = [
        Factors(torch.randn(24, 3, generator=generator), torch.randn(3, 17, generator=generator)) for _ in range(3)
    ]
    W0 = gaussian(24, 17, seed=7)
    dense = torch.stack([each.left.double() @ each.right.double() for each in factors if each])
    frame, cores = to_cores(factors, (24, 17), "out")
    method = get_method("pact")
    options = method.options({"rewritten": 3, "base_share": 0.4}).resolve({})
    found = method(cores, options, Context("layer.weight", names_of(dense), W0, frame=frame)).delta
    assert error(frame.to_left(found), on(W0, dense, rewritten=3, base_share=0.4).delta) <= 1e-8


def test_an_inner_method_sees_the_filtered_model_first() -> None:
    base, tuned = small_model(torch.float64)
    merged = merge_state_dicts(base, tuned, method="pact", inner="ties", rewritten=2, base_share=0.3)
    names = ["a.weight", "b.weight", "c.weight"]
    changes = [deltas(base, tuned, name).numpy() for name in names]
    left = [
        reference_pact_filter(tau, base[name].numpy(), rewritten=2, base_share=0.3)
        for name, tau in zip(names[:2], changes, strict=False)
    ]
    for name, expected in zip(names, reference_ties([*left, changes[2]], 0.2, "mean"), strict=True):
        assert error(merged[name] - base[name] + base[name], base[name] + torch.from_numpy(expected)) <= 1e-8


@pytest.mark.parametrize("inner", ["pact", "emr", "regmean"])
def test_methods_that_cannot_be_inside_are_refused(inner: str) -> None:
    with pytest.raises(InputError, match=f"method 'pact': inner='{inner}' is not allowed"):
        merge("pact", experts(2, 8, 8), inner=inner)
