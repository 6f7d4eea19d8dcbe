"""`acemerge merge`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acemerge.checkpoints.hashed_ahead import hashing_ahead
from acemerge.cli.flags import AsJson, Models, RecipeFlags, with_flags
from acemerge.cli.printing import print_json, read_as_far_as_wanted, telling_of
from acemerge.cli.process import importing
from acemerge.cli.push import PushFlags, send
from acemerge.recipe.run_options import RunOptions

if TYPE_CHECKING:
    from acemerge.execute.pipeline import MergeResult
    from acemerge.recipe.recipe import Recipe


@with_flags(asked=RecipeFlags, run=RunOptions, to=PushFlags)
def merge_command(
    models: Models,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder to create. It appears only when it is whole.")
    ],
    asked: RecipeFlags,
    run: RunOptions,
    to: PushFlags,
    tune: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Choose method and options by a few rows of each expert's task: <expert>.jsonl with a text and a label a line, "
            "or <expert>.safetensors.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Also list every tensor: what was done, and how it came out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge a base's fine-tunes into one model.

        acemerge merge llama llama-math llama-code -o merged
        acemerge merge gpt2 a b c -o out -m ace -s epsilon=4e-2  # another method
        acemerge merge recipe.yaml -o out                  # with rules for tensors
        acemerge merge llama lora-a lora-b -o out          # of LoRA adapters
        acemerge merge llama lora-a lora-b -o out --as adapter   # into one adapter
        acemerge merge base a b -o out -m regmean --data rows    # rows/a.jsonl ...
        acemerge merge base a b -o out --tune rows   # what some 32 rows like best

    The output is an ordinary Hugging Face folder with a model card. Experts that have their own task heads keep them under
    heads/; `acemerge task` makes a model for one task. If the run is interrupted, repeat the command to go on.
    """
    recipe, relative_to = asked.recipe(models)
    repository = to.repository(run.offline)
    how = replace(run, quiet=run.quiet or as_json)
    named = [recipe.base, *(expert.model for expert in recipe.experts)]
    with hashing_ahead(relative_to / name for name in named if isinstance(name, str)):
        with importing():
            from acemerge.execute.pipeline import run_merge
        if tune:
            recipe = _tuned(recipe, tune, output, how, relative_to)
        result = run_merge(recipe, output, how, relative_to=relative_to)
    tell(result, verbose=verbose, quiet=run.quiet, as_json=as_json)
    send(repository, output, quiet=run.quiet or as_json)


def _tuned(recipe: Recipe, rows: Path, output: Path, run: RunOptions, relative_to: Path) -> Recipe:
    """The recipe with the method that the rows like best."""
    from acemerge.cli.sweep_display import print_sweep
    from acemerge.sweeps.tuning import tune

    tuned = tune(recipe, rows, output, run, relative_to=relative_to)
    if not run.quiet:
        with read_as_far_as_wanted():  # the merge is still to come
            print_sweep(tuned.tried)
    return tuned.recipe


def tell(result: MergeResult, *, verbose: bool, quiet: bool, as_json: bool) -> None:
    """Warnings on standard error; the summary for people or for programs."""
    from acemerge.output.overreach import averaging_instead

    instead = averaging_instead(result.plan.recipe, result.output)
    cautions = [f"{said}: {instead}" for said in result.plan.cautions]
    for said in (cautions, [warning for record in result.tensors for warning in record["warnings"]]):
        if said:  # else nothing need be imported that prints in colours
            from acemerge.cli.display import print_warnings

            print_warnings(said)
    with read_as_far_as_wanted(), telling_of(result.output):  # an upload may be still to come
        if as_json:
            print_json(_result_json(result))
        elif not quiet:
            from acemerge.cli.display import print_result

            print_result(result, verbose)


def _result_json(result: MergeResult) -> dict[str, Any]:
    return {
        "output": str(result.output),
        **result.plan.to_json(),
        "tensors": list(result.tensors),
        "warnings": result.warnings,
    }
