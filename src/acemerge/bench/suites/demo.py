"""The suite of `acemerge demo`: four of the text tasks, with experts that train in a minute or two."""

from __future__ import annotations

from dataclasses import replace

from acemerge.bench.data.text_tasks import TASKS
from acemerge.bench.domains.text import TextDomain
from acemerge.bench.suites.registry import Suite

# Those of the bench's tasks that come in small packages and learn from few rows.
_TRAIN_ROWS = {"movie": 1600, "langid": 1200, "commits": 1600, "reuters_r8": 640}


class DemoDomain(TextDomain):
    """The text domain with experts of its own: those of the bench train for longer."""

    name = "demo"


def demo_suite(name: str) -> Suite:
    """Fewer rows to learn from, and a little more speed."""
    tasks = [task for task in TASKS if task.name in _TRAIN_ROWS]
    short = (replace(t, train_rows=_TRAIN_ROWS[t.name], learning_rate=max(1e-4, t.learning_rate)) for t in tasks)
    return Suite(name, DemoDomain(), tuple(short))
