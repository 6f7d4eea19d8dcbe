"""The registry of measurements: what a method that uses data finds out about the experts before it merges.

A method in `methods/` declares `uses="data"` and knows nothing of models or rows. A file in `calibration/measurements/` says what
is measured for it:

    @measures("regmean")
    def measure_grams(run, options):
        return Measured(...)

What it returns is what the method's kernel finds in `context.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from acemerge.discovery import register_all
from acemerge.errors import InputError

if TYPE_CHECKING:
    from acemerge.calibration.run import DataRun

ENTRY_POINT_GROUP = "acemerge.measurements"

Measurement = Callable[["DataRun", Any], Any]
"""Given the models and rows to run, and the method's options."""
_Measurement = TypeVar("_Measurement", bound=Measurement)

_registered: dict[str, Measurement] = {}


def measures(method: str) -> Callable[[_Measurement], _Measurement]:
    """Register the measurement of the method of that name."""

    def register(measurement: _Measurement) -> _Measurement:
        _registered[method] = measurement
        return measurement

    return register


@cache
def _discover() -> None:
    register_all("acemerge.calibration.measurements", ENTRY_POINT_GROUP)


def measurement_of(method: str) -> Measurement:
    """What is measured for the method of that name."""
    _discover()
    if method not in _registered:
        raise InputError(
            f"method '{method}' uses data, and nothing is registered that measures it: the package that brings the method must "
            f"register a function with @measures(\"{method}\"), by an entry point in the group '{ENTRY_POINT_GROUP}'"
        )
    return _registered[method]
