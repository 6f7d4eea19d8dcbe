"""`acemerge report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    merged: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that `acemerge merge` wrote.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write it; by default OUT.html."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write every figure as .svg and .png into this folder.")
    ] = None,
) -> None:
    """Show what a merge did to every tensor: one HTML file, from the manifest of a merged folder, at any time.

        acemerge report merged     # writes merged.html

    The inputs are not needed. `acemerge merge --report` puts the same page into the output itself, as report.html.
    """
    from acemerge.cli.display import print_findings
    from acemerge.output.manifest import read_merge
    from acemerge.reports.figure import check_installed
    from acemerge.reports.merge_report import merge_page
    from acemerge.reports.page import write_page

    check_installed()
    page = merge_page(read_merge(merged))
    whole = merged.resolve()
    output = output or whole.with_name(f"{whole.name}.html")
    write_page(page, output, figures)
    print_findings(page.level, page.verdict, page.findings)
    print("wrote " + ", ".join(str(path) for path in (output, figures) if path))
