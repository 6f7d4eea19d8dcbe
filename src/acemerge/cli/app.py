"""The command line: verbs only. Everything they do is in the library."""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Annotated, NoReturn

import typer

from acemerge.cli.bench import bench_app, demo_command
from acemerge.cli.diagnose import diagnose_command
from acemerge.cli.evaluate import evaluate_command
from acemerge.cli.extract import extract_command
from acemerge.cli.help_text import help_text
from acemerge.cli.merge import merge_command
from acemerge.cli.methods import methods_command
from acemerge.cli.plan import plan_command
from acemerge.cli.printing import leave_reader, standard_output_to_the_end
from acemerge.cli.process import (
    INTERRUPTED,
    INTERRUPTION,
    Interruption,
    explain_bus_errors,
    open_standard_streams,
    prompt_interruption,
)
from acemerge.cli.push import push_command
from acemerge.cli.recipe import recipe_app
from acemerge.cli.report import report_command
from acemerge.cli.route import route_command
from acemerge.cli.sweep import sweep_command
from acemerge.cli.task import task_command
from acemerge.cli.usage import PlainUsage
from acemerge.cli.verify import verify_command
from acemerge.errors import AcemergeError, disk_failed, first_line, printable
from acemerge.version import __version__

_VERBS: dict[str, tuple[Callable[..., None], str]] = {
    "merge": (merge_command, "Merge a base's fine-tunes into one model."),
    "plan": (plan_command, "Show what a merge would do to every tensor, and its cost."),
    "diagnose": (diagnose_command, "Look first: can these be merged, and where do they disagree?"),
    "report": (report_command, "Make a page of what a merge did to every tensor."),
    "verify": (verify_command, "Check that an output is still what was written."),
    "task": (task_command, "Make the model for one task, with that expert's own head."),
    "extract": (extract_command, "Make a LoRA adapter of a full fine-tune."),
    "push": (push_command, "Upload an output to the Hugging Face hub."),
    "route": (route_command, "Index adapters, to be merged for each query by load_routed."),
    "sweep": (sweep_command, "Merge at every combination of settings, and find the best."),
    "methods": (methods_command, "List the merging methods, or describe one."),
    "demo": (demo_command, "Train, merge and compare four experts of a real text model."),
    "evaluate": (evaluate_command, "Measure one model on a suite's tasks."),
}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"acemerge {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="With any command: on an error, show the traceback.")] = False,
) -> None:
    """Merge fine-tuned models into one, from the weights alone: no data, no training.

    A first merge:  acemerge merge BASE EXPERT EXPERT -o OUT

    What it would do, without doing it:  acemerge plan BASE EXPERT EXPERT
    """


def _app_of(verbs: Iterable[str], groups: Iterable[typer.Typer] = ()) -> typer.Typer:
    made = typer.Typer(
        name="acemerge",
        callback=_root,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # in plain text nothing is cut at 80 columns
    )
    for verb in verbs:
        command, in_short = _VERBS[verb]
        made.command(verb, cls=PlainUsage, help=help_text(command), short_help=in_short)(command)
    for group in groups:
        made.add_typer(group)
    return made


app = _app_of(_VERBS, (recipe_app, bench_app))


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 the merge failed, 2 bad usage or input, 3 a diagnosis that says not to merge, 130 interrupted.
    """
    # Before torch loads: its idle threads sleep instead of spinning, so that they and the BLAS library's do not fight for cores.
    # On a busy machine this is the difference between one thread's speed and a tenth of it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Also before torch loads: large tensors in huge pages where the kernel has them, which costs a quarter of the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Python looks for garbage every 700 objects; importing torch makes a million that all stay, a seventh of its time.
    gc.set_threshold(50_000)
    # So long a thread that wants to read or hash on waits for one that runs Python; by default ten times as long.
    sys.setswitchinterval(0.0005)
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
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        # Where one verb is asked for, the flags of all the others need not be made.
        chosen = _app_of(arguments[:1]) if arguments[:1] and arguments[0] in _VERBS else app
        with standard_output_to_the_end():
            chosen(arguments)
    except BrokenPipeError:
        leave_reader()
    except Exception as error:
        if interruption.received:
            _leave_interrupted()
        if debug:
            traceback.print_exc()
        told = _explain(error)
        first, *more = [told] if isinstance(told, str) else told
        print("\n".join(map(printable, [f"acemerge: error: {first}", *more])), file=sys.stderr, flush=True)
        code = error.exit_code if isinstance(error, AcemergeError) else 1
        if isinstance(error, AcemergeError) and error.ends_the_process:
            os._exit(code)
        sys.exit(code)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer turns Ctrl-C into this
            _leave_interrupted()
        if not isinstance(stop.__context__, BrokenPipeError):  # typer turns that into a failure
            raise
        leave_reader()


def _leave_interrupted() -> NoReturn:
    print(INTERRUPTION, end="", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _explain(error: Exception) -> str | tuple[str, ...]:
    """One sentence for any failure, foreseen or not; of ours, its lines."""
    if isinstance(error, AcemergeError):
        return error.args
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror.lower()}" if error.filename and error.strerror else str(error)
    if disk_failed(error):
        return f"{first_line(error)}; the disk fails, or is full: make room or take another one, then repeat the command"
    if isinstance(error, MemoryError) or re.search("can.?not allocate memory|can't allocate memory", str(error), re.I):
        return "out of memory; nothing was published. `acemerge plan` shows what is needed; close other programs, or merge less"
    failure = f"unexpected {type(error).__name__}: {error}"
    return f"{failure}; nothing was published. This is a bug: please report it with what --debug shows"


if __name__ == "__main__":
    main()
