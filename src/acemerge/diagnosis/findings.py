"""What the numbers mean, in words, and what to do about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import yaml

from acemerge.diagnosis.measure import Diagnosis, TensorDiagnosis
from acemerge.diagnosis.summary import Summary, pairs
from acemerge.planning.kinship import IF_SWAPPED, RELATED, SWAPPED, seems_the_base
from acemerge.recipe.recipe import DEFAULT_METHOD
from acemerge.reports.page import Finding, Level, gravest_first

FAR = 0.3
"""A change longer than this share of the base itself is no small fine-tune."""
DUPLICATE, ALIKE, OPPOSED = 0.99, 0.5, -0.2
NEAR_ONE = 1.0
"""Of the mean log energy: within a factor e of 1."""
STRONG = 10.0
"""Times the median energy: an expert that overrules the others where nothing is normalised."""
RIDGE_DOMINATES, CENTRED_AWAY, KEPT_CHANGE, LOW_RANK = 0.5, 0.3, 0.1, 0.999
_MOST_RULES = 4
_MOST_NAMES = 5


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """All of them, the gravest first. Of what cannot be merged at all nothing else is said: beside a stranger all looks odd."""
    summary = Summary(diagnosis)
    found = [finding for look in _LOOKS for finding in look(summary)]
    found = [finding for finding in found if finding.level == "stop"] or found
    return gravest_first(_each_command_once(found))


def _each_command_once(found: list[Finding]) -> list[Finding]:
    """What two findings advise is to be run once."""
    first = {finding.command: i for i, finding in reversed(list(enumerate(found)))}
    return [replace(finding, command=finding.command if first[finding.command] == i else "") for i, finding in enumerate(found)]


def verdict(found: list[Finding]) -> tuple[Level, str]:
    """The whole in one sentence."""
    levels = [finding.level for finding in found]
    if "stop" in levels:
        return "stop", "Do not merge these as they are."
    cautions = levels.count("caution")
    if cautions:
        return (
            "caution",
            f"These can be merged; {cautions} {'thing deserves' if cautions == 1 else 'things deserve'} a look first.",
        )
    return "good", "These experts look mergeable."


def _origin(summary: Summary) -> Iterator[Finding]:
    """Whether the experts are fine-tunes of the base at all."""
    names, strangers = summary.diagnosis.experts, _strangers(summary)
    for t, (name, energy) in enumerate(zip(names, summary.energies, strict=True)):
        if energy == 0:
            yield Finding(
                "caution",
                f"Expert '{name}' has not changed a single matrix.",
                "Leave it out: it adds nothing, and averaging dilutes the other experts with it.",
                _merge_without(summary, t),
            )
        elif t in strangers:
            yield Finding(
                "stop",
                f"Expert '{name}' does not look like a fine-tune of this base: the median cosine of its matrices with the base's "
                f"is {summary.base_cosines[t]:z.2f}, where a fine-tune's is near 1.",
                "Give the base that it was trained from, or look at the others without it: models of different origin cannot be "
                "merged weight by weight.",
                summary.diagnosis.command("diagnose", "-o", "diagnosis.html", only=set(summary.tasks) - strangers),
            )


def _strangers(summary: Summary) -> set[int]:
    """Those whose matrices are not the base's; an adapter has none to tell by."""
    judged = zip(summary.base_cosines, summary.energies, summary.diagnosis.experts, strict=True)
    return {
        t for t, (cosine, energy, name) in enumerate(judged)
        if energy and cosine is not None and cosine < RELATED and name not in summary.diagnosis.adapters
    }  # fmt: skip


def _far(summary: Summary) -> Iterator[Finding]:
    """Experts that moved far, in one sentence."""
    changes = dict(zip(summary.diagnosis.experts, summary.relative_changes, strict=True))
    far = {name: change for name, change in changes.items() if change > FAR}
    if far:
        told = _names(list(far))
        least, most = (f"{end:.0%}" for end in (min(far.values()), max(far.values())))
        own = (
            f"its change is {most}" if len(far) == 1 else f"their changes are {least if least == most else f'{least} to {most}'}"
        )
        yield Finding(
            "caution",
            f"{told[:1].upper()}{told[1:]} moved far from the base: {own} of the base's own length.",
            "Make sure that this is the base. After long training merged models lose more; evaluate with care.",
            compare_with_averaging(summary.diagnosis),
        )


def _pairs_of_experts(summary: Summary) -> Iterator[Finding]:
    names = summary.diagnosis.experts
    ranked = pairs(summary.cosines)
    for cosine, s, t in ranked:
        if cosine > DUPLICATE:
            yield Finding(
                "caution",
                f"Experts '{names[s]}' and '{names[t]}' made nearly the same change (cosine {cosine:.3f}).",
                "Keep one of them: twice the same expert counts double.",
                _merge_without(summary, t),
            )
        elif cosine < OPPOSED:
            yield Finding(
                "caution",
                f"Experts '{names[s]}' and '{names[t]}' pull in opposite directions (cosine {cosine:.2f}).",
                "No single model can follow both; evaluate these two first, or leave one out.",
                compare_with_averaging(summary.diagnosis, only={s, t}),
            )
    if ranked and ranked[0][0] >= OPPOSED and ranked[-1][0] <= DUPLICATE:
        yield Finding("good", _said_of_cosines(ranked, names))


def _said_of_cosines(ranked: Sequence[tuple[float, int, int]], names: Sequence[str]) -> str:
    if len(ranked) == 1:
        return f"The cosine between the two experts' changes is {ranked[0][0]:z.2f}."
    (low, *least), (high, *most) = ranked[0], ranked[-1]
    a, b = (" and ".join(f"'{names[expert]}'" for expert in pair) for pair in (least, most))
    kind = "different" if high < ALIKE else "partly the same"
    return f"Experts changed {kind} things: cosines between their changes go from {low:z.2f} ({a}) to {high:z.2f} ({b})."


def _swapped(summary: Summary) -> Iterator[Finding]:
    """An expert that may be the base itself."""
    inner, names = summary.inner_products, summary.diagnosis.experts
    for t in summary.tasks:
        if seems_the_base(inner, t):
            yield Finding("caution", f"Expert '{names[t]}' {SWAPPED}.", f"{IF_SWAPPED[:1].upper()}{IF_SWAPPED[1:]}.")


def _strength(summary: Summary) -> Iterator[Finding]:
    """Experts of unequal strength, and what ACE makes of that."""
    diagnosis = summary.diagnosis
    active = [(energy, name) for energy, name in zip(summary.energies, diagnosis.experts, strict=True) if energy > 0]
    if len(active) > 1:
        middle = statistics.median(energy for energy, _ in active)
        for energy, name in active:
            if energy > STRONG * middle:
                yield Finding(
                    "caution",
                    f"Expert '{name}' changed {energy / middle:.0f} times as much (in energy) as the middle one.",
                    "Averaging and task arithmetic will follow it. ACE normalises such layers where gamma > tau; see the first "
                    "figure.",
                    compare_with_averaging(summary.diagnosis),
                )
    judged = [tensor for tensor in diagnosis.matrices if tensor.gamma is not None]
    if judged:
        count, tau = sum(tensor.heterogeneous for tensor in judged), diagnosis.ace["tau"]
        text = (
            f"{count} of {len(judged)} matrices are heterogeneous (gamma above tau = {tau:g}): there ACE weighs experts equally "
            "and refines the spectrum." + ("" if count == len(judged) else " In the others it keeps their own strength.")
        )
        none = f"None of the {len(judged)} matrices has gamma above tau = {tau:g}: ACE keeps the experts' own strength."
        if len(diagnosis.experts) > 1:
            yield Finding("good", text if count else none)


def _scale(summary: Summary) -> Iterator[Finding]:
    """gamma divides by the squared mean of log energies, so it has no bound where energies are near 1."""
    judged = [tensor for tensor in summary.diagnosis.matrices if tensor.gamma is not None]
    logs = [[math.log(energy) for energy in tensor.entries.energies if energy > 0] for tensor in judged]
    near_one = [
        tensor for tensor, own in zip(judged, logs, strict=True)
        if tensor.heterogeneous and len(own) > 1 and abs(statistics.fmean(own)) < NEAR_ONE
    ]  # fmt: skip
    if near_one:
        yield Finding(
            "caution",
            f"In {len(near_one)} of {len(judged)} matrices gamma is large because the experts' energies lie near 1, where its "
            "denominator vanishes, not because experts differ more than elsewhere: gamma depends on the scale of the weights.",
            "Which of ACE's branches suits them, a test has to say.",
            _sweep(summary.diagnosis, "-m", "ace", "--set", f"tau={summary.diagnosis.ace['tau']:g},1e9"),
        )


def _regularisation(summary: Summary) -> Iterator[Finding]:
    matrices = [tensor for tensor in summary.diagnosis.matrices if tensor.ridge_share is not None]
    heavy = [tensor for tensor in matrices if (tensor.ridge_share or 0) > RIDGE_DOMINATES]
    epsilon = summary.diagnosis.ace["epsilon"]
    if heavy:
        yield Finding(
            "caution",
            f"In {len(heavy)} of {len(matrices)} matrices the regulariser outweighs the experts' covariances "
            f"(epsilon {epsilon:g} against changes this small), so ACE is close to averaging there.",
            f"Evaluate a smaller epsilon as well, such as -m ace -s epsilon={epsilon / 100:g}",
            _sweep(summary.diagnosis, "-m", "ace", "--set", f"epsilon={epsilon:g},{epsilon / 100:g}"),
        )


def _centring(summary: Summary) -> Iterator[Finding]:
    """The zero-mean assumption A3: ACE removes column means and does not put them back."""
    for name, share in zip(summary.diagnosis.experts, summary.mean_shares, strict=True):
        if share is not None and share > CENTRED_AWAY:
            yield Finding(
                "caution",
                f"{share:.0%} of the change of expert '{name}' lies in column means, which ACE takes for noise and removes.",
                "The assumption of zero means does not hold for it; evaluate its task first.",
                compare_with_averaging(summary.diagnosis),
            )


def _kept(summary: Summary) -> Iterator[Finding]:
    """What experts changed and the preset leaves at the base, by methods such as ACE; others average it."""
    diagnosis = summary.diagnosis
    alike: dict[tuple[str, ...], list[str]] = {}  # tensors -> the experts that changed these
    for t, name in enumerate(diagnosis.experts):
        kept = [x for x in diagnosis.tensors if x.fate == "kept" and t in x.experts]
        changed = tuple(x.name for x in kept if len(x.shape) > 1 and _relative_energy(x, t) > KEPT_CHANGE**2)
        alike.setdefault(changed, []).append(name)
    for changed, names in alike.items():
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            told = _names(names)
            yield Finding(
                "caution",
                f"{told[:1].upper()}{told[1:]} changed '{changed[0]}'{more} by over {KEPT_CHANGE:.0%}. With the preset "
                f"'{diagnosis.preset}' methods for matrices, such as ace, keep the base's values; {DEFAULT_METHOD} averages "
                "where shapes are equal.",
                f"If {'the expert depends' if len(names) == 1 else 'these depend'} on it, and the method keeps it, add a recipe "
                "rule {match: PATTERN, do: average}.",
                _rules(changed),
            )


def _relative_energy(tensor: TensorDiagnosis, expert: int) -> float:
    """|D_t|^2 / |W0|^2; a tensor that is zero in the base counts as unchanged."""
    base = tensor.entries.base_energy
    return tensor.entries.energies[tensor.experts.index(expert)] / base if base else 0.0


def _ranks(summary: Summary) -> Iterator[Finding]:
    """Low-rank changes: LoRA fine-tunes, whether given as adapters or merged into full models."""
    found = zip(summary.diagnosis.experts, summary.leading_energies, strict=True)
    adapters = summary.diagnosis.adapters
    low = [name for name, share in found if name in adapters or (share is not None and share > LOW_RANK)]
    if low:
        yield Finding(
            "caution",
            f"The changes of {_names(low)} are carried by very few directions, as LoRA's are. What such changes reveal of an "
            "expert's inputs is mostly the adapter's random start, so ACE's objective says little here: where it was measured, "
            "averaging LoRA experts kept 93% of their accuracy and ACE with its defaults 63% (docs/adapters.md).",
            "Merge by averaging as well, and evaluate both.",
            compare_with_averaging(summary.diagnosis),
        )


def _too_long(summary: Summary) -> Iterator[Finding]:
    """What `merge` would warn of when it is done."""
    if summary.too_long:
        told = ", ".join(f"{label} ({times:.1f} times)" for label, times in summary.too_long.items())
        yield Finding(
            "caution",
            f"Merges that would be longer than a merge of these models should be: {told}. Of merges that went so far, almost all "
            "that were measured were worse than averaging (docs/guard.md).",
            "Evaluate them beside averaging.",
            compare_with_averaging(summary.diagnosis),
        )


def compare_with_averaging(diagnosis: Diagnosis, only: Collection[int] | None = None) -> str:
    """On data of the user's: the base, the experts and averaging are scored besides."""
    return _sweep(diagnosis, "-m", DEFAULT_METHOD, "-m", "average", only=only)


def _sweep(diagnosis: Diagnosis, *settings: str, only: Collection[int] | None = None) -> str:
    return diagnosis.command("sweep", *settings, "--evaluate", "python your_score.py", "-o", "compared", only=only)


def _merge_without(summary: Summary, expert: int) -> str:
    others = {t for t in summary.tasks if t != expert}
    return summary.diagnosis.command("merge", "-o", "merged", only=others)


def _rules(names: Sequence[str]) -> str:
    """For a recipe."""
    rules = [{"match": name, "do": "average"} for name in names[:_MOST_RULES]]
    return yaml.safe_dump({"tensors": rules}, default_flow_style=True, sort_keys=False, width=math.inf).strip().strip("{}")


_LOOKS: tuple[Callable[[Summary], Iterator[Finding]], ...] = (
    _origin, _far, _swapped, _pairs_of_experts, _strength, _scale, _regularisation, _centring, _kept, _ranks, _too_long
)  # fmt: skip


def _names(names: list[str]) -> str:
    """As a sentence has them.

    >>> _names(["a"]), _names(list("abcde")), _names(list("abcdef"))
    ("expert 'a'", "'a', 'b', 'c', 'd', 'e'", "'a', 'b', 'c', 'd' and 2 more experts")
    """
    shown = ", ".join(f"'{name}'" for name in (names if len(names) <= _MOST_NAMES else names[: _MOST_NAMES - 1]))
    more = f" and {len(names) - _MOST_NAMES + 1} more experts" if len(names) > _MOST_NAMES else ""
    return f"expert {shown}" if len(names) == 1 else f"{shown}{more}"
