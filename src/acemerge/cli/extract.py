"""`acemerge extract`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from acemerge.cli.flags import AsJson, RecipeFlags, only, with_flags, without
from acemerge.cli.push import PushFlags, send
from acemerge.recipe.run_options import RunOptions


@with_flags(
    asked=only(RecipeFlags, "rank", "energy", "save_rest", "dtype", "preset", "allow_nonfinite"),
    run=without(RunOptions, "keep_stages"),
    to=PushFlags,
)
def extract_command(
    base: Annotated[str, typer.Argument(help="The model that was fine-tuned: a folder, a file of weights, or a hub id.")],
    fine_tune: Annotated[str, typer.Argument(help="What it became: a full model.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder to create. It appears only when it is whole.")
    ],
    asked: RecipeFlags,
    run: RunOptions,
    to: PushFlags,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Also list every tensor, with what is kept of it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a LoRA adapter of a full fine-tune: what it changed of the base, as low-rank factors.

        acemerge extract llama llama-math -o math-lora --rank 32
        acemerge extract llama llama-math -o math-lora --energy 0.95

    With --energy each matrix gets the rank that keeps so much of its change. peft loads the adapter on the base. Factors hold
    the matrices of linear layers. Norms, biases, embeddings and output layers are left out, unless --save-rest writes them whole;
    either way the summary says how much of the change is where. The head of a task goes to heads/, and `acemerge task` makes an
    adapter with it.
    """
    from acemerge.cli.merge import tell
    from acemerge.execute.extraction import run_extraction

    recipe, _ = replace(asked, method=["average"], save_as="adapter").recipe([base, fine_tune])
    repository = to.repository(run.offline)
    result = run_extraction(recipe, output, replace(run, quiet=run.quiet or as_json))
    tell(result, verbose=verbose, quiet=run.quiet, as_json=as_json)
    send(repository, output, quiet=run.quiet or as_json)
