"""ACE without tuning: the experts' average, and what a closed-form merge adds to it, no stronger than the base can take.

    D_t = W_t - W0 (m x n)      S_t = D_t^T D_t, an n x n covariance whose trace is |D_t|^2

The steps are numbered as in the docs (docs/methods/ace_auto.md). All constants are pure numbers: no step depends on units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.ace import nobody_changed
from acemerge.methods.option_text import Fact
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.shared_routes import AtPoints, shared_route
from acemerge.numerics.covariance import Experts
from acemerge.numerics.linalg import (
    LeadingDirections,
    directions_elements,
    directions_flops,
    leading_directions,
    sum_of_squares,
    weighted_sum,
)
from acemerge.numerics.spectral_norm import spectral_norm
from acemerge.numerics.threads import AT_ONCE, share, torch_at_rest

ROUNDING = 1e-5
"""Of the strongest direction: what is weaker is rounding of float32 weights."""
REACH = 0.08
REACH_OF_WRITERS = 0.04
"""Where all experts share an output layer with an answer for every token, whatever is added is read by it."""
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining")
"""How the classes of such models end."""


@dataclass(frozen=True)
class AceAutoOptions(Options):
    """Numbers chosen once for all models: docs/methods/ace_auto.md says how, and what others would do."""

    power: Annotated[
        float,
        Field(ge=0, le=1, description="p: strengths s of what is added to the average become s^p; 1 leaves them as they are"),
    ] = 0.25
    reach: Annotated[
        Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"],
        Field(
            description="k: strength of the strongest direction added, at most, as a share of the base's; 'auto': "
            f"{REACH:g}, and {REACH_OF_WRITERS:g} for models that write text"
        ),
    ] = "auto"
    ridge: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="r: ridge of each covariance, as a share of its mean eigenvalue")
    ] = 0.01

    def resolve(self, config: Mapping[str, Any]) -> AceAutoOptions:
        """Replace reach='auto' by its value for models of these classes."""
        if self.reach != "auto":
            return self
        writes = any(str(name).endswith(WRITERS) for name in config.get("architectures") or ())
        return replace(self, reach=REACH_OF_WRITERS if writes else REACH)


def _flops(tasks: int, rows: int, columns: int) -> float:
    """GEMM-equivalent operations: the closed form, all its singular directions, and their product."""
    m, n, small = rows, columns, min(rows, columns)
    covariance = tasks * m * n * min(n, tasks * m)
    solve = min(n, tasks * m) ** 3 / 3 + 2.0 * m * n * n
    return covariance + 3.0 * tasks * m * n * small + solve + directions_flops(m, n, small) + 2.0 * m * n * small


def _float64_elements(tasks: int, rows: int, columns: int) -> float:
    """Peak of working memory in float64 numbers: the system as it is formed, or what P adds to the average."""
    m, n, small = rows, columns, min(rows, columns)
    dual = tasks * m < n
    system = float((tasks * m) ** 2 + tasks * m * n) if dual else float(n * n)
    accumulate = system + m * n + min(tasks, AT_ONCE) * (n * n if n <= m else m * n + m * m)
    solve = system + (4.0 if dual else 2.0) * m * n
    return max(accumulate, solve, 2.0 * m * n + small * small + directions_elements(m, n, small))


@method(
    "ace_auto",
    title="ACE without tuning",
    paper="acemerge's own, after ACE-Merging, CVPR 2026",
    closed_form=True,
    low_rank="both",
    rest="average all",
    facts={
        "overlap": "how much of the experts' changes is common: 1 all of it, 1 / (number of experts) none",
        "rank": "directions that are added to the average",
        "strength": "of the strongest of them, as a share of the base's own",
        "length": "of the merged change, in lengths of an expert's",
    },
    flops=_flops,
    float64_elements=_float64_elements,
)
def ace_auto(task_vectors: Float[Tensor, "task out in"], options: AceAutoOptions, context: Context) -> Merged:
    """The experts' average, and what the optimal merge under each task's own inputs adds to it. Nothing to tune.

    ACE's closed form says in which directions the average falls short of the experts. These are added, evened out, and as strong
    as the base can take: full fine-tunes or adapters, classifiers or language models, two experts or twenty need no setting of
    their own. One expert comes back unchanged.
    """
    [(_, merged)] = merge_points(task_vectors, [options], context)
    return merged


@shared_route("ace_auto", float64_elements=_float64_elements)
def merge_points(
    task_vectors: Float[Tensor, "task out in"], options: Sequence[AceAutoOptions], context: Context
) -> Iterator[AtPoints]:
    """M at every setting; those with the same ridge share all but the last product."""
    options = [own.resolve({}) for own in options]
    energies = share(sum_of_squares, task_vectors)
    if not any(energies):
        yield list(range(len(options))), nobody_changed(task_vectors)
        return
    changed = [t for t, energy in enumerate(energies) if energy > 0]
    mean = partial(weighted_sum, task_vectors, [1 / len(changed)] * len(task_vectors))  # made anew: one matrix less to hold
    layer = LayerSizes(
        len(changed),
        math.sqrt(math.fsum(energies) / len(changed)),
        math.sqrt(sum_of_squares(mean())),
        0.0 if context.base is None else spectral_norm(context.base),
        min(context.frame_of(task_vectors).shape),
    )
    for ridge in dict.fromkeys(own.ridge for own in options):
        with torch_at_rest():
            beyond = clear_directions(optimal_merge(task_vectors, changed, energies, ridge, context).sub_(mean()))
        for point, own in enumerate(options):
            if own.ridge == ridge:
                yield [point], add_to_average(mean(), beyond, layer, own)


def optimal_merge(
    task_vectors: Float[Tensor, "task out in"], changed: Sequence[int], energies: Sequence[float], ridge: float, context: Context
) -> Float[Tensor, "out in"]:
    """Step 1: P = (sum_t D_t (a_t S_t + e I)) (sum_t (a_t S_t + e I))^-1, a_t = 1/|D_t|^2, e = r/n.

    Every a_t S_t has the mean eigenvalue 1/n. An expert that did not change the tensor has no opinion on it.
    """
    frame = context.frame_of(task_vectors)
    experts = Experts(task_vectors, changed, frame, centre=False)
    S, N = experts.weighted_covariance([1 / energies[t] for t in changed])
    e = ridge / frame.shape[1]
    return S.factorise(len(changed) * e)(experts.add_weighted(N, [e] * len(changed)))


def clear_directions(matrix: Float[Tensor, "out in"]) -> LeadingDirections:
    """Step 2: U diag(s) V^T, without what is rounding."""
    found = leading_directions(matrix, min(matrix.shape))
    clear = found.values > ROUNDING * found.values[-1:]
    if clear.all():
        return found
    return LeadingDirections(found.values[clear], found.left[:, clear], found.right[:, clear])


@dataclass(frozen=True)
class LayerSizes:
    """How large the changes of one tensor are."""

    experts: int
    """That changed the tensor."""
    expert: float
    """The root mean square of their |D_t|."""
    mean: float
    """|mean_t D_t|."""
    base: float
    """|W0|_2, the strength of the base's strongest direction; zero if the base is not known."""
    directions: int
    """min(m, n): as many as a matrix of this shape can have."""

    @property
    def overlap(self) -> float:
        """1 if all experts changed the tensor alike, or there is one; 1/T if no two have anything in common, and never less."""
        return min(1.0, max(1 / self.experts, (self.mean / self.expert) ** 2))


def add_to_average(
    mean: Float[Tensor, "out in"], beyond: LeadingDirections, layer: LayerSizes, options: AceAutoOptions
) -> Merged:
    """Step 4: M = mean_t D_t + top U diag((s/s_1)^p) V^T, in place of the mean."""
    U, s, V = beyond.left, beyond.values, beyond.right
    top = strongest_added(s, layer, options)
    M = mean
    if top:
        strengths = top * (s / s[-1]) ** options.power
        M.addmm_(*((U, (V * strengths).T) if len(U) > len(V) else (U * strengths, V.T)))  # scales the smaller side
    facts: dict[str, Fact] = {
        "overlap": layer.overlap,
        "rank": len(s) if top else 0,
        "strength": top / layer.base if top else 0.0,
        "length": math.sqrt(sum_of_squares(M)) / layer.expert,
    }
    return Merged(M, {"active_experts": layer.experts, **facts})


def strongest_added(s: Float[Tensor, " rank"], layer: LayerSizes, options: AceAutoOptions) -> float:
    """Step 3: top = min(s_1, k |W0|_2 rank / min(m, n))."""
    if not len(s):
        return 0.0
    assert options.reach != "auto"
    return min(float(s[-1]), options.reach * layer.base * len(s) / layer.directions)
