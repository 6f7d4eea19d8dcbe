"""From what the user typed to files on this machine: a folder, a weights file, or a Hugging Face hub id."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from acemerge.checkpoints.folder import NO_WEIGHTS
from acemerge.checkpoints.formats.registry import formats, weight_suffixes
from acemerge.errors import InputError, first_line

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
_BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.tiktoken", *NO_WEIGHTS]


@dataclass(frozen=True)
class Source:
    """A model on this machine, and how to speak of it to other people: never by a local path."""

    given: str
    path: Path
    hub_id: str | None = None
    revision: str | None = None
    adapter: Source | None = None
    """That is to be merged into it, given as MODEL+ADAPTER."""

    @property
    def public_name(self) -> str:
        """The hub id with its exact revision, or the folder's own name."""
        name = self.path.resolve().name
        if self.hub_id:
            name = f"{self.hub_id}@{self.revision}" if self.revision else self.hub_id
        return f"{name}+{self.adapter.public_name}" if self.adapter else name

    @property
    def short_name(self) -> str:
        """A name for tables and head folders."""
        name = self.hub_id.split("/")[-1] if self.hub_id else self.path.resolve().name
        stem = re.sub(r"[^\w.+-]", "_", Path(name).stem if self.path.is_file() else name)
        return f"{stem}+{self.adapter.short_name}" if self.adapter else stem


@dataclass(frozen=True)
class Sources:
    """Where a recipe's models are on this machine."""

    base: Source
    experts: tuple[Source, ...]
    names: tuple[str, ...] = ()
    """Unique short names, the base's first."""

    @property
    def paths(self) -> list[Path]:
        """Of all models."""
        given = (self.base, *self.experts)
        return [source.path for model in given for source in (model, model.adapter) if source]


def is_hub_id(name: str) -> bool:
    """Whether it has the form of one, OWNER/NAME or NAME, without a revision."""
    match = _HUB_ID.fullmatch(name)
    return match is not None and match["revision"] is None


def expand_home(path: Path) -> Path:
    """A path that may begin with ~ or ~user."""
    try:
        return path.expanduser()
    except (RuntimeError, ValueError):  # a name with a null character
        raise InputError(f"{path}: there is no such user, so no such folder") from None


def resolve_source(given: str, *, relative_to: Path = Path(), offline: bool = False) -> Source:
    """Find a model: an existing path first, then MODEL+ADAPTER, then the hub (its cache only, when offline)."""
    model, plus, adapter = given.rpartition("+")
    if not plus or _look_up(given, relative_to)[1]:
        return _one_model(given, relative_to, offline)
    found, change = (_one_model(each, relative_to, offline) for each in (model, adapter))
    return replace(found, given=given, adapter=change)


def _look_up(given: str, relative_to: Path) -> tuple[Path, bool]:
    """The path that it may be, and whether that is there."""
    path = relative_to / expand_home(Path(given))
    try:
        return path, path.exists()
    except OSError as error:
        raise InputError(f"{given}: cannot be looked up ({error.strerror})") from None


def _one_model(given: str, relative_to: Path, offline: bool) -> Source:
    """Without an adapter on it: a model can be given with one, not with several."""
    path, exists = _look_up(given, relative_to)
    if exists:
        return _from_path(given, _readable(given, path))
    match = _HUB_ID.fullmatch(given)
    in_a_folder_here = "/" in given and os.path.isdir(path.parent)
    if match is None or given.startswith((".", "/", "~")) or given.endswith(weight_suffixes()) or in_a_folder_here:
        raise InputError(f"{given}: no such file or folder{_near(path)}")
    try:
        return _from_hub(given, match["repo"], match["revision"], offline)
    except InputError as error:
        raise InputError(f"{error}{_near(path)}") from None


def _readable(given: str, path: Path) -> Path:
    """A folder whose files can be looked at; a file says itself what is wrong with it."""
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise InputError(f"{given}: you lack the permission to read this folder")
    return path


def _near(path: Path) -> str:
    """A closing hint at what is there under nearly that name."""
    there = next(parent for parent in path.parents if os.path.isdir(parent))  # also of a path too long to be asked for
    missing, *rest = path.relative_to(there).parts
    try:
        names = difflib.get_close_matches(missing, [each.name for each in there.iterdir()], n=3)
    except OSError:
        return ""
    found = (there.joinpath(name, *rest) for name in names)
    return next((f"; did you mean {near}?" for near in found if os.path.exists(near)), "")


def _from_path(given: str, path: Path) -> Source:
    """A snapshot in the hub's cache, models--OWNER--NAME/snapshots/REVISION, is known by what the hub calls it."""
    folder = path.resolve()
    repo = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repo.startswith("models--"):
        return Source(given, path, repo.removeprefix("models--").replace("--", "/"), folder.name)
    return Source(given, path)


def _from_hub(given: str, repo: str, revision: str | None, offline: bool) -> Source:
    from huggingface_hub import constants, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE
    try:
        for each in (each for each in formats() if each.of_hugging_face):
            wanted = [*_BESIDE_WEIGHTS, *(f"*{suffix}" for suffix in each.suffixes)]
            folder = Path(snapshot_download(repo, revision=revision, local_files_only=offline, allow_patterns=wanted))
            if any(map(each.matches, folder.glob("*"))):
                break
    except Exception as error:  # the hub client raises a dozen unrelated types; the user needs one sentence
        forbidden = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "--offline"
        absent = f"it is not in the local hub cache, and {forbidden} forbids a download"
        tried = absent if offline else f"the hub said: {first_line(error)}"
        raise InputError(f"{given}: no such folder here, and as a hub id it could not be fetched: {tried}") from None
    return Source(given, folder, repo, folder.name)
