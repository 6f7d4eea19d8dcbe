"""`acemerge plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acemerge.cli.flags import AsJson, Models, RecipeFlags, only, with_flags, without
from acemerge.cli.printing import print_json
from acemerge.errors import PreflightError, printable
from acemerge.recipe.run_options import RunOptions


@with_flags(asked=without(RecipeFlags, "allow_nonfinite"), run=only(RunOptions, "offline"))
def plan_command(
    models: Models,
    asked: RecipeFlags,
    run: RunOptions,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Also check that this output can be written.")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List every tensor by itself.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a merge would do to every tensor, and what it would cost.

    Reads headers only: no tensor data. Reports every problem that the headers can show, and those of --data.
    """
    from acemerge.cli.display import print_plan
    from acemerge.execute.stages import plan_before_stages, plan_stages
    from acemerge.output.resources import check_memory, check_space, needed_space
    from acemerge.output.staging import check_output

    recipe, relative_to = asked.recipe(models)
    if output is not None:
        check_output(output, overwrite=False)
    stages = plan_stages(recipe, run, relative_to)
    _, plan = plan_before_stages(recipe, run, relative_to)
    if output is not None:
        found = [check_space(output, needed_space(plan)), check_memory(plan.peak_memory)]
        if problems := [problem for problem in found if problem]:
            raise PreflightError(problems)
    if as_json:
        told = {name: stage.to_json() for name, stage in stages.items()}
        print_json({**plan.to_json(), **({"stages": told} if told else {})})
    else:
        for name, stage in stages.items():
            print(printable(f"stage '{name}', made first:"))
            print_plan(stage, verbose)
        if stages:
            print("the merge of these stages, planned with each stage's base in its place:")
        print_plan(plan, verbose)
