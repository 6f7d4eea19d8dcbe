"""LARV: a scale for every matrix, by its depth and by how its change fits the base, for any other method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.layer_names import depths
from acemerge.methods.inner import InnerOptions, inner_core_sides, inner_facts, inner_statistics
from acemerge.methods.registry import Context, Merged, Statistics, method
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import add_gram, directions_flops, sum_of_squares, weighted_sum

Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class LarvOptions(InnerOptions):
    """There is no official code: the values of the tiers, and what a layer's change is, are our reading."""

    outer: ClassVar[str] = "larv"

    gate: Annotated[
        Literal["tiers", "continuous"],
        Field(description="the scale: one of three by the score's rank, or a function of the score"),
    ] = "tiers"
    low: Annotated[Scale, Field(description="tiers: of the third of the matrices with the lowest score")] = 0.5
    middle: Annotated[Scale, Field(description="tiers: of the third between")] = 0.75
    high: Annotated[Scale, Field(description="tiers: of the third with the highest score")] = 1.0
    gamma: Annotated[Scale, Field(description="continuous: how fast 1 + tanh(gamma (score - 1)) / 2 goes from 0.5 to 1.5")] = 3.0
    eta: Annotated[Scale, Field(description="power of the effective rank in the score")] = 1.0
    rho: Annotated[Scale, Field(description="power of the depth in the score")] = 0.5


@dataclass(frozen=True)
class Proxies:
    """Of one matrix: how many more directions the base has than the change, and how little the two commute."""

    rank_ratio: float
    commutator: float


def measure(task_vectors: Float[Tensor, "task out in"], context: Context) -> Proxies | None:
    """e = er(W0) / er(tau) and c = (|W0 tau^T - tau W0^T| + |W0^T tau - tau^T W0|) / (2 |W0| |tau|), tau = mean_t tau_t.

    None without a base or a change: then there is nothing to compare.
    """
    tau = weighted_sum(task_vectors, [1 / len(task_vectors)] * len(task_vectors))
    if context.base is None or not tau.any() or not context.base.any():
        return None
    W0, frame = context.base.to(tau), context.frame_of(task_vectors)
    rows, columns = _in_frame(W0, frame, "right") @ tau.T, _in_frame(W0, frame, "left").T @ tau
    terms = _twice_antisymmetric(rows, frame.left) + _twice_antisymmetric(columns, frame.right)
    lengths = math.sqrt(sum_of_squares(W0) * sum_of_squares(tau))
    return Proxies(effective_rank(W0) / effective_rank(tau), terms / (2 * lengths))


def _in_frame(W: Float[Tensor, "out in"], frame: Frame, side: Literal["left", "right"]) -> Tensor:
    """left^T W, or W right."""
    if side == "left":
        return W if frame.left is None else frame.left.to(W).T @ W
    return W if frame.right is None else W @ frame.right.to(W)


def _twice_antisymmetric(X: Float[Tensor, "m p"], basis: Float[Tensor, "m p"] | None) -> float:
    """|X L^T - L X^T|_F for orthonormal L: the square is 2 |X|^2 - 2 tr((L^T X)^2)."""
    if basis is None:
        return math.sqrt(sum_of_squares(X - X.T))
    inside = basis.to(X).T @ X
    return math.sqrt(max(0.0, 2 * sum_of_squares(X) - 2 * float((inside * inside.T).sum())))


def effective_rank(A: Float[Tensor, "out in"]) -> float:
    """exp of the entropy of s_i^2 / |A|^2: 1 of rank one, min(out, in) of an orthogonal matrix."""
    rows = A if A.shape[0] >= A.shape[1] else A.T.contiguous()
    gram = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=A.device)
    add_gram(gram, rows)
    squares = torch.linalg.eigvalsh(gram).clamp_(min=0)
    return float(torch.exp(torch.special.entr(squares / squares.sum()).sum()))


def scales_of(proxies: Mapping[str, Proxies], options: LarvOptions) -> dict[str, float]:
    """s_l of every matrix that was measured, by its name."""
    if not proxies:
        return {}
    names = sorted(proxies)
    c = torch.tensor([proxies[name].commutator for name in names], dtype=torch.float64)
    spread = float(c.std(correction=0))
    z = (c - c.mean()) / (spread if spread >= 1e-8 else 1.0)
    e = torch.tensor([proxies[name].rank_ratio for name in names], dtype=torch.float64)
    score = e**options.eta * _relative_depths(names) ** options.rho / (torch.nn.functional.softplus(z) + 1)
    if options.gate == "continuous":
        scale = 1 + 0.5 * torch.tanh(options.gamma * (score - 1))
    else:
        lower, upper = (float(score.quantile(share)) for share in (1 / 3, 2 / 3))
        scale = torch.where(score >= upper, options.high, torch.where(score >= lower, options.middle, options.low)).double()
    return dict(zip(names, scale.tolist(), strict=True))


def _relative_depths(names: list[str]) -> Float[Tensor, " layer"]:
    """d_l = (l + 1) / L of each tensor; what lies outside of the stack of layers counts as the last one."""
    found = depths(names)
    layers = 1 + max((depth for depth in found.values() if depth is not None), default=0)
    relative = [1.0 if depth is None else (depth + 1) / layers for depth in found.values()]
    return torch.tensor(relative, dtype=torch.float64)


class LarvStatistics:
    """First every matrix's proxies, which give the scales, then what the inner method gathers of the scaled experts."""

    def __init__(self, options: LarvOptions, inner: Statistics | None) -> None:
        self._options, self.inner = options, inner
        self._proxies: dict[str, Proxies] = {}
        self._scales: dict[str, float] | None = None

    def observe(self, task_vectors: Tensor, context: Context) -> None:
        """See one tensor."""
        if self._scales is not None:
            assert self.inner is not None
            self.inner.observe(task_vectors * self.scale(context), context)
            return
        found = measure(task_vectors, context)
        if found is not None:
            self._proxies[context.tensor] = found

    def end_pass(self) -> bool:
        """The scales take one pass; then it is for the inner method to say."""
        if self._scales is None:
            self._scales = scales_of(self._proxies, self._options)
            return self.inner is not None
        return self.inner is not None and self.inner.end_pass()

    def scale(self, context: Context) -> float:
        """s_l; 1 of what could not be measured."""
        return (self._scales or {}).get(context.tensor, 1.0)


@method(
    "larv",
    title="LARV, a scale for every layer",
    paper="LARV, arXiv 2602.09413, 2026",
    statistics=lambda options, experts: LarvStatistics(options, inner_statistics(options, experts)),
    low_rank=inner_core_sides,
    facts=lambda options: {"scale": "what the experts' changes were multiplied by", **inner_facts(options)},
    flops=lambda tasks, rows, columns: (
        2.0 * directions_flops(rows, columns, 0) + 2.0 * rows * columns * (rows + columns + 2 * tasks)
    ),
    float64_elements=lambda tasks, rows, columns: (
        (tasks + 3.0) * rows * columns + 2.0 * max(rows, columns) ** 2 + 2.0 * min(rows, columns) ** 2
    ),
)
def larv(task_vectors: Float[Tensor, "task out in"], options: LarvOptions, context: Context) -> Merged:
    """A step before another method: a scale for every matrix, by depth and fit; LOW CONFIDENCE, no official code.

    The score of a matrix rises with its depth and with the effective rank of the base over that of the change, and falls with how
    little the two commute. Scales follow its rank in the model, or the score itself. Needs the base's weights.
    """
    statistics: LarvStatistics = context.statistics
    scale = statistics.scale(context)
    inner, inner_options = options.inner_method()
    merged = inner(task_vectors * scale, inner_options, replace(context, statistics=statistics.inner))
    unknown = "no base weights are at hand: the scale is 1"
    warnings = merged.warnings if context.base is not None else (*merged.warnings, unknown)
    return replace(merged, facts={"scale": scale, **merged.facts}, warnings=warnings)
