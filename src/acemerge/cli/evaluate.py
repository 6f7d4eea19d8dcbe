"""`acemerge evaluate`: one model on a suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from acemerge.cli.bench import BatchSize, Data, Device, Limit, Models, RunCode, SuiteName, Tasks, open_suite, say


def evaluate_command(
    model: Annotated[
        str, typer.Argument(help="A merged model, an expert or the base: a folder, a file of weights, or a hub id.")
    ],
    suite: SuiteName,
    tasks: Tasks = None,
    limit: Limit = None,
    models: Models = None,
    data: Data = None,
    device: Device = "cpu",
    batch_size: BatchSize = None,
    with_experts: Annotated[
        bool | None,
        typer.Option(
            "--with-experts/--without-experts",
            help="Also measure the experts, for the share of their scores that is left; by default where the paper does.",
        ),
    ] = None,
    run_generated_code: RunCode = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for the results.")] = Path(
        "evaluate-output"
    ),
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress, only the results.")] = False,
) -> None:
    """Measure one model on a suite's tasks, and print the paper's numbers below.

        acemerge evaluate demo-output/merged --suite demo
        acemerge evaluate merged --suite demo --tasks movie,commits
        acemerge evaluate expert --suite text-8 --tasks movie
        acemerge evaluate merged --suite clip-vit-b32-8 --device cuda

    A model with a head of its own is for one task; one without heads gets those of the suite's experts. If the run is
    interrupted, repeat the command to go on.
    """
    chosen = open_suite(suite, models, data, tasks, device, batch_size, run_generated_code)
    chosen = replace(chosen, compute=replace(chosen.compute, quiet=quiet))
    from acemerge.bench.measure.one_model import evaluate_model
    from acemerge.bench.tables.show import publish_table
    from acemerge.checkpoints.source import resolve_source
    from acemerge.output.whole_files import check_writable

    check_writable(output, f"-o {output}")
    source = resolve_source(model)
    compared = chosen.normalised if with_experts is None else with_experts
    table = evaluate_model(chosen, source, limit or chosen.limit, compared, _say_nothing if quiet else say)
    chosen_tasks = ["+".join(task.name for task in chosen.tasks)] if tasks else []
    publish_table(table, output, "-".join([source.short_name, suite, *chosen_tasks, *([str(limit)] if limit else [])]))


def _say_nothing(message: str) -> None:
    """For -q."""
