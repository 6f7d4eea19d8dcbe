"""ACE-Merging: the closed-form merge under each task's own input covariance, read off its weight change.

    D_t = W_t - W0 (m x n)      C_t = D_t with its column means mu_t removed      S_t = C_t^T C_t, tr_t = trace S_t

The steps are numbered as in the docs (docs/methods/ace.md). How products are formed is the business of `numerics.covariance`.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.option_text import Fact
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.covariance import Experts
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import Gram, add_product, leading_directions, rounding_error, shared_rows, sum_of_squares
from acemerge.numerics.threads import AT_ONCE, share, torch_at_rest

DEFAULT_EPSILON = 1e-5
SMALL = 512
"""Matrices with fewer rows or columns are merged in float64: there is no time to save."""
PRECISE = 3e-5
"""What rounding may typically do to a merge in float32; known to a factor of 3, so the error stays below 1e-4 of the change."""


@dataclass(frozen=True)
class AceOptions(Options):
    """Defaults are the paper's."""

    epsilon: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["paper"],
        Field(description="ridge of each task's covariance; 'paper': 4e-2 GPT-2, 2e-4 RoBERTa-base, 1e-5 otherwise"),
    ] = "paper"
    tau: Annotated[float, Field(ge=0, description="a tensor is heterogeneous when gamma > tau")] = 0.3
    k_frac: Annotated[float, Field(ge=0, le=1, description="share of singular directions refined")] = 0.3
    normalise: Annotated[bool, Field(description="adaptive normalisation of heterogeneous tensors")] = True
    prior: Annotated[bool, Field(description="collective structural prior")] = True
    refine: Annotated[bool, Field(description="spectral refinement of heterogeneous tensors")] = True

    def resolve(self, config: Mapping[str, Any]) -> AceOptions:
        """Replace epsilon='paper' by the paper's value for this base model."""
        if self.epsilon != "paper":
            return self
        model_type = config.get("model_type")
        if model_type == "gpt2":
            return replace(self, epsilon=4e-2)
        if model_type == "roberta" and config.get("hidden_size", 768) == 768:
            return replace(self, epsilon=2e-4)
        return replace(self, epsilon=DEFAULT_EPSILON)


def _flops(tasks: int, rows: int, columns: int) -> float:
    """GEMM-equivalent operations of the heterogeneous branch, the dearer one."""
    m, n, small = rows, columns, min(rows, columns)
    covariance = tasks * m * n * min(n, tasks * m)  # SYRK of the stack, or its dual
    products = 3.0 * tasks * m * n * small  # smaller Gram (SYRK) and C_t S_t
    solve = min(n, tasks * m) ** 3 / 3 + 2.0 * m * n * n
    refinement = 2.0 * m * n * n + m * n * small + 4.0 * small**3
    return covariance + products + solve + refinement


def _float64_elements(tasks: int, rows: int, columns: int) -> float:
    """Peak of working memory in float64 numbers: the largest of the three phases below."""
    m, n, small = rows, columns, min(rows, columns)
    dual = tasks * m < n
    system = float((tasks * m) ** 2 + tasks * m * n) if dual else float(n * n)
    accumulate = system + m * n + min(tasks, AT_ONCE) * (n * n if n <= m else m * n + m * m)
    residual_ = system + 2.0 * m * n + (2.0 * m * n if dual else 0.0)
    refine = 2.0 * m * n + small * small + 0.6 * small * (m + n)
    vectors = (2.0 * tasks + 36.0) * n  # column means and the like: they count where a matrix has few rows
    return max(accumulate, residual_, refine) + vectors


@method(
    "ace",
    title="ACE-Merging",
    paper="ACE-Merging, CVPR 2026",
    closed_form=True,
    low_rank="both",
    facts={
        "gamma": "heterogeneity of the experts' energies",
        "branch": "of ACE",
        "ridge_share": "the regulariser's part of the trace of ACE's system",
        "precision": "in which ACE's system was solved",
        "refined_directions": "leading singular directions that ACE refined",
    },
    flops=_flops,
    float64_elements=_float64_elements,
)
def ace(task_vectors: Float[Tensor, "task out in"], options: AceOptions, context: Context) -> Merged:
    """The optimal merge under each task's own input covariance, which its weight change reveals.

    Closed form per matrix; experts of unequal strength are normalised, a prior shared by all experts steadies the
    system, and the leading singular directions of heterogeneous tensors are refined. No data, no training.
    """
    options = options.resolve({})
    frame = context.frame_of(task_vectors)
    energies = share(sum_of_squares, task_vectors)
    if not any(energies):
        return nobody_changed(task_vectors)
    with torch_at_rest():
        if float32_pays(task_vectors):
            with suppress(ArithmeticError):  # too ill-conditioned for it
                return merge_opinions(read_opinions(task_vectors, energies, frame, torch.float32), options, frame)
        return merge_opinions(read_opinions(task_vectors, energies, frame, torch.float64), options, frame)


@dataclass(frozen=True)
class Opinions:
    """What the experts that changed this tensor say, whatever the options: steps 1 and 2."""

    experts: Experts
    energies: list[float]
    traces: list[float]
    gamma: float


def read_opinions(
    task_vectors: Float[Tensor, "task out in"], energies: list[float], frame: Frame, dtype: torch.dtype
) -> Opinions:
    """Without the experts that did not change this tensor: they have no opinion on it."""
    changed = [t for t, energy in enumerate(energies) if energy > 0]
    experts = Experts(task_vectors, changed, frame, centre=True, dtype=dtype)
    energies = [energies[t] for t in changed]
    return Opinions(experts, energies, experts.traces(energies), heterogeneity(energies))


def nobody_changed(task_vectors: Float[Tensor, "task out in"]) -> Merged:
    """Nothing to merge."""
    return Merged(torch.zeros_like(task_vectors[0]), {"active_experts": 0})


def merge_opinions(opinions: Opinions, options: AceOptions, frame: Frame) -> Merged:
    """Steps 3 to 6, in the experts' precision; an ArithmeticError if float32 is not precise enough."""
    experts = opinions.experts
    heterogeneous = opinions.gamma > options.tau
    a, e = covariance_weights(opinions.traces, options, heterogeneous)  # step 3
    ridge = math.fsum(e)

    # Step 2 with its weights: S = sum_t a_t S_t, and sum_t a_t C_t S_t.
    S, CS = experts.weighted_covariance(a)
    R = residual(experts, a, S, CS, ridge, frame) if heterogeneous and options.refine else None
    N = experts.add_weighted(CS, e)  # sum_t C_t Sreg_t, in the place of CS
    P, rounding = closed_form(S, N, ridge, prior_strength(opinions, options, heterogeneous), frame)  # steps 4 and 5
    check_precision(rounding, P.dtype)
    del S, N, CS  # as large as everything else here

    facts = describe(opinions, heterogeneous, a, e, frame)
    if R is None:
        return Merged(P, facts)

    # Step 6. Refinement: the leading k directions of F = P + R, all with their mean strength.
    F = R.add_(P).double()
    leading = leading_directions(F, refined_directions(options, frame))
    if len(leading.values):
        check_precision(rounding * rounding_spread(F, leading.values), P.dtype)
        add_product(P, leading.left.to(P.dtype), leading.right.to(P.dtype).T, float(leading.values.mean()))
    return Merged(P, {**facts, "refined_directions": len(leading.values)})


def describe(opinions: Opinions, heterogeneous: bool, a: list[float], e: list[float], frame: Frame) -> dict[str, Fact]:
    """What a reader of the report should know."""
    return {
        "active_experts": len(opinions.energies),
        "gamma": min(opinions.gamma, sys.float_info.max),
        "branch": "heterogeneous" if heterogeneous else "homogeneous",
        "ridge_share": regulariser_share(a, e, opinions.traces, frame.shape[1]),
        "precision": str(opinions.experts.dtype).removeprefix("torch."),
    }


def prior_strength(opinions: Opinions, options: AceOptions, heterogeneous: bool) -> float:
    """Step 4: kappa, in c = kappa * (column means of S)."""
    if not options.prior:
        return 0.0
    return 1 / statistics.fmean(opinions.energies) if heterogeneous else 1.0


def refined_directions(options: AceOptions, frame: Frame) -> int:
    """Step 6: k."""
    return math.floor(options.k_frac * min(frame.shape) + 1e-9)  # 0.3 * 10 is 2.9999... in floating point


def rounding_spread(F: Float[Tensor, "out in"], values: Float[Tensor, " k"]) -> float:
    """F's rounding is spread over all its directions, and divided by s_i in the i-th of U_k V_k^T."""
    return math.sqrt(sum_of_squares(F) / min(F.shape) * float(values.pow(-2).mean()))


def covariance_weights(traces: list[float], options: AceOptions, heterogeneous: bool) -> tuple[list[float], list[float]]:
    """Step 3: a_t and e_t, so that Stilde_t = a_t S_t and Sreg_t = Stilde_t + e_t I.

    An expert that centring removes (tr_t = 0: only its column means changed) has no covariance to normalise by.
    """
    assert not isinstance(options.epsilon, str)
    scales = [1 / tr if heterogeneous and options.normalise and tr > 0 else 1.0 for tr in traces]
    return scales, [options.epsilon * scale for scale in scales]


def regulariser_share(a: list[float], e: list[float], traces: list[float], columns: int) -> float:
    """The part of sum_t e_t I in the trace of the system sum_t Sreg_t."""
    ridge = math.fsum(e) * columns
    return ridge / (ridge + math.fsum(map(float.__mul__, a, traces)))


def closed_form(
    S: Gram, N: Float[Tensor, "out in"], ridge: float, kappa: float, frame: Frame
) -> tuple[Float[Tensor, "out in"], float]:
    """Steps 4 and 5: P = N (S + ridge I + 1 c^T)^-1 with the prior c = kappa * (column means of S); S and N are used up.

    Beside it, how far rounding moves P, relative to its length.

    The prior is rank one, so by Sherman-Morrison, with Z = N (S + ridge I)^-1 and u = (S + ridge I)^-1 c,
    P = Z - (Z 1) u^T / (1 + sum u). The denominator is at least 1: the system is never singular.
    """
    ones = frame.ones_in.to(N.dtype)
    c = S.times(ones[None])[0] * (kappa / frame.shape[1])  # S is symmetric: its row sums are its column sums
    size = S.norm()
    divide = S.factorise(ridge)
    Z = divide(N)
    u = divide(c[None])[0]
    return Z.addr_(Z @ ones, u, alpha=-1 / (1 + float(u @ ones))), rounding_error(size, divide, Z)


def check_precision(rounding: float, dtype: torch.dtype) -> None:
    """Float32 has to be as good as the weights, which are stored in it or in less; float64 always is."""
    if dtype == torch.float32 and not rounding <= PRECISE:
        raise ArithmeticError(f"float32 would leave a relative error of {rounding:.1g}")


def float32_pays(task_vectors: Float[Tensor, "task out in"]) -> bool:
    """Whether float32, if it turns out to be precise enough, saves time that is worth saving."""
    tasks, rows, columns = task_vectors.shape
    very_wide = tasks * rows < columns
    return task_vectors.dtype == torch.float32 and min(rows, columns) >= SMALL and not very_wide


def heterogeneity(energies: list[float]) -> float:
    """gamma = var(log energy) / mean(log energy)^2, sample variance; 0 for one expert."""
    if len(energies) == 1:
        return 0.0
    logs = [math.log(energy) for energy in energies]
    spread, centre = statistics.variance(logs), statistics.fmean(logs)
    if spread == 0:
        return 0.0
    return spread / centre**2 if centre**2 > 0 else math.inf


def residual(experts: Experts, a: list[float], S: Gram, CS: Tensor, ridge: float, frame: Frame) -> Float[Tensor, "out in"]:
    """R = sum_t D_t (Stilde_t - mean_s Sreg_s), with the uncentred D_t = C_t + 1 mu_t^T (step 6)."""
    R = torch.addr(CS, frame.ones_out.to(CS.dtype), experts.mean_covariance(a))

    def subtract(rows: slice) -> None:
        D_sum = experts.sum(rows)
        R[rows].sub_(S.times(D_sum).add_(D_sum, alpha=ridge), alpha=1 / len(a))

    share(subtract, shared_rows(R))
    return R
