"""`acemerge diagnose`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acemerge.diagnosis import DEFAULT_CANDIDATES

if TYPE_CHECKING:
    from acemerge.diagnosis.measure import Diagnosis


def diagnose_command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE EXPERT...", help="The base and its fine-tunes, as for `acemerge merge`; or one recipe.yaml."
        ),
    ],
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
            help="A merge to forecast, such as ace:epsilon=1e-3; repeatable. By default a recipe's own, and "
            f"{', '.join(DEFAULT_CANDIDATES)}.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Forecasts and spectra from the first, middle and last layer only.")
    ] = False,
    preset: Annotated[str | None, typer.Option(help="Which tensors merge, as for `acemerge merge`.")] = None,
    orientation: Annotated[str | None, typer.Option(help="canonical, or stored.")] = None,
    missing: Annotated[str | None, typer.Option(help="A tensor that some experts lack: 'error' or 'skip'.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every measurement as JSON on standard output.")] = False,
) -> None:
    """Look at experts before merging: are they mergeable, where do they disagree, which method would lose least?

    [bold]acemerge diagnose base math code -o report.html[/]                     a page with figures and every tensor

    [bold]acemerge diagnose base math code -m ace -m ace:epsilon=1e-3[/]         forecasts for settings of your own

    From the weights alone, one tensor at a time; nothing is merged or written but the report. It takes about as long as a merge
    by each of the methods; --quick is for large models.
    """
    from acemerge.cli.diagnose_display import print_diagnosis
    from acemerge.diagnosis.candidates import of_recipe
    from acemerge.diagnosis.measure import measure, planned_work
    from acemerge.execute.pipeline import compute_threads, find_sources, torch_device
    from acemerge.planning.progress import show_progress
    from acemerge.recipe.arguments import recipe_from
    from acemerge.reports.figure import check_installed
    from acemerge.reports.page import check_report

    if output or figures:
        check_installed()
        check_report(output, figures)
    flags = {"preset": preset, "orientation": orientation, "missing": missing}
    recipe, relative_to = recipe_from(models, [], {name: value for name, value in flags.items() if value is not None})
    sources = find_sources(recipe, relative_to, offline)
    candidates = methods or [*of_recipe(recipe), *DEFAULT_CANDIDATES]
    where = torch_device(device)
    with compute_threads(threads), show_progress(planned_work(recipe, sources), quiet=quiet or as_json) as progress:
        found = measure(recipe, sources, progress, candidates=candidates, device=where, quick=quick)
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print_diagnosis(found)
    if output or figures:
        _write(found, output, figures, quiet=as_json)


def _write(found: Diagnosis, output: Path | None, figures: Path | None, *, quiet: bool) -> None:
    from acemerge.diagnosis.report import diagnosis_page
    from acemerge.reports.page import save_figures, write_report

    page = diagnosis_page(found)
    if output:
        write_report(page, output)
    if figures:
        save_figures(page, figures)
    if not quiet:
        print("wrote " + ", ".join(str(path) for path in (output, figures) if path))
