"""The errors a user can meet. Each message names what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable
from pathlib import Path


class AcemergeError(Exception):
    """Anything acemerge refuses to do, or could not do: what there is to say, line by line, where strangers' names add none.

    `exit_code` is what the command line returns for it.
    """

    exit_code = 1
    ends_the_process = False
    """Whether the command line ends at once, because another library would hang or crash while Python cleans up."""

    def __str__(self) -> str:
        """Its lines."""
        return "\n".join(map(str, self.args))

    @property
    def found(self) -> tuple[str, ...]:
        """What is wrong, each in one line."""
        return tuple(map(str, self.args))


class InputError(AcemergeError):
    """The recipe, the options or the checkpoints cannot be used as given; nothing has been computed or written."""

    exit_code = 2


class MergeError(AcemergeError):
    """The merge started and could not be completed; no output folder was published."""


MOST_SHOWN = 20  # problems: a model of the wrong kind has one for each of its tensors


class PreflightError(InputError):
    """Every problem that the checkpoints' headers reveal, reported together."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = "1 problem" if count == 1 else f"{count} problems"
        shown = [f"  - {problem}" for problem in self.problems[:MOST_SHOWN]]
        more = [f"  and {count - MOST_SHOWN} more, the first of them: {self.problems[MOST_SHOWN]}"] if count > MOST_SHOWN else []
        super().__init__(f"{heading} found before any work was done:", *shown, *more)

    @property
    def found(self) -> tuple[str, ...]:
        """Every problem, without the heading."""
        return self.problems

    def __reduce__(self) -> tuple[type[PreflightError], tuple[tuple[str, ...]]]:
        """Another process raises it with its problems, not with its message."""
        return PreflightError, (self.problems,)


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough for a sentence of ours; its kind, if it says nothing.

    >>> first_line(ValueError("no such file\\nin the archive")), first_line(KeyError())
    ('no such file', 'KeyError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_OF_DISKS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def disk_failed(error: BaseException) -> bool:
    """Whether it comes of a disk that fails or is full, whatever libraries made of that: nobody may go on without what is on it.

    >>> disk_failed(RuntimeError(f"read: {os.strerror(errno.EIO)}")), disk_failed(FileNotFoundError())
    (True, False)
    """
    is_one = any(os.strerror(each) in str(error) or (isinstance(error, OSError) and error.errno == each) for each in _OF_DISKS)
    before = error.__cause__ or error.__context__
    return is_one or (before is not None and disk_failed(before))


def printable(text: str) -> str:
    """A line with what strangers' files may have put into it, as a terminal can show it: nothing moves its cursor, colours or
    title, or begins another line.

    >>> printable("a\\x1b[2Jb\\nc")
    'a\\\\x1b[2Jb\\\\nc'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


_FEW = 20


def no_folder(path: Path) -> str:
    """What is wrong with a path that should be a folder's."""
    return f"{path}: is a file, not a folder" if path.exists() else f"{path}: no such folder"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A closing hint for an unknown name: the nearest known one, and all of them where they are few or none is near.

    >>> did_you_mean("epsilonn", ["epsilon", "tau"])
    "did you mean 'epsilon'? Known: epsilon, tau"
    """
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    listing = f"Known: {', '.join(known)}"
    if not near:
        return listing
    return f"did you mean '{near[0]}'?" + (f" {listing}" if len(known) <= _FEW else "")
