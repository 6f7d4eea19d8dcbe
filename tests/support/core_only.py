"""What acemerge must do where only its own dependencies are installed: `python core_only.py FOLDER [--pretend]`.

`make test-install` runs this in such an environment. With --pretend, every package of the extras counts as not installed.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

# torch brings the first two, rich the third, and every environment has the last.
ALWAYS_THERE = {"jinja2", "markupsafe", "markdown_it", "pip"}


def modules_of_the_extras() -> set[str]:
    """The installed modules whose packages only an extra of acemerge asks for."""
    asked = {False: {"acemerge"}, True: set[str]()}
    for requirement in requires("acemerge") or []:
        asked["extra ==" in requirement].add(same_name(re.split(r"[^\w.-]", requirement)[0]))
    only_extras = asked[True] - asked[False]
    return {module for module, packages in packages_distributions().items() if {same_name(p) for p in packages} <= only_extras}


def same_name(package: str) -> str:
    """Package names are the same whatever the case, and whether dash, dot or underscore."""
    return re.sub(r"[-_.]+", "-", package).lower()


def run(*arguments: object) -> None:
    from acemerge.cli import main

    sys.argv = ["acemerge", *map(str, arguments)]
    code: object = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    assert not code, f"{sys.argv} ended with {code}"


def main() -> None:
    folder, pretend = Path(sys.argv[1]), "--pretend" in sys.argv
    extras = modules_of_the_extras()
    if pretend:
        for module in extras:
            sys.modules[module] = None  # type: ignore[assignment]
    else:
        assert extras <= ALWAYS_THERE, f"more than the core is installed: {sorted(extras - ALWAYS_THERE)}"

    from acemerge.testing import check_method
    from small_models import write_models

    check_method("average")  # without pytest
    models = write_models(folder)
    run("--help")
    run("plan", *models.arguments)
    run("merge", *models.arguments, "-o", folder / "merged")
    run("verify", folder / "merged")
    print(f"the core works without its extras ({len(extras)} modules refused)" if pretend else "the core works by itself")


if __name__ == "__main__":
    main()
