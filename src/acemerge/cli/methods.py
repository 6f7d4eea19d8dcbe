"""`acemerge methods`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from acemerge.cli.flags import AsJson
from acemerge.cli.printing import print_json
from acemerge.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from acemerge.methods import Method

USES = ("weights", "data", "test-rows")


def methods_command(
    name: Annotated[str | None, typer.Argument(help="A method, for its options; all methods without it.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Only these: closed-form, spectral, entries, around, data or per-task.")
    ] = None,
    uses: Annotated[
        str | None,
        typer.Option(help="Only what uses the weights alone, data, or, in its paper, the test rows: weights, data or test-rows."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the merging methods, or describe one: what it does, its options, defaults, ranges and paper."""
    from acemerge.cli.display import KINDS, describe_method, list_methods, method_json
    from acemerge.methods import all_methods, get_method

    if name and (kind or uses):
        raise InputError(f"--kind and --uses choose from the list of all methods; 'acemerge methods {name}' describes one")
    _check("kind", kind, tuple(KINDS))
    _check("uses", uses, USES)
    chosen = [get_method(name)] if name else [each for each in all_methods() if _fits(each, kind, uses)]
    if as_json:
        print_json([method_json(method) for method in chosen])
    elif name:
        describe_method(chosen[0])
    elif chosen:
        list_methods(chosen)
    else:
        print(f"no method of kind {kind} uses {uses}")


def _check(flag: str, given: str | None, known: Sequence[str]) -> None:
    if given is not None and given not in known:
        raise InputError(f"--{flag} {given}: {did_you_mean(given, known)}")


def _fits(method: Method, kind: str | None, uses: str | None) -> bool:
    """A method whose paper takes test rows for data uses data, too."""
    return kind in (None, method.kind) and (uses in (None, method.uses) or (uses == "test-rows" and method.test_rows))
