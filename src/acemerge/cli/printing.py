"""What commands print for programs, and readers of standard output that do not take it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from acemerge.errors import AcemergeError


@contextmanager
def telling_of(output: Path) -> Iterator[None]:
    """Where standard output cannot take the summary, say that the work itself is done."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        leave_reader()
        raise AcemergeError(
            f"{output} was written and is whole, but standard output did not take the summary: {error.strerror}"
        ) from None


@contextmanager
def read_as_far_as_wanted() -> Iterator[None]:
    """A reader of what is printed, such as `head`, may leave; the command goes on to its end."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        leave_reader()
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):  # rich turns that into a failure
            raise
        leave_reader()


@contextmanager
def standard_output_to_the_end() -> Iterator[None]:
    """Where standard output cannot take what a command prints, say so; Python would, in its own words and after the end."""
    ended: BaseException = SystemExit(0)
    try:
        yield
    except BaseException as given:
        ended = given
    try:
        sys.stdout.flush()
    except OSError as error:
        leave_reader()
        went_well = isinstance(ended, SystemExit) and not ended.code
        if not isinstance(error, BrokenPipeError) and (went_well or isinstance(ended, OSError)):
            raise AcemergeError(f"standard output does not take what there is to say: {error.strerror}") from None
    raise ended


def print_json(content: Any) -> None:
    """Indented, all at once."""
    with read_as_far_as_wanted():
        print(json.dumps(content, indent=1), flush=True)


def leave_reader() -> None:
    """The reader of our output has seen enough, as `head` does: nothing went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
