"""MINGLE: gates learnt one expert after the other, on unlabelled rows of that expert's task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from acemerge.calibration.inputs import Batch
from acemerge.calibration.layer_inputs import LayerInputs
from acemerge.calibration.measured import Tensors, keep
from acemerge.calibration.registry import measures
from acemerge.calibration.run import DataRun, ExpertModel
from acemerge.errors import InputError
from acemerge.methods.mingle import MingleOptions, low_rank_experts
from acemerge.numerics.linalg import leading_directions
from acemerge.numerics.randomness import generator_for
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.task_vectors import load_dense

NEW_DIRECTION = 1e-6
"""What is less of a direction's length beside the known ones is rounding."""


@dataclass(frozen=True)
class Gates:
    """What every expert counts for in every task, by tensor."""

    values: Mapping[tuple[str, str], Mapping[str, float]]
    """By task (its expert's name) and tensor: each expert's gate."""

    def gates(self, task: str, tensor: str, experts: Sequence[str]) -> Sequence[float]:
        """Of these experts; 0 of a tensor that no rows came to."""
        found = self.values.get((task, tensor), {})
        return [found.get(expert, 0.0) for expert in experts]


@measures("mingle")
def measure_gates(run: DataRun, options: MingleOptions) -> Gates:
    """Learn them, or find them learnt."""
    names = [planned.name for planned in run.tensors]
    settings = [
        options.directions, options.subspace, options.gamma, options.beta, options.learning_rate, options.steps,
        options.batch_size, options.temperature, options.seed,
    ]  # fmt: skip
    fates = [[t.name, t.action, t.method] for t in run.plan.tensors]
    experts = [run.key(index, options.rows) for index in range(len(run.experts))]
    file = keep(["gates", settings, fates, run.hashes[run.plan.base.name], experts], lambda: _learn(run, options))
    found = file.read("gates").tolist()
    every = [expert.name for expert in run.experts]
    return Gates(
        {(task, name): dict(zip(every, found[t][j], strict=True)) for t, task in enumerate(every) for j, name in enumerate(names)}
    )


# --- the mixture ---------------------------------------------------------------------------------------------------------


@dataclass
class Gate:
    """Of one layer: g_i(x) = w_i x + b_i for every expert so far, and what the inputs of their tasks span."""

    experts: Float[Tensor, "expert out in"]
    """f_i of all experts, also of those that are still to come."""
    weights: list[Tensor] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)
    span: Tensor | None = None
    insistence: Tensor | None = None

    def add(self) -> list[Tensor]:
        """Another expert's gate, closed; what is to be learnt of it."""
        for tensor in (*self.weights, *self.biases):
            tensor.requires_grad_(False)
        like = self.experts
        self.weights.append(torch.zeros(like.shape[2], dtype=like.dtype, device=like.device, requires_grad=True))
        self.biases.append(torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True))
        self.insistence = None
        return [self.weights[-1], self.biases[-1]]

    def values(self, mean_input: Float[Tensor, " in"]) -> Float[Tensor, " expert"]:
        """The gates are linear, so their mean over inputs is their value at the mean input."""
        return torch.stack(self.weights) @ mean_input + torch.stack(self.biases)

    def change(self, values: Float[Tensor, " expert"]) -> Float[Tensor, "out in"]:
        """sum_i g_i f_i."""
        return torch.einsum("i,ioj->oj", values, self.experts[: len(values)])

    def project(self, gradient: Float[Tensor, " in"], options: MingleOptions) -> Float[Tensor, " in"]:
        """Less of it along the inputs of earlier tasks: g - U diag(lambda) U^T g, lambda = exp(-gamma S).

        S is the running mean of how much of a gradient lies along each of these directions, |u^T g| / |g|.
        """
        if self.span is None:
            return gradient
        along = self.span.T @ gradient
        share = along.abs() / gradient.norm().clamp_min(1e-12)
        before = torch.zeros_like(share) if self.insistence is None else self.insistence
        self.insistence = options.beta * before + (1 - options.beta) * share
        return gradient - self.span @ (torch.exp(-options.gamma * self.insistence) * along)

    def remember(self, gram: Float[Tensor, "in in"], k: int) -> None:
        """The leading directions of the task's inputs, beside those that are known."""
        top = torch.linalg.eigh(gram.to(self.experts)).eigenvectors[:, len(gram) - min(k, len(gram)) :]
        known = torch.zeros_like(top[:, :0]) if self.span is None else self.span
        rest = leading_directions((top - known @ (known.T @ top)).double(), top.shape[1])
        self.span = torch.cat([known, rest.left[:, rest.values > NEW_DIRECTION].to(known)], 1)


@dataclass
class Mixture:
    """The gates of all layers, at work in a model whose layers have the base's weights."""

    gates: dict[str, Gate]
    """By the base's name of the layer's weight."""
    real: Tensor | None = None
    """Of the batch under way, which tokens are not padding."""
    seen: dict[str, Tensor] = field(default_factory=dict)
    """The gates' values in the batch under way."""

    @contextmanager
    def in_place(self, model: ExpertModel) -> Iterator[None]:
        """Every layer gives W0 x + sum_i g_i f_i x."""
        with ExitStack() as hooks:
            for name, gate in self.gates.items():
                for module, _ in model.owners.get(name, ()):
                    handle = module.register_forward_hook(
                        lambda _, given, output, name=name, gate=gate: self._mixed(name, gate, given[0], output)
                    )
                    hooks.callback(handle.remove)
            yield

    def begin(self, batch: Batch) -> None:
        """Another batch comes."""
        mask = batch.get("attention_mask")
        self.real = mask.bool() if mask is not None and mask.dim() == 2 else None
        self.seen = {}

    def _mixed(self, name: str, gate: Gate, x: Tensor, output: Tensor) -> Tensor:
        values = gate.values(self._mean(x))
        self.seen[name] = values.detach()
        return output + nn.functional.linear(x, gate.change(values))

    def _mean(self, x: Tensor) -> Float[Tensor, " in"]:
        """Of every row over its tokens, then over rows."""
        if self.real is None or x.dim() != 3 or x.shape[:2] != self.real.shape:
            return x.flatten(0, -2).mean(0)
        real = self.real.to(x.device, x.dtype)[..., None]
        return ((x * real).sum(1) / real.sum(1).clamp_min(1)).mean(0)


# --- learning ------------------------------------------------------------------------------------------------------------


def _learn(run: DataRun, options: MingleOptions) -> Tensors:
    """[task, tensor, expert]: the gates of all experts on every task's rows, when the last one is learnt."""
    mixture = open_mixture(run, options)
    for expert, checkpoint in enumerate(run.experts):
        run.progress.say(f"gates of '{checkpoint.name}', {expert + 1} of {len(run.experts)}: {options.steps} steps")
        student = open_student(run, expert)
        learn_gates(run, mixture, student, expert, options)
        remember_inputs(run, mixture, student, expert, options)
    found = [gates_of_task(run, mixture, expert, options) for expert in range(len(run.experts))]
    return {"gates": torch.stack(found)}


def open_mixture(run: DataRun, options: MingleOptions) -> Mixture:
    """Every layer's low-rank experts, whole: memory of all experts' linear layers."""
    gates = {}
    for planned in run.tensors:
        experts = low_rank_experts(load_dense(run.plan, planned, run.device), options.directions)
        whole = torch.zeros(len(run.experts), *experts[0].shape, dtype=torch.float32, device=run.device)
        for source, own in zip(planned.experts, experts, strict=True):
            whole[source.expert] = own
        gates[planned.name] = Gate(whole)
    return Mixture(gates)


def open_student(run: DataRun, expert: int) -> ExpertModel:
    """The base under this expert's head, with what is not gated as it will be."""
    model = run.load(expert)
    for planned in run.plan.tensors:
        if planned.name in model.owners and planned.action in ("merged", "averaged", "kept"):
            gated = planned in run.tensors
            value = run.plan.base.read(planned.name) if gated else merge_tensor(run.plan, planned, run.device).value
            model.install(planned.name, value)
    return model


def learn_gates(run: DataRun, mixture: Mixture, student: ExpertModel, expert: int, options: MingleOptions) -> list[float]:
    """The losses, step by step: the cross-entropy of the mixture's answers under the expert's own."""
    parameters = {name: gate.add() for name, gate in mixture.gates.items()}
    optimizer = torch.optim.Adam([each for own in parameters.values() for each in own], lr=options.learning_rate)
    teacher, losses = run.load(expert), []
    for step in range(options.steps):
        generator = generator_for(options.seed, run.experts[expert].name, step)
        batch = run.inputs(expert, options.rows).some(options.batch_size, generator)
        with torch.no_grad():
            wanted = (run.logits(expert, teacher, batch) / options.temperature).softmax(1)
        if wanted.shape[1] == 1:
            raise InputError(
                f"expert {run.experts[expert].where}: its head gives one number, not classes, so no answers can be compared; "
                "leave it out, or use regmean"
            )
        mixture.begin(batch)
        with mixture.in_place(student):
            log_p = (run.logits(expert, student, batch) / options.temperature).log_softmax(1)
        loss = -(wanted * log_p).sum(1).mean()
        optimizer.zero_grad()
        if loss.requires_grad:  # no layer that is merged has a say in the answers
            loss.backward()
        for name, (weight, _) in parameters.items():
            if weight.grad is not None:
                weight.grad = mixture.gates[name].project(weight.grad, options)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def remember_inputs(run: DataRun, mixture: Mixture, student: ExpertModel, expert: int, options: MingleOptions) -> None:
    """Later gates shall leave alone what this task's inputs look like, in every layer."""
    seen = LayerInputs()
    with mixture.in_place(student), seen.watching(student, [name for name in mixture.gates if name in student.owners]):
        for batch in run.inputs(expert, options.rows).batches_in_order(options.batch_size):
            mixture.begin(batch)
            seen.begin(batch, student.module)
            run.run(expert, student, batch)
    for name, gram in seen.grams().items():
        mixture.gates[name].remember(gram.to(run.device), options.subspace)


@torch.no_grad()
def gates_of_task(run: DataRun, mixture: Mixture, expert: int, options: MingleOptions) -> Float[Tensor, "tensor expert"]:
    """The mean over the task's rows; 0 where none came."""
    student = open_student(run, expert)
    total = torch.zeros(len(mixture.gates), len(run.experts), dtype=torch.float64)
    rows = 0
    with mixture.in_place(student):
        for batch in run.inputs(expert, options.rows).batches_in_order(options.batch_size):
            mixture.begin(batch)
            run.run(expert, student, batch)
            size = len(next(iter(batch.values())))
            rows += size
            for j, name in enumerate(mixture.gates):
                if name in mixture.seen:
                    total[j] += size * mixture.seen[name].double().cpu()
    return total / rows
