"""The diagnosis in a few numbers: over all layers, for each pair of experts, each expert and each candidate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from acemerge.diagnosis.measure import Diagnosis, TensorDiagnosis
from acemerge.output.overreach import evenly_spread, middle

CAVEAT = "This is what ACE minimises, not accuracy: a smaller number does not mean a better merge."
Matrix = list[list[float | None]]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Summary:
    """Aggregates of one diagnosis."""

    diagnosis: Diagnosis

    @property
    def tasks(self) -> range:
        """The experts' indices."""
        return range(len(self.diagnosis.experts))

    @cached_property
    def inner_products(self) -> list[list[float]]:
        """Of the experts' changes, over all merged matrices."""
        return self._pairs(lambda tensor, s, t: tensor.entries.inner[s][t])

    @cached_property
    def cosines(self) -> Matrix:
        """Of the experts' changes over all merged matrices; None where an expert changed nothing."""
        inner = self.inner_products
        energy = [inner[t][t] for t in self.tasks]
        return self._matrix(lambda s, t: _over(inner[s][t], math.sqrt(energy[s] * energy[t])))

    @cached_property
    def sign_conflicts(self) -> Matrix:
        """The share of the entries changed by both experts that they changed in opposite directions; half by chance."""
        opposed = self._pairs(lambda tensor, s, t: tensor.entries.signs_opposed[s][t])
        shared = self._pairs(lambda tensor, s, t: tensor.entries.signs_shared[s][t])
        return self._matrix(lambda s, t: _over(opposed[s][t], shared[s][t]))

    @cached_property
    def overlaps(self) -> Matrix:
        """Of the experts' leading input directions, the mean over the matrices whose spectra were taken."""
        return self._matrix(self._overlap)

    @cached_property
    def chance_overlap(self) -> float | None:
        """What unrelated experts would have."""
        return _mean(tensor.spectra.chance for tensor in self.diagnosis.matrices if tensor.spectra)

    def _overlap(self, s: int, t: int) -> float | None:
        return _mean(
            tensor.spectra.overlap[tensor.experts.index(s)][tensor.experts.index(t)]
            for tensor in self.diagnosis.matrices
            if tensor.spectra and s in tensor.experts and t in tensor.experts
        )

    def _pairs(self, value: Callable[[TensorDiagnosis, int, int], float]) -> list[list[float]]:
        total = [[0.0 for _ in self.tasks] for _ in self.tasks]
        for tensor in self.diagnosis.matrices:
            for row, s in enumerate(tensor.experts):
                for column, t in enumerate(tensor.experts):
                    total[s][t] += value(tensor, row, column)
        return total

    def _matrix(self, value: Callable[[int, int], float | None]) -> Matrix:
        return [[value(s, t) for t in self.tasks] for s in self.tasks]

    @cached_property
    def too_long(self) -> dict[str, float]:
        """Of the candidates of which `merge` would warn, how far they go."""
        looked = evenly_spread([tensor.forecasts for tensor in self.diagnosis.matrices if tensor.forecasts])
        times = {label: middle([own[label].times_allowed for own in looked]) for label in self.diagnosis.candidates}
        return {label: far for label, far in times.items() if far is not None and far > 1}

    @cached_property
    def energies(self) -> list[float]:
        """Each expert's |D_t|_F^2 over all merged matrices."""
        return [math.fsum(self._of(t, lambda tensor, row: tensor.entries.energies[row])) for t in self.tasks]

    @cached_property
    def base_cosines(self) -> list[float | None]:
        """The median over matrices of each expert's cosine with the base."""
        found = [
            [c for c in self._of(t, lambda tensor, row: tensor.entries.base_cosine[row]) if c is not None] for t in self.tasks
        ]
        return [statistics.median(cosines) if cosines else None for cosines in found]

    @cached_property
    def relative_changes(self) -> list[float]:
        """Each expert's |D| / |W0| over all merged matrices."""
        base = [math.fsum(self._of(t, lambda tensor, _: tensor.entries.base_energy)) for t in self.tasks]
        return [math.sqrt(_over(energy, size) or 0.0) for energy, size in zip(self.energies, base, strict=True)]

    @cached_property
    def mean_shares(self) -> list[float | None]:
        """The part of each expert's energy that lies in column means: what ACE's centring removes. Weighted by energy."""
        return [self._weighted(t, lambda tensor, row: tensor.mean_share[row]) for t in self.tasks]

    @cached_property
    def leading_energies(self) -> list[float | None]:
        """The median over matrices of the share of an expert's change in its top 5% of singular values: 1 for a low rank."""
        found = [
            self._of(t, lambda tensor, row: tensor.spectra.leading_energies[row] if tensor.spectra else None) for t in self.tasks
        ]
        shares = [[share for share in own if share is not None] for own in found]
        return [statistics.median(own) if own else None for own in shares]

    def interference(self, candidate: str, expert: int, tensors: Iterable[TensorDiagnosis] | None = None) -> float | None:
        """The mean over matrices of what the candidate would do to one expert: 0 as the expert, 1 as the base."""
        found = []
        for tensor in self.diagnosis.matrices if tensors is None else tensors:
            if candidate in tensor.forecasts and expert in tensor.experts:
                found.append(tensor.forecasts[candidate].interference[tensor.experts.index(expert)])
        return _mean(value for value in found if value is not None)

    def objective(self, candidate: str, tensors: Iterable[TensorDiagnosis] | None = None) -> float | None:
        """The mean over matrices of the layer objective of all experts together, over the base's."""
        chosen = self.diagnosis.matrices if tensors is None else tensors
        found = [tensor.forecasts[candidate].objective for tensor in chosen if candidate in tensor.forecasts]
        return _mean(value for value in found if value is not None)

    @cached_property
    def forecasts(self) -> dict[str, float]:
        """Candidate -> its objective, in the order asked for: it is no ranking."""
        means = {candidate: self.objective(candidate) for candidate in self.diagnosis.candidates}
        return {candidate: mean for candidate, mean in means.items() if mean is not None}

    def _of(self, t: int, value: Callable[[TensorDiagnosis, int], Value]) -> list[Value]:
        return [value(tensor, tensor.experts.index(t)) for tensor in self.diagnosis.matrices if t in tensor.experts]

    def _weighted(self, t: int, value: Callable[[TensorDiagnosis, int], float]) -> float | None:
        changed = [x for x in self.diagnosis.matrices if t in x.experts and x.mean_share]
        rows = [(x.entries.energies[x.experts.index(t)], value(x, x.experts.index(t))) for x in changed]
        return _over(math.fsum(energy * share for energy, share in rows), math.fsum(energy for energy, _ in rows))


def pairs(matrix: Matrix) -> list[tuple[float, int, int]]:
    """Every pair of different experts that has a value, the smallest first."""
    found = [(value, s, t) for s, row in enumerate(matrix) for t, value in enumerate(row) if s < t and value is not None]
    return sorted(found)


def _over(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: Iterable[float]) -> float | None:
    found: Sequence[float] = list(values)
    return statistics.fmean(found) if found else None
