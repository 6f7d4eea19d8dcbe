"""EMR: masks, scales and the elected sign."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from acemerge.methods import Context, get_method
from per_task_cases import changes, random_task_vectors, rebuilt, reference_emr, run


def test_emr_copies_give_the_expert_back() -> None:
    task_vectors = random_task_vectors(12, 8, tasks=1).expand(3, 12, 8)
    assert all(torch.allclose(change, task_vectors[0]) for change in changes("emr", task_vectors))


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_emr_invariants(seed: int, tasks: int) -> None:
    task_vectors = random_task_vectors(6, 5, tasks=tasks, seed=seed)
    merged = run("emr", task_vectors)
    assert merged.shared is not None
    for tau, part in zip(task_vectors, merged.parts, strict=True):
        reconstruction = part["scale"] * part["mask"] * merged.shared
        if part["mask"].any():  # the same L1 norm
            torch.testing.assert_close(reconstruction.abs().sum(), tau.abs().sum())
        assert (reconstruction * tau >= 0).all()  # never the opposite sign
        agreeing = part["mask"] * tau
        assert ((part["mask"] * merged.shared).abs() >= agreeing.abs()).all()
        if agreeing.any():
            assert float(part["scale"]) <= float(tau.abs().sum() / agreeing.abs().sum()) * (1 + 1e-12)


def test_emr_a_sum_of_zero_elects_minus() -> None:
    tau = torch.tensor([1.0, -2.0, 3.0])
    assert run("emr", torch.stack([tau, -tau])).delta.equal(torch.tensor([-1.0, -2.0, -3.0]))


def test_emr_warns_of_an_expert_that_never_has_the_elected_sign() -> None:
    tau = torch.tensor([1.0, 2.0, 3.0])
    merged = run("emr", torch.stack([-tau, 5 * tau]))
    assert merged.parts[0]["scale"] == 0
    assert "'e0'" in merged.warnings[0]


def test_emr_scales_differ_where_tensors_differ_in_size() -> None:
    taus = {"long": random_task_vectors(40), "short": random_task_vectors(3, seed=1)}
    base = {name: torch.zeros(tau.shape[1:], dtype=torch.float64) for name, tau in taus.items()}
    statistics = {rescale: get_method("emr") for rescale in ("global", "tensor_means")}
    for rescale, method in statistics.items():
        options = method.options({"rescale": rescale})
        assert method.statistics is not None
        gathered = method.statistics(options, ("e0", "e1", "e2"))
        assert gathered is not None
        for name, tau in taus.items():
            gathered.observe(tau, Context(name, ("e0", "e1", "e2"), base[name]))
        assert not gathered.end_pass()
        expected = reference_emr({name: tau.numpy() for name, tau in taus.items()}, rescale)
        for name, tau in taus.items():
            merged = method(tau, options, Context(name, ("e0", "e1", "e2"), base[name], gathered))
            for task in range(3):
                torch.testing.assert_close(rebuilt(merged, task), torch.from_numpy(expected[task][name]))
