"""The paper's suites by name. Each is made from the options that say where its models and data are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from acemerge.bench.data.glue import MATCHED, MISMATCHED
from acemerge.bench.suites.clip import clip_suite
from acemerge.bench.suites.language import gpt2_suite, llama_suite, roberta_suite
from acemerge.bench.suites.options import SuiteOptions
from acemerge.bench.suites.registry import Suite

PAPER_SUITES: dict[str, Callable[[str, SuiteOptions], Suite]] = {
    **{f"clip-vit-{b}-{n}": partial(clip_suite, b, n) for b in ("b32", "b16", "l14") for n in (8, 14, 20)},
    "gpt2-glue": partial(gpt2_suite, MATCHED),
    "gpt2-glue-mm": partial(gpt2_suite, MISMATCHED),
    "roberta-base-glue": partial(roberta_suite, "base"),
    "roberta-large-glue": partial(roberta_suite, "large"),
    "llama-3.2-3b": llama_suite,
}
