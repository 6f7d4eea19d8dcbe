"""The text of `--help`, from a command's docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import dedent, indent
from typing import Any

_AS_IT_IS = "\b\n"  # click's mark of a paragraph whose lines are not to be filled


def help_text(command: Callable[..., Any]) -> str:
    """Its paragraphs, of which the indented ones, examples, keep their lines.

    >>> def merge():
    ...     '''Merge models.
    ...
    ...         merge a b
    ...
    ...     All is well.
    ...     '''
    >>> help_text(merge)
    'Merge models.\\n\\n\\x08\\n  merge a b\\n\\nAll is well.'
    """
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(_AS_IT_IS + indent(dedent(text), "  ") if text.startswith(" ") else text for text in paragraphs)
