"""What mergekit calls the options of methods that it has too: a hint for those who come from there, nothing is accepted by it."""

from __future__ import annotations

from collections.abc import Mapping

_SAME = "{theirs} is called '{ours}' here"
_COMPLEMENT = "{theirs} is 1 - '{ours}' here"
_HALF = "{theirs} is half of '{ours}' here"
_TRUE_BY_ROW = "{theirs}: true is '{ours}=row' here"
_FALSE_BY_ROW = "{theirs}: false is '{ours}=row' here"
_TRUE_BY_COLUMN = "{theirs}: true is '{ours}=column' here"
_TRUE_IS_MEAN = "{theirs}: true is '{ours}=mean' here, and false '{ours}=sum'"
_TRUE_IS_DIVIDED = "{theirs}: true divides by the sum of the weights; divide '{ours}' themselves here"
_NEEDLESS = "{theirs} changes nothing in the result; leave it out"
_NONE_LIKE_IT = "{theirs}: true has no counterpart in this method here, and false is what it does; leave it out"
_TRUE_ALWAYS = "{theirs}: true is what this method does here; leave it out"

_ANY_METHOD = {"lambda": (_SAME, "alpha"), "int8_mask": (_NEEDLESS, "")}
_SCALED = {"weight": (_SAME, "weights")}
_SUMMED = {**_SCALED, "normalize": (_TRUE_IS_DIVIDED, "weights")}
_ELECTED = {**_SCALED, "normalize": (_TRUE_IS_MEAN, "merge")}
_TRIMMED = {"density": (_SAME, "keep"), "rescale": (_NONE_LIKE_IT, "")}
_OUTLIERS = {**_TRIMMED, "gamma": (_SAME, "outliers")}
_DROPPED = {"density": (_COMPLEMENT, "drop")}
_DROPPED_BY_SIZE = {**_DROPPED, "epsilon": (_HALF, "window")}
_NAMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "linear": {"weight": (_SAME, "weights"), "normalize": (_SAME, "normalise")},
    "task_arithmetic": {**_SUMMED, "density": (_NEEDLESS, ""), "rescale": (_NEEDLESS, "")},
    "ties": {**_ELECTED, **_TRIMMED},
    "dare_task_arithmetic": {**_SUMMED, **_DROPPED},
    "dare_ties": {**_ELECTED, **_DROPPED},
    "della": {**_SCALED, **_DROPPED_BY_SIZE, "normalize": (_TRUE_ALWAYS, "")},
    "della_linear": {**_SCALED, **_DROPPED_BY_SIZE, "normalize": (_SAME, "normalise")},
    "breadcrumbs": {**_SUMMED, **_OUTLIERS},
    "breadcrumbs_ties": {**_ELECTED, **_OUTLIERS},
    "model_stock": {"filter_wise": (_TRUE_BY_ROW, "scope")},
    "sce": {"select_topk": (_SAME, "select")},
    "nuslerp": {
        "weight": (_SAME, "weights"),
        "nuslerp_flatten": (_FALSE_BY_ROW, "scope"),
        "nuslerp_row_wise": (_TRUE_BY_COLUMN, "scope"),
    },
    "multislerp": {"weight": (_SAME, "weights"), "normalize_weights": (_SAME, "normalise"), "eps": (_NEEDLESS, "")},
    "karcher": {"max_iter": (_SAME, "iterations"), "tol": (_SAME, "tolerance")},
    "ram_plus": {"r": (_SAME, "strength")},
    "knots_ties": {**_ELECTED, **_TRIMMED},  # of ties, which it runs
}


def mergekit_hint(method: str, option: str) -> str | None:
    """What an option of mergekit's is here, if it is anything.

    >>> mergekit_hint("ties", "density"), mergekit_hint("dare_ties", "density"), mergekit_hint("ace", "density")
    ("mergekit's density is called 'keep' here", "mergekit's density is 1 - 'drop' here", None)
    """
    told = {**_ANY_METHOD, **_NAMES.get(method, {})}.get(option)
    return told[0].format(theirs=f"mergekit's {option}", ours=told[1]) if told else None
