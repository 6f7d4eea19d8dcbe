"""The command line: verbs only. Everything they do is in the library."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from acemerge.cli.bench import bench_app, demo_command
from acemerge.cli.diagnose import diagnose_command
from acemerge.cli.evaluate import evaluate_command
from acemerge.cli.process import (
    INTERRUPTED,
    INTERRUPTION,
    Interruption,
    explain_bus_errors,
    open_standard_streams,
    prompt_interruption,
)
from acemerge.cli.report import report_command
from acemerge.cli.sweep import sweep_command
from acemerge.errors import AcemergeError, MergeError, PreflightError
from acemerge.recipe.arguments import recipe_from
from acemerge.version import __version__

if TYPE_CHECKING:
    from acemerge.execute.pipeline import MergeResult

app = typer.Typer(
    name="acemerge",
    help="""Merge fine-tuned models into one, from the weights alone: no data, no training.

    A first merge:  acemerge merge BASE EXPERT EXPERT -o OUT
    What it would do, without doing it:  acemerge plan BASE EXPERT EXPERT
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(bench_app)
app.command("demo")(demo_command)
app.command("sweep")(sweep_command)
app.command("diagnose")(diagnose_command)
app.command("report")(report_command)
app.command("evaluate")(evaluate_command)

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="BASE EXPERT...",
        help="The base and its fine-tunes: folders, weight files, PEFT adapters or hub ids (org/name\\[@revision]). "
        "Or one recipe.yaml.",
    ),
]
MethodName = Annotated[
    str | None, typer.Option("-m", "--method", help="Merging method, 'ace' by default; see `acemerge methods`.")
]
Settings = Annotated[
    list[str],
    typer.Option("-s", "--set", metavar="KEY=VALUE", help="An option of the method, such as epsilon=1e-5; repeatable."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="SUITE|FOLDER",
        help="For methods that use data (regmean, fisher, ...): a suite of `acemerge bench`, such as text-8, or a folder with "
        "a file per expert, <expert>.jsonl or <expert>.safetensors.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(help="Which tensors merge: auto (from the base's config), bert, gpt2, llm, t5, vit or generic."),
]
OrientationName = Annotated[
    str | None,
    typer.Option(help="canonical: matrices as \\[out, in] whatever their storage. stored: as they lie in the file."),
]
Missing = Annotated[
    str | None,
    typer.Option(help="A tensor that some experts lack: 'error', or 'skip' to merge it from those that have it."),
]
OutputDtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Output dtype: float32, bfloat16, float16 or float64; by default each tensor keeps the base's."),
]
SaveAs = Annotated[
    str | None,
    typer.Option("--as", help="What to write: 'model', or 'adapter' to merge LoRA adapters into one LoRA adapter."),
]
Rank = Annotated[
    int | None,
    typer.Option(help="With --as adapter: the largest rank to write. By default the merge's own, with nothing left out.", min=1),
]
ShardSize = Annotated[str | None, typer.Option(help="Largest output file, such as 500MB; 5GB by default.")]
AllowNonfinite = Annotated[
    bool,
    typer.Option(
        "--allow-nonfinite", help="NaN or infinite values in a model: average such tensors and warn, instead of stopping."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Try even if disk or memory seem too small.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network; hub ids come from the local cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output, for programs.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"acemerge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="With any command: on an error, show the traceback.")] = False,
) -> None:
    pass


@app.command("merge")
def merge_command(
    models: Models,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to create. It appears only when it is whole.")],
    method: MethodName = None,
    settings: Settings = [],  # noqa: B006
    data: Data = None,
    preset: Preset = None,
    orientation: OrientationName = None,
    missing: Missing = None,
    dtype: OutputDtype = None,
    save_as: SaveAs = None,
    rank: Rank = None,
    shard_size: ShardSize = None,
    device: Annotated[
        str, typer.Option(help="Where to compute: cpu, cuda, cuda:N, or several, cuda:0,cuda:1, a shard at a time on each.")
    ] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; all cores by default. With --engine ray: of each task, 1 by default.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local: this process. ray: the machines of a Ray cluster, a shard at a time on each core.")
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="With --engine ray: the cluster, HOST:PORT or 'auto'. By default RAY_ADDRESS, else one started for this run."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            help="Go on from the finished shards of an interrupted run of the same merge, after checking their checksums.",
        ),
    ] = True,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Hash every input in full first, and reuse finished shards only if they were made of the same bytes."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier acemerge output.")] = False,
    allow_nonfinite: AllowNonfinite = False,
    force: Force = False,
    offline: Offline = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no summary; errors only.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Also list every tensor: what was done, and how it came out.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Also write report.html into the output: what became of every tensor, with figures."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge a base's fine-tunes into one model.

    [bold]acemerge merge llama llama-math llama-code -o merged[/]          ACE-Merging, the default

    [bold]acemerge merge gpt2 a b c -o out -m ace -s epsilon=4e-2[/]        one option set

    [bold]acemerge merge recipe.yaml -o out[/]                             the same from a file, plus per-tensor rules

    [bold]acemerge merge llama lora-a lora-b -o out --as adapter[/]        LoRA adapters into one; without --as, into a full model

    [bold]acemerge merge base a b -o out -m regmean --data rows[/]         a method that uses data: rows/a.jsonl, rows/b.jsonl

    The output is an ordinary Hugging Face folder with a model card. Experts that have their own task heads keep them under
    heads/; `acemerge task` makes a model for one task. If the run is interrupted, repeat the command to go on.
    """
    from acemerge.cli.display import print_result
    from acemerge.execute.pipeline import run_merge

    flags = _given(method, data, preset, orientation, missing, dtype, save_as, rank, shard_size)
    if allow_nonfinite:
        flags["allow_nonfinite"] = True
    recipe, relative_to = recipe_from(models, settings, flags)
    result = run_merge(
        recipe, output, relative_to=relative_to, device=device, threads=threads, engine=engine, ray_address=ray_address,
        resume=resume, overwrite=overwrite, offline=offline, verify=verify, force=force, report=report, quiet=quiet or as_json,
    )  # fmt: skip
    with _telling_of(output):
        if as_json:
            _print_json(_result_json(result))
        elif not quiet:
            print_result(result, verbose)


@app.command("plan")
def plan_command(
    models: Models,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also check that this output can be written.")] = None,
    method: MethodName = None,
    settings: Settings = [],  # noqa: B006
    data: Data = None,
    preset: Preset = None,
    orientation: OrientationName = None,
    missing: Missing = None,
    dtype: OutputDtype = None,
    save_as: SaveAs = None,
    rank: Rank = None,
    shard_size: ShardSize = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Show what a merge would do to every tensor, and what it would cost.

    Reads headers only: no tensor data. Reports every problem that the headers can show, and those of --data.
    """
    from acemerge.cli.display import print_plan
    from acemerge.execute.pipeline import find_sources, make_plan
    from acemerge.output.resources import check_resources
    from acemerge.output.staging import check_output

    recipe, relative_to = recipe_from(
        models, settings, _given(method, data, preset, orientation, missing, dtype, save_as, rank, shard_size)
    )
    if output is not None:
        check_output(output, overwrite=False)
    plan = make_plan(recipe, find_sources(recipe, relative_to, offline), relative_to)
    if output is not None and (problems := check_resources(output, plan)):
        raise PreflightError(problems)
    if as_json:
        _print_json(plan.to_json())
    else:
        print_plan(plan)


@app.command("verify")
def verify_command(
    output: Annotated[Path, typer.Argument(help="A folder that `acemerge merge` or `acemerge task` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Check that an output is still what was written: every file and every tensor, against the manifest's hashes.

    Exit code 0 if it is whole, 1 if something is missing or changed, 2 if the folder is not an output of acemerge.
    """
    from acemerge.output.verify import verify_output

    found = verify_output(output)
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
    elif not found.problems:
        tensors = f" and {found.tensors} tensors" if found.tensors else ""  # of a task's model, the files alone are hashed
        print(f"{output}: whole; {found.files} files{tensors} are as they were written")
        for name in found.foreign:
            print(f"note: {name} is not from acemerge")
    if found.problems:
        raise MergeError("\n".join([f"{output}: not what was written:", *(f"  - {problem}" for problem in found.problems)]))


@app.command("methods")
def methods_command(
    name: Annotated[str | None, typer.Argument(help="A method, for its options; all methods without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the merging methods, or describe one: what it does, its options, defaults, ranges and paper."""
    from acemerge.cli.display import describe_method, list_methods, method_json
    from acemerge.methods import all_methods, get_method

    chosen = [get_method(name)] if name else all_methods()
    if as_json:
        _print_json([method_json(method) for method in chosen])
    elif name:
        describe_method(chosen[0])
    else:
        list_methods(chosen)


@app.command("task")
def task_command(
    merged: Annotated[Path, typer.Argument(help="A folder that `acemerge merge` wrote, with heads/ or tasks/ in it.")],
    expert: Annotated[str, typer.Argument(help="Which expert's task: its name in the merge, a folder under heads/ or tasks/.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to create.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Make the model for one task: the merged backbone with what is that expert's own put back on it.

    [bold]acemerge task merged sst2 -o merged-sst2[/]

    Put back are the expert's head, config and tokenizer (heads/), and for methods that make one model per task, such as emr,
    tall_mask and twin, its mask or low-rank factors (tasks/). The output is an ordinary Hugging Face folder.
    """
    from acemerge.output.task_models import export_expert

    export_expert(merged, expert, output, overwrite=overwrite)
    print(f"{output}: the merged model for the task of '{expert}'")


def _given(*values: str | int | None) -> dict[str, Any]:
    names = ("method", "data", "preset", "orientation", "missing", "dtype", "save_as", "rank", "shard_size")
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


@contextmanager
def _telling_of(output: Path) -> Iterator[None]:
    """Where standard output cannot take the summary, say that the work itself is done."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _leave_reader()
        raise AcemergeError(
            f"{output} was written and is whole, but standard output did not take the summary: {error.strerror}"
        ) from None


def _print_json(content: Any) -> None:
    try:
        print(json.dumps(content, indent=1), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough: nothing went wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _result_json(result: MergeResult) -> dict[str, Any]:
    return {
        "output": str(result.output),
        **result.plan.to_json(),
        "tensors": list(result.tensors),
        "warnings": result.warnings,
    }


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 the merge failed, 2 bad usage or input, 130 interrupted."""
    # Before torch loads: its idle threads sleep instead of spinning, so that they and the BLAS library's do not fight for cores.
    # On a busy machine this is the difference between one thread's speed and a tenth of it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Also before torch loads: large tensors in huge pages where the kernel has them, which costs a quarter of the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    open_standard_streams()
    explain_bus_errors()
    try:
        with prompt_interruption() as interruption:
            _run(interruption)
    except KeyboardInterrupt:  # while an error was being reported, or a second time
        _leave_interrupted()
    finally:
        gc.freeze()  # the process ends here: Python need not look through all of torch for garbage, which takes a while


def _run(interruption: Interruption) -> None:
    """The command, with every way it can end turned into an exit code and at most one message."""
    debug = "--debug" in sys.argv  # before or after the verb
    try:
        app([argument for argument in sys.argv[1:] if argument != "--debug"])
    except BrokenPipeError:
        _leave_reader()
    except Exception as error:
        if interruption.received:
            _leave_interrupted()
        if debug:
            traceback.print_exc()
        print(f"acemerge: error: {_explain(error)}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, AcemergeError) else 1)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer turns Ctrl-C into this
            _leave_interrupted()
        if not isinstance(stop.__context__, BrokenPipeError):  # typer turns that into a failure
            raise
        _leave_reader()


def _leave_reader() -> None:
    """The reader of our output has seen enough, as `head` does: nothing went wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _leave_interrupted() -> NoReturn:
    print(INTERRUPTION, end="", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _explain(error: Exception) -> str:
    """One sentence for any failure, foreseen or not."""
    if isinstance(error, AcemergeError | OSError):
        return str(error)
    if isinstance(error, MemoryError) or re.search("can.?not allocate memory|can't allocate memory", str(error), re.I):
        return "out of memory; nothing was published. `acemerge plan` shows what is needed; close other programs, or merge less"
    failure = f"unexpected {type(error).__name__}: {error}"
    return f"{failure}; nothing was published. This is a bug: please report it with what --debug shows"


if __name__ == "__main__":
    main()
