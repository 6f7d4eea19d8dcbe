"""`acemerge diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acemerge.cli.flags import AsJson, Models, RecipeFlags, only, with_flags
from acemerge.cli.printing import print_json, read_as_far_as_wanted
from acemerge.diagnosis import DEFAULT_CANDIDATES
from acemerge.recipe.run_options import RunOptions

if TYPE_CHECKING:
    from acemerge.diagnosis.measure import Diagnosis

DO_NOT_MERGE = 3
"""The exit code where that is the verdict."""


@with_flags(
    asked=only(RecipeFlags, "preset", "orientation", "missing"), run=only(RunOptions, "device", "threads", "offline", "quiet")
)
def diagnose_command(
    models: Models,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write the page to this file, such as report.html.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write every figure as .svg and .png into this folder.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--method",
            metavar="METHOD[:KEY=VALUE,...]",
            help="A merge to measure, averaging besides, such as ace:epsilon=1e-3; repeatable. By default a recipe's own, and "
            f"{', '.join(DEFAULT_CANDIDATES)}.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Distances and spectra from the first, middle and last layer only.")
    ] = False,
    asked: RecipeFlags = RecipeFlags(),
    run: RunOptions = RunOptions(),
    as_json: AsJson = False,
) -> None:
    """Look at experts before merging: are they mergeable, and where do they disagree?

        acemerge diagnose base math code -o report.html    # a page with figures
        acemerge diagnose base math code -m ace -m ace:epsilon=1e-3   # compare

    From the weights alone, one tensor at a time; nothing is merged or written but the report. It takes about as long as a merge
    by each of the methods; --quick is for large models. The exit code is 3 if the experts should not be merged as they are.
    """
    from acemerge.cli.diagnose_display import print_diagnosis, print_what_is_amiss
    from acemerge.diagnosis.candidates import of_recipe
    from acemerge.diagnosis.findings import findings, verdict
    from acemerge.diagnosis.measure import measure, planned_work
    from acemerge.execute.compute import compute_threads, torch_device
    from acemerge.execute.opening import find_sources
    from acemerge.planning.progress import show_progress
    from acemerge.reports.figure import check_installed
    from acemerge.reports.page import check_report

    if output or figures:
        check_installed()
        check_report(output, figures)
    recipe, relative_to = asked.recipe(models)
    sources = find_sources(recipe, relative_to, run.offline)
    candidates = methods or [*of_recipe(recipe), *DEFAULT_CANDIDATES]
    where = torch_device(run.device)
    plan, more = planned_work(recipe, sources, candidates, quick=quick)
    with compute_threads(run.threads), show_progress(plan, quiet=run.quiet or as_json, more=more) as progress:
        found = measure(recipe, sources, progress, candidates=candidates, device=where, quick=quick)
    written = _write(found, output, figures)
    with read_as_far_as_wanted():
        if as_json:
            print_json(found.to_json())
        elif run.quiet:
            print_what_is_amiss(found)
        else:
            print_diagnosis(found)
            if written:
                print("wrote " + ", ".join(map(str, written)))
    if verdict(findings(found))[0] == "stop":
        raise typer.Exit(DO_NOT_MERGE)


def _write(found: Diagnosis, output: Path | None, figures: Path | None) -> list[Path]:
    """The page and the figures, before anything is printed, which a reader may stop."""
    if not (output or figures):
        return []
    from acemerge.diagnosis.report import diagnosis_page
    from acemerge.reports.page import write_page

    write_page(diagnosis_page(found), output, figures)
    return [path for path in (output, figures) if path]
