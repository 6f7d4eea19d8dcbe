"""Fisher merging: the diagonal of each expert's Fisher information, from gradients of its own answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.calibration.measured import Measured, Tensors, keep
from acemerge.calibration.registry import measures
from acemerge.calibration.run import DataRun, ExpertModel
from acemerge.errors import InputError
from acemerge.methods.fisher import FisherOptions
from acemerge.numerics.linalg import sum_of_squares
from acemerge.numerics.randomness import generator_for

NEGLIGIBLE = 1e-7
"""Directions of the answers' covariance below this share of the largest are within float32's rounding."""
MOST_PASSES = 2_000
"""Backward passes for one row, beyond which the exact form is refused."""
SUMMED_ROWS = 16
"""Rows whose gradients the variant of other libraries sums before it squares."""

Score = tuple[float, Tensor]
"""A weight w and a scalar s of the parameters: they stand for w (ds/dtheta)^2."""


@dataclass(frozen=True)
class Information(Measured):
    """Each expert's diagonal Fisher information, and its scale."""

    scales: Mapping[str, float]

    def scale(self, expert: str) -> float:
        """1 over the root mean square: of the expert's own information, or of all experts' together."""
        return self.scales[expert]


@measures("fisher")
def measure_information(run: DataRun, options: FisherOptions) -> Information:
    """F_t of every expert, one expert at a time, one row at a time."""
    files = {}
    for index, expert in enumerate(run.experts):
        run.progress.say(f"Fisher information of '{expert.name}' on {run.inputs(index, options.rows).rows} rows")
        scale = 1.0 if options.scales == "equal" else options.scales[index]
        place = [] if scale == 1 else ["at", scale, run.hashes[run.plan.base.name]]
        key = ["information", options.form, options.seed, *run.key(index, options.rows), *place]
        files[expert.name] = [keep(key, partial(expert_information, run, index, options, scale))]
    return Information(files, information_scales(run, Measured(files), options.normalise))


def information_scales(run: DataRun, measured: Measured, normalise: bool) -> dict[str, float]:
    """1 / RMS(F_t) over all merged tensors; without `normalise` one scale for all, which changes nothing but the floor."""
    energies: dict[str, float] = {}
    for expert in run.experts:
        found = (measured.of(expert.name, planned.name) for planned in run.tensors)
        energies[expert.name] = math.fsum(sum_of_squares(values) for values in found if values is not None)
    entries = sum(planned.header.elements for planned in run.tensors)
    common = math.fsum(energies.values()) / len(energies)
    scaled_by = {name: own if normalise else common for name, own in energies.items()}
    return {name: math.sqrt(entries / energy) if energy > 0 else 0.0 for name, energy in scaled_by.items()}


def expert_information(run: DataRun, expert: int, options: FisherOptions, scale: float) -> Tensors:
    """F_t: the mean over rows of the squared gradients, at theta_0 + scale * tau_t."""
    model, inputs = run.load(expert), run.inputs(expert, options.rows)
    if scale != 1:
        scale_change(run, expert, model, scale)
    owned = {name: model.tensor(name) for name in run.stored_names(expert) if name in model.owners}
    # A buffer, such as a running mean, has no gradient: no information.
    watched = {name: tensor.requires_grad_() for name, tensor in owned.items() if isinstance(tensor, torch.nn.Parameter)}
    names, parameters = list(watched), list(watched.values())
    total = {name: torch.zeros_like(parameter) for name, parameter in watched.items()}
    drawn = generator_for(options.seed, run.experts[expert].name)
    size = SUMMED_ROWS if options.form == "summed_gradient" else 1
    for batch in inputs.batches_in_order(size):
        logits = run.logits(expert, model, batch)
        scores = list(_scores(logits, options, drawn))
        for number, (weight, score) in enumerate(scores):
            retain = number < len(scores) - 1
            found = torch.autograd.grad(score, parameters, retain_graph=retain, allow_unused=True)
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    total[name].addcmul_(gradient, gradient, value=weight / inputs.rows)
    return {name: values.detach().cpu() for name, values in total.items()}


def scale_change(run: DataRun, expert: int, model: ExpertModel, scale: float) -> None:
    """Let an expert's model have so much of its change; its head, and what is not merged, stay as they are."""
    for name in run.stored_names(expert):
        own = model.tensor(name) if name in model.owners else None
        base = run.plan.base.read(name)
        if own is not None and base.shape == own.shape:
            model.install(name, torch.lerp(base.to(own), own, scale))


def _scores(logits: Float[Tensor, "answer class"], options: FisherOptions, drawn: torch.Generator) -> Iterator[Score]:
    """What the information of these rows is the sum of."""
    if options.form == "exact":
        yield from exact_scores(logits)
    elif logits.shape[1] == 1:
        yield from ((1.0, answer) for answer in logits[:, 0])  # a regression: see exact_scores
    elif options.form == "sampled":
        chosen = torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=drawn).to(logits.device)
        yield 1.0, logits.log_softmax(1).gather(1, chosen).sum()
    else:
        roots = logits.detach().softmax(1).sqrt()
        yield 1.0, (roots * logits.log_softmax(1)).sum()


def exact_scores(logits: Float[Tensor, "answer class"]) -> Iterator[Score]:
    """sum_y p_y (d log p_y)^2 = dz^T (diag p - p p^T) dz, along the eigenvectors of that covariance.

    At most one pass fewer than there are classes, and a single one for two classes. One output alone is a regression with
    unit variance, for which the information is (dz)^2.
    """
    answers, classes = logits.shape
    if answers * (classes - 1) > MOST_PASSES:
        raise InputError(
            f"method 'fisher': the exact form takes up to {answers * (classes - 1)} backward passes for one row of this model "
            f"({answers} answers among {classes} classes); pass -s form=sampled, which takes one"
        )
    for answer in logits:
        if classes == 1:
            yield 1.0, answer[0]
            continue
        p = answer.detach().double().softmax(0)
        values, vectors = torch.linalg.eigh(p.diag() - torch.outer(p, p))
        for value, vector in zip(values.tolist(), vectors.T, strict=True):
            if value > NEGLIGIBLE * float(values[-1]):
                yield value, vector.to(answer.dtype) @ answer
