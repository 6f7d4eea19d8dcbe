"""AdaMerging: coefficients learnt on unlabelled rows, so that the merged model is sure of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.calibration.inputs import Batch
from acemerge.calibration.measured import Tensors, keep, kept_file, read_kept, write_kept
from acemerge.calibration.registry import measures
from acemerge.calibration.run import DataRun
from acemerge.calibration.shared_backbone import SharedBackbone
from acemerge.methods import Context
from acemerge.methods.adamerging import AdaMergingOptions
from acemerge.methods.ties import TiesOptions, TiesStatistics
from acemerge.numerics.randomness import generator_for
from acemerge.planning.tensor import ComputedTensor
from acemerge.tensors.task_vectors import pieces_context, stored_values

SAVED_EVERY = 20
"""Steps after which the state is kept, so that an interrupted run goes on there."""


@dataclass(frozen=True)
class Coefficients:
    """As they were learnt, by expert and tensor; and what was elected of the task vectors, if that was asked for."""

    values: Mapping[tuple[str, str], float]
    elected: TiesStatistics | None = None

    def coefficient(self, expert: str, tensor: str) -> float:
        """One of them."""
        return self.values[expert, tensor]

    def of_task_vectors(self, task_vectors: Tensor, context: Context) -> Tensor:
        """What they are for."""
        return self.elected.elect(task_vectors, context) if self.elected else task_vectors


@measures("adamerging")
def measure_coefficients(run: DataRun, options: AdaMergingOptions) -> Coefficients:
    """Learn them, or find them learnt."""
    settings: list[Any] = [
        options.granularity,
        options.start,
        options.clamp,
        options.learning_rate,
        options.batch_size,
        options.seed,
    ]
    settings += ["plus_plus", options.keep] if options.plus_plus else []
    elected = elect(run, options.keep) if options.plus_plus else None
    experts = [run.key(index, options.rows) for index in range(len(run.experts))]
    key = ["coefficients", settings, run.hashes[run.plan.base.name], experts, [planned.name for planned in run.tensors]]
    file = keep([*key, options.steps], lambda: _learn(run, options, key, elected))
    learnt = file.read("coefficients").tolist()
    return Coefficients(
        {
            (expert.name, planned.name): value
            for expert, row in zip(run.experts, learnt, strict=True)
            for planned, value in zip(run.tensors, row, strict=True)
        },
        elected,
    )


def elect(run: DataRun, keep: float) -> TiesStatistics:
    """AdaMerging++: TIES' thresholds and signs, over all tensors that get coefficients."""
    statistics, more = TiesStatistics(TiesOptions(keep=keep)), True
    run.progress.say(f"electing entries of {len(run.tensors)} tensors")
    while more:
        for planned in run.tensors:
            _show(run, planned, statistics)
        more = statistics.end_pass()
    return statistics


def _show(run: DataRun, planned: ComputedTensor, statistics: TiesStatistics) -> None:
    context = pieces_context(run.plan, planned)
    stored_values(run.plan, planned).each(lambda piece: statistics.observe(piece.task_vectors, context))


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


def _learn(run: DataRun, options: AdaMergingOptions, key: list[Any], elected: TiesStatistics | None) -> Tensors:
    """Minimise the entropy of the merged model's answers on unlabelled rows of every task."""
    learner = Learner.new(options, len(run.experts), len(run.tensors))
    state_file = kept_file([*key, "state"])
    done = _take_up(learner, state_file, options.steps)
    backbone = SharedBackbone.open(run, elected) if done < options.steps else None
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
    generator = generator_for(options.seed, run.experts[expert].name, step)
    return run.inputs(expert, options.rows).some(options.batch_size, generator)
