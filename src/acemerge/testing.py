"""What every merging method promises, as checks that any package can run over its own methods.

    from acemerge.testing import check_method

    def test_my_method():
        check_method("mine")

A suite that wants one test per promise goes over `checks(name)`; each check is called with the method's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from acemerge.api import merge_state_dicts, merge_task_vectors
from acemerge.errors import InputError
from acemerge.methods import Context, Merged, Method, Options, get_method
from acemerge.methods.registry import TensorStatistics, needs_data
from acemerge.numerics.frame import Factors, to_cores

Measured = Callable[[Tensor], Any]
"""For a method that uses data: task vectors -> what its kernel finds in `context.statistics`, as if measured."""

MATRICES = ((12, 8), (8, 12), (9, 9), (3, 40), (2, 2), (1, 5), (5, 1), (1, 1))
NOT_MATRICES = ((), (7,), (2, 3, 2, 2))


@dataclass(frozen=True)
class Check:
    """One promise. Called with a method's name, it raises an AssertionError that names both if the promise is broken."""

    name: str
    promise: str
    concerns: Callable[[Method], bool]
    """Whether the method makes this promise at all."""
    body: Callable[[Trial], None]

    def __call__(self, method: str, measured: Measured | None = None) -> None:
        """Put the method to the test."""
        trial = Trial(get_method(method), measured)
        if trial.method.uses == "data" and measured is None:
            raise InputError(f"{needs_data(method)}: give `measured`, which makes up what it would have measured")
        try:
            with torch.random.fork_rng(devices=[]):
                self.body(trial)
        except Exception as error:  # whatever stops a method breaks the promise
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"method '{method}' fails '{self.name}' ({self.promise}): {kind}{error}") from error


def checks(method: str | None = None) -> list[Check]:
    """Every check, or those that concern one method: one that depends on the experts' order is not asked whether it does."""
    return [check for check in _checks if method is None or check.concerns(get_method(method))]


def check_method(name: str, *, measured: Measured | None = None) -> None:
    """Run every check that concerns a registered method; an AssertionError names all that fail.

    A method that uses data is given what `measured(task_vectors)` makes up, with the task vectors [task, ...] of one tensor.
    """
    failures = []
    for check in checks(name):
        try:
            check(name, measured)
        except AssertionError as failure:
            failures.append(failure)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise AssertionError("\n".join(map(str, failures)))


@dataclass(frozen=True)
class Trial:
    """A method, and what it takes to run it."""

    method: Method
    measured: Measured | None

    def experts(self, wanted: int = 3) -> int:
        """As many as wanted, unless the method takes only one number of them."""
        return self.method.experts or wanted

    def names(self, task_vectors: Tensor) -> tuple[str, ...]:
        """Of the experts."""
        return tuple(f"expert {task}" for task in range(len(task_vectors)))

    def task_vectors(self, *shape: int, tasks: int = 3, seed: int = 0) -> Tensor:
        """Of random experts, each stronger than the one before."""
        generator = torch.Generator().manual_seed(seed)
        strengths = torch.tensor([0.02 * 1.7**task for task in range(self.experts(tasks))])
        return torch.randn(len(strengths), *shape, generator=generator) * strengths.view(-1, *[1] * len(shape))

    def options(self, **given: Any) -> Options:
        """As a merge would have them."""
        return self.method.options(given).resolve({})

    def context(self, task_vectors: Tensor, names: tuple[str, ...] | None = None) -> Context:
        """One tensor of a base that is zero."""
        known = self.measured(task_vectors) if self.measured and self.method.uses == "data" else None
        return Context("layer.weight", names or self.names(task_vectors), torch.zeros_like(task_vectors[0]), known)

    def run(self, task_vectors: Tensor, names: tuple[str, ...] | None = None, **options: Any) -> Merged:
        """The method on one tensor."""
        return self.method(task_vectors, self.options(**options), self.context(task_vectors, names))

    def whole_model(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """A base with tensors of every kind, and its experts."""
        base = {name: w.to(dtype) if w.is_floating_point() else w for name, w in _base_tensors().items()}
        return base, {f"expert {seed}": _fine_tuned(base, seed) for seed in range(self.experts())}


def _base_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"layers.0.weight": (12, 8), "layers.0.bias": (12,), "layers.1.weight": (6, 12), "embed.weight": (20, 8)}
    floats = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**floats, "scale": torch.tensor(1.5), "steps": torch.tensor(7)}


def _fine_tuned(base: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        name: w + 0.05 * torch.randn(w.shape, generator=generator) if w.is_floating_point() else w.clone()
        for name, w in base.items()
    }


# --- the checks --------------------------------------------------------------------------------------------------------

_checks: list[Check] = []


def _check(concerns: Callable[[Method], bool] = lambda method: True) -> Callable[[Callable[[Trial], None]], None]:  # noqa: ARG005
    """Add a check; its name and promise are the function's."""

    def add(body: Callable[[Trial], None]) -> None:
        _checks.append(Check(body.__name__.strip("_"), (body.__doc__ or "").rstrip("."), concerns, body))

    return add


def _without_data(method: Method) -> bool:
    return method.uses == "weights"


def _demand(condition: object, otherwise: str) -> None:
    """An assertion that stays when Python optimises, and says what was found."""
    if not condition:
        raise AssertionError(otherwise)


def _demand_finite(tensor: Tensor) -> None:
    bad = int((~torch.isfinite(tensor)).sum())
    _demand(bad == 0, f"{bad} of {tensor.numel()} values are NaN or infinite")


def _demand_same_bits(one: Merged, other: Merged, what: str) -> None:
    for mine, theirs in zip(_tensors(one), _tensors(other), strict=True):
        _demand(mine.dtype == theirs.dtype and torch.equal(mine, theirs), f"{what} differ")
    _demand(one.warnings == other.warnings, f"{what} come with different warnings")


def _tensors(merged: Merged) -> list[Tensor]:
    """Everything that was computed."""
    shared = [] if merged.shared is None else [merged.shared]
    return [merged.delta, *shared, *(part for own in merged.parts for _, part in sorted(own.items()))]


def _refusal(refused: Callable[[], object]) -> str:
    """What an InputError says; nothing if there is none."""
    try:
        refused()
    except InputError as error:
        return str(error)
    return ""


# What it computes


@_check()
def shape_and_finiteness(trial: Trial) -> None:
    """The merged matrix is finite and has the shape of the experts', thin and square ones too."""
    for shape in MATRICES:
        delta = trial.run(trial.task_vectors(*shape)).delta
        _demand(delta.shape == shape, f"task vectors of shape {list(shape)} give a result of shape {list(delta.shape)}")
        _demand(delta.is_floating_point(), f"the result is of {delta.dtype}")
        _demand_finite(delta)


@_check()
def tensors_that_are_not_matrices(trial: Trial) -> None:
    """A method that touches all tensors merges vectors, scalars and convolutions; others refuse them."""
    for shape in NOT_MATRICES:
        task_vectors = trial.task_vectors(*shape)
        if trial.method.touches == "all":
            delta = trial.run(task_vectors).delta
            _demand(delta.shape == shape, f"task vectors of shape {list(shape)} give a result of shape {list(delta.shape)}")
            _demand_finite(delta)
        else:
            said = _refusal(partial(merge_task_vectors, task_vectors, trial.method.name))
            reason = "merges matrices" if trial.method.uses == "weights" else "uses data"
            _demand(reason in said, f"a tensor of shape {list(shape)} is not refused")


@_check(_without_data)
def dtype_in_is_dtype_out(trial: Trial) -> None:
    """Task vectors of any precision give a finite result of that precision."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        merged = merge_task_vectors(trial.task_vectors(12, 8).to(dtype), method=trial.method.name)
        _demand(merged.dtype == dtype, f"{dtype} gives {merged.dtype}")
        _demand_finite(merged)


@_check()
def float32_agrees_with_float64(trial: Trial) -> None:
    """The same numbers in float32 and in float64 give the same merge, but for rounding."""
    task_vectors = trial.task_vectors(12, 8)
    exact = trial.run(task_vectors.double()).delta.double()
    error = float((trial.run(task_vectors).delta.double() - exact).norm() / exact.norm())
    _demand(error <= 1e-4, f"they differ by {error:.2g} of the merge")


@_check()
def nobody_changed_anything(trial: Trial) -> None:
    """Experts that are the base give the base, exactly."""
    _demand(not trial.run(torch.zeros(trial.experts(), 12, 8)).delta.any(), "the result is not zero")


@_check()
def one_frozen_expert_is_harmless(trial: Trial) -> None:
    """An expert that did not change a tensor does not spoil it."""
    task_vectors = trial.task_vectors(12, 8)
    task_vectors[0] = 0
    _demand_finite(trial.run(task_vectors).delta)


@_check(lambda method: method.experts in (None, 1))
def one_expert(trial: Trial) -> None:
    """One expert can be merged."""
    _demand_finite(trial.run(trial.task_vectors(12, 8, tasks=1)).delta)


@_check()
def duplicate_experts(trial: Trial) -> None:
    """Two equal experts give a finite result, the same each time."""
    task_vectors = trial.task_vectors(12, 8)
    task_vectors[1:2] = task_vectors[0]
    first = trial.run(task_vectors)
    _demand_finite(first.delta)
    _demand_same_bits(first, trial.run(task_vectors), "two merges of equal experts")


@_check()
def rank_deficient_experts(trial: Trial) -> None:
    """Experts of rank one, of which covariances are singular, do not blow up."""
    task_vectors = trial.task_vectors(12, 1) @ trial.task_vectors(1, 8, seed=1)
    delta = trial.run(task_vectors).delta
    _demand_finite(delta)
    ratio = float(delta.norm() / task_vectors.norm())
    _demand(ratio < 20, f"the result is {ratio:.3g} times as long as all task vectors together")


@_check(lambda method: not method.ordered)
def order_of_experts(trial: Trial) -> None:
    """The experts' order does not matter; a method to which it does says ordered=True."""
    task_vectors = trial.task_vectors(12, 8)
    names = trial.names(task_vectors)
    turned = trial.run(task_vectors.roll(1, 0), names=(*names[-1:], *names[:-1]))
    torch.testing.assert_close(turned.delta, trial.run(task_vectors).delta, rtol=1e-4, atol=1e-6)


@_check()
def alpha_scales(trial: Trial) -> None:
    """Alpha multiplies the merged vector, whatever else the method does."""
    task_vectors = trial.task_vectors(12, 8)
    halved, whole = trial.run(task_vectors, alpha=0.5).delta, trial.run(task_vectors, alpha=1.0).delta
    torch.testing.assert_close(halved, whole / 2)


# Purity


@_check()
def inputs_are_untouched(trial: Trial) -> None:
    """Task vectors and the base's weights are left as they were."""
    for dtype in (torch.float32, torch.float64):
        task_vectors = trial.task_vectors(12, 8).to(dtype)
        context = trial.context(task_vectors)
        assert context.base is not None
        before, base = task_vectors.clone(), context.base.clone()
        trial.method(task_vectors, trial.options(), context)
        _demand(task_vectors.equal(before), f"the task vectors in {dtype} were changed")
        _demand(context.base.equal(base), f"the base in {dtype} was changed")


@_check()
def results_are_new(trial: Trial) -> None:
    """What comes out may be written to: it does not share memory with what went in."""
    for dtype in (torch.float32, torch.float64):
        for tasks in (1, 3):
            task_vectors = trial.task_vectors(12, 8, tasks=tasks).to(dtype)
            memory = task_vectors.untyped_storage().data_ptr()
            for found in _tensors(trial.run(task_vectors, alpha=1.0)):
                _demand(found.untyped_storage().data_ptr() != memory, f"a result in {dtype} lies in the task vectors' memory")


@_check()
def same_input_same_bits(trial: Trial) -> None:
    """The same input gives the same bits, whatever torch's own random numbers: random ones come from `context.generator`."""
    task_vectors = trial.task_vectors(12, 8)
    torch.manual_seed(1)
    first = trial.run(task_vectors)
    torch.manual_seed(2)
    _demand_same_bits(first, trial.run(task_vectors), "two merges of the same input")


# Whole models


@_check(_without_data)
def a_whole_model_with_every_kind_of_tensor(trial: Trial) -> None:
    """A model comes out with the base's names, shapes and dtypes, finite, and its counters as they were."""
    for dtype in (torch.float32, torch.bfloat16):
        base, experts = trial.whole_model(dtype)
        merged = merge_state_dicts(base, experts, method=trial.method.name)
        _demand(merged.keys() == base.keys(), "the names are not the base's")
        for name, weight in merged.items():
            same = weight.dtype == base[name].dtype and weight.shape == base[name].shape
            _demand(same, f"'{name}' is {weight.dtype} {list(weight.shape)}")
            _demand_finite(weight)
        _demand(merged["steps"].equal(base["steps"]), "a counter was changed")


@_check(_without_data)
def the_order_of_tensors(trial: Trial) -> None:
    """The order of a model's tensors changes nothing."""
    base, experts = trial.whole_model(torch.float32)
    merged = merge_state_dicts(base, experts, method=trial.method.name)
    turned = {name: dict(reversed(expert.items())) for name, expert in experts.items()}
    other = merge_state_dicts(dict(reversed(base.items())), turned, method=trial.method.name)
    differing = [name for name in base if not merged[name].equal(other[name])]
    _demand(not differing, f"{differing} differ")


@_check(lambda method: method.uses == "data")
def never_without_its_data(trial: Trial) -> None:
    """A method that uses data refuses to do without, wherever it is asked to."""
    base, experts = trial.whole_model(torch.float32)
    task_vectors, name = trial.task_vectors(12, 8), trial.method.name
    for said in (
        _refusal(lambda: merge_state_dicts(base, experts, method=name)),
        _refusal(lambda: merge_task_vectors(task_vectors, method=name)),
        _refusal(lambda: trial.method(task_vectors, trial.options())),
    ):
        _demand(needs_data(name) in said, f"it says {said!r}")


# What it declares


@_check(lambda method: bool(method.is_elementwise(method.options({}))))
def pieces_give_the_same_bits(trial: Trial) -> None:
    """A method that says elementwise gives the same bits a piece at a time, and has nothing to tell of them."""
    task_vectors, options = trial.task_vectors(5000), trial.options()
    pieces = [task_vectors[:, :1024], task_vectors[:, 1024:4096], task_vectors[:, 4096:]]
    plain = Context("layer.weight", trial.names(task_vectors))
    context = Context(plain.tensor, plain.experts, statistics=_gather(trial, options, pieces, plain))
    merged = [trial.method(piece.contiguous(), options, context) for piece in pieces]
    whole = trial.method(task_vectors, options, plain)
    _demand(torch.cat([piece.delta for piece in merged]).equal(whole.delta), "pieces and the whole tensor differ")
    told = any(piece.facts or piece.warnings or piece.parts for piece in merged)
    _demand(not told, "facts, warnings or parts of a piece would be lost")


def _gather(trial: Trial, options: Options, pieces: list[Tensor], context: Context) -> Any:
    """What the method's statistics pass finds in one tensor that is seen in pieces; None if it makes no pass."""
    factory = trial.method.statistics
    statistics = factory(options, context.experts) if factory else None
    if statistics is None:
        return None

    def show(look: Callable[[Tensor], None]) -> None:
        for piece in pieces:
            look(piece.contiguous())

    if isinstance(statistics, TensorStatistics):
        statistics.know_tensor(show, context)
    more = True
    while more:
        show(lambda piece: statistics.observe(piece, context))
        more = statistics.end_pass()
    return statistics


@_check(lambda method: method.core_sides(method.options({}).resolve({})) is not None)
def the_low_rank_core_gives_the_same_merge(trial: Trial) -> None:
    """A method that says low_rank merges adapters in their small core to the same result as expanded."""
    generator = torch.Generator().manual_seed(0)
    options = trial.options()
    sides = trial.method.core_sides(options)
    assert sides is not None
    for shape in ((24, 17), (13, 30)):
        experts: list[Factors | None] = [
            Factors(torch.randn(shape[0], rank, generator=generator) * 0.1, torch.randn(rank, shape[1], generator=generator))
            for rank in [3, 1, 4, 2][: trial.experts()]
        ]
        dense = torch.stack([each.left.double() @ each.right.double() for each in experts if each])
        frame, cores = to_cores(experts, shape, sides)
        names = trial.names(dense)
        expected = trial.method(dense, options, Context("layer.weight", names)).delta.double()
        found = trial.method(cores, options, Context("layer.weight", names, frame=frame)).delta.double()
        error = float((frame.to_right(frame.to_left(found)) - expected).norm() / expected.norm())
        _demand(error <= 1e-6, f"core and matrix differ by {error:.2g} of the merge")


@_check(lambda method: method.per_task)
def parts_belong_to_the_experts(trial: Trial) -> None:
    """A method with a model per task gives every expert parts from which a tensor of the right shape can be made."""
    merged = trial.run(trial.task_vectors(12, 8))
    _demand(len(merged.parts) == trial.experts(), f"{len(merged.parts)} experts have parts")
    for own in merged.parts:
        for part in own.values():
            _demand(part.dtype == torch.bool or bool(torch.isfinite(part).all()), "a part is not finite")
        _demand(_shape_of(own, merged) in (None, (12, 8)), f"parts {sorted(own)} make a tensor of shape {_shape_of(own, merged)}")


def _shape_of(own: Mapping[str, Tensor], merged: Merged) -> tuple[int, ...] | None:
    """Of what `Merged` says the parts make; None of an expert that has nothing of its own."""
    if not own:
        return None
    if "mask" in own:
        _demand(own["mask"].dtype == torch.bool and own["scale"].numel() == 1, "a mask is boolean and has one scale")
        _demand(merged.shared is not None, "a mask refers to the shared vector, which is missing")
        return tuple(own["mask"].shape)
    return tuple((own["left"] @ own["right"] if "left" in own else own["delta"]).shape)


@_check(lambda method: not method.per_task)
def one_model_has_no_parts(trial: Trial) -> None:
    """Only a method that says per_task gives experts parts of their own: they would be lost."""
    _demand(not trial.run(trial.task_vectors(12, 8)).parts, "there are parts")


@_check()
def options_round_trip(trial: Trial) -> None:
    """Default options are within their own ranges, and survive being written to a recipe and read again."""
    method = trial.method
    described = {option.name: option.default for option in method.describe_options()}
    _demand(method.options(described) == method.options({}), "the defaults that are shown are not the defaults")
    for options in (method.options({}), trial.options()):
        again = method.options(json.loads(json.dumps(asdict(options))))
        _demand(again == options, f"{options} comes back as {again}")


@_check()
def unknown_options_are_refused(trial: Trial) -> None:
    """An option that does not exist is refused by name."""
    said = _refusal(lambda: trial.method.options({"no_such_option": 1}))
    _demand("has no option 'no_such_option'" in said, f"it says {said!r}")


@_check()
def it_explains_itself(trial: Trial) -> None:
    """Title, paper, docstring and the meaning of every option are there for help, and estimates for the plan."""
    method = trial.method
    _demand(method.title and method.paper and method.summary, "a title, a paper or the function's docstring is missing")
    for option in method.describe_options():
        _demand(option.meaning and option.allowed, f"option '{option.name}' has no description")
    for sizes in ((1, 2, 2), (8, 768, 3072), (3, 4, 4096)):
        _demand(method.flops(*sizes) > 0, f"flops{sizes} is not positive")
        _demand(method.float64_elements(*sizes) >= 0, f"float64_elements{sizes} is negative")


@_check()
def what_is_told_is_declared(trial: Trial) -> None:
    """What it tells of a tensor is declared, and each fact says what it means."""
    for shape in ((12, 8), (9, 9)):
        task_vectors = trial.task_vectors(*shape)
        declared = trial.method.declared_facts(trial.options())
        known = {fact.replace("{expert}", expert) for fact in declared for expert in trial.names(task_vectors)}
        undeclared = trial.run(task_vectors).facts.keys() - known - {"active_experts"}
        _demand(not undeclared, f"tells {sorted(undeclared)}, which `facts` does not declare")
        _demand(all(declared.values()), "a fact is declared without its meaning")
