"""The page: what every report has, whatever it is about, and how it becomes one HTML file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from acemerge.errors import AcemergeError, InputError
from acemerge.output.whole_files import check_writable, write_files
from acemerge.reports.figure import Figure
from acemerge.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

Level = Literal["stop", "caution", "good"]
_MARKS: Mapping[Level, str] = {"good": "✓", "caution": "!", "stop": "✗"}
_WORDS: Mapping[Level, str] = {"good": "Good", "caution": "Caution", "stop": "Stop"}


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing, and what to do about it."""

    level: Level
    text: str
    advice: str = ""
    command: str = ""
    """The same to be typed."""


@dataclass(frozen=True)
class Provenance:
    """What a page speaks of, and how to get the same again."""

    command: str
    versions: Mapping[str, str]
    inputs: Mapping[str, Mapping[str, str]]
    """Model -> file -> its hash."""
    note: str = ""
    """Where the command is to be run."""

    @property
    def files(self) -> int:
        """Of all models."""
        return sum(map(len, self.inputs.values()))


@dataclass(frozen=True)
class Column:
    """Of the table of tensors."""

    key: str
    title: str
    meaning: str
    form: str = ""
    """How numbers are written, such as '.3g'; empty for text."""
    choices: Sequence[str] = ()
    """Values to filter by."""

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers."""
        return bool(self.form)


@dataclass(frozen=True)
class Cell:
    """As it is shown, and the number to sort by."""

    text: str
    value: str = ""


@dataclass(frozen=True)
class Row:
    """Of the table."""

    cells: Sequence[tuple[Column, Cell]]
    folded: bool
    """Not shown until it is asked for."""


@dataclass(frozen=True)
class Table:
    """Records are mappings of columns' keys to values; a value may be missing."""

    caption: str
    columns: Sequence[Column]
    records: Sequence[Mapping[str, str | float | None]]
    row: str = "tensor"
    """What each of them is about."""

    @property
    def rows(self) -> list[Row]:
        """As they are shown."""
        return [
            Row([(column, _cell(column, record.get(column.key))) for column in self.columns], _is_folded(record))
            for record in self.records
        ]

    @property
    def folded(self) -> int:
        """How many rows are not shown at first."""
        return sum(map(_is_folded, self.records))


def _is_folded(record: Mapping[str, str | float | None]) -> bool:
    """There is little to see of a tensor that is the base's."""
    return record.get("fate") == "kept"


def _cell(column: Column, value: str | float | None) -> Cell:
    if value is None:
        return Cell("")
    return Cell(format(value, column.form), repr(float(value))) if column.numeric else Cell(str(value))


@dataclass(frozen=True)
class Page:
    """The content of one report."""

    kind: str
    title: str
    lead: str
    level: Level
    verdict: str
    findings: Sequence[Finding]
    facts: Mapping[str, str]
    figures: Sequence[Figure]
    table: Table
    provenance: Provenance
    commands: Mapping[str, str] = field(default_factory=dict)
    """What to do next, ready to be copied."""
    details: Mapping[str, str] = field(default_factory=dict)

    def to_html(self) -> str:
        """One file that loads nothing."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("acemerge", "reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        environment.filters |= {"whole_words": _whole_words, "whole_arguments": _whole_arguments, "slug": _slug}
        return environment.get_template("page.html").render(page=self, version=__version__, marks=_MARKS, words=_WORDS)


_BREAKABLE = re.compile(r"((?:tau|epsilon) = \S+|[^\s()]*\w[-/=:]\w[^\s()]*)")
_LONGEST_WHOLE = 28
_DOT = re.compile(r"\.(?=[^\W\d])")
"""Inside a tensor's name."""


def _whole_words(text: str) -> Markup:
    """Names and settings on one line: a browser breaks expert-3 and 1e-05 at their hyphens. Long ones it may, behind a dot."""
    from markupsafe import Markup, escape

    whole = Markup('<span class="whole">{}</span>')
    parts = enumerate(_BREAKABLE.split(text))  # every other one is what was looked for
    return Markup("").join(
        whole.format(part) if i % 2 and len(part) <= _LONGEST_WHOLE else Markup(_DOT.sub(".<wbr>", escape(part)))
        for i, part in parts
    )


def _whole_arguments(command: str) -> Markup:
    """A command goes on in the next line between two arguments, and not behind the hyphen of a flag; long ones may be broken."""
    from markupsafe import Markup, escape

    whole = Markup('<span class="whole">{}</span>')
    words = command.split(" ")
    return Markup(" ").join(whole.format(word) if "-" in word and len(word) <= _LONGEST_WHOLE else escape(word) for word in words)


def _slug(text: str) -> str:
    """As a file's name."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.") or "tensors"


def gravest_first(findings: Sequence[Finding]) -> list[Finding]:
    """In the order in which they are shown."""
    return sorted(findings, key=lambda finding: ("stop", "caution", "good").index(finding.level))


def verdict_of(findings: Sequence[Finding]) -> Level:
    """The gravest of them."""
    levels = [finding.level for finding in findings]
    return "stop" if "stop" in levels else "caution" if "caution" in levels else "good"


def check_report(path: Path | None, figures: Path | None = None) -> None:
    """Refuse early what no report could be written to, before anything is measured for it."""
    if path is not None and path.is_dir():
        raise InputError(f"-o {path}: is a folder; give the name of a file, such as {path / 'report.html'}")
    if path is not None:
        check_writable(path.parent, f"-o {path}")
    if figures is not None:
        check_writable(figures, f"--figures {figures}")


def write_report(page: Page, path: Path) -> Path:
    """The page alone."""
    write_page(page, path, None)
    return path


def write_page(page: Page, path: Path | None, figures: Path | None) -> None:
    """The page as a file, and every figure as .svg and .png in a folder: all of it, or nothing."""
    check_report(path, figures)
    contents: dict[Path, str | bytes] = {path: page.to_html()} if path else {}
    if figures:
        contents |= {figures / name: content for figure in page.figures for name, content in figure.files().items()}
    try:
        write_files(contents)
    except OSError as error:
        asked = " and ".join([*([f"-o {path}"] if path else []), *([f"--figures {figures}"] if figures else [])])
        raise AcemergeError(
            f"{asked}: cannot be written ({error.strerror}), and nothing was; make room or choose another place, then repeat "
            "the command"
        ) from None
