"""DARE with task arithmetic: drop most changes at random, rescale the rest, sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor

from acemerge.methods.expert_weights import ExpertWeights, check_count, check_each, each_expert, split_list, weight_each
from acemerge.methods.registry import Alpha, Context, Options, method
from acemerge.numerics.dropping import Rescale, Seed, drop

Probability = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class DareOptions(Options):
    """Defaults of the official code, rescaling switched on as in the paper."""

    drop: Annotated[
        Probability | tuple[Probability, ...],
        BeforeValidator(split_list),
        Field(description="share of entries dropped at random, p; 0 drops none; one for all experts, or one each"),
    ] = 0.1
    rescale: Rescale = "inverse"
    drop_vectors: Annotated[
        bool, Field(description="also drop in biases, norms and scalars; false: only in tensors with two axes or more")
    ] = True
    seed: Seed = 0


@dataclass(frozen=True)
class DareTaskArithmeticOptions(DareOptions):
    """The scale is task arithmetic's: drop=0 is task arithmetic."""

    weights: ExpertWeights = "equal"
    alpha: Alpha = 0.3

    def check(self, experts: int) -> None:
        """One number per expert."""
        check_each("drop", self.drop, experts)
        check_count(self.weights, experts)


def dare(task_vector: Float[Tensor, "*shape"], options: DareOptions, context: Context, task: int) -> Float[Tensor, "*shape"]:
    """One expert's d_t = (b_t o tau_t) / (1 - p), b_t ~ Bernoulli(1 - p) per entry."""
    if task_vector.dim() < 2 and not options.drop_vectors:
        return task_vector
    p = each_expert(options.drop, len(context.experts))[task]
    return drop(task_vector, 1 - p, options.rescale, context.generator(options.seed, task))


@method(
    "dare_task_arithmetic",
    title="DARE + Task Arithmetic",
    paper="Yu et al., Language models are Super Mario, ICML 2024",
    touches="all",
    flops=lambda tasks, rows, columns: 10.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 2.0 * rows * columns,  # noqa: ARG005
)
def dare_task_arithmetic(
    task_vectors: Float[Tensor, "task *shape"], options: DareTaskArithmeticOptions, context: Context
) -> Float[Tensor, "*shape"]:
    """Drop entries of each task vector at random, rescale the others to keep the expectation, and sum: M = sum_t w_t d_t.

    Fewer entries of different experts meet, at the price of noise; on average it is task arithmetic, and drop=0 is exactly
    that. The same seed gives the same model.
    """
    M = torch.zeros_like(task_vectors[0])
    for task, weight in enumerate(weight_each(options.weights, context.experts, context.tensor)):
        M.add_(dare(task_vectors[task], options, context, task), alpha=weight)
    return M
