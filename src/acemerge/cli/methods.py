"""`acemerge methods`."""

from __future__ import annotations

from typing import Annotated

import typer

from acemerge.cli.flags import AsJson
from acemerge.cli.printing import print_json


def methods_command(
    name: Annotated[str | None, typer.Argument(help="A method, for its options; all methods without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the merging methods, or describe one: what it does, its options, defaults, ranges and paper."""
    from acemerge.cli.display import describe_method, list_methods, method_json
    from acemerge.methods import all_methods, get_method

    chosen = [get_method(name)] if name else all_methods()
    if as_json:
        print_json([method_json(method) for method in chosen])
    elif name:
        describe_method(chosen[0])
    else:
        list_methods(chosen)
