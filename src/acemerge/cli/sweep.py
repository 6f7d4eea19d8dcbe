"""`acemerge sweep`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from acemerge.cli.flags import AsJson, Models, RecipeFlags, with_flags, without
from acemerge.cli.printing import print_json, telling_of
from acemerge.errors import InputError
from acemerge.recipe.run_options import RunOptions


@with_flags(asked=without(RecipeFlags, "settings"), run=without(RunOptions, "keep_stages"))
def sweep_command(
    models: Models,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the models, one folder each, and sweep.json.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "-s",
            "--set",
            metavar="KEY=VALUE,VALUE,...",
            help="Values of an option of the method, such as reach=0.03,0.06; repeatable: every combination is a point. "
            "With several -m, METHOD.KEY=... is for one method, KEY=... for all that have the option.",
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Score every model: run on its folder (the last argument, or where {} is), the command prints JSON such as "
            '{"accuracy": 0.91} as its last line.',
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Score every model by a few rows of each expert's task: <expert>.jsonl with a text and a label a line, or "
            "<expert>.safetensors.",
        ),
    ] = None,
    keep: Annotated[str, typer.Option(help="With scores, which models stay: best, all or none.")] = "best",
    maximise: Annotated[
        str | None, typer.Option(metavar="SCORE", help="The score whose largest value is best; by default the first one.")
    ] = None,
    minimise: Annotated[str | None, typer.Option(metavar="SCORE", help="The score whose smallest value is best.")] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, help="With scores, models on the disk at a time; by default what fits in half of its free space."),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Choose N points one after the other, by the scores before, instead of a grid (optuna). --set then also takes "
            "ranges, such as reach=0.01..1:log or alpha=0.5..2.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --search: of its random numbers.")] = 0,
    asked: RecipeFlags = RecipeFlags(),
    run: RunOptions = RunOptions(),
    as_json: AsJson = False,
) -> None:
    """Merge at every combination of settings in one pass, and find the best.

        acemerge sweep base math code -o grid -s reach=0.03,0.06,0.12 \\
            -s power=0.25,0.5

    writes six models: grid/reach=0.03,power=0.25 and so on.

        acemerge sweep base math code -o grid -s reach=0.03,0.06,0.12 \\
            --evaluate "python score.py"

    scores them one by one and keeps the best.

        acemerge sweep base math code -o grid -s reach=0.03,0.06,0.12 --rows rows

    scores them by a few rows of each expert's task: rows/math.jsonl, rows/code.jsonl.

        acemerge sweep base math code -o found --search 20 \\
            -s reach=0.01..1:log -s alpha=0.5..2 --evaluate "python score.py"

    chooses 20 points by the scores of those before. Any method, any of its options:

        acemerge sweep base math code -o grid -m ties -s keep=0.1,0.2 -s alpha=0.3,1

    Several methods, each with its own values; a method without any is one point:

        acemerge sweep base math code -o grid -m ace -m tsv_m -m average \\
            -s ace.epsilon=1e-5,1e-3 -s tsv_m.alpha=0.5,1

    With --evaluate the table also has the scores of the base, the experts and plain averaging.

    Every model is what `acemerge merge` with these options writes. Tensors are read once for all points, and what points have in
    common is computed once: with ACE (-m ace), 45 points cost as much as two to four merges. If the run is interrupted, repeat
    the command to go on; with more values, it adds to what is there.
    """
    from acemerge.cli.sweep_display import print_sweep, sweep_json
    from acemerge.recipe.arguments import parse_lists
    from acemerge.sweeps.evaluation import CommandEvaluation
    from acemerge.sweeps.points import Grid, split_settings
    from acemerge.sweeps.run import SweepOptions, run_sweep
    from acemerge.sweeps.table import Objective

    if maximise and minimise:
        raise InputError("--maximise and --minimise: one score decides; give one of them")
    if (maximise or minimise) and not (evaluate or rows):
        flag = "--maximise" if maximise else "--minimise"
        raise InputError(f"{flag} {maximise or minimise}: nothing gives scores; add --evaluate COMMAND or --rows FOLDER")
    recipes, relative_to = asked.recipes(models)
    split = split_settings([recipe.method for recipe in recipes], parse_lists(settings or []))
    options = SweepOptions(
        evaluate=CommandEvaluation(evaluate) if evaluate else None,
        rows=rows,
        keep=keep,
        objective=Objective(minimise or maximise, largest=minimise is None),
        at_once=at_once,
    )
    run = replace(run, quiet=run.quiet or as_json)
    if search and len(recipes) > 1:
        raise InputError("--search: chooses settings of one method; give -m once, or leave out --search")
    if search:
        from acemerge.sweeps.search import SearchOptions, run_search

        result = run_search(recipes[0], split[0], output, run, options, SearchOptions(search, seed), relative_to=relative_to)
    else:
        grids = [Grid(*each) for each in zip(recipes, split, strict=True)]
        result = run_sweep(grids, output, run, options, relative_to=relative_to)
    with telling_of(output):
        if as_json:
            print_json(sweep_json(result))
        elif not run.quiet:
            print_sweep(result)
    if run.quiet and not as_json and (warned := sum(point.warnings > 0 for point in result.points)):
        print(f"warning: {warned} of {len(result.points)} points have warnings; sweep.json counts them", file=sys.stderr)
