"""TIES-Merging: trim small changes, elect a sign per entry, average what agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor

from acemerge.methods.expert_weights import (
    ExpertWeights,
    check_count,
    check_each,
    each_expert,
    split_list,
    weight_each,
)
from acemerge.methods.registry import Context, Options, method
from acemerge.numerics.linalg import row_blocks, weighted_sum
from acemerge.numerics.thresholds import MagnitudeThresholds, trim

Share = Annotated[float, Field(gt=0, le=1)]
Prepare = Callable[[Tensor, Context], Tensor]


@dataclass(frozen=True)
class TiesOptions(Options):
    """Defaults are the paper's without validation data: keep 20% of the whole task vector, disjoint mean, scale 1."""

    keep: Annotated[
        Share | tuple[Share, ...],
        BeforeValidator(split_list),
        Field(description="share of largest entries kept, 0.2 = 20%; 1 trims nothing; one for all experts, or one each"),
    ] = 0.2
    merge: Annotated[Literal["mean", "sum"], Field(description="of the agreeing entries: their mean (the paper) or sum")] = "mean"
    scope: Annotated[
        Literal["model", "tensor"], Field(description="one threshold per expert over the whole model, or one per tensor")
    ] = "model"
    weights: ExpertWeights = "equal"

    def check(self, experts: int) -> None:
        """One number per expert."""
        check_each("keep", self.keep, experts)
        check_count(self.weights, experts)


_COUNTING = Lock()  # of all threads; not an attribute, because statistics travel between processes


class TiesStatistics:
    """Each expert's threshold, then the majority sign of the whole model, over what `prepare` makes of the task vectors."""

    def __init__(self, options: TiesOptions, prepare: Prepare | None = None) -> None:
        self._options, self._prepare = options, prepare
        self._thresholds = MagnitudeThresholds(options.keep)
        self._thresholds_known = options.scope == "tensor" or all(keep >= 1 for keep in each_expert(options.keep, 1))
        self._tensor_thresholds: dict[str, MagnitudeThresholds] = {}
        self._sign_sum = 0

    def observe(self, task_vectors: Tensor, context: Context) -> None:
        """See one tensor, or a piece of one; may be called from several threads."""
        prepared = self._prepare(task_vectors, context) if self._prepare else task_vectors
        if not self._thresholds_known:
            self._thresholds.observe(prepared, context.experts)
        else:
            weights = weight_each(self._options.weights, context.experts, context.tensor)
            sums = weighted_sum(self.trim(prepared, context), weights)
            excess = int(sums.sign_().sum())
            with _COUNTING:
                self._sign_sum += excess

    def know_tensor(self, show: Callable[[Callable[[Tensor], None]], object], context: Context) -> None:
        """With a threshold per tensor, find this one's: those of a model that has no other."""
        if self._options.scope == "tensor":
            thresholds, more = MagnitudeThresholds(self._options.keep), True
            while more:
                show(lambda piece: thresholds.observe(piece, context.experts))
                more = thresholds.end_pass()
            self._tensor_thresholds[context.tensor] = thresholds

    def _of_tensor(self, task_vectors: Tensor, context: Context) -> MagnitudeThresholds:
        """Known already where tensors come in pieces; otherwise this is the whole tensor."""
        if context.tensor not in self._tensor_thresholds:
            self.know_tensor(lambda look: look(task_vectors), context)
        return self._tensor_thresholds[context.tensor]

    def end_pass(self) -> bool:
        """Thresholds take two passes, or none; the majority sign takes one more."""
        if self._thresholds_known:
            return False
        self._thresholds_known = not self._thresholds.end_pass()
        return True

    def trim(self, task_vectors: Tensor, context: Context) -> Tensor:
        """u_t: each task vector with its small entries zeroed."""
        thresholds = self._thresholds if self._options.scope == "model" else self._of_tensor(task_vectors, context)
        trimmed = torch.empty_like(task_vectors)
        for out, task_vector, expert in zip(trimmed, task_vectors, context.experts, strict=True):
            out.copy_(trim(task_vector, thresholds.threshold(expert)))
        return trimmed

    def elect(self, task_vectors: Tensor, context: Context) -> Tensor:
        """u_t where it has the elected sign, 0 elsewhere: what would be averaged, still apart."""
        trimmed = self.trim(task_vectors, context)
        sums = weighted_sum(trimmed, [1.0] * len(trimmed))
        positive = sums >= 0 if self.majority_sign > 0 else sums > 0
        return torch.where(positive, trimmed.clamp(min=0), trimmed.clamp(max=0))

    @property
    def majority_sign(self) -> int:
        """What entries whose sum is exactly zero take; negative when the whole model's signs balance, as in the release."""
        return 1 if self._sign_sum > 0 else -1


def elect_and_merge(
    trimmed: Float[Tensor, "task *shape"], merge: str, majority_sign: int, weights: Sequence[float] | None = None
) -> Float[Tensor, "*shape"]:
    """Elect a sign per entry by the sum, then take the mean (or sum) of the entries that have it, weighted if asked.

    An expert with a negative weight takes part with its change turned around.
    """
    entries = trimmed.reshape(len(trimmed), -1)
    given = torch.tensor(weights or [1.0] * len(trimmed), dtype=torch.float64, device=trimmed.device)
    w, turned = given.abs(), bool((given < 0).any())
    merged = torch.empty(entries.shape[1], dtype=torch.float64, device=trimmed.device)
    for block in row_blocks(len(merged), len(trimmed)):
        u = entries[:, block].double()
        if turned:
            u *= given.sign()[:, None]
        # In float64, float32 entries that cancel do so exactly, whatever the experts' order.
        sums = w @ u
        positive = sums >= 0 if majority_sign > 0 else sums > 0  # an exact zero takes the majority's sign
        signs = positive.double().mul_(2).sub_(1)
        agreeing = u.mul_(signs).relu_()  # the magnitudes of those that have it
        total = w @ agreeing
        if merge == "mean":
            share = w @ agreeing.sign_()
            total /= share.masked_fill_(share == 0, 1)
        merged[block] = total.mul_(signs).add_(0.0)  # no negative zeros
    return merged.reshape(trimmed.shape[1:])


@method(
    "ties",
    title="TIES-Merging",
    paper="Yadav et al., TIES-Merging, NeurIPS 2023",
    touches="all",
    elementwise=True,
    statistics=lambda options, experts: TiesStatistics(options),  # noqa: ARG005
    flops=lambda tasks, rows, columns: 10.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (0.5 * tasks + 2.5) * rows * columns,
)
def ties(task_vectors: Float[Tensor, "task *shape"], options: TiesOptions, context: Context) -> Float[Tensor, "*shape"]:
    """Trim each task vector to its largest entries, elect a sign per entry, and average the entries that agree with it.

    By default one threshold per expert over the whole model, found exactly in a streaming statistics pass.
    """
    statistics: TiesStatistics = context.statistics
    weights = weight_each(options.weights, context.experts, context.tensor)
    return elect_and_merge(statistics.trim(task_vectors, context), options.merge, statistics.majority_sign, weights)
