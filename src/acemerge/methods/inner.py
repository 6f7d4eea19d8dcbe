"""What methods around another one have in common: those that change what it is given, or what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field
from torch import Tensor

from acemerge.errors import InputError
from acemerge.methods.registry import Context, Merged, Method, Options, Statistics, get_method
from acemerge.numerics.frame import Sides

Prepare = Callable[[Tensor, Context], tuple[Tensor, Context]]
"""Task vectors and context -> both as the inner method gets them."""

Own = TypeVar("Own", bound="InnerOptions")


@dataclass(frozen=True)
class InnerOptions(Options):
    """Which method is inside."""

    outer: ClassVar[str]
    """The name of the method around it."""

    inner: Annotated[str, Field(description="the method that merges, with its own default options and scale")] = "task_arithmetic"

    def resolve(self: Own, config: Mapping[str, Any]) -> Own:  # noqa: ARG002
        """These options, if that method can be inside."""
        inner = get_method(self.inner)
        if inner.name == self.outer or inner.per_task or inner.experts is not None or inner.uses == "data":
            raise InputError(
                f"method '{self.outer}': inner={self.inner!r} is not allowed: it must make one model of any number of experts by "
                "the weights alone, such as tsv_m, iso_c or ties"
            )
        return self

    def check(self, experts: int) -> None:
        """As the inner method says."""
        self.inner_method()[1].check(experts)

    def inner_method(self) -> tuple[Method, Options]:
        """The method inside and its options."""
        inner = get_method(self.inner)
        return inner, inner.options({}).resolve({})


def inner_core_sides(options: InnerOptions) -> Sides | None:
    """For `low_rank` of a method that depends on no coordinates itself."""
    inner, inner_options = options.inner_method()
    return inner.core_sides(inner_options)


def inner_facts(options: InnerOptions) -> Mapping[str, str]:
    """What the inner method tells of a tensor."""
    inner, inner_options = options.inner_method()
    return inner.declared_facts(inner_options)


def inner_statistics(options: InnerOptions, experts: tuple[str, ...]) -> Statistics | None:
    """What the inner method must know first."""
    inner, inner_options = options.inner_method()
    return inner.statistics(inner_options, experts) if inner.statistics else None


@dataclass(frozen=True)
class PreparedStatistics:
    """What the inner method gathers, of what it is given."""

    inner: Statistics
    prepare: Prepare

    def observe(self, task_vectors: Tensor, context: Context) -> None:
        """See one tensor."""
        self.inner.observe(*self.prepare(task_vectors, context))

    def end_pass(self) -> bool:
        """As the inner method says."""
        return self.inner.end_pass()


def prepared_statistics(options: InnerOptions, experts: tuple[str, ...], prepare: Prepare) -> PreparedStatistics | None:
    """The same, if the inner method gathers anything."""
    gathered = inner_statistics(options, experts)
    return None if gathered is None else PreparedStatistics(gathered, prepare)


def merge_prepared(options: InnerOptions, task_vectors: Tensor, context: Context) -> Merged:
    """The inner method's merge of what was prepared for it, with what it gathered of that."""
    inner, inner_options = options.inner_method()
    gathered = context.statistics.inner if isinstance(context.statistics, PreparedStatistics) else None
    return inner(task_vectors, inner_options, replace(context, statistics=gathered))
