"""The licences of everything that acemerge needs when it runs, extras included, from what is installed: docs/licences.md.

python tests/support/licences.py          # writes it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

from packaging.requirements import Requirement

PAGE = Path(__file__).parents[2] / "docs" / "licences.md"
LOCK = Path(__file__).parents[2] / "requirements.lock"
EXTRAS = ("bench", "cluster", "eval", "gguf", "lora", "report", "search")
COPYLEFT = re.compile(r"GPL|General Public|Affero|EUPL|European Union Public|SSPL|OSL-|CeCILL|CC-BY-SA|Sleepycat|RPL-", re.I)
"""Licences that reach programs which only use the package, or that are disputed to."""
OF_SINGLE_FILES = re.compile(r"MPL|Mozilla|EPL-|CDDL", re.I)
"""Whoever changes such a package's files has to publish those: nothing is asked of who uses it."""
TOLERATED = {
    "chardet": "LGPL; it comes with lm-eval, of the extra `eval`, and is neither changed nor passed on; without that extra it is "
    "not installed"
}
_OF_GPUS = re.compile(r"nvidia-|cuda-|triton")
"""With torch's CUDA builds, by NVIDIA's terms; torch's CPU build has none of them."""


def same_name(name: str) -> str:
    """As indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed() -> dict[str, set[str]]:
    """Every package that is installed here because acemerge, with these extras, needs it -> the extras that lead to it."""
    found: dict[str, set[str]] = {}
    for extra in ("", *EXTRAS):
        for name in _closure("acemerge", (extra,), set()):
            if name != "acemerge" and not _OF_GPUS.match(name):
                found.setdefault(name, set()).add(extra)
    return found


def _closure(name: str, extras: tuple[str, ...], seen: set[tuple[str, str]]) -> Iterator[str]:
    """A package and all that it needs, as far as it is installed."""
    new = [extra for extra in extras if (same_name(name), extra) not in seen]
    seen |= {(same_name(name), extra) for extra in new}
    try:
        wanted = [Requirement(each) for each in requires(name) or []] if new else []
    except PackageNotFoundError:
        return
    yield same_name(name)
    for each in wanted:
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in new):
            yield from _closure(each.name, ("", *sorted(each.extras)), seen)


def licence_of(name: str) -> str:
    """As the package states it: by an expression, else by its classifiers, else by a line of text."""
    told = metadata(name)
    stated = told["License-Expression"] or ""
    classifiers = [each.split(" :: ")[-1] for each in told.get_all("Classifier") or [] if each.startswith("License ::")]
    text = (told["License"] or "").strip().split("\n")[0]
    return stated or " or ".join(classifiers) or text


def is_copyleft(licence: str) -> bool:
    """Where there is a choice, none of the choices may be free of it."""
    return all(COPYLEFT.search(choice) for choice in re.split(r" or (?!later)", licence, flags=re.I))


def page() -> str:
    """What the docs show."""
    rows = []
    for name, extras in sorted(needed().items()):
        why = "core" if "" in extras else ", ".join(f"`{extra}`" for extra in sorted(extras))
        rows.append(f"| {name} | {licence_of(name)} | {why} |")
    exceptions = "\n".join(f"- {name}: {why}." for name, why in TOLERATED.items())
    return f"""# Licences of what acemerge needs

acemerge itself is under Apache-2.0. Below is every package that it needs when it runs, with what they need in turn, and which
part of acemerge needs it: the core, or an extra. Licences are as the packages themselves state them in their metadata.

    python tests/support/licences.py     # writes this page, from what is installed

`make test` fails on a package that is not listed with its licence, and on one whose licence is copyleft (GPL, LGPL, AGPL, EUPL,
SSPL, ...). Licences of the kind of MPL-2.0 are let through: they ask something only of those who change that package's own files.
One exception is made:

{exceptions}

With CUDA builds of torch come NVIDIA's own packages under NVIDIA's own terms; the CPU build has none of them.

| package | licence | needed by |
|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
