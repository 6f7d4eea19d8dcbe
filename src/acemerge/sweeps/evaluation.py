"""How a point is evaluated: by a Python function, or by a command that prints the scores."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acemerge.errors import InputError, MergeError

Evaluate = Callable[[Path, Mapping[str, Any]], Mapping[str, float] | float]
"""Scores of the model in a folder, merged with these settings: numbers by name, or one number."""


def describe_evaluation(evaluate: Evaluate) -> str:
    """What scores are noted with: another command's or function's are no use."""
    described = getattr(evaluate, "__qualname__", type(evaluate).__qualname__)
    return str(getattr(evaluate, "command", f"{getattr(evaluate, '__module__', '')}.{described}"))


def checked_scores(given: Any, origin: str) -> dict[str, float | None]:
    """Named numbers; one number alone is called `score`. What is not a number is kept as None."""
    scores = {"score": given} if _is_number(given) else given
    if not isinstance(scores, Mapping) or not scores or not all(isinstance(name, str) for name in scores):
        raise MergeError(f'{origin}: gave {_short(given)}; it must give numbers by name, such as {{"accuracy": 0.91}}')
    for name, value in scores.items():
        if not _is_number(value):
            raise MergeError(f"{origin}: the score '{name}' is {_short(value)}, which is no number")
    return {name: float(value) if math.isfinite(value) else None for name, value in scores.items()}


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str) and hasattr(value, "__float__")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True)
class CommandEvaluation:
    """Runs a command, without a shell, on a model's folder: in the place of `{}`, or else as the last argument.

    The last line that it writes to its standard output holds the scores, as JSON; what it writes to standard error is shown.
    """

    command: str

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise InputError(f"--evaluate {self.command}: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise InputError(f"--evaluate {self.command}: there is no such command; give one such as 'python score.py'")

    def __call__(self, folder: Path, settings: Mapping[str, Any]) -> Mapping[str, float]:  # noqa: ARG002
        """Its scores."""
        words, place = shlex.split(self.command), str(folder.resolve())
        arguments = [word.replace("{}", place) for word in words] if "{}" in self.command else [*words, place]
        ended = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise MergeError(f"--evaluate {self.command}: ended with code {ended.returncode} on {folder}")
        last = (ended.stdout.strip().splitlines() or [""])[-1]
        try:
            scores: Mapping[str, float] = json.loads(last)
        except ValueError:
            example = '{"accuracy": 0.91}'
            raise MergeError(f"--evaluate {self.command}: its last line is {_short(last)}, not JSON such as {example}") from None
        return scores
