"""A finished folder to the Hugging Face hub. The token is huggingface_hub's affair: it is never printed, and written nowhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acemerge.checkpoints.source import is_hub_id
from acemerge.errors import AcemergeError, InputError, first_line
from acemerge.output.manifest import read_manifest
from acemerge.version import __version__

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class Repository:
    """A model repository of the hub that may be written to."""

    name: str
    public: bool = False

    @classmethod
    def checked(cls, name: str, *, public: bool = False, offline: bool = False) -> Repository:
        """Whoever is logged in may write there, as far as the hub tells; asked before any work is done."""
        if not is_hub_id(name) or "/" not in name:
            raise InputError(f"--push {name}: write it as ORG/NAME, such as my-name/my-model")
        owner = name.split("/")[0]
        known = _owners(name, offline)
        if owner not in known:
            raise InputError(f"--push {name}: you are logged in as {known[0]}, who may not write to '{owner}' (known: {known})")
        return cls(name, public)

    def upload(self, folder: Path, *, quiet: bool = False) -> str:
        """Its address, when everything is there. What an interrupted upload has brought there is not sent again."""
        read_manifest(folder)
        with _telling_how_to_try_again(folder, self), _progress(quiet):
            api = _api()
            created = api.create_repo(self.name, private=not self.public, exist_ok=True)
            message = f"Made by acemerge {__version__}"
            api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message, ignore_patterns=[".acemerge-*"])
        return str(created)


def _owners(name: str, offline: bool) -> list[str]:
    """The user and the organisations of whoever is logged in."""
    from huggingface_hub import constants, get_token

    if offline or constants.HF_HUB_OFFLINE:
        raise InputError(f"--push {name}: needs the network, which --offline or HF_HUB_OFFLINE forbids")
    if get_token() is None:
        raise InputError(f"--push {name}: nobody is logged in to the hub; {_LOG_IN}")
    try:
        user: dict[str, Any] = _api().whoami()
    except Exception as error:  # the hub client raises a dozen unrelated types; the user needs one sentence
        raise InputError(f"--push {name}: the hub did not say who is logged in: {_without_token(error)}; {_LOG_IN}") from None
    return [str(user.get("name")), *(str(org.get("name")) for org in user.get("orgs") or [])]


@contextmanager
def _telling_how_to_try_again(folder: Path, repository: Repository) -> Iterator[None]:
    again = f"acemerge push {folder} {repository.name}{' --public' if repository.public else ''}"
    try:
        yield
    except KeyboardInterrupt:
        print(f"acemerge: {folder} is whole, but its upload was interrupted; to go on: {again}", file=sys.stderr)
        raise
    except Exception as error:
        raise AcemergeError(f"{folder} is whole, but was not uploaded: {_without_token(error)}; to try again: {again}") from None


@contextmanager
def _progress(quiet: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if not quiet or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="acemerge", library_version=__version__)


def _without_token(error: BaseException) -> str:
    """What went wrong, whatever the library puts into its messages."""
    from huggingface_hub import get_token

    token = get_token()
    said = first_line(error)
    return said.replace(token, "***") if token else said
