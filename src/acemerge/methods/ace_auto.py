"""ACE without tuning: the closed-form merge under each task's own input covariance, given a spectrum and a length that fit.

    D_t = W_t - W0 (m x n)      S_t = D_t^T D_t, an n x n covariance whose trace is |D_t|^2

The steps are numbered as in the docs (docs/methods/ace_auto.md). All constants are pure numbers: no step depends on units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.ace import nobody_changed
from acemerge.methods.option_text import Fact
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.shared_routes import AtPoints, shared_route
from acemerge.numerics.covariance import Experts
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import (
    LeadingDirections,
    directions_elements,
    directions_flops,
    leading_directions,
    sum_of_squares,
    weighted_sum,
)
from acemerge.numerics.threads import AT_ONCE, share, torch_at_rest

ROUNDING = 1e-5
"""Of the strongest direction, or of an expert's length: what is weaker is rounding of float32 weights."""


@dataclass(frozen=True)
class AceAutoOptions(Options):
    """Three numbers, chosen once for all models: docs/methods/ace_auto.md says how, and what others would do."""

    power: Annotated[
        float, Field(ge=0, le=1, description="p: singular values s of experts that share nothing become s^p; 1 leaves them")
    ] = 0.5
    reach: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="k: the share of the base's length that an expert's is balanced with")
    ] = 0.4
    ridge: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="r: ridge of each covariance, as a share of its mean eigenvalue")
    ] = 0.01


def _flops(tasks: int, rows: int, columns: int) -> float:
    """GEMM-equivalent operations: the closed form, all its singular directions, and their product."""
    m, n, small = rows, columns, min(rows, columns)
    covariance = tasks * m * n * min(n, tasks * m)
    solve = min(n, tasks * m) ** 3 / 3 + 2.0 * m * n * n
    return covariance + 3.0 * tasks * m * n * small + solve + directions_flops(m, n, small) + 2.0 * m * n * small


def _float64_elements(tasks: int, rows: int, columns: int) -> float:
    """Peak of working memory in float64 numbers: the system while it is put together, or P with its directions and M."""
    m, n, small = rows, columns, min(rows, columns)
    dual = tasks * m < n
    system = float((tasks * m) ** 2 + tasks * m * n) if dual else float(n * n)
    accumulate = system + m * n + min(tasks, AT_ONCE) * (n * n if n <= m else m * n + m * m)
    solve = system + (4.0 if dual else 2.0) * m * n
    return max(accumulate, solve, 4.0 * m * n + directions_elements(m, n, small))


@method(
    "ace_auto",
    title="ACE without tuning",
    paper="acemerge's own, after ACE-Merging, CVPR 2026",
    closed_form=True,
    low_rank="both",
    rest="average all",
    facts={
        "overlap": "how much of the experts' changes is common: 1 all of it, 1 / (number of experts) none",
        "power": "of the singular values",
        "rank": "directions that the merge has",
        "length": "of the merged change, in lengths of an expert's",
    },
    flops=_flops,
    float64_elements=_float64_elements,
)
def ace_auto(task_vectors: Float[Tensor, "task out in"], options: AceAutoOptions, context: Context) -> Merged:
    """The optimal merge under each task's own input covariance, as strong as the base can take. Nothing to tune.

    ACE's closed form gives the directions. Their strengths are evened out, and the change gets a length between an expert's and
    the base's: few experts or many, full fine-tunes or adapters need no setting of their own. One expert comes back unchanged.
    """
    [(_, merged)] = merge_points(task_vectors, [options], context)
    return merged


@shared_route("ace_auto", float64_elements=_float64_elements)
def merge_points(
    task_vectors: Float[Tensor, "task out in"], options: Sequence[AceAutoOptions], context: Context
) -> Iterator[AtPoints]:
    """M at every setting; those with the same ridge share all but the last product."""
    energies = share(sum_of_squares, task_vectors)
    if not any(energies):
        yield list(range(len(options))), nobody_changed(task_vectors)
        return
    lengths = measure_lengths(task_vectors, energies, context)
    for ridge in dict.fromkeys(own.ridge for own in options):
        with torch_at_rest():
            directions = merged_directions(task_vectors, energies, ridge, context.frame_of(task_vectors))
        for point, own in enumerate(options):
            if own.ridge == ridge:
                yield [point], with_strength(directions, lengths, own)


def merged_directions(
    task_vectors: Float[Tensor, "task out in"], energies: Sequence[float], ridge: float, frame: Frame
) -> LeadingDirections:
    """Steps 1 and 2: P = (sum_t D_t (a_t S_t + e I)) (sum_t (a_t S_t + e I))^-1 = U diag(s) V^T, a_t = 1/|D_t|^2, e = r/n.

    Every a_t S_t has the mean eigenvalue 1/n. An expert that did not change the tensor has no opinion on it.
    """
    changed = [t for t, energy in enumerate(energies) if energy > 0]
    experts = Experts(task_vectors, changed, frame, centre=False)
    S, N = experts.weighted_covariance([1 / energies[t] for t in changed])
    e = ridge / frame.shape[1]
    P = S.factorise(len(changed) * e)(experts.add_weighted(N, [e] * len(changed)))
    found = leading_directions(P, min(P.shape))
    clear = found.values > ROUNDING * found.values[-1:]
    return LeadingDirections(found.values[clear], found.left[:, clear], found.right[:, clear])


@dataclass(frozen=True)
class Lengths:
    """What the spectrum and the length of the merged change depend on."""

    experts: int
    """That changed the tensor."""
    expert: float
    """The root mean square of their |D_t|."""
    mean: float
    """|mean_t D_t|."""
    base: float
    """|W0|."""
    directions: int
    """min(m, n): as many as a matrix of this shape can have."""

    @property
    def overlap(self) -> float:
        """1 if all experts changed the tensor alike, or there is one; 1/T if no two have anything in common, and never less."""
        return min(1.0, max(1 / self.experts, (self.mean / self.expert) ** 2))


def measure_lengths(task_vectors: Float[Tensor, "task out in"], energies: Sequence[float], context: Context) -> Lengths:
    """Of the experts and the base; a base that is not known counts as zero."""
    changed = sum(energy > 0 for energy in energies)
    mean = weighted_sum(task_vectors, [1 / changed] * len(task_vectors))
    base = 0.0 if context.base is None else sum_of_squares(context.base)
    rms = math.sqrt(math.fsum(energies) / changed)
    directions = min(context.frame_of(task_vectors).shape)
    return Lengths(changed, rms, math.sqrt(sum_of_squares(mean)), math.sqrt(base), directions)


def with_strength(directions: LeadingDirections, lengths: Lengths, options: AceAutoOptions) -> Merged:
    """Steps 3 and 4: M = length U diag(s^p) V^T / |s^p|."""
    U, s, V = directions.left, directions.values, directions.right
    p, length = spectrum_power(lengths, len(s), options), merged_length(lengths, len(s), options)
    if not float(s.norm()) > ROUNDING * lengths.expert:
        M, length = U.new_zeros(len(U), len(V)), 0.0
    else:
        M = (U * (s**p * (length / float((s**p).norm())))) @ V.T
    facts: dict[str, Fact] = {"overlap": lengths.overlap, "power": p, "rank": len(s), "length": length / lengths.expert}
    return Merged(M, {"active_experts": lengths.experts, **facts})


def spectrum_power(lengths: Lengths, rank: int, options: AceAutoOptions) -> float:
    """Step 3: the option, times the share of directions, for experts that share nothing; 1 for copies; in proportion between."""
    p = options.power * rank / lengths.directions
    return p + (1 - p) * lengths.overlap


def merged_length(lengths: Lengths, rank: int, options: AceAutoOptions) -> float:
    """Step 4: sqrt(k |W0| |D|) (rank / min(m, n))^(3/4), within what the experts account for.

    Never shorter than their average, and never longer than one of them times the number of different ones, 1 / overlap.
    """
    wanted = math.sqrt(options.reach * lengths.base * lengths.expert) * math.pow(rank / lengths.directions, 0.75)
    return min(max(wanted, lengths.mean), lengths.expert / lengths.overlap)
