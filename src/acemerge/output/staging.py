"""Output that is either absent or whole: staged beside its final place, published by rename, resumable by shard."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from acemerge.checkpoints.content_hash import has_hash
from acemerge.errors import InputError, MergeError
from acemerge.output.input_hashes import Hashes, InputHashes
from acemerge.output.manifest import ShardRecord, files_below, own_files
from acemerge.output.publishing import flush, is_occupied, locked, publish, remove, replaced_folder
from acemerge.output.whole_files import replace_file

_STATE = ".acemerge-state.json"


class _State(BaseModel):
    """What a run notes in its staging folder after every shard."""

    digest: str
    finished: dict[str, ShardRecord]
    inputs: dict[str, dict[str, str]]


@dataclass
class Staging:
    """The folder a merge is written in before it is published, and what is already finished in it."""

    folder: Path
    digest: str
    inputs: InputHashes | None = None
    finished: dict[str, ShardRecord] = field(default_factory=dict)
    earlier_inputs: Hashes = field(default_factory=dict)
    """Hashes of the files that an earlier run's shards were made of, as far as that run knew them."""
    note: str | None = None
    """What became of an earlier run's work, for the user."""

    def take_up(self, resume: bool) -> None:
        """Go on from what an earlier run of the same merge finished, or clear it away."""
        state = _read_state(self.folder)
        if state is None:
            usable = False
        elif not resume:
            usable, self.note = False, "starting over, as --no-resume asks"
        elif state.digest != self.digest:
            usable, self.note = False, "starting over: the recipe, the version or an input differs from the interrupted run's"
        elif self.inputs and self.inputs.verified and state.inputs != self.inputs.all():
            usable, self.note = False, "starting over: the interrupted run had not read these very inputs in full"
        else:
            usable, self.note = True, f"going on: {len(state.finished)} shards of the interrupted run are finished"
        if usable and state:
            self.finished, self.earlier_inputs = state.finished, state.inputs
        parts = {name.split("/")[0] for record in self.finished.values() for name in record.parts}
        self._write_state()
        _clear(self.folder, keep={_STATE, *self.finished, *parts})

    def finish(self, shard: str, record: Mapping[str, Any]) -> None:
        """Note that a shard is complete, so that a later run need not do it again: a `ShardRecord` in plain values."""
        self.finished[shard] = ShardRecord.model_validate(record)
        self._write_state()

    def check_inputs(self, hashes: Hashes) -> None:
        """Refuse to publish shards of an earlier run that were made from other inputs than this run's."""
        for model, files in self.earlier_inputs.items():
            for file, told in files.items():
                if hashes[model][file] != told:
                    raise MergeError(
                        f"{model}/{file}: its content is not what the interrupted run read, though its size and date are; pass "
                        "--no-resume to start over"
                    )

    def _write_state(self) -> None:
        known = self.inputs.known() if self.inputs else {}
        # What an earlier run noted stands: its shards are still here.
        inputs = {model: {**files, **self.earlier_inputs.get(model, {})} for model, files in known.items()}
        finished = {shard: record.to_json() for shard, record in self.finished.items()}
        state = {"digest": self.digest, "finished": finished, "inputs": inputs}
        with replace_file(self.folder / _STATE) as staged:
            staged.write_text(json.dumps(state))

    def reusable(self, shard: str) -> bool:
        """Whether a shard of an earlier run is there, whole and unchanged."""
        record = self.finished.get(shard)
        if record is None:
            return False
        expected = {shard: record.hash, **record.parts}
        return all((self.folder / name).is_file() and has_hash(self.folder / name, told) for name, told in expected.items())


def check_output(output: Path, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Refuse an output place that cannot be used, or that holds or lies in anything of the user's, before any work."""
    check_place(output, inputs)
    if is_occupied(output):
        _check_may_replace(output, overwrite)


def check_place(output: Path, inputs: Sequence[Path] = ()) -> None:
    """Refuse a place where no folder can be made, or that has to do with a model that is read."""
    if output.is_symlink():
        raise InputError(f"{output}: is a link; give the folder itself")
    place = output.resolve()
    if place.is_mount():
        raise InputError(f"{output}: is the root of a file system, which nothing can be renamed to; give a folder inside it")
    for path in (given.resolve() for given in inputs):
        if place == path or place in path.parents or (path.is_dir() and path in place.parents):
            raise InputError(f"{output}: is, holds or lies in the model {path.name} that is read; choose another output")
    existing = next(p for p in place.parents if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{output}: cannot be created, {existing} is not a writable folder")


def _check_may_replace(output: Path, overwrite: bool) -> None:
    """Only what acemerge wrote itself is ever replaced: every file must be in the folder's own manifest."""
    try:
        known = own_files(output)
    except InputError:
        reason = "is not an acemerge output, so it is not replaced"
        raise InputError(f"{output}: already exists and {reason}; choose another output, or remove it yourself") from None
    if not overwrite:
        raise InputError(f"{output}: already exists; choose another output, or pass --overwrite to replace it")
    foreign = [name for name in files_below(output) if name not in known]
    if foreign:
        raise InputError(f"{output}: holds '{foreign[0]}', which acemerge did not write; move it away, then --overwrite works")


def partial_folder(output: Path) -> Path:
    """Where an output is staged."""
    return output.with_name(output.name + ".partial")


@contextmanager
def staged_output(
    output: Path,
    digest: str,
    *,
    resume: bool,
    overwrite: bool = False,
    inputs: InputHashes | None = None,
) -> Iterator[Staging]:
    """Stage an output folder; publish it when the block ends well.

    When it does not, finished shards stay in `<output>.partial` for the next run, which goes on from there if the recipe
    and the inputs are the same; with nothing finished, nothing stays.
    """
    folder = partial_folder(output)
    with _explained(output), _parent_of(output), locked(output):
        _tidy_up_after_a_kill(output)
        if is_occupied(output):  # asked again, now that nobody else is at work
            _check_may_replace(output, overwrite)
        _check_ours(folder, output)
        folder.mkdir(exist_ok=True)
        staging = Staging(folder, digest, inputs)
        staging.take_up(resume)
        try:
            yield staging
        except BaseException:
            if not staging.finished:
                shutil.rmtree(folder, ignore_errors=True)  # what made it fail may make this fail
            raise
        (folder / _STATE).unlink()
        earlier = publish(folder, output)
        with _explained_after_publishing(output):
            flush(output.parent)
            if earlier:
                remove(earlier, _STATE)


def withdraw(output: Path) -> None:
    """Remove a published output, its lock and what a kill left of removing it: it is whole, or gone from its place at once."""
    partial = partial_folder(output)
    with locked(output):
        if partial.exists():
            _check_ours(partial, output)
            shutil.rmtree(partial)
        if output.exists():
            _check_may_replace(output, overwrite=True)
            output.rename(partial)
            remove(partial, _STATE)


@contextmanager
def _parent_of(output: Path) -> Iterator[None]:
    output.parent.mkdir(parents=True, exist_ok=True)
    yield


_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    """A disk that is full, read-only or broken, in one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or (error.filename and not str(error.filename).startswith(str(output))):
            raise
        partial = partial_folder(output)
        kept = f" Finished shards are kept in {partial.name}, which needs room too." if partial.exists() else ""
        raise MergeError(
            f"{output}: cannot be written ({error.strerror}) and was not published.{kept} Make room or choose another place, "
            "then repeat the command"
        ) from None


@contextmanager
def _explained_after_publishing(output: Path) -> Iterator[None]:
    """The same when the output is in its place already."""
    try:
        yield
    except OSError as error:
        raise MergeError(
            f"{output}: was published, but then its disk failed ({error.strerror}); whether it is whole says `acemerge verify "
            f"{output}`"
        ) from None


def _is_ours(folder: Path) -> bool:
    """Whether acemerge left a folder there: by its state, or as an output it replaced. Only then is it taken over."""
    if not folder.exists() or (folder.is_dir() and (not any(folder.iterdir()) or any(folder.glob(f"{_STATE}*")))):
        return True
    try:
        _check_may_replace(folder, overwrite=True)
    except InputError:
        return False
    return True


def _check_ours(folder: Path, output: Path) -> None:
    if not _is_ours(folder):
        raise InputError(f"{folder}: needed for the work on {output.name}, but holds files that are not acemerge's; move it away")


def _tidy_up_after_a_kill(output: Path) -> None:
    """Where two folders cannot be exchanged, a kill can leave the earlier output aside: put it back, or finish removing it."""
    replaced = replaced_folder(output)
    if not replaced.is_dir() or (not _is_ours(replaced) and not is_occupied(output)):
        return
    _check_ours(replaced, output)
    if is_occupied(output):
        remove(replaced, _STATE)
    else:
        replaced.rename(output)


def _read_state(folder: Path) -> _State | None:
    """What an earlier run noted; nothing, if it did not get that far or its note is damaged."""
    try:
        return _State.model_validate_json((folder / _STATE).read_bytes())
    except (OSError, ValueError):
        return None


def _clear(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
