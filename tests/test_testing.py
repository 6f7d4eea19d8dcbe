"""Methods that break their promises are caught, by name; those that keep them pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods import Context, Merged, Options, method, registry
from acemerge.testing import check_method, checks
from data_statistics import made_up_statistics

Kernel = Callable[..., Merged | Tensor]


@dataclass(frozen=True)
class PlainOptions(Options):
    """None of its own."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Registers a kernel under a name, for as long as the test takes."""
    registry.all_methods()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    def register(kernel: Kernel, **declared: Any) -> str:
        method("mine", title="Mine", paper="none", **{"touches": "all", **declared})(kernel)
        return "mine"

    return register


def mean(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean."""
    return task_vectors.mean(0)


def changes_its_input(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean, in the first expert's place."""
    return task_vectors[0].add_(task_vectors[1:].sum(0)).div(len(task_vectors))


def changes_the_base(task_vectors: Tensor, options: PlainOptions, context: Context) -> Tensor:
    """The mean, added to the base as well."""
    merged = task_vectors.mean(0)
    if context.base is not None:
        context.base.add_(merged)
    return merged


def hands_out_its_input(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The sum, but of one expert the expert."""
    return task_vectors.sum(0) if len(task_vectors) > 1 else task_vectors[0]


def prefers_the_first(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean, with twice the first."""
    return task_vectors.mean(0) + task_vectors[0]


def returns_a_row(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean, flat."""
    return task_vectors.mean(0).reshape(-1)


def throws_dice(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean of random entries."""
    return task_vectors.mean(0) * (torch.rand(task_vectors.shape[1:]) > 0.5)


def divides_by_zero(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean, scaled by the norm of every expert."""
    return torch.stack([task_vector / task_vector.norm() for task_vector in task_vectors]).mean(0)


def needs_two(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The first and the second."""
    return task_vectors.sum(0) + 0 * task_vectors[1]


def rounds(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean in half precision, of float32."""
    return task_vectors.mean(0) if task_vectors.dtype == torch.float64 else task_vectors.mean(0).bfloat16().float()


def centres(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean less its own mean, which depends on all entries and on coordinates."""
    merged = task_vectors.mean(0)
    return merged - merged.mean()


def ignores_alpha(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    """The mean, whatever the scale."""
    return task_vectors.mean(0) / options.alpha


def keeps_parts(task_vectors: Tensor, options: PlainOptions) -> Merged:
    """The mean, and what each expert has beyond it."""
    merged = task_vectors.mean(0)
    return Merged(merged, parts=[{"delta": task_vector - merged} for task_vector in task_vectors])


def parts_of_another_shape(task_vectors: Tensor, options: PlainOptions) -> Merged:
    """The mean, and a row for each expert."""
    return Merged(task_vectors.mean(0), parts=[{"delta": task_vector.reshape(-1)} for task_vector in task_vectors])


def no_docstring(task_vectors: Tensor, options: PlainOptions) -> Tensor:
    return task_vectors.mean(0)


@dataclass(frozen=True)
class BadDefault(Options):
    share: Annotated[float, Field(gt=0, le=1, description="of something")] = 2.0


def bad_default(task_vectors: Tensor, options: BadDefault) -> Tensor:
    """The mean."""
    return task_vectors.mean(0)


WRONG: list[tuple[Kernel, dict[str, Any], str]] = [
    (changes_its_input, {}, "inputs_are_untouched"),
    (changes_the_base, {}, "inputs_are_untouched"),
    (hands_out_its_input, {}, "results_are_new"),
    (prefers_the_first, {}, "order_of_experts"),
    (returns_a_row, {}, "shape_and_finiteness"),
    (returns_a_row, {}, "tensors_that_are_not_matrices"),
    (throws_dice, {}, "same_input_same_bits"),
    (divides_by_zero, {}, "nobody_changed_anything"),
    (divides_by_zero, {}, "one_frozen_expert_is_harmless"),
    (needs_two, {}, "one_expert"),
    (rounds, {}, "float32_agrees_with_float64"),
    (centres, {"elementwise": True}, "pieces_give_the_same_bits"),
    (centres, {"low_rank": "both", "touches": "matrices"}, "the_low_rank_core_gives_the_same_merge"),
    (ignores_alpha, {}, "alpha_scales"),
    (keeps_parts, {}, "one_model_has_no_parts"),
    (parts_of_another_shape, {"per_task": True}, "parts_belong_to_the_experts"),
    (mean, {"per_task": True}, "parts_belong_to_the_experts"),
    (no_docstring, {}, "it_explains_itself"),
    (bad_default, {}, "options_round_trip"),
]


@pytest.mark.parametrize(("kernel", "declared", "broken"), WRONG, ids=[f"{k.__name__}-{broken}" for k, _, broken in WRONG])
def test_a_broken_promise_is_named(registered: Callable[..., str], kernel: Kernel, declared: dict[str, Any], broken: str) -> None:
    name = registered(kernel, **declared)
    with pytest.raises(AssertionError, match=f"method 'mine' fails '{broken}'"):
        check_method(name)


@pytest.mark.parametrize(
    ("kernel", "declared"),
    [
        (mean, {}),
        (mean, {"elementwise": True, "low_rank": "both"}),
        (mean, {"touches": "matrices"}),
        (mean, {"experts": 2}),
        (prefers_the_first, {"ordered": True}),
        (needs_two, {"experts": 2}),
        (keeps_parts, {"per_task": True}),
    ],
)
def test_a_kept_promise_is_not(registered: Callable[..., str], kernel: Kernel, declared: dict[str, Any]) -> None:
    check_method(registered(kernel, **declared))


def test_all_failures_are_told_at_once(registered: Callable[..., str]) -> None:
    with pytest.raises(AssertionError) as failure:
        check_method(registered(divides_by_zero))
    assert "'nobody_changed_anything'" in str(failure.value)
    assert "'one_frozen_expert_is_harmless'" in str(failure.value)


def test_a_check_alone(registered: Callable[..., str]) -> None:
    name = registered(throws_dice)
    by_name = {check.name: check for check in checks(name)}
    by_name["inputs_are_untouched"](name)
    with pytest.raises(AssertionError, match="two merges of the same input differ"):
        by_name["same_input_same_bits"](name)
    assert {check.name for check in checks()} > set(by_name)


def test_the_programs_own_random_numbers_are_left_alone(registered: Callable[..., str]) -> None:
    before = torch.get_rng_state()
    check_method(registered(mean))
    assert torch.get_rng_state().equal(before)


def test_a_method_that_uses_data_needs_something_measured() -> None:
    with pytest.raises(InputError, match="'fisher' uses data of every expert's task besides the weights: give `measured`"):
        check_method("fisher")
    check_method("fisher", measured=lambda task_vectors: made_up_statistics(registry.get_method("fisher"), task_vectors))
