"""The registry: what a method is, how it is declared, found, described and given its options.

A method is a pure function of task vectors and options: no files, no tensor names, no devices. Declaring one is a frozen
options dataclass and a decorated function in a file of this package:

    @dataclass(frozen=True)
    class AverageOptions(Options):
        \"\"\"No options of its own.\"\"\"

    @method("average", title="Weight averaging", paper="Wortsman et al., ICML 2022", touches="all")
    def average(task_vectors, options):
        return task_vectors.mean(0)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, get_type_hints, runtime_checkable

import torch
from jaxtyping import Float
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from acemerge.discovery import has_module, register_all
from acemerge.errors import InputError, did_you_mean
from acemerge.methods.mergekit_names import mergekit_hint
from acemerge.methods.option_text import DescribedOption, Fact, describe_option
from acemerge.numerics.frame import Frame, Sides, standard_frame
from acemerge.numerics.randomness import generator_for

ENTRY_POINT_GROUP = "acemerge.methods"

Alpha = Annotated[float, Field(allow_inf_nan=False, description="final scale: W = W0 + alpha * M")]


@dataclass(frozen=True)
class Options:
    """What every method has. A method's own options inherit from this and may change the default."""

    alpha: Alpha = 1.0

    def check(self, experts: int) -> None:
        """Refuse options that do not suit this number of experts."""

    def resolve(self, config: Mapping[str, Any]) -> Options:  # noqa: ARG002
        """These options with every value that depends on the base model's config made explicit."""
        return self


@dataclass(frozen=True)
class Context:
    """What a kernel may know beyond the numbers. A kernel that needs it takes a third parameter, `context`."""

    tensor: str = "tensor"
    experts: tuple[str, ...] = ()
    """The experts' names, in the order of the task vectors."""
    base: Tensor | None = None
    """W0, oriented like the task vectors, in its stored dtype."""
    statistics: Any = None
    """What the method's statistics pass gathered, or what it measured on data."""
    frame: Frame | None = None
    """The coordinates that the task vectors are given in; those of the tensor itself by default."""
    to_method: Callable[[Tensor], Tensor] = lambda stored: stored
    """Turns what is laid out as the file stores the tensor the way the task vectors are given."""

    def frame_of(self, task_vectors: Float[Tensor, "task *shape"]) -> Frame:
        """The coordinates of these task vectors."""
        return self.frame or standard_frame(task_vectors)

    def generator(self, seed: int, task: int) -> torch.Generator:
        """Random numbers that depend on the seed, the expert and the tensor's name only: not on order, threads or shards."""
        return generator_for(seed, self.experts[task], self.tensor)


@runtime_checkable
class Statistics(Protocol):
    """What a whole-model method must know before it merges the first tensor, gathered in passes of bounded memory."""

    def observe(self, task_vectors: Tensor, context: Context) -> None:
        """See one tensor's task vectors."""

    def end_pass(self) -> bool:
        """All tensors have been seen once more; whether another pass is needed."""


@runtime_checkable
class TensorStatistics(Statistics, Protocol):
    """Statistics of an elementwise method that must know something of a whole tensor before they see its pieces."""

    def know_tensor(self, show: Callable[[Callable[[Tensor], None]], object], context: Context) -> None:
        """In the first pass; `show(look)` calls `look` with every piece of the tensor's task vectors, in several threads."""


@dataclass(frozen=True)
class Merged:
    """A merged task vector, and what a reader of the report should know about how it came out.

    A method that makes one model per task also returns each task's small `parts`, one mapping per expert, and the `shared`
    vector that masks refer to. A task's own tensor is then

    - {"left", "right"}: the shared model's + left @ right;
    - {"delta"}: the shared model's + delta;
    - {"mask", "scale"}: the base's + scale * mask * shared, the mask being boolean.
    """

    delta: Tensor
    facts: Mapping[str, Fact] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    parts: Sequence[Mapping[str, Tensor]] = ()
    shared: Tensor | None = None


Kernel = Callable[..., "Merged | Tensor"]
Cost = Callable[[int, int, int], float]
OfOptions = bool | Callable[[Any], bool]
Facts = Mapping[str, str] | Callable[[Any], Mapping[str, str]]
LowRank = Sides | Callable[[Any], Sides | None] | None
PartsCost = Callable[[Any, int, int, int], float]
StatisticsFactory = Callable[[Any, tuple[str, ...]], "Statistics | None"]
Touches = Literal["matrices", "linear", "blocks", "all"]
Rest = Literal["average", "average all", "keep"]
Uses = Literal["weights", "data"]
Kind = Literal["closed-form", "spectral", "entries", "around", "data", "per-task"]


@dataclass(frozen=True)
class Method:
    """A registered method. Call it with task vectors [task, ...] and its options."""

    name: str
    title: str
    paper: str
    summary: str
    touches: Touches
    rest: Rest
    options_type: type[Options]
    kernel: Kernel
    statistics: StatisticsFactory | None
    uses: Uses
    test_rows: bool
    experts: int | None
    ordered: bool
    takes_base: bool
    always: OfOptions
    per_task: bool
    closed_form: bool
    elementwise: OfOptions
    low_rank: LowRank
    facts: Facts
    flops: Cost
    float64_elements: Cost
    measured_elements: Cost
    parts_elements: PartsCost

    @cached_property
    def takes_context(self) -> bool:
        """Whether its kernel asks for more than task vectors and options."""
        return "context" in inspect.signature(self.kernel).parameters

    @property
    def kind(self) -> Kind:
        """Its place in a list of methods. One with an option `inner` is a step around the method that this names."""
        if self.per_task:
            return "per-task"
        if self.uses == "data":
            return "data"
        if "inner" in (option.name for option in fields(self.options_type)):
            return "around"
        if self.closed_form:
            return "closed-form"
        return "entries" if self.touches == "all" else "spectral"

    def is_elementwise(self, options: Options) -> bool:
        """Whether each merged entry depends on that entry of the task vectors alone, so that pieces can be merged one by one."""
        return self.elementwise(options) if callable(self.elementwise) else self.elementwise

    def is_always_called(self, options: Options) -> bool:
        """Whether it may change even a tensor that no expert changed."""
        return self.always(options) if callable(self.always) else self.always

    def core_sides(self, options: Options) -> Sides | None:
        """On which sides of low-rank task vectors it may work in their small common core instead; None: on neither."""
        return self.low_rank(options) if callable(self.low_rank) else self.low_rank

    def declared_facts(self, options: Options) -> Mapping[str, str]:
        """What its kernel may tell of a tensor, and what that means; `{expert}` stands for each expert's name."""
        return self.facts(options) if callable(self.facts) else self.facts

    def __call__(self, task_vectors: Float[Tensor, "task *shape"], options: Options, context: Context | None = None) -> Merged:
        """alpha * M, in the precision the method worked in, with the method's facts.

        Without statistics the tensor is taken for a whole model of its own, and they are gathered here.
        """
        context = context or Context(experts=tuple(map(str, range(len(task_vectors)))))
        if self.uses == "data" and context.statistics is None:
            raise InputError(f"{needs_data(self.name)}: acemerge.merge(..., data=...) measures it")
        if context.statistics is None:
            context = replace(context, statistics=self._statistics_of_one(task_vectors, options, context))
        result = self.kernel(task_vectors, options, context) if self.takes_context else self.kernel(task_vectors, options)
        merged = result if isinstance(result, Merged) else Merged(result)
        return merged if options.alpha == 1.0 else replace(merged, delta=merged.delta * options.alpha)

    def _statistics_of_one(self, task_vectors: Tensor, options: Options, context: Context) -> Statistics | None:
        statistics = self.statistics(options, context.experts) if self.statistics else None
        more = statistics is not None
        while statistics is not None and more:
            statistics.observe(task_vectors, context)
            more = statistics.end_pass()
        return statistics

    def options(self, given: Mapping[str, Any]) -> Options:
        """Validated options; unknown names and bad values are refused in the user's own words."""
        known = [f.name for f in fields(self.options_type)]
        for name in given:
            if name not in known:
                hint = mergekit_hint(self.name, name) or _others_with(name, known) or did_you_mean(name, known)
                raise InputError(f"method '{self.name}' has no option '{name}': {hint}")
        for option in self.describe_options():
            # pydantic would take true for 1.
            if isinstance(given.get(option.name), bool) and "true or false" not in option.allowed:
                raise InputError(self._refusal(option, given[option.name]))
        try:
            return self._validated(dict(given))
        except ValidationError as error:
            explained = dict.fromkeys(self._explain(dict(e), given) for e in error.errors())  # a union fails once per member
            raise InputError(*explained) from None

    def _explain(self, error: Mapping[str, Any], given: Mapping[str, Any]) -> str:
        name = str(error["loc"][0])
        return self._refusal(next(o for o in self.describe_options() if o.name == name), given[name])

    def _refusal(self, option: DescribedOption, value: Any) -> str:
        return f"method '{self.name}': {option.name}={value!r} is not allowed: it must be {option.allowed}"

    def describe_options(self) -> list[DescribedOption]:
        """Name, default, allowed values and meaning of each option, for help, docs and errors."""
        return list(self._described)

    # Both are made of the options' type alone, and slower to make than a small tensor is to merge.

    @cached_property
    def _described(self) -> tuple[DescribedOption, ...]:
        hints = get_type_hints(self.options_type, include_extras=True)
        defaults = asdict(self.options_type())
        described = [describe_option(name, hints[name], default) for name, default in defaults.items()]
        return (*described[1:], described[0])  # a method's own options first, the common alpha last

    @cached_property
    def _validated(self) -> Callable[[Mapping[str, Any]], Options]:
        return TypeAdapter(self.options_type).validate_python


def needs_data(name: str) -> str:
    """The beginning of every refusal to do without data."""
    return f"method '{name}' uses data of every expert's task besides the weights"


def masks_elements(options: Options, tasks: int, rows: int, columns: int) -> float:  # noqa: ARG001
    """Numbers to store for one vector that tasks share, and for each task a bit per entry and a float64 scale."""
    return rows * columns * (1 + tasks / 32) + 3 * tasks


_registered: dict[str, Method] = {}


def method(
    name: str,
    *,
    title: str,
    paper: str,
    touches: Touches = "matrices",
    rest: Rest = "average",
    statistics: StatisticsFactory | None = None,
    uses: Uses = "weights",
    test_rows: bool = False,
    experts: int | None = None,
    ordered: bool = False,
    takes_base: bool = False,
    always: OfOptions = False,
    per_task: bool = False,
    closed_form: bool = False,
    elementwise: OfOptions = False,
    low_rank: LowRank = None,
    facts: Facts = MappingProxyType({}),
    flops: Cost = lambda tasks, rows, columns: 2.0 * tasks * rows * columns,
    float64_elements: Cost = lambda tasks, rows, columns: 0.0,  # noqa: ARG005
    measured_elements: Cost = lambda tasks, rows, columns: 0.0,  # noqa: ARG005
    parts_elements: PartsCost = lambda options, tasks, rows, columns: (1.0 + tasks) * rows * columns,  # noqa: ARG005
) -> Callable[[Kernel], Kernel]:
    """Register a merging method.

    `touches` says which tensors it is for: "matrices", the others being averaged or kept as `rest` says ("average all": also
    those that a preset leaves at the base), or "all" floating-point tensors. Of methods that run the models on data: "linear",
    the weights of linear layers, the others being averaged; "blocks", those in the model's stack of blocks, what comes after the
    stack being kept at the base's value.
    `statistics(options, expert_names)` makes what a whole-model method gathers first, or None when its options need no such
    pass. `uses` says what it needs: the "weights" alone, or also "data" of every expert's task; its kernel then finds in
    `context.statistics` what the measurement registered for it (see `calibration.registry`) has found. `test_rows` says that
    its paper takes for data the very rows, unlabelled, that the merge is then judged on. `experts` is the number
    of experts it takes, if only one number will do; `ordered` says that their order matters; `takes_base` that the base
    may be one of them, since it is their weights that are joined, whatever they are measured against; `always`, or what it gives
    for the options, that it may change even a tensor that no expert changed; `per_task` that it makes one model per task, not
    one merged model; `closed_form` that it solves a system of the experts' covariances, by which lists of methods
    tell it from those that work on singular directions. `elementwise`, or what it gives for the options, says that each entry
    of the result depends on that entry of the task vectors only (and on the statistics, which then see pieces of tensors, in
    several threads), that there are no facts or warnings, and that `context.base` is not used: tensors are then merged a piece
    at a time (see `numerics.pieces`). `low_rank`, or what it gives for the options, names the sides of its matrices whose
    coordinates it does not depend on (see `numerics.frame`): LoRA experts are then merged in their small common core.
    `facts`, or what it gives for the options, names what the kernel tells of a tensor (`Merged.facts`) and says in a few words
    what each means, for reports; `{expert}` in both stands for an expert's name, where there is one for each. `active_experts`,
    how many experts changed the tensor, needs no declaration.
    `flops` and `float64_elements` estimate, for the plan, the work and the peak of working memory beyond the task vectors, given
    (tasks, rows, columns), `measured_elements` how many float64 numbers it holds for one tensor of one expert while it measures;
    `parts_elements`, of a method with one model per task, how many float32 numbers it writes at most for
    the tasks and what they share, given (options, tasks, rows, columns). The summary shown to users is the function's docstring.
    """

    def register(kernel: Kernel) -> Kernel:
        options_type = get_type_hints(kernel)["options"]
        _registered[name] = Method(
            name=name, title=title, paper=paper, summary=inspect.cleandoc(kernel.__doc__ or ""), touches=touches, rest=rest,
            options_type=options_type, kernel=kernel, statistics=statistics, uses=uses, test_rows=test_rows, experts=experts,
            ordered=ordered, takes_base=takes_base, always=always, per_task=per_task, closed_form=closed_form,
            elementwise=elementwise, low_rank=low_rank, facts=facts, flops=flops, float64_elements=float64_elements,
            measured_elements=measured_elements, parts_elements=parts_elements,
        )  # fmt: skip
        return kernel

    return register


@cache
def _discover() -> None:
    register_all("acemerge.methods", ENTRY_POINT_GROUP)


def all_methods() -> list[Method]:
    """Every registered method, by name."""
    _discover()
    return [_registered[name] for name in sorted(_registered)]


_WELL_KNOWN = ("ace", "linear", "ties")


def _others_with(option: str, known: Sequence[str]) -> str:
    """Which methods have an option that one has not: nobody who leaves out -m need know the default's options."""
    having = [other.name for other in all_methods() if any(f.name == option for f in fields(other.options_type))]
    others = [*(name for name in _WELL_KNOWN if name in having), *(name for name in having if name not in _WELL_KNOWN)]
    if not others:
        return ""
    named = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
    return f"{named} {'has' if len(others) == 1 else 'have'} it (-m {others[0]}). Known: {', '.join(sorted(known))}"


def get_method(name: str) -> Method:
    """The method of that name. The file that is called so is imported first: most often it is all that is needed."""
    if name not in _registered and has_module("acemerge.methods", name):
        import_module(f"acemerge.methods.{name}")
    if name not in _registered:
        _discover()
    if name not in _registered:
        raise InputError(f"there is no method '{name}': {did_you_mean(name, _registered)}")
    return _registered[name]
