"""ACTMat, and WUDI's closed form, which differs from it by the weights only, against their transcriptions."""

from typing import Any

import pytest
import torch

from acemerge.errors import InputError
from spectral_cases import check, error, every_shape, experts, low_rank, merge, orthogonal_row_spaces, run
from spectral_references import reference_actmat, reference_wudi_closed


@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("tasks", [1, 3, 6])
@every_shape
def test_closed_forms_agree(shape: tuple[int, int], tasks: int, decay: float) -> None:
    task_vectors = experts(tasks, *shape, decay=decay)
    check("actmat", task_vectors, reference_actmat)
    check("wudi", task_vectors, reference_wudi_closed, mode="closed_form")


@pytest.mark.parametrize("rtol", [1e-9, 1e-4, 0.05])
@every_shape
def test_closed_forms_agree_for_each_cut(shape: tuple[int, int], rtol: float) -> None:
    task_vectors = experts(3, *shape, decay=1.0)
    check("actmat", task_vectors, reference_actmat, rtol=rtol)
    check("wudi", task_vectors, reference_wudi_closed, mode="closed_form", rtol=rtol)


@every_shape
def test_the_default_cut_is_that_of_a_float32_pseudo_inverse(shape: tuple[int, int]) -> None:
    task_vectors = experts(2, *shape, decay=3.0)
    explicit = merge("actmat", task_vectors, rtol=shape[1] * 2.0**-23)
    assert merge("actmat", task_vectors).equal(explicit)
    steep = experts(6, 20, 16, decay=3.0)
    eigenvalues = torch.linalg.svdvals(torch.cat(tuple(steep))) ** 2
    for rtol in (None, 1e-13):
        expected = int((eigenvalues > (rtol or 16 * 2.0**-23) * eigenvalues[0]).sum())
        assert run("actmat", steep, **({"rtol": rtol} if rtol else {})).facts["kept_directions"] == expected


@pytest.mark.parametrize("options", [{"rtol": 0.0}, {"rtol": 1.0}, {"rtol": "double"}])
def test_a_cut_has_to_be_a_share(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"a number > 0 and < 1 or 'float32'"):
        merge("actmat", experts(2, 4, 4), **options)


@pytest.mark.parametrize(("name", "options"), [("actmat", {}), ("wudi", {"mode": "closed_form"})])
@pytest.mark.parametrize("copies", [1, 3])
@every_shape
def test_closed_form_of_one_expert_or_its_copies_is_that_expert(
    shape: tuple[int, int], copies: int, name: str, options: dict[str, str]
) -> None:
    task_vectors = experts(1, *shape).repeat(copies, 1, 1)
    assert error(merge(name, task_vectors, **options), task_vectors[0]) <= 1e-9


@pytest.mark.parametrize(("name", "options"), [("actmat", {}), ("wudi", {"mode": "closed_form"})])
def test_experts_that_read_different_inputs_are_summed(name: str, options: dict[str, str]) -> None:
    task_vectors = orthogonal_row_spaces(3, 10, 30, rank=6)
    assert error(merge(name, task_vectors, **options), task_vectors.sum(0)) <= 1e-9


@pytest.mark.parametrize(("name", "options"), [("actmat", {}), ("wudi", {"mode": "closed_form"})])
def test_every_expert_is_reproduced_on_its_own_inputs_if_these_are_independent(name: str, options: dict[str, str]) -> None:
    task_vectors = experts(3, 6, 30, decay=0.0)
    merged = merge(name, task_vectors, **options)
    for delta in task_vectors:
        assert error(merged @ delta.T, delta @ delta.T) <= 1e-9


@pytest.mark.parametrize("shape", [(12, 12), (8, 18), (20, 9)], ids=["square", "wide", "tall"])
def test_actmat_solves_the_normal_equation(shape: tuple[int, int]) -> None:
    task_vectors = experts(3, *shape)
    merged = merge("actmat", task_vectors)
    terms = torch.stack([(merged - delta) @ delta.T @ delta for delta in task_vectors])
    assert terms.sum(0).norm() <= 1e-10 * terms.norm()


def test_actmat_stays_in_the_joint_row_space() -> None:
    task_vectors = low_rank(3, 10, 40, rank=2)
    rows = torch.linalg.svd(torch.cat(tuple(task_vectors)), full_matrices=False).Vh[:6]
    merged = merge("actmat", task_vectors)
    assert error(merged @ rows.T @ rows, merged) <= 1e-9


def test_actmat_follows_the_longest_expert_and_wudi_does_not() -> None:
    task_vectors = experts(3, 14, 12)
    distances = []
    for factor in (1e2, 1e3, 1e4):
        scaled = task_vectors * torch.tensor([factor, 1.0, 1.0], dtype=torch.float64)[:, None, None]
        distances.append(error(merge("actmat", scaled), scaled[0]))
    assert distances[0] > 50 * distances[1] > 2500 * distances[2]  # with the square of the length
    assert error(merge("wudi", scaled, mode="closed_form"), scaled[0]) > 0.1


def test_actmat_and_wudi_agree_on_experts_of_one_length() -> None:
    task_vectors = experts(3, 14, 12)
    task_vectors = task_vectors / task_vectors.square().sum((1, 2), keepdim=True).sqrt()
    assert error(merge("wudi", task_vectors, mode="closed_form"), merge("actmat", task_vectors)) <= 1e-9


@every_shape
def test_actmat_is_the_core_of_ace(shape: tuple[int, int]) -> None:
    """Without column means, prior, normalisation, refinement and (nearly) without a ridge, ACE is the same closed form."""
    task_vectors = experts(2, *shape, decay=0.0)
    task_vectors = task_vectors - task_vectors.mean(1, keepdim=True)
    core = merge("ace", task_vectors, epsilon=1e-12, normalise=False, prior=False, refine=False)
    assert error(core, merge("actmat", task_vectors)) <= 1e-5
