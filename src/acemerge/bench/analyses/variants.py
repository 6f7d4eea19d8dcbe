"""The paper's analyses of ACE, on any suite: each is a list of candidates for the same merge, measure and table."""

from __future__ import annotations

from typing import Any

from acemerge.bench.measure.run import BASE, EXPERTS, Candidate


def _ace(label: str, **request: Any) -> Candidate:
    return Candidate(label, {"method": "ace", **request})


def ablation() -> list[Candidate]:
    """E1 to E4 of the paper: the closed form alone, then with each of the three components added."""
    return [
        BASE,
        EXPERTS,
        _ace("E1 closed form", normalise=False, prior=False, refine=False),
        _ace("E2 + normalisation", normalise=True, prior=False, refine=False),
        _ace("E3 + prior", normalise=True, prior=True, refine=False),
        _ace("E4 + refinement", normalise=True, prior=True, refine=True),
    ]


def sensitivity() -> list[Candidate]:
    """tau and k_frac around their defaults, and epsilon over its range."""
    shares = (0.1, 0.2, 0.3, 0.4, 0.5)
    ridges = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    return [
        EXPERTS,
        *(_ace(f"tau={tau}", tau=tau) for tau in shares),
        *(_ace(f"k_frac={k_frac}", k_frac=k_frac) for k_frac in shares),
        *(_ace(f"epsilon={epsilon:g}", epsilon=epsilon) for epsilon in ridges),
    ]


def orientation() -> list[Candidate]:
    """Input covariances (canonical) against those of whatever axis is stored second; they differ where matrices are [in, out]."""
    ridges = (1e-5, 1e-3, 4e-2, 1.0)
    ways = ("canonical", "stored")
    return [
        BASE,
        EXPERTS,
        *(_ace(f"ace {way} epsilon={e:g}", orientation=way, epsilon=e) for e in ridges for way in ways),
        *(Candidate(f"{m} {way}", {"method": m, "orientation": way}) for m in ("actmat", "wudi") for way in ways),
        Candidate("task_arithmetic", {"method": "task_arithmetic"}),
        Candidate("tsv_m", {"method": "tsv_m"}),
    ]


def fused() -> list[Candidate]:
    """Matrices that hold several, such as GPT-2's q, k and v, merged as one (whole) and each for itself (apart)."""
    ways = ("whole", "apart")
    methods = ("ace", "ace_auto", "tsv_m", "iso_c")
    return [EXPERTS, *(Candidate(f"{m} {way}", {"method": m, "fused": way}) for m in methods for way in ways)]


_NEVER, _ALWAYS = 1e9, 0.0


_MATRICES_ONLY = [{"match": pattern, "do": "keep"} for pattern in ("*embed*", "*bias*", "*[Nn]orm*")]


def choices() -> list[Candidate]:
    """What each choice in ACE is worth: the branch, the ridge, the scale, which tensors merge, centring."""
    return [
        BASE,
        EXPERTS,
        _ace("ace"),
        _ace("never heterogeneous", tau=_NEVER),
        _ace("always heterogeneous", tau=_ALWAYS),
        _ace("always heterogeneous, not refined", tau=_ALWAYS, refine=False),
        _ace("no prior", prior=False),
        _ace("alpha=0.5", alpha=0.5),
        _ace("alpha=0.75", alpha=0.75),
        _ace("alpha=1.5", alpha=1.5),
        _ace("other tensors averaged", preset="generic"),
        _ace("other tensors averaged, never heterogeneous", preset="generic", tau=_NEVER),
        Candidate("not centred, no ridge (actmat)", {"method": "actmat"}),
        Candidate("task_arithmetic", {"method": "task_arithmetic"}),
        Candidate("task_arithmetic, matrices only", {"method": "task_arithmetic", "tensors": _MATRICES_ONLY}),
        Candidate("tsv_m", {"method": "tsv_m"}),
        Candidate("tsv_m, other tensors averaged", {"method": "tsv_m", "preset": "generic"}),
    ]


ANALYSES = {"ablation": ablation, "sensitivity": sensitivity, "choices": choices, "orientation": orientation, "fused": fused}
