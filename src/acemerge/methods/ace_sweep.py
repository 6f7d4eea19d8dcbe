"""ACE at many settings of a tensor, with the numbered steps of `ace.py`: each is done once for all settings that agree on it.

    S = sum_t a_t S_t and sum_t a_t C_t S_t     once; both branches' weights a_t from the same S_t and C_t S_t
    N = sum_t a_t C_t S_t + epsilon E           with E = sum_t a_t C_t: affine in epsilon
    R = R_0 - (epsilon sum_t a_t / T) sum_t D_t affine in epsilon
    P                                           a Cholesky factorisation and a solve for each epsilon
    U_k V_k^T of F = P + R                      once for each epsilon, for the largest k: a smaller k takes the first of them

tau only chooses the branch, so all tau on the same side of gamma are one setting. In the eigenbasis of S an epsilon would cost a
product of the size of the solve it saves: finding that basis takes longer than factorising S for dozens of epsilons.

As a merge does, float32 is tried first where it pays; settings that it is not precise enough for are left for float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.methods.ace import (
    AceOptions,
    Opinions,
    check_precision,
    closed_form,
    covariance_weights,
    describe,
    float32_pays,
    nobody_changed,
    prior_strength,
    read_opinions,
    refined_directions,
    residual,
    rounding_spread,
)
from acemerge.methods.registry import Context, Merged
from acemerge.methods.shared_routes import AtPoints, shared_route
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import Gram, leading_directions, sum_of_squares


@dataclass(frozen=True, order=True)
class _System:
    """Settings with the same P."""

    heterogeneous: bool
    epsilon: float
    kappa: float


@dataclass(frozen=True, order=True)
class _Setting:
    """What the options come to for this tensor; equal settings have equal results. Sorted, what can be shared is adjacent."""

    a: tuple[float, ...]
    system: _System
    k: int
    """-1: not refined."""


def _float64_elements(tasks: int, rows: int, columns: int) -> float:
    """Peak of working memory in float64 numbers: both branches' sums, and one P and its refinement."""
    m, n, small = rows, columns, min(rows, columns)
    dual = tasks * m < n
    system = float((tasks * m) ** 2 + tasks * m * n) if dual else float(n * n)
    accumulate = 3.0 * (system + m * n) + (n * n if n <= m else m * n + m * m)
    solve = 3.0 * system + 7.0 * m * n + 3.0 * small * small + small * (m + n)
    return max(accumulate, solve)


@shared_route("ace", float64_elements=_float64_elements)
def ace_sweep(task_vectors: Float[Tensor, "task out in"], options: Sequence[AceOptions], context: Context) -> Iterator[AtPoints]:
    """M at every setting: in float32 where that is precise enough for it, all others in float64, as a merge does."""
    frame = context.frame_of(task_vectors)
    energies = [sum_of_squares(D) for D in task_vectors]
    if not any(energies):
        yield list(range(len(options))), nobody_changed(task_vectors)
        return
    left = list(range(len(options)))
    for dtype in [torch.float32, torch.float64] if float32_pays(task_vectors) else [torch.float64]:
        opinions = read_opinions(task_vectors, energies, frame, dtype)  # steps 1 and 2
        for found, merged in _merge_points({point: options[point].resolve({}) for point in left}, opinions, frame):
            left = [point for point in left if point not in found]
            yield found, merged
        if not left:
            return


def _merge_points(options: Mapping[int, AceOptions], opinions: Opinions, frame: Frame) -> Iterator[AtPoints]:
    """The results that the opinions' precision is good enough for."""
    points: dict[_Setting, list[int]] = {}
    for point, own in options.items():
        points.setdefault(_setting(own, opinions, frame), []).append(point)
    weightings = sorted({setting.a for setting in points})
    sums = opinions.experts.weighted_covariances(weightings)
    for a in weightings:
        S, CS = sums.pop(0)
        for setting, merged in _merge_settings(sorted(s for s in points if s.a == a), opinions, S, CS, frame):
            yield points[setting], merged


def _setting(options: AceOptions, opinions: Opinions, frame: Frame) -> _Setting:
    heterogeneous = opinions.gamma > options.tau
    a, _ = covariance_weights(opinions.traces, options, heterogeneous)  # step 3
    assert not isinstance(options.epsilon, str)
    system = _System(heterogeneous, options.epsilon, prior_strength(opinions, options, heterogeneous))
    return _Setting(tuple(a), system, refined_directions(options, frame) if heterogeneous and options.refine else -1)


def _merge_settings(
    settings: Sequence[_Setting], opinions: Opinions, S: Gram, CS: Float[Tensor, "out in"], frame: Frame
) -> Iterator[tuple[_Setting, Merged]]:
    """Steps 3 to 6 for settings of the same weights a_t; sorted, so that those with the same P come together."""
    experts, a = opinions.experts, list(settings[0].a)
    # What float32 is not good enough for is left; float64 has to be.
    precise_or_left = suppress(ArithmeticError) if experts.dtype == torch.float32 else nullcontext()
    E = experts.add_weighted(torch.zeros_like(CS), a)
    R_0 = D_sum = None
    if any(setting.k >= 0 for setting in settings):
        R_0 = residual(experts, a, S, CS, 0.0, frame)
        D_sum = experts.sum(slice(None))
    for system, sharing in groupby(settings, lambda setting: setting.system):
        e = [system.epsilon * weight for weight in a]
        ridge = math.fsum(e)
        with precise_or_left:
            # Steps 4 and 5.
            P, rounding = closed_form(S.copy(), torch.add(CS, E, alpha=system.epsilon), ridge, system.kappa, frame)
            check_precision(rounding, P.dtype)
            facts = describe(opinions, system.heterogeneous, a, e, frame)
            refined = []
            for setting in sharing:
                if setting.k < 0:
                    yield setting, Merged(P.clone(), facts)
                else:
                    refined.append(setting)
            if refined and R_0 is not None and D_sum is not None:
                F = torch.add(P, R_0).sub_(D_sum, alpha=ridge / len(a)).double()
                for setting, M, found in _refine(P, F, refined, rounding):
                    yield setting, Merged(M, {**facts, "refined_directions": found})


def _refine(
    P: Float[Tensor, "out in"], F: Float[Tensor, "out in"], settings: Sequence[_Setting], rounding: float
) -> Iterator[tuple[_Setting, Tensor, int]]:
    """Step 6 for each k, in ascending order: P + mean(s_1..s_k) U_k V_k^T, and how many of the k directions there were.

    A larger k has smaller s_k: where one is not precise enough, those after it are not either.
    """
    leading = leading_directions(F, settings[-1].k)
    values, left, right = (_largest_first(x) for x in (leading.values, leading.left.to(P.dtype), leading.right.to(P.dtype)))
    directions, done = torch.zeros_like(P), 0
    for setting in settings:
        found = min(setting.k, len(values))
        directions.addmm_(left[:, done:found], right[:, done:found].T)
        done = found
        if found:
            check_precision(rounding * rounding_spread(F, values[:found]), P.dtype)
        yield setting, torch.add(P, directions, alpha=float(values[:found].mean()) if found else 0.0), found


def _largest_first(ascending: Tensor) -> Tensor:
    return ascending.flip(-1)
