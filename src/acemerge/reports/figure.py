"""A figure: drawn once in the page's own colours, light or dark, and once in fixed ones for files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from acemerge.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7f7f7f")
"""Okabe and Ito's colours, which people who confuse red and green can tell apart; on light and on dark ground alike."""
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", (0, (4, 1)), (0, (1, 1)), (0, (4, 1, 1, 1)))
"""After the colours are used up."""


@dataclass(frozen=True)
class Palette:
    """The colours that depend on the ground."""

    ink: str
    muted: str
    grid: str


FOR_FILES = Palette("#1c2126", "#57606a", "#d8dee4")
# In a page, these stand for variables of its style sheet.
_FOR_PAGES = Palette("#010203", "#040506", "#070809")
_VARIABLES = {_FOR_PAGES.ink: "var(--ink)", _FOR_PAGES.muted: "var(--muted)", _FOR_PAGES.grid: "var(--grid)"}


@dataclass(frozen=True)
class Figure:
    """What to draw, and the same in words."""

    name: str
    """For file names and links: letters and hyphens."""
    title: str
    caption: str
    """How to read it."""
    alternative: str
    """What there is to see, with the numbers that matter, for those who cannot see it."""
    draw: Callable[[Palette], Drawing]

    def inline(self) -> str:
        """An <svg> element that takes its colours from the page."""
        svg = _svg(self.draw(_FOR_PAGES), self.name)
        for colour, variable in _VARIABLES.items():
            svg = svg.replace(colour, variable)
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        label = f'role="img" aria-label="{escape(self.alternative, quote=True)}"'
        return svg.replace("<svg", f"<svg {label}", 1)

    def files(self) -> dict[str, bytes]:
        """As .svg and .png."""
        drawing, pixels = self.draw(FOR_FILES), io.BytesIO()
        vector = _svg(drawing, self.name).encode()
        drawing.savefig(pixels, format="png", dpi=200, facecolor="white", metadata={"Software": None})
        return {f"{self.name}.svg": vector, f"{self.name}.png": pixels.getvalue()}


def _svg(drawing: Drawing, salt: str) -> str:
    """The same bytes every time: no date, no random ids; text as text."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def check_installed() -> None:
    """Refuse early, and say what to install."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(f"reports need {error.name}: pip install 'acemerge[report]'") from None
