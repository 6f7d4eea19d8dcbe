"""A diagnosis as a page: summary, figures, and a table of every tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from acemerge.diagnosis.figures import figures
from acemerge.diagnosis.findings import compare_with_averaging, findings, verdict
from acemerge.diagnosis.measure import Diagnosis, TensorDiagnosis
from acemerge.layer_names import kinds_in_order
from acemerge.reports.page import Column, Finding, Page, Provenance, Table

_COLUMNS_OF_ACE = (
    Column("gamma", "gamma", "heterogeneity of the experts' energies, which chooses ACE's branch", ".3f"),
    Column("branch", "branch", "of ACE", choices=("heterogeneous", "homogeneous")),
    Column("ridge", "ridge share", "the regulariser's part of the trace of ACE's system", ".3f"),
    Column("leading", "top 5% of P", "share of ACE's closed form's energy in its top 5% of singular values", ".0%"),
)


def diagnosis_page(diagnosis: Diagnosis) -> Page:
    """What to show of it."""
    found = findings(diagnosis)
    level, sentence = verdict(found)
    experts = diagnosis.experts
    return Page(
        kind="acemerge: diagnosis before merging",
        title=f"{len(experts)} {'expert' if len(experts) == 1 else 'experts'} of {diagnosis.base}",
        lead=f"Experts: {', '.join(experts)}. Measured from the weights alone; nothing was merged or run.",
        level=level,
        verdict=sentence,
        findings=found,
        facts=_facts(diagnosis),
        figures=figures(diagnosis),
        table=tensor_table(diagnosis),
        provenance=_provenance(diagnosis),
        commands={} if level == "stop" else _next(diagnosis, found),
        details={"Notes": "\n".join(diagnosis.notes)} if diagnosis.notes else {},
    )


def _provenance(diagnosis: Diagnosis) -> Provenance:
    compared = [word for candidate in diagnosis.candidates for word in ("-m", candidate)]
    quick = ["--quick"] if diagnosis.quick else []
    command = diagnosis.command("diagnose", *compared, *quick, "-o", "report.html")
    return Provenance(command, diagnosis.versions, diagnosis.inputs, "where these models are")


def _next(diagnosis: Diagnosis, found: Sequence[Finding]) -> dict[str, str]:
    advised = {finding.command for finding in found}
    commands = {
        "See what a merge would do to every tensor, where these models are": diagnosis.command("plan"),
        "Merge": diagnosis.command("merge", "-o", "merged", "--report"),
        "Compare with averaging on data of yours, by a command that prints scores": compare_with_averaging(diagnosis),
    }
    return {purpose: command for purpose, command in commands.items() if command not in advised}


def _facts(diagnosis: Diagnosis) -> dict[str, str]:
    ace = diagnosis.ace
    extent = "first, middle and last layer (--quick)" if diagnosis.quick else "every matrix"
    ranks = {name: str(low) if low == high else f"{low} to {high}" for name, (low, high) in diagnosis.ranks.items()}
    return {
        "model type": diagnosis.model_type,
        "preset": diagnosis.preset,
        "tensors": f"{len(diagnosis.tensors)}, of them {len(diagnosis.matrices)} matrices that ACE merges",
        "ACE": f"epsilon {ace['epsilon']:g}, tau {ace['tau']:g}, k_frac {ace['k_frac']:g}",
        "distances and spectra": extent,
        **({"adapter ranks": ", ".join(f"{name} {rank}" for name, rank in ranks.items())} if ranks else {}),
    }


def tensor_table(diagnosis: Diagnosis) -> Table:
    """A row for each tensor."""
    kinds = kinds_in_order(tensor.kind for tensor in diagnosis.tensors)
    columns = [
        Column("name", "tensor", "name in the base"),
        Column("kind", "kind", "kind of layer", choices=kinds),
        Column("depth", "layer", "counted from 0", ".0f"),
        Column("shape", "shape", "as stored"),
        Column("fate", "fate", "what a merge by ACE would do with it", choices=sorted({t.fate for t in diagnosis.tensors})),
        *(_COLUMNS_OF_ACE if diagnosis.compares_ace else ()),
        *(Column(f"forecast {c}", c, f"distance of {c} under ACE's own objective", ".2f") for c in diagnosis.candidates),
        Column("conflict", "conflicts", "mean share of opposite signs between two experts", ".0%"),
        Column("cosine", "cosine", "mean cosine between two experts' changes", ".2f"),
        Column("normal", "from normal", "largest distance of an expert's entries from a normal distribution function", ".3f"),
        Column("mean", "mean/sd", "largest mean of an expert's entries, in standard deviations", ".3f"),
        *(Column(f"norm {e}", f"|D| {e}", f"length of {e}'s change", ".3g") for e in diagnosis.experts),
    ]  # fmt: skip
    caption = "Choose a heading to sort by it; hold the pointer over it for its meaning. |D| is the length of an expert's change."
    return Table(caption, columns, [_record(diagnosis, tensor) for tensor in diagnosis.tensors])


def _record(diagnosis: Diagnosis, tensor: TensorDiagnosis) -> dict[str, str | float | None]:
    entries = tensor.entries
    gamma = tensor.gamma if tensor.fate == "merged" else None  # elsewhere it decides nothing
    branch = "" if gamma is None else "heterogeneous" if tensor.heterogeneous else "homogeneous"
    means = [abs(m) / d for m, d in zip(entries.mean, entries.deviation, strict=True) if d]
    distances = [distance for distance in entries.normal_distance if distance is not None]
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "depth": tensor.depth,
        "shape": "x".join(map(str, tensor.shape)) or "scalar",
        "fate": tensor.fate,
        "gamma": gamma if gamma is None or math.isfinite(gamma) else None,
        "branch": branch,
        "ridge": tensor.ridge_share,
        **{f"forecast {c}": tensor.forecasts[c].objective if c in tensor.forecasts else None for c in diagnosis.candidates},
        "leading": tensor.spectra.plain.leading_energy if tensor.spectra else None,
        "conflict": _mean_of_pairs(entries.signs_opposed, entries.signs_shared),
        "cosine": _mean_of_pairs(entries.inner, _norm_products(entries.energies)),
        "normal": max(distances, default=None),
        "mean": max(means, default=None),
        **{
            f"norm {diagnosis.experts[expert]}": math.sqrt(energy)
            for expert, energy in zip(tensor.experts, entries.energies, strict=True)
        },
    }


def _norm_products(energies: Sequence[float]) -> list[list[float]]:
    return [[math.sqrt(a * b) for b in energies] for a in energies]


def _mean_of_pairs(over: Sequence[Sequence[float]], under: Sequence[Sequence[float]]) -> float | None:
    found = [over[s][t] / under[s][t] for s in range(len(over)) for t in range(s) if under[s][t]]
    return sum(found) / len(found) if found else None
