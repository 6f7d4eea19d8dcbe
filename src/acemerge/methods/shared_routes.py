"""One tensor merged at many settings of a method: what is equal is merged once, and what a method can share is computed once.

A method's shared route is one function, found by the method's name. A method without one is simply called for each setting.

    @shared_route("ace", float64_elements=...)
    def ace_sweep(task_vectors, options, context):  # options: one per point, all different
        ...
        yield [0, 2], Merged(M)                     # the points, by index, that this is the result of
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from acemerge.methods.registry import Context, Cost, Merged, Method, Options

AtPoints = tuple[list[int], Merged]
"""A result, and the points that it belongs to."""
Route = Callable[[Tensor, Sequence[Any], Context], Iterator[AtPoints]]


@dataclass(frozen=True)
class SharedRoute:
    """A method's way through many settings, and its peak of float64 numbers beyond the task vectors."""

    kernel: Route
    float64_elements: Cost


_routes: dict[str, SharedRoute] = {}


def shared_route(method: str, *, float64_elements: Cost) -> Callable[[Route], Route]:
    """Register a method's shared route.

    It gets task vectors, the options of every point and one context, and yields every point's M, before the scale alpha, exactly
    once. What it yields is the caller's to change. Only for methods without statistics, whose context is the same at all points.
    """

    def register(kernel: Route) -> Route:
        _routes[method] = SharedRoute(kernel, float64_elements)
        return kernel

    return register


def find_route(method: str) -> SharedRoute | None:
    """The method's shared route, if it has one."""
    return _routes.get(method)


def merge_at_points(
    method: Method, task_vectors: Float[Tensor, "task *shape"], options: Sequence[Options], contexts: Sequence[Context]
) -> Iterator[AtPoints]:
    """alpha * M of every point, in any order; points with equal options share one."""
    points: dict[Options, list[int]] = {}
    for point, own in enumerate(options):
        points.setdefault(own, []).append(point)
    route = find_route(method.name)
    if route is None or len(points) == 1:
        for own, sharing in points.items():
            yield sharing, method(task_vectors, own, contexts[sharing[0]])
        return
    distinct = list(points)
    for found, merged in route.kernel(task_vectors, distinct, contexts[0]):
        scaled: dict[float, list[int]] = {}
        for index in found:
            scaled.setdefault(distinct[index].alpha, []).extend(points[distinct[index]])
        # The unscaled one last: whoever gets it may change it.
        for alpha in sorted(scaled, key=lambda alpha: alpha == 1.0):
            yield scaled[alpha], merged if alpha == 1.0 else replace(merged, delta=merged.delta * alpha)
