"""`acemerge verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acemerge.cli.flags import AsJson
from acemerge.cli.printing import print_json
from acemerge.errors import MergeError, printable


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
        print_json(found.to_json())
    elif not found.problems:
        tensors = f" and {found.tensors} tensors" if found.tensors else ""  # of a task's model, the files alone are hashed
        print(f"{output}: whole; {found.files} files{tensors} are as they were written")
        for name in found.foreign:
            print(printable(f"note: {name} is not from acemerge"))
    if found.problems:
        raise MergeError(f"{output}: not what was written:", *(f"  - {problem}" for problem in found.problems))
