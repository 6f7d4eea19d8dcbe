"""What every registered method promises, whatever it computes. A new method file is covered with no edit here.

A method that uses data is given made-up measurements (`data_statistics.py`); whole models of such methods are merged in
`test_data_merges.py`, where there are models that run.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import acemerge
from acemerge.errors import InputError
from acemerge.methods import Context, Merged, Method, all_methods
from data_statistics import made_up_statistics
from small_models import base_tensors, fine_tuned

METHODS = all_methods()
WEIGHTS_ALONE = [m for m in METHODS if m.uses == "weights"]
every_method = pytest.mark.parametrize("method", METHODS, ids=[m.name for m in METHODS])
every_method_without_data = pytest.mark.parametrize("method", WEIGHTS_ALONE, ids=[m.name for m in WEIGHTS_ALONE])


def experts_of(method: Method, wanted: int = 3) -> int:
    return method.experts or wanted


def random_task_vectors(method: Method, *shape: int, tasks: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    strengths = torch.tensor([0.02 * 1.7**t for t in range(experts_of(method, tasks))])
    return torch.randn(len(strengths), *shape, generator=generator) * strengths.view(-1, *[1] * len(shape))


def run(method: Method, task_vectors: Tensor, names: tuple[str, ...] | None = None, **options: Any) -> Merged:
    names = names or tuple("abcdefgh"[: len(task_vectors)])
    known = made_up_statistics(method, task_vectors)
    context = Context("layer.weight", names, torch.zeros_like(task_vectors[0]), known)
    return method(task_vectors, method.options(options).resolve({}), context)


@every_method
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (9, 9), (3, 40)])
def test_shape_and_finiteness(method: Method, shape: tuple[int, int]) -> None:
    merged = run(method, random_task_vectors(method, *shape))
    assert merged.delta.shape == shape
    assert merged.delta.is_floating_point()
    assert torch.isfinite(merged.delta).all()


@every_method_without_data
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtype_in_is_dtype_out(method: Method, dtype: torch.dtype) -> None:
    merged = acemerge.merge_task_vectors(random_task_vectors(method, 12, 8).to(dtype), method=method.name)
    assert merged.dtype == dtype
    assert torch.isfinite(merged).all()


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_untouched(method: Method, dtype: torch.dtype) -> None:
    task_vectors = random_task_vectors(method, 12, 8).to(dtype)
    before = task_vectors.clone()
    run(method, task_vectors)
    assert task_vectors.equal(before)


@every_method
def test_same_input_same_bits(method: Method) -> None:
    task_vectors = random_task_vectors(method, 12, 8)
    assert run(method, task_vectors).delta.equal(run(method, task_vectors).delta)


@every_method
def test_order_of_experts(method: Method) -> None:
    if method.ordered:
        pytest.skip("declared to depend on the order")
    task_vectors = random_task_vectors(method, 12, 8)
    order = torch.tensor([2, 0, 1])
    permuted = run(method, task_vectors[order], names=("c", "a", "b"))
    torch.testing.assert_close(permuted.delta, run(method, task_vectors).delta, rtol=1e-4, atol=1e-6)


@every_method
def test_what_is_told_is_declared(method: Method) -> None:
    names = ("a", "b", "c")[: experts_of(method)]
    for shape in ((12, 8), (9, 9)):
        told = run(method, random_task_vectors(method, *shape), names).facts
        declared = method.declared_facts(method.options({}).resolve({}))
        known = {name.replace("{expert}", expert) for name in declared for expert in names}
        assert told.keys() <= known | {"active_experts"}
        assert all(declared.values()), "each says what it means"


@every_method
def test_nobody_changed_anything(method: Method) -> None:
    zeros = torch.zeros(experts_of(method), 12, 8)
    assert not run(method, zeros).delta.any()


@every_method
def test_one_frozen_expert_is_harmless(method: Method) -> None:
    task_vectors = random_task_vectors(method, 12, 8)
    task_vectors[0] = 0
    assert torch.isfinite(run(method, task_vectors).delta).all()


@every_method
def test_one_expert(method: Method) -> None:
    if method.experts not in (None, 1):
        pytest.skip(f"takes exactly {method.experts} experts")
    assert torch.isfinite(run(method, random_task_vectors(method, 12, 8, tasks=1)).delta).all()


@every_method
def test_duplicate_experts_are_deterministic(method: Method) -> None:
    task_vectors = random_task_vectors(method, 12, 8)
    task_vectors[1] = task_vectors[0]
    first, second = run(method, task_vectors), run(method, task_vectors)
    assert torch.isfinite(first.delta).all()
    assert first.delta.equal(second.delta)
    assert first.warnings == second.warnings


@every_method
def test_rank_deficient_experts(method: Method) -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = experts_of(method)
    task_vectors = torch.randn(tasks, 12, 1, generator=generator) @ torch.randn(tasks, 1, 8, generator=generator)
    merged = run(method, task_vectors)
    assert torch.isfinite(merged.delta).all()
    assert merged.delta.norm() < 20 * task_vectors.norm()


@every_method
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 2, 2)])
def test_tensors_that_are_not_matrices(method: Method, shape: tuple[int, ...]) -> None:
    task_vectors = random_task_vectors(method, *shape)
    if method.touches == "all":
        assert run(method, task_vectors).delta.shape == shape
    else:
        reason = "merges matrices" if method.uses == "weights" else "uses data"
        with pytest.raises(InputError, match=reason):
            acemerge.merge_task_vectors(task_vectors, method=method.name)


def whole_model(method: Method, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    base = {n: w.to(dtype) if w.is_floating_point() else w for n, w in base_tensors().items()}
    return base, {name: fine_tuned(base, i) for i, name in zip(range(experts_of(method)), "abcdefgh", strict=False)}


@every_method_without_data
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_with_every_kind_of_tensor(method: Method, dtype: torch.dtype) -> None:
    base, experts = whole_model(method, dtype)
    merged = acemerge.merge_state_dicts(base, experts, method=method.name)
    assert merged.keys() == base.keys()
    for name, weight in merged.items():
        assert weight.dtype == base[name].dtype
        assert weight.shape == base[name].shape
        assert not weight.is_floating_point() or torch.isfinite(weight).all()
    assert merged["steps"].equal(base["steps"])


@every_method_without_data
def test_the_order_of_tensors_changes_nothing(method: Method) -> None:
    base, experts = whole_model(method, torch.float32)
    merged = acemerge.merge_state_dicts(base, experts, method=method.name)
    turned = acemerge.merge_state_dicts(
        dict(reversed(base.items())), {n: dict(reversed(e.items())) for n, e in experts.items()}, method=method.name
    )
    assert all(merged[name].equal(turned[name]) for name in base)


@pytest.mark.parametrize("method", [m for m in METHODS if m.uses == "data"], ids=lambda m: m.name)
def test_a_method_that_uses_data_never_does_without(method: Method) -> None:
    base, experts = whole_model(method, torch.float32)
    task_vectors = random_task_vectors(method, 12, 8)
    refusal = f"method '{method.name}' uses data of every expert's task besides the weights"
    with pytest.raises(InputError, match=refusal):
        acemerge.merge_state_dicts(base, experts, method=method.name)
    with pytest.raises(InputError, match=refusal):
        acemerge.merge_task_vectors(task_vectors, method=method.name)
    with pytest.raises(InputError, match=refusal):
        method(task_vectors, method.options({}))


@every_method
def test_defaults_are_within_their_own_ranges(method: Method) -> None:
    defaults = {option.name: option.default for option in method.describe_options()}
    assert method.options(defaults) == method.options({})


@every_method
def test_alpha_scales_the_merged_vector(method: Method) -> None:
    task_vectors = random_task_vectors(method, 12, 8)
    torch.testing.assert_close(run(method, task_vectors, alpha=0.5).delta, run(method, task_vectors, alpha=1.0).delta / 2)
