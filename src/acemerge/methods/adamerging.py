"""AdaMerging: one coefficient per expert, or per expert and tensor, learnt so that the merged model is sure of its answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.calibration.inputs import Batch
from acemerge.calibration.measured import Tensors, keep, kept_file, read_kept, write_kept
from acemerge.calibration.run import DataRun
from acemerge.calibration.shared_backbone import SharedBackbone
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.numerics.linalg import weighted_sum

SAVED_EVERY = 20
"""Steps after which the state is kept, so that an interrupted run goes on there."""


@dataclass(frozen=True)
class AdaMergingOptions(Options):
    """The authors' defaults. Their two batches of 16 for a step are one of 32, which gives the same direction."""

    granularity: Annotated[
        Literal["layer", "task"],
        Field(description="layer: a coefficient for every expert and tensor; task: one for every expert"),
    ] = "layer"
    start: Annotated[float, Field(ge=0, le=1, description="of every coefficient; a tensor that never matters keeps it")] = 0.3
    clamp: Annotated[bool, Field(description="use the coefficients cut to what lies between 0 and 1")] = True
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False, description="of Adam")] = 1e-3
    steps: Annotated[int, Field(ge=0, description="of Adam; with 0 it is task arithmetic with the start")] = 500
    batch_size: Annotated[int, Field(ge=1, description="rows of every task in a step")] = 32
    rows: Annotated[int, Field(ge=1, description="rows of every expert's data that batches are drawn from, at most")] = 1000
    seed: Annotated[int, Field(ge=0, description="of the drawing of batches")] = 0


class HasCoefficients(Protocol):
    """What the kernel needs to know."""

    def coefficient(self, expert: str, tensor: str) -> float:
        """lambda_t of this tensor."""


@dataclass(frozen=True)
class Coefficients:
    """As they were learnt, by expert and tensor."""

    values: Mapping[tuple[str, str], float]

    def coefficient(self, expert: str, tensor: str) -> float:
        """One of them."""
        return self.values[expert, tensor]


def measure_coefficients(run: DataRun, options: AdaMergingOptions) -> Coefficients:
    """Learn them, or find them learnt."""
    settings = [options.granularity, options.start, options.clamp, options.learning_rate, options.batch_size, options.seed]
    experts = [run.key(index, options.rows) for index in range(len(run.experts))]
    key = ["coefficients", settings, run.hashes[run.plan.base.name], experts, [planned.name for planned in run.tensors]]
    file = keep([*key, options.steps], lambda: _learn(run, options, key))
    learnt = file.read("coefficients").tolist()
    return Coefficients(
        {
            (expert.name, planned.name): value
            for expert, row in zip(run.experts, learnt, strict=True)
            for planned, value in zip(run.tensors, row, strict=True)
        }
    )


@dataclass(frozen=True)
class Learner:
    """Adam on the coefficients, whose state can be kept and taken up again."""

    raw: Tensor
    optimizer: torch.optim.Adam
    clamp: bool
    shape: tuple[int, int]

    @staticmethod
    def new(options: AdaMergingOptions, tasks: int, tensors: int) -> Learner:
        """Everything at the start value."""
        columns = tensors if options.granularity == "layer" else 1
        raw = torch.full((tasks, columns), options.start, dtype=torch.float64, requires_grad=True)
        return Learner(raw, torch.optim.Adam([raw], lr=options.learning_rate), options.clamp, (tasks, tensors))

    def coefficients(self) -> Float[Tensor, "task tensor"]:
        """lambda_{t,j}, as the model uses them."""
        return (self.raw.clamp(0, 1) if self.clamp else self.raw).expand(self.shape)

    def learn(self, slopes: Float[Tensor, "task tensor"]) -> None:
        """One step against these slopes of the loss; a coefficient that is cut has none."""
        self.optimizer.zero_grad()
        self.coefficients().backward(slopes)
        self.optimizer.step()

    def state(self, step: int) -> Tensors:
        """What is needed to go on after this many steps."""
        return {"raw": self.raw.detach(), "steps": torch.tensor(step), **self.optimizer.state[self.raw]}

    def take_up(self, state: Tensors) -> int:
        """Go on from there; how many steps are done."""
        with torch.no_grad():
            self.raw.copy_(state.pop("raw"))
        done = int(state.pop("steps"))
        self.optimizer.state[self.raw] = {name: tensor.clone() for name, tensor in state.items()}
        return done


def _learn(run: DataRun, options: AdaMergingOptions, key: list[Any]) -> Tensors:
    """Minimise the entropy of the merged model's answers on unlabelled rows of every task."""
    learner = Learner.new(options, len(run.experts), len(run.tensors))
    state_file = kept_file([*key, "state"])
    done = _take_up(learner, state_file, options.steps)
    backbone = SharedBackbone.open(run) if done < options.steps else None
    for step in range(done, options.steps):
        assert backbone is not None
        backbone.set_coefficients(learner.coefficients().detach())
        entropy = backbone.entropy([_batch(run, expert, step, options) for expert in range(len(run.experts))])
        learner.learn(backbone.slopes())
        if (step + 1) % SAVED_EVERY == 0:
            write_kept(state_file, learner.state(step + 1))
            mean = entropy / len(run.experts)
            run.progress.say(f"coefficients: step {step + 1} of {options.steps}, mean entropy of the answers {mean:.4f}")
    return {"coefficients": learner.coefficients().detach().clone()}


def _take_up(learner: Learner, state_file: Any, steps: int) -> int:
    """How many steps an interrupted run of the same learning has done, not more than are asked for."""
    found = read_kept(state_file)
    if found is None or int(found.read("steps")) > steps:
        return 0
    return learner.take_up({name: found.read(name) for name in found.tensors})


def _batch(run: DataRun, expert: int, step: int, options: AdaMergingOptions) -> Batch:
    """Rows by seed, expert and step only, so that it does not matter where an interrupted run goes on."""
    identity = hashlib.sha256(f"{options.seed}/{run.experts[expert].name}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(identity[:8], "little") >> 1)
    return run.inputs(expert, options.rows).some(options.batch_size, generator)


@method(
    "adamerging",
    title="AdaMerging",
    paper="Yang et al., AdaMerging: adaptive model merging for multi-task learning, ICLR 2024",
    touches="all",
    measure=measure_coefficients,
    facts={"coefficient of {expert}": "what {expert}'s change was multiplied by"},
    flops=lambda tasks, rows, columns: 2.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: 1.0 * rows * columns,  # noqa: ARG005
    measured_elements=lambda tasks, rows, columns: 1.0 * rows * columns,  # noqa: ARG005
)
def adamerging(task_vectors: Float[Tensor, "task *shape"], options: AdaMergingOptions, context: Context) -> Merged:  # noqa: ARG001
    """Uses data. Task arithmetic whose coefficients are learnt: the merged model is to be sure of its answers.

    theta^j = theta_0^j + sum_t lambda_{t,j} tau_t^j for every tensor j, or one lambda_t for all. Adam minimises the entropy of
    the answers on unlabelled rows of every task, under the experts' own heads.
    """
    measured: HasCoefficients = context.statistics
    coefficients = [measured.coefficient(expert, context.tensor) for expert in context.experts]
    facts = {f"coefficient of {expert}": value for expert, value in zip(context.experts, coefficients, strict=True)}
    return Merged(weighted_sum(task_vectors, coefficients), facts)
