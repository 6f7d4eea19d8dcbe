"""Output that is either absent or whole: staged beside its final place, published by rename, resumable by shard."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, uint8

from acemerge.checkpoint import SAFETENSORS_NAME, TensorHeader, element_size
from acemerge.errors import InputError, MergeError
from acemerge.sizes import human_bytes

MANIFEST = "acemerge_manifest.json"
_STATE = ".acemerge-state.json"
_LOCK = ".acemerge-lock"
_COPIED_AT_ONCE = 2**23


def write_safetensors(path: Path, headers: Sequence[tuple[str, TensorHeader]], values: Iterable[Tensor]) -> str:
    """Write a safetensors file one tensor at a time, in the order given, and return its sha256.

    The library's own writer needs all tensors at once; here the header is known from the plan, so memory holds one tensor.
    """
    header = _encoded_header(headers)
    digest = hashlib.sha256(header)
    with path.open("wb") as file:
        file.write(header)
        for (name, expected), value in zip(headers, values, strict=True):
            data = _bytes_of(value)
            if data.nbytes != expected.nbytes:
                raise MergeError(f"{path.name}: tensor '{name}' has {data.nbytes} bytes, the plan says {expected.nbytes}")
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview[int]:
    """A tensor's own memory, row-major, without a copy if it is so already."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.contiguous().reshape(-1).view(uint8).numpy()
    return memoryview(array)


def _encoded_header(headers: Sequence[tuple[str, TensorHeader]]) -> bytes:
    """A safetensors header, padded so that the data after it is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in headers:
        start, end = end, end + tensor.nbytes
        dtype = SAFETENSORS_NAME[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


@dataclass
class _GrowingFile:
    """A safetensors file whose tensors are not known beforehand: data first, to the side; the header at the end."""

    path: Path
    data: BinaryIO
    headers: list[tuple[str, TensorHeader]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        self.headers.append((name, TensorHeader(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))))
        self.data.write(_bytes_of(tensor))

    def finish(self) -> None:
        starts = accumulate((header.nbytes for _, header in self.headers), initial=0)
        # Wide dtypes first keeps every tensor aligned in the file.
        ordered = sorted(zip(starts, self.headers, strict=False), key=lambda entry: -element_size(entry[1][1].dtype))
        with self.path.open("wb") as file:
            file.write(_encoded_header([header for _, header in ordered]))
            for start, (_, header) in ordered:
                self._copy(file, start, header.nbytes)
            file.flush()
            os.fsync(file.fileno())

    def _copy(self, file: BinaryIO, start: int, length: int) -> None:
        self.data.seek(start)
        while length:
            block = self.data.read(min(length, _COPIED_AT_ONCE))
            file.write(block)
            length -= len(block)


class PartsWriter:
    """What methods with one model per task write beside a shard: `shared/<shard>` and `tasks/<expert>/<shard>`."""

    def __init__(self, folder: Path, shard: str, open_files: ExitStack) -> None:
        self._folder, self._shard, self._open_files = folder, shard, open_files
        self._files: dict[str, _GrowingFile] = {}

    def _file(self, place: str) -> _GrowingFile:
        if place not in self._files:
            path = self._folder / place / self._shard
            path.parent.mkdir(parents=True, exist_ok=True)
            data = self._open_files.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
            self._files[place] = _GrowingFile(path, data)
        return self._files[place]

    def add(self, name: str, shared: Mapping[str, Tensor], parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """What all tasks share of one tensor, and each expert's parts of it."""
        for place, own in [("shared", shared), *((f"tasks/{expert}", own) for expert, own in parts.items())]:
            for part, value in own.items():
                self._file(place).add(f"{name}:{part}", value)

    def finish(self) -> dict[str, str]:
        """Complete the files; their hashes by path."""
        for file in self._files.values():
            file.finish()
        return {f"{place}/{self._shard}": file_sha256(file.path) for place, file in self._files.items()}


def file_sha256(path: Path) -> str:
    """The hash of a file's content; free for files of the hub cache, which are named by it."""
    real = path.resolve()
    if len(real.name) == 64 and real.parent.name == "blobs":
        return real.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class Staging:
    """The folder a merge is written in before it is published, and what is already finished in it."""

    folder: Path
    digest: str
    finished: dict[str, dict[str, Any]]

    def finish(self, shard: str, record: dict[str, Any]) -> None:
        """Note that a shard is complete, so that a later run need not do it again."""
        self.finished[shard] = record
        self._write_state()

    def _write_state(self) -> None:
        temporary = self.folder / f"{_STATE}.new"
        temporary.write_text(json.dumps({"digest": self.digest, "finished": self.finished}))
        temporary.replace(self.folder / _STATE)

    def reusable(self, shard: str) -> bool:
        """Whether a shard of an earlier run is there, whole and unchanged."""
        record = self.finished.get(shard)
        if record is None:
            return False
        expected = {shard: record["sha256"], **record["parts"]}
        return all((self.folder / name).is_file() and file_sha256(self.folder / name) == sha for name, sha in expected.items())


def check_output(output: Path, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Refuse an output place that cannot be used, or that holds or lies in anything of the user's, before any work."""
    if output.is_symlink():
        raise InputError(f"{output}: is a link; give the folder itself")
    place = output.resolve()
    for path in (given.resolve() for given in inputs):
        if place == path or place in path.parents or (path.is_dir() and path in place.parents):
            raise InputError(f"{output}: is, holds or lies in the model {path.name} that is read; choose another output")
    occupied = output.exists() and not (output.is_dir() and not any(output.iterdir()))
    if occupied and not overwrite:
        raise InputError(f"{output}: already exists; choose another output, or pass --overwrite to replace it")
    if occupied:
        _check_replaceable(output)
    existing = next(p for p in place.parents if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{output}: cannot be created, {existing} is not a writable folder")


def _check_replaceable(output: Path) -> None:
    """Only what acemerge wrote itself is ever replaced: every file must be in the folder's own manifest."""
    try:
        known = set(json.loads((output / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{output}: exists and is not an acemerge output, so it is not replaced; remove it yourself") from None
    foreign = [name for name in files_below(output) if name not in known]
    if foreign:
        raise InputError(f"{output}: holds '{foreign[0]}', which acemerge did not write; move it away, then --overwrite works")


def files_below(folder: Path) -> list[str]:
    """Every file of a folder but acemerge's working ones, by its path within it."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(path for path in paths if not path.startswith(".acemerge-"))


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the folder's own account, last: it lists every file, which is what a later --overwrite goes by."""
    complete = {**content, "files": sorted([*files_below(folder), MANIFEST])}
    (folder / MANIFEST).write_text(json.dumps(complete, indent=1) + "\n", encoding="utf-8")


def check_space(output: Path, needed: int) -> str | None:
    """A problem report if the disk cannot hold the output; what an interrupted run has already written counts as there."""
    existing = next(p for p in output.resolve().parents if p.exists())
    free = shutil.disk_usage(existing).free
    partial = _partial(output)
    written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else 0
    if needed <= free + written:
        return None
    return f"output {output}: needs {human_bytes(needed)}, the disk has {human_bytes(free)} free; make room or use another disk"


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


@contextmanager
def staged_output(output: Path, digest: str, *, resume: bool) -> Iterator[Staging]:
    """Stage an output folder; publish it when the block ends well.

    When it does not, finished shards stay in `<output>.partial` for the next run, which goes on from there if the recipe
    and the inputs are the same; with nothing finished, nothing stays.
    """
    folder = _partial(output)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / _LOCK).is_file():
        raise InputError(f"{folder}: needed for the work on {output.name}, but holds files that are not acemerge's; move it away")
    with _locked(folder / _LOCK, output):
        staging = Staging(folder, digest, _earlier_state(folder, digest) if resume else {})
        parts = {name.split("/")[0] for record in staging.finished.values() for name in record["parts"]}
        _clear(folder, keep={_LOCK, _STATE, *staging.finished, *parts})
        try:
            yield staging
        except BaseException:
            if not staging.finished:
                shutil.rmtree(folder)
            raise
        _publish(folder, output)
        for name in (_STATE, _LOCK):
            (output / name).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, output: Path) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{output}: another acemerge process is writing it; wait for it, or choose another output") from None
        yield


def _earlier_state(folder: Path, digest: str) -> dict[str, dict[str, Any]]:
    try:
        state = json.loads((folder / _STATE).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return dict(state["finished"]) if state.get("digest") == digest else {}


def _clear(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _publish(folder: Path, output: Path) -> None:
    """Rename into place; an output being replaced is moved aside first and deleted last."""
    if not output.exists() or not any(output.iterdir()):
        folder.rename(output)
        return
    with tempfile.TemporaryDirectory(prefix=f"{output.name}.replaced-", dir=output.parent) as aside:
        output.rename(Path(aside) / output.name)
        folder.rename(output)
