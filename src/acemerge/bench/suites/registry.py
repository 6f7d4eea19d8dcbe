"""The suites by name: which tasks, which kind of model, and where base and experts are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from acemerge.bench.data.task import Task, TrainedTask
from acemerge.bench.domains.domain import Domain, TrainableDomain
from acemerge.bench.measure.evaluation import HERE, Compute, Judge, judge_by_rows
from acemerge.bench.measure.experts import Experts, Say, prepare_experts
from acemerge.bench.suites.options import FROM_THE_HUB, SuiteOptions
from acemerge.errors import InputError, did_you_mean


class ExpertFolders(Protocol):
    """Where a suite's base and experts are."""

    @property
    def base(self) -> Path:
        """The base's folder or file."""

    def folder(self, task: Task) -> Path:
        """The folder or file of the expert that knows the task."""

    def identity(self, tasks: Sequence[Task]) -> Any:
        """What changes when these tasks' models change, as JSON takes it."""


@dataclass(frozen=True)
class Suite:
    """Tasks whose experts are merged together."""

    name: str
    domain: Domain
    tasks: tuple[Task, ...]
    given: ExpertFolders | None = None
    """Base and experts that others trained; without, they are trained here."""
    compute: Compute = HERE
    judge: Judge = judge_by_rows
    own_heads: bool = True
    """Whether each expert has a head of its own, to be put on a merged model; else every model answers as it is."""
    normalised: bool = False
    """Whether its tables show each score as a share of the expert's."""
    between_experts: bool = False
    """Whether a score is a place between the base and the task's expert, so that no model is judged without them."""
    merge: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of every merge of this suite's experts."""
    limit: int | None = 1000
    """Test rows of each task, at most, unless a command says otherwise."""

    def experts(self, seed: int) -> ExpertFolders:
        """Those that were given, or those of one seed."""
        return self.given or Experts(self.domain, seed)

    def folders(self, seed: int) -> dict[str, Path]:
        """Every expert once, by name, in the tasks' order."""
        experts = self.experts(seed)
        return {task.expert: experts.folder(task) for task in self.tasks}

    def prepare(self, seeds: Sequence[int], say: Say) -> None:
        """Find the experts that were given; train those that are to be trained here and are not there yet."""
        if self.given is not None:
            self.folders(0)
        else:
            tasks = [cast(TrainedTask, task) for task in self.tasks]
            prepare_experts(cast(TrainableDomain, self.domain), tasks, seeds, say, self.compute.workers)


def _demo(name: str, count: int) -> Suite:  # noqa: ARG001
    from acemerge.bench.suites.demo import demo_suite

    return demo_suite(name)


def _text(name: str, count: int) -> Suite:
    from acemerge.bench.data.text_tasks import TASKS
    from acemerge.bench.domains.text import TextDomain

    return Suite(name, TextDomain(), TASKS[:count])


def _gpt2(name: str, count: int) -> Suite:
    from acemerge.bench.domains.gpt2 import TASKS, Gpt2Domain

    return Suite(name, Gpt2Domain(), TASKS[:count])


def _stories(name: str, count: int) -> Suite:
    from acemerge.bench.data.kinds_of_text import TASKS
    from acemerge.bench.domains.stories import StoriesDomain
    from acemerge.bench.measure.next_token import judge_by_loss

    return Suite(name, StoriesDomain(), TASKS[:count], judge=judge_by_loss, own_heads=False, between_experts=True, limit=200)


def _vision(name: str, count: int) -> Suite:
    from acemerge.bench.data.vision_tasks import TASKS
    from acemerge.bench.domains.vision import VisionDomain

    return Suite(name, VisionDomain(), TASKS[:count])


def _lora_text(name: str, count: int) -> Suite:
    from acemerge.bench.suites.lora import lora_text_suite

    return lora_text_suite(name, count)


def _lora_digits(name: str, count: int) -> Suite:  # noqa: ARG001
    from acemerge.bench.suites.lora import lora_digits_suite

    return lora_digits_suite(name)


_SUITES: dict[str, tuple[Callable[[str, int], Suite], int]] = {
    "demo": (_demo, 4),
    "text-8": (_text, 8),
    "text-14": (_text, 14),
    "gpt2-6": (_gpt2, 6),
    "stories-6": (_stories, 6),
    "vision-8": (_vision, 8),
    "vision-14": (_vision, 14),
    "vision-20": (_vision, 20),
    "lora-text-8": (_lora_text, 8),
    "lora-digits": (_lora_digits, 5),
}


def get_suite(name: str, options: SuiteOptions = FROM_THE_HUB) -> Suite:
    """The suite of that name. Options say where the models and data of one of the paper's suites are."""
    from acemerge.bench.suites.paper import PAPER_SUITES

    if name in PAPER_SUITES:
        return PAPER_SUITES[name](name, options)
    if name not in _SUITES:
        raise InputError(f"there is no suite '{name}': {did_you_mean(name, [*_SUITES, *PAPER_SUITES])}")
    options.refuse_for_trained(name)
    make, count = _SUITES[name]
    suite = make(name, count)
    return replace(suite, tasks=options.choose(suite.tasks, name), compute=Compute(options.device, options.batch_size))
