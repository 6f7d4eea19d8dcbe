"""Passthrough: one model's weights as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.registry import Context, Options, method


@dataclass(frozen=True)
class PassthroughOptions(Options):
    """As they are."""

    scale: Annotated[float, Field(allow_inf_nan=False, description="what the weights are multiplied by")] = 1.0


@method(
    "passthrough",
    title="Passthrough",
    paper="Goddard et al., Arcee's MergeKit, EMNLP 2024, where it comes from",
    touches="all",
    experts=1,
    takes_base=True,
    always=lambda options: options.scale != 1,
)
def passthrough(
    task_vectors: Float[Tensor, "task *shape"], options: PassthroughOptions, context: Context
) -> Float[Tensor, "*shape"]:
    """One expert's weights, scaled if asked: W = scale W_1, on every floating-point tensor.

    For models that are put together from runs of layers (a recipe's `slices`), where each run has one model.
    """
    if len(task_vectors) != 1:
        experts = ", ".join(context.experts)
        raise InputError(f"tensor '{context.tensor}': passthrough takes exactly 1 expert, not {len(task_vectors)} ({experts})")
    if options.scale == 1:
        return task_vectors[0].clone()
    M = task_vectors[0].double() * options.scale
    if context.base is not None:
        M.add_(context.base.to(M), alpha=options.scale - 1)
    return M
