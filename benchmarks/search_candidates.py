"""Candidates for a merge that needs no tuning: where the directions come from, which spectrum they get, how long the change is.

    M = length * shape(U diag(s) V^T),   U diag(s) V^T = directions of the experts' changes

Each of the three is a small function with a name; a candidate is three names with their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from search_layers import Layer
from torch import Tensor

from acemerge.methods import get_method
from acemerge.numerics.spectral_norm import spectral_norm

Matrix = Float[Tensor, "out in"]
Directions = Callable[[Layer], Matrix]
NEGLIGIBLE = 1e-5
"""Share of the first singular value below which there is no direction: rounding of float32 weights."""


def registered(name: str, layer: Layer, **options: object) -> Matrix:
    """What a registered method makes of it."""
    method = get_method(name)
    return method(layer.D, method.options(options).resolve({})).delta.double()


def closed_form(layer: Layer, normalise: float = 1.0, ridge: float = 1e-2, centre: bool = True, oas: bool = False) -> Matrix:
    """sum_t C_t (a_t S_t + e_t I) (sum_t a_t S_t + e_t I)^-1, a_t = tr_t^-normalise, e_t = ridge a_t tr_t / n: scale-free."""
    D = layer.D.double()
    D = D[D.flatten(1).any(1)]
    C = D - D.mean(1, keepdim=True) if centre else D
    m, n = D.shape[1:]
    N, Q = torch.zeros(m, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    for own in C:
        S = own.T @ own
        trace = float(S.trace())
        if not trace:
            continue
        a = trace**-normalise
        e = a * trace / n * (_oas(S, m) if oas else ridge)
        S = a * S
        S.diagonal().add_(e)
        N += own @ S
        Q += S
    P: Tensor = torch.linalg.solve(Q, N.T).T
    return P


def _oas(S: Tensor, m: int) -> float:
    """r / (1 - r) of oracle approximating shrinkage, for m rows."""
    n = len(S)
    mu, square = float(S.trace()) / n / m, float(S.square().sum()) / m**2 / n**2
    r = min(0.99, (square + mu**2) / ((m + 1) * (square - mu**2 / n)))
    return r / (1 - r)


def equally_long(power: float, inner: Directions, layer: Layer) -> Matrix:
    """Experts of lengths |D_t|^(1 - power) before another method."""
    lengths = layer.D.double().flatten(1).norm(dim=1)
    changed = lengths > 0
    rms = lengths[changed].square().mean().sqrt()
    factors = torch.where(changed, (rms / lengths.clamp_min(1e-300)).pow(power), 0.0)
    return inner(replace(layer, D=layer.D * factors.float()[:, None, None]))


def around_average(inner: Directions, layer: Layer) -> Matrix:
    """Another method's merge of what sets each expert apart from their average."""
    return inner(replace(layer, D=layer.D - average_of(layer)))


def beyond_average(inner: Directions, layer: Layer) -> Matrix:
    """What another method's merge has beyond the experts' average."""
    return inner(layer) - average_of(layer)


def average_of(layer: Layer) -> Matrix:
    """Of the experts that changed the layer."""
    return layer.D.sum(0) / max(1, int(layer.D.flatten(1).any(1).sum()))


def blend(parts: tuple[Directions, ...], layer: Layer) -> Matrix:
    """The sum of several, each of unit length."""
    found = [part(layer) for part in parts]
    return sum((M / M.norm() for M in found if M.any()), torch.zeros_like(found[0]))


def pico(inner: Directions, layer: Layer) -> Matrix:
    """Pico's calibration of what the experts write, before another method."""
    D = layer.D.double()
    left = [torch.linalg.svd(own, full_matrices=False) for own in D]
    stacked = torch.cat([U[:, s > NEGLIGIBLE * s[:1]] * s[s > NEGLIGIBLE * s[:1]].sqrt() for U, s, _ in left], 1)
    U, s, _ = torch.linalg.svd(stacked, full_matrices=False)
    c = s.square() / s.square().sum()
    a = 1 / (1 + (len(D) - 1) * c)
    calibrated = D + torch.einsum("mk,k,tkn->tmn", U, a - 1, torch.einsum("mk,tmn->tkn", U, D))
    return inner(replace(layer, D=calibrated.float()))


@dataclass(frozen=True)
class Spectral:
    """The singular value decomposition of a layer's directions, and what rules need to know of the layer."""

    U: Float[Tensor, "out k"]
    s: Float[Tensor, " k"]
    V: Float[Tensor, "in k"]
    layer: Layer
    rms: float
    """sqrt(mean_t |D_t|^2), over the experts that changed the layer."""
    base: float
    """|W0|."""
    overlap: float
    """|sum_t D_t|^2 / (T sum_t |D_t|^2): 1 if all are the same, 1/T if they are orthogonal, and never less."""
    experts: int
    mean: float
    """|mean_t D_t|."""
    strongest: float
    """|W0|_2."""


def decompose(M: Matrix, layer: Layer) -> Spectral:
    """By an SVD in float32, which is as good as the weights."""
    U, s, Vt = torch.linalg.svd(M.float(), full_matrices=False)
    clear = s > NEGLIGIBLE * s[:1]
    energies = layer.D.flatten(1).double().square().sum(1)
    changed = int((energies > 0).sum())
    total = float(layer.D.double().sum(0).square().sum())
    return Spectral(
        U[:, clear], s[clear], Vt[clear].T, layer, math.sqrt(float(energies.sum()) / max(1, changed)),
        float(layer.W0.double().norm()), max(1 / max(1, changed), total / max(1e-300, changed * float(energies.sum()))), changed,
        math.sqrt(total) / max(1, changed), spectral_norm(layer.W0),
    )  # fmt: skip


Shape = Callable[[Spectral], Tensor]
Length = Callable[[Spectral, Tensor], float]


def power(p: float, x: Spectral) -> Tensor:
    """s^p."""
    return x.s**p


def power_by_overlap(p: float, x: Spectral) -> Tensor:
    """s^q, with q = p for orthogonal experts and 1 if all are the same, or there is one."""
    return x.s ** float(p + (1 - p) * x.overlap)


def power_by_overlap_and_rank(p: float, x: Spectral) -> Tensor:
    """The same, with p times the share of the matrix's directions that the change has."""
    return power_by_overlap(p * len(x.s) / min(x.layer.W0.shape), x)


def rank_of_all(x: Spectral) -> Tensor:
    """s^p with the p that gives M as many directions as the experts have together (participation ratios)."""
    wanted = sum(participation(torch.linalg.svdvals(D)) for D in x.layer.D if D.any())
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if participation(x.s**middle) < wanted else (middle, high)
    return x.s ** ((low + high) / 2)


def participation(s: Tensor) -> float:
    """(sum s^2)^2 / sum s^4: how many directions share the energy."""
    return float(s.square().sum() ** 2 / s.pow(4).sum())


def as_it_is(x: Spectral, s: Tensor) -> float:  # noqa: ARG001
    """The directions' own length."""
    return float(x.s.norm())


def as_shaped(x: Spectral, s: Tensor) -> float:  # noqa: ARG001
    """The shape is of the right length already."""
    return float(s.norm())


def held(p: float, k: float, x: Spectral, e: float = 0.0) -> Tensor:
    """s^p, the first no stronger than it was, nor than k |W0|_2 times a power of the share of the matrix's directions."""
    share = len(x.s) / min(x.layer.W0.shape)
    strengths: Tensor = (x.s / x.s[0]) ** p
    top: float = min(float(x.s[0]), k * x.strongest * share**e)
    return top * strengths


Saturation = Callable[[Tensor, float], Tensor]


def clipped(s: Tensor, top: float) -> Tensor:
    """min(s, top)."""
    return s.clamp_max(top)


def hyperbolic(s: Tensor, top: float) -> Tensor:
    """s / (1 + s / top)."""
    return s / (1 + s / top)


def euclidean(s: Tensor, top: float) -> Tensor:
    """s / sqrt(1 + (s / top)^2)."""
    return s / torch.sqrt(1 + (s / top) ** 2)


def saturated(form: Saturation, length: Length, x: Spectral) -> Tensor:
    """The singular values held below a top such that the change is no longer than a rule allows; as they are if it is not."""
    allowed = length(x, x.s)
    if float(x.s.norm()) <= allowed:
        return x.s
    low, high = 0.0, 100 * float(x.s[0])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if float(form(x.s, middle).norm()) > allowed else (middle, high)
    s = form(x.s, (low + high) / 2)
    return s * (allowed / float(s.norm()))


def at_least_the_mean(k: float, x: Spectral, s: Tensor) -> float:
    """sqrt(k |W0| rms), or the experts' mean if that is longer."""
    return max(geometric(k, x, s), x.mean)


def times_rms(c: float, x: Spectral, s: Tensor) -> float:  # noqa: ARG001
    """c rms."""
    return c * x.rms


def geometric(k: float, x: Spectral, s: Tensor, q: float = 0.5) -> float:  # noqa: ARG001
    """sqrt(k |W0| rms); q: another exponent of the base's part."""
    return float((k * x.base) ** q * x.rms ** (1 - q))


def between(k: float, x: Spectral, s: Tensor, q: float = 0.5) -> float:
    """The same, but no shorter than the experts' mean and no longer than so many times an expert as they differ."""
    return min(max(geometric(k, x, s, q), x.mean), x.rms / x.overlap)


def between_by_rank(k: float, x: Spectral, s: Tensor, e: float = 0.5) -> float:
    """sqrt(k |W0| rms), times a power of the share of the matrix's directions that the change has; bounds as above."""
    wanted = geometric(k, x, s) * math.pow(len(s) / min(x.layer.W0.shape), e)
    return min(max(wanted, x.mean), x.rms / x.overlap)


def geometric_spectral(k: float, x: Spectral, s: Tensor) -> float:
    """The same of spectral norms: |M|_2 = sqrt(k |W0|_2 rms_t |D_t|_2)."""
    own = [float(torch.linalg.matrix_norm(D, 2)) for D in x.layer.D]
    rms = math.sqrt(sum(value**2 for value in own) / max(1, x.experts))
    return math.sqrt(k * x.strongest * rms) / float(s[0] / s.norm())


Place = Callable[[Spectral, Matrix], Matrix]


def on_the_base(x: Spectral, M: Matrix) -> Matrix:  # noqa: ARG001
    """The change is all there is."""
    return M


def on_the_average(x: Spectral, M: Matrix) -> Matrix:
    """The change starts from the experts' average."""
    return M + average_of(x.layer)


def with_the_average(x: Spectral, M: Matrix) -> Matrix:
    """As much of the average is added as the change lacks of it."""
    average = average_of(x.layer)
    own = float(average.square().sum())
    return M + max(0.0, 1 - float((M * average).sum()) / own) * average if own else M


@dataclass(frozen=True)
class Candidate:
    """One way to merge."""

    label: str
    directions: str
    """A name in DIRECTIONS."""
    shape: Shape
    length: Length
    whole: bool = False
    """Whether the lengths are only added up, to a budget for the whole model."""
    place: Place = on_the_base

    def changes(self, layers: Sequence[Spectral]) -> list[Matrix]:
        """M of every layer."""
        shapes = [self.shape(x) for x in layers]
        lengths = [self.length(x, s) if len(s) else 0.0 for x, s in zip(layers, shapes, strict=True)]
        if self.whole:
            lengths = shared_budget(layers, lengths)
        return [
            self.place(x, (x.U * (s * (length / float(s.norm())))) @ x.V.T if len(s) else torch.zeros_like(x.layer.W0))
            for x, s, length in zip(layers, shapes, lengths, strict=True)
        ]


def shared_budget(layers: Sequence[Spectral], lengths: Sequence[float]) -> list[float]:
    """The same total energy, shared among the layers as the experts' own energy is."""
    total = math.sqrt(sum(length**2 for length in lengths) / sum(x.rms**2 for x in layers))
    return [total * x.rms for x in layers]


_ACE = partial(registered, "ace")
DIRECTIONS: dict[str, Directions] = {
    "ace": _ACE,
    "ace, not refined": partial(registered, "ace", refine=False),
    "ace, no prior": partial(registered, "ace", prior=False),
    "closed form": closed_form,
    "closed form, ridge 1e-3": partial(closed_form, ridge=1e-3),
    "closed form, ridge 1e-1": partial(closed_form, ridge=1e-1),
    "closed form, OAS": partial(closed_form, oas=True),
    "closed form, uncentred": partial(closed_form, centre=False),
    "closed form, not normalised": partial(closed_form, normalise=0.0),
    "closed form, half normalised": partial(closed_form, normalise=0.5),
    "sum": lambda layer: layer.D.double().sum(0),
    "tsv_m": partial(registered, "tsv_m"),
    "iso_cts": partial(registered, "iso_cts"),
    "ace + iso_cts": partial(blend, (_ACE, partial(registered, "iso_cts"))),
    "closed form + iso_cts": partial(blend, (closed_form, partial(registered, "iso_cts"))),
    "closed form + tsv_m": partial(blend, (closed_form, partial(registered, "tsv_m"))),
    "closed form + sum": partial(blend, (closed_form, lambda layer: layer.D.double().sum(0))),
    "equal experts": partial(equally_long, 1.0, closed_form),
    "equal experts, uncentred": partial(equally_long, 1.0, partial(closed_form, centre=False)),
    "equal experts, OAS": partial(equally_long, 1.0, partial(closed_form, oas=True)),
    "equal experts, ridge 1e-1": partial(equally_long, 1.0, partial(closed_form, ridge=1e-1)),
    "equal experts, ridge 1e-3": partial(equally_long, 1.0, partial(closed_form, ridge=1e-3)),
    "equal experts, ace": partial(equally_long, 1.0, _ACE),
    "equal experts, tsv_m": partial(equally_long, 1.0, partial(registered, "tsv_m")),
    "equal experts, iso_cts": partial(equally_long, 1.0, partial(registered, "iso_cts")),
    "equal experts + iso_cts": partial(equally_long, 1.0, partial(blend, (closed_form, partial(registered, "iso_cts")))),
    "more equal experts, uncentred": partial(equally_long, 0.5, partial(closed_form, centre=False)),
    "more equal experts": partial(equally_long, 0.5, closed_form),
    "pico, closed form": partial(pico, closed_form),
    "apart": partial(around_average, partial(closed_form, centre=False)),
    "beyond": partial(beyond_average, partial(closed_form, centre=False)),
    "beyond, ace": partial(beyond_average, _ACE),
    "apart, tsv_m": partial(around_average, partial(registered, "tsv_m")),
    "apart, iso_cts": partial(around_average, partial(registered, "iso_cts")),
}


def _power(directions: str, p: float, length: Length, how_long: str, whole: bool = False) -> Candidate:
    return Candidate(f"{directions}; p {p:g}; {how_long}", directions, partial(power, p), length, whole)


def _fixed(directions: str, p: float, k: float) -> Candidate:
    return _power(directions, p, partial(geometric, k), f"k {k:g}")


def _saturated(directions: str, form: str, k: float) -> Candidate:
    shape = partial(saturated, _FORMS[form], partial(at_least_the_mean, k))
    return Candidate(f"{directions}; {form}; at most k {k:g}", directions, shape, as_shaped)


def _held(directions: str, p: float, k: float, e: float = 0.0) -> Candidate:
    label = f"on the average: {directions}; p {p:g}; at most {k:g} of the base's strongest" + f" by rank to {e:g}" * bool(e)
    return Candidate(label, directions, partial(held, p, k, e=e), as_shaped, place=on_the_average)


_FORMS: dict[str, Saturation] = {"clipped": clipped, "hyperbolic": hyperbolic, "euclidean": euclidean}
_PLAIN = "closed form"
_UNCENTRED = f"{_PLAIN}, uncentred"
CANDIDATES: list[Candidate] = [
    _power("ace", 1, as_it_is, "as it is"),
    _power("tsv_m", 1, as_it_is, "as it is"),
    _power("iso_cts", 1, as_it_is, "as it is"),
    Candidate("mean", "sum", partial(power, 1.0), lambda x, s: float(x.s.norm()) / x.experts),  # noqa: ARG005
    *(_fixed("ace", p, k) for p in (0.5, 0.25, 0.75) for k in (0.35, 0.2, 0.5)),
    *(_fixed(_PLAIN, p, k) for p in (0.5, 0.25, 0.75) for k in (0.35, 0.2, 0.5)),
    *(_power(name, 1, as_it_is, "as it is") for name in DIRECTIONS if name.startswith((_PLAIN, "more")) and "+" not in name),
    *(_saturated(name, form, k) for name in ("ace", _PLAIN, f"{_PLAIN}, uncentred") for form in _FORMS for k in (0.35, 0.2, 0.5)),
    *(_fixed("more equal experts", p, k) for p in (0.5, 0.25, 0.75) for k in (0.35, 0.2, 0.5)),
    *(_fixed("equal experts", p, k) for p in (0.5, 0.25, 0.75) for k in (0.35, 0.2, 0.5)),
    *(_power(name, 1, as_it_is, "as it is") for name in DIRECTIONS if name.startswith("equal experts") and "+" not in name),
    *(_saturated("equal experts", form, k) for form in _FORMS for k in (0.35, 0.2, 0.5)),
    *(
        Candidate(
            f"{name}; p {p:g} by overlap; k {k:g} q {q:.2g} between", name, partial(power_by_overlap, p), partial(between, k, q=q)
        )
        for name in (
            _PLAIN,
            f"{_PLAIN}, uncentred",
            "more equal experts",
            "more equal experts, uncentred",
            "closed form + iso_cts",
        )
        for p in (0.5, 0.25)
        for k, q in ((0.17, 2 / 3), (0.12, 2 / 3), (0.22, 2 / 3), (0.075, 1), (0.06, 1), (0.09, 1), (0.35, 0.5))
    ),
    *(
        Candidate(f"{name}; p {p:g} by overlap; k {k:g} by rank", name, partial(power_by_overlap, p), partial(between_by_rank, k))
        for name in (f"{_PLAIN}, uncentred", _PLAIN)
        for p in (0.5, 0.25, 0.35)
        for k in (0.35, 0.4, 0.5, 0.6)
    ),
    *(
        Candidate(
            f"{_PLAIN}, uncentred; p {p:g} by overlap and rank; k {k:g} by rank to {e:g}",
            f"{_PLAIN}, uncentred",
            partial(power_by_overlap_and_rank, p),
            partial(between_by_rank, k, e=e),
        )
        for e in (0.5, 0.75, 1, 1.5)
        for p in (0.5,)
        for k in (0.4,)
    ),
    *(
        Candidate(
            f"{_PLAIN}, uncentred; p 0.5 by overlap; k 0.4 by rank to {e:g}",
            f"{_PLAIN}, uncentred",
            partial(power_by_overlap, 0.5),
            partial(between_by_rank, 0.4, e=e),
        )
        for e in (0.75, 1)
    ),
    *(_power(_PLAIN, p, partial(times_rms, c), f"{c:g} rms") for c in (0.4, 0.5, 0.6, 0.7, 0.8) for p in (0.25, 0.5, 0.75, 1)),
    *(_power("iso_cts", 0.5, partial(times_rms, c), f"{c:g} rms") for c in (0.4, 0.5, 0.6, 0.7, 0.8)),
    Candidate("equal experts; p by overlap; k 0.35", "equal experts", partial(power_by_overlap, 0.5), partial(geometric, 0.35)),
    Candidate(
        "equal experts; p by overlap; k 0.35 between", "equal experts", partial(power_by_overlap, 0.5), partial(between, 0.35)
    ),
    Candidate("equal experts; rank of all; k 0.35", "equal experts", rank_of_all, partial(geometric, 0.35)),
    Candidate(f"{_PLAIN}; p by overlap; k 0.35", _PLAIN, partial(power_by_overlap, 0.5), partial(geometric, 0.35)),
    Candidate(f"{_PLAIN}; p by overlap; k 0.35 between", _PLAIN, partial(power_by_overlap, 0.5), partial(between, 0.35)),
    Candidate(f"{_PLAIN}; rank of all; k 0.35", _PLAIN, rank_of_all, partial(geometric, 0.35)),
    *(_power(_PLAIN, 0.5, partial(geometric_spectral, k), f"spectral k {k:g}") for k in (0.1, 0.2, 0.35, 0.5)),
    _power(_PLAIN, 0.5, partial(geometric, 0.35), "k 0.35, one budget", whole=True),
    *(_power(_PLAIN, 0.5, partial(times_rms, c), f"{c:g} rms") for c in (1, 2, 3, 4, 5, 6)),
    *(_fixed(name, 0.5, 0.35) for name in DIRECTIONS if name not in ("ace", _PLAIN, "equal experts", "more equal experts")),
    *(
        Candidate(
            f"on the average: {name}; p {p:g}; {c:g} rms", name, partial(power, p), partial(times_rms, c), place=on_the_average
        )
        for name in ("apart", "beyond")
        for p in (0.5, 1)
        for c in (0.25, 0.5, 1, 1.5, 4)
    ),
    *(
        Candidate(f"on the average: {name}; p 1; as it is", name, partial(power, 1), as_it_is, place=on_the_average)
        for name in ("beyond, ace", "apart, tsv_m", "apart, iso_cts")
    ),
    *(
        Candidate(
            f"with the average: p 0.5; {c:g} rms", _UNCENTRED, partial(power, 0.5), partial(times_rms, c), place=with_the_average
        )
        for c in (1, 2.5)
    ),
    *(
        _held(name, p, k)
        for name, powers, strengths in (
            ("beyond", (0, 0.1, 0.25, 0.5), (0.03, 0.045, 0.06, 0.08, 0.1)),
            ("beyond", (0.2, 0.35), (0.06,)),
            ("apart", (0.25, 0.5), (0.03, 0.06, 0.1)),
            (_UNCENTRED, (0.25, 0.5), (0.03, 0.06)),
        )
        for p in powers
        for k in strengths
    ),
    *(_held("beyond", p, k, e) for e in (0.5, 1) for p in (0.25, 0.5) for k in (0.06, 0.08)),
]
