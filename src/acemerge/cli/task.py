"""`acemerge task`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acemerge.errors import printable


def task_command(
    merged: Annotated[Path, typer.Argument(help="A folder that `acemerge merge` wrote, with heads/ or tasks/ in it.")],
    expert: Annotated[str, typer.Argument(help="Which expert's task: its name in the merge, a folder under heads/ or tasks/.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder to create.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Make the model for one task: the merged backbone with what is that expert's own put back on it.

        acemerge task merged sst2 -o merged-sst2

    Put back are the expert's head, config and tokenizer (heads/), and for methods that make one model per task, such as emr,
    tall_mask and twin, its mask or low-rank factors (tasks/). The output is an ordinary Hugging Face folder.
    """
    from acemerge.output.task_models import export_expert

    export_expert(merged, expert, output, overwrite=overwrite)
    print(printable(f"{output}: the merged model for the task of '{expert}'"))
