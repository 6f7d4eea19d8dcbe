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


def print_json(content: Any) -> None:
    """Indented, all at once."""
    try:
        print(json.dumps(content, indent=1), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough: nothing went wrong
        leave_reader()


def leave_reader() -> None:
    """The reader of our output has seen enough, as `head` does: nothing went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
