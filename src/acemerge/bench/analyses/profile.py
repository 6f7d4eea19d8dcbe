"""A look inside ACE on a suite's experts, by kind of layer: a diagnosis as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from acemerge.bench.suites.plan import suite_recipe
from acemerge.bench.suites.registry import Suite
from acemerge.diagnosis.measure import Diagnosis, TensorDiagnosis, measure
from acemerge.execute.opening import find_sources
from acemerge.layer_names import kinds_in_order
from acemerge.planning.progress import SilentProgress


def profile(suite: Suite, seed: int) -> Diagnosis:
    """Of every merged matrix."""
    recipe = suite_recipe(suite, seed)
    return measure(recipe, find_sources(recipe, offline=True), SilentProgress(), candidates=["ace"])


def profile_table(diagnosis: Diagnosis) -> list[list[str]]:
    """By kind of matrix, over its layers."""
    lines = [
        [
            "matrix",
            "layers",
            "gamma",
            "heterogeneous",
            "ridge share",
            "norm / largest task",
            "rank of P",
            "rank of M",
            "top 5% of P",
            "top 5% of M",
            "cosine",
        ]
    ]
    for kind in kinds_in_order(tensor.kind for tensor in diagnosis.matrices):
        lines.append([kind, *_line([tensor for tensor in diagnosis.matrices if tensor.kind == kind])])
    return lines


def _line(tensors: Sequence[TensorDiagnosis]) -> list[str]:
    gammas = [tensor.gamma for tensor in tensors if tensor.gamma is not None]
    spectra = [tensor.spectra for tensor in tensors if tensor.spectra]
    return [
        str(len(tensors)),
        f"{min(gammas):.2f}-{max(gammas):.2f}" if gammas else "",
        f"{sum(tensor.heterogeneous for tensor in tensors)} of {len(tensors)}",
        _mean([tensor.ridge_share for tensor in tensors if tensor.ridge_share is not None], ".3f"),
        _mean([tensor.forecasts["ace"].norm_ratio for tensor in tensors if tensor.forecasts], ".2f"),
        _mean([found.plain.stable_rank for found in spectra], ".1f"),
        _mean([found.merged.stable_rank for found in spectra], ".1f"),
        _mean([found.plain.leading_energy for found in spectra], ".0%"),
        _mean([found.merged.leading_energy for found in spectra], ".0%"),
        _mean([found.leading_cosine for found in spectra], ".3f"),
    ]


def _mean(values: Sequence[float], form: str) -> str:
    return format(statistics.fmean(values), form) if values else ""
