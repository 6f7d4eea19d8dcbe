"""`acemerge push`, and `--push` of the commands that write a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acemerge.recipe.run_options import option

if TYPE_CHECKING:
    from acemerge.output.hub import Repository

Public = Annotated[bool, typer.Option("--public", help="Anybody may see a repository that is created; by default it is private.")]
_PUBLIC = "With --push: anybody may see a repository that is created; by default it is private."


@dataclass(frozen=True, kw_only=True)
class PushFlags:
    """Where the finished folder goes, if anywhere."""

    push: str | None = option(
        None, "Upload the finished folder to this repository of the Hugging Face hub, with its card.", metavar="ORG/NAME"
    )
    public: bool = option(False, _PUBLIC, "--public")

    def repository(self, offline: bool) -> Repository | None:
        """Checked before any work: without a token or network nothing is begun."""
        if self.push is None:
            return None
        from acemerge.output.hub import Repository

        return Repository.checked(self.push, public=self.public, offline=offline)


def push_command(
    folder: Annotated[Path, typer.Argument(help="A folder that acemerge wrote.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A model repository of the Hugging Face hub.")],
    public: Public = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no summary; errors only.")] = False,
) -> None:
    """Upload an output to the Hugging Face hub, after checking that it is still what was written.

        acemerge push merged my-name/my-model

    The repository is created if it is not there, private unless --public. If the upload is interrupted, repeat the command: what
    is there already is not sent again. Log in before with `hf auth login`, or set HF_TOKEN.
    """
    from acemerge.errors import InputError
    from acemerge.output.hub import Repository
    from acemerge.output.verify import verify_output

    checked = Repository.checked(repository, public=public)
    if problems := verify_output(folder).problems:
        raise InputError(f"{folder}: not what was written, so it is not uploaded: {problems[0]} (`acemerge verify {folder}`)")
    send(checked, folder, quiet=quiet)


def send(repository: Repository | None, folder: Path, *, quiet: bool) -> None:
    """Upload, if asked to, and say where it is."""
    if repository is None:
        return
    address = repository.upload(folder, quiet=quiet)
    if not quiet:
        print(f"uploaded to {address}", file=sys.stderr)
