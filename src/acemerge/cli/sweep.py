"""`acemerge sweep`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from acemerge.errors import InputError


def sweep_command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE EXPERT...", help="The base and its fine-tunes, as for `acemerge merge`; or one recipe.yaml."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the models, one folder each, and sweep.json.")],
    settings: Annotated[
        list[str],
        typer.Option(
            "-s",
            "--set",
            metavar="KEY=VALUE,VALUE,...",
            help="Values of an option of the method, such as epsilon=1e-5,1e-4; repeatable: every combination is a point.",
        ),
    ],
    method: Annotated[str | None, typer.Option("-m", "--method", help="Merging method, 'ace' by default.")] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Score every model: run on its folder (the last argument, or where {} is), the command prints JSON such as "
            '{"accuracy": 0.91} as its last line.',
        ),
    ] = None,
    keep: Annotated[str, typer.Option(help="With --evaluate, which models stay: best, all or none.")] = "best",
    maximise: Annotated[
        str | None, typer.Option(metavar="SCORE", help="The score whose largest value is best; by default the first one.")
    ] = None,
    minimise: Annotated[str | None, typer.Option(metavar="SCORE", help="The score whose smallest value is best.")] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --evaluate, models on the disk at a time; by default what fits in half of its free space."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="SUITE|FOLDER", help="For methods that use data.")] = None,
    preset: Annotated[str | None, typer.Option(help="Which tensors merge, as for `acemerge merge`.")] = None,
    orientation: Annotated[str | None, typer.Option(help="canonical, or stored.")] = None,
    missing: Annotated[str | None, typer.Option(help="A tensor that some experts lack: 'error' or 'skip'.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Output dtype, as for `acemerge merge`.")] = None,
    save_as: Annotated[str | None, typer.Option("--as", help="What to write: 'model', or 'adapter'.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="With --as adapter: the largest rank to write.")] = None,
    shard_size: Annotated[str | None, typer.Option(help="Largest output file, such as 500MB; 5GB by default.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the finished shards of interrupted points.")
    ] = True,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every input in full first.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace points of other inputs or options.")] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Average tensors with NaN or infinite values and warn.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Try even if disk or memory seem too small.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no table; errors only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON on standard output.")] = False,
) -> None:
    """Merge at every combination of settings in one pass, and find the best.

    [bold]acemerge sweep base math code -o grid --set epsilon=1e-5,1e-4,1e-3 --set k_frac=0.1,0.3[/]

    writes six models: grid/epsilon=1e-05,k_frac=0.1 and so on.

    [bold]acemerge sweep base math code -o grid --set epsilon=1e-5,1e-4,1e-3 --evaluate "python score.py"[/]

    scores them one by one and keeps the best. Any method, any of its options:

    [bold]acemerge sweep base math code -o grid -m ties --set keep=0.1,0.2,0.3 --set alpha=0.3,1[/]

    Every model is what `acemerge merge` with these options writes. Tensors are read once for all points, and what points have in
    common is computed once: with ACE, 45 points cost as much as two to four merges. If the run is interrupted, repeat the
    command to go on; with more values, it adds to what is there.
    """
    from acemerge.cli.sweep_display import print_sweep, sweep_json
    from acemerge.recipe.arguments import parse_lists, recipe_from
    from acemerge.sweeps.evaluation import CommandEvaluation
    from acemerge.sweeps.run import run_sweep
    from acemerge.sweeps.table import Objective

    if maximise and minimise:
        raise InputError("--maximise and --minimise: one score decides; give one of them")
    flags: dict[str, Any] = {
        "method": method, "data": data, "preset": preset, "orientation": orientation, "missing": missing, "dtype": dtype,
        "save_as": save_as, "rank": rank, "shard_size": shard_size, "allow_nonfinite": allow_nonfinite or None,
    }  # fmt: skip
    lists = parse_lists(settings)
    recipe, relative_to = recipe_from(models, [], {name: value for name, value in flags.items() if value is not None})
    result = run_sweep(
        recipe, lists, output, evaluate=CommandEvaluation(evaluate) if evaluate else None, keep=keep,
        objective=Objective(minimise or maximise, largest=minimise is None), at_once=at_once, relative_to=relative_to,
        device=device, threads=threads, resume=resume, overwrite=overwrite, offline=offline, verify=verify, force=force,
        quiet=quiet or as_json,
    )  # fmt: skip
    if as_json:
        print(json.dumps(sweep_json(result), indent=1))
    elif not quiet:
        print_sweep(result)
