"""What mergekit calls the options of methods that it has too: a hint for those who come from there, nothing is accepted by it."""

from __future__ import annotations

from collections.abc import Mapping

_SAME = "{theirs} is called '{ours}' here"
_COMPLEMENT = "{theirs} is 1 - '{ours}' here"
_HALF = "{theirs} is half of '{ours}' here"
_TRUE_BY_ROW = "{theirs}: true is '{ours}=row' here"
_FALSE_BY_ROW = "{theirs}: false is '{ours}=row' here"
_TRUE_BY_COLUMN = "{theirs}: true is '{ours}=column' here"

_LAMBDA = {"lambda": (_SAME, "alpha")}
_SCALED = {**_LAMBDA, "weight": (_SAME, "weights")}
_NAMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "linear": {"weight": (_SAME, "weights"), "normalize": (_SAME, "normalise")},
    "task_arithmetic": _SCALED,
    "ties": {**_SCALED, "density": (_SAME, "keep")},
    "dare_task_arithmetic": {**_SCALED, "density": (_COMPLEMENT, "drop")},
    "dare_ties": {**_SCALED, "density": (_COMPLEMENT, "drop")},
    "della": {**_SCALED, "density": (_COMPLEMENT, "drop"), "epsilon": (_HALF, "window")},
    "breadcrumbs": {**_SCALED, "density": (_SAME, "keep"), "gamma": (_SAME, "outliers")},
    "model_stock": {"filter_wise": (_TRUE_BY_ROW, "scope")},
    "sce": {"select_topk": (_SAME, "select")},
    "della_linear": {
        **_LAMBDA,
        "weight": (_SAME, "weights"),
        "density": (_COMPLEMENT, "drop"),
        "epsilon": (_HALF, "window"),
        "normalize": (_SAME, "normalise"),
    },
    "breadcrumbs_ties": {**_SCALED, "density": (_SAME, "keep"), "gamma": (_SAME, "outliers")},
    "nuslerp": {
        "weight": (_SAME, "weights"),
        "nuslerp_flatten": (_FALSE_BY_ROW, "scope"),
        "nuslerp_row_wise": (_TRUE_BY_COLUMN, "scope"),
    },
    "multislerp": {"weight": (_SAME, "weights"), "normalize_weights": (_SAME, "normalise")},
    "karcher": {"max_iter": (_SAME, "iterations"), "tol": (_SAME, "tolerance")},
    "ram_plus": {"r": (_SAME, "strength")},
    "knots_ties": {**_SCALED, "density": (_SAME, "keep")},  # of ties, which it runs
}


def mergekit_hint(method: str, option: str) -> str | None:
    """What an option of mergekit's is here, if it means the same.

    >>> mergekit_hint("ties", "density"), mergekit_hint("dare_ties", "density"), mergekit_hint("ace", "density")
    ("mergekit's density is called 'keep' here", "mergekit's density is 1 - 'drop' here", None)
    """
    told = _NAMES.get(method, {}).get(option)
    return told[0].format(theirs=f"mergekit's {option}", ours=told[1]) if told else None
