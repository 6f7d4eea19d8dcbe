"""Files as they are written: safetensors one tensor at a time, and what per-task methods add."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, uint8

from acemerge.checkpoints.content_hash import RunningHash, file_hash
from acemerge.checkpoints.tensor_header import SAFETENSORS_NAME, TensorHeader, element_size, header_of
from acemerge.errors import MergeError

_COPIED_AT_ONCE = 2**23
_SYNCED_AT_ONCE = 2**27


def write_safetensors(
    path: Path, headers: Sequence[tuple[str, TensorHeader]], values: Iterable[Tensor], tensor_hashes: dict[str, str] | None = None
) -> str:
    """Write a safetensors file one tensor at a time, in the order given, and return its hash; `tensor_hashes` gets theirs.

    Memory holds two tensors: one is hashed and written in a thread while the next is made.
    """
    with ExitStack() as open_files, ThreadPoolExecutor(1) as behind:
        file = StreamedFile(path, headers, open_files, tensor_hashes)
        writing: Future[None] | None = None
        for value in values:
            if writing:
                writing.result()
            writing = behind.submit(file.add, value)
        if writing:
            writing.result()
        return file.finish()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of tensors that are all there; wide dtypes first, which keeps every tensor aligned in the file.

    The library's own writer begins in a file beside, under a name of chance, which stays if the process is killed.
    """
    ordered = sorted(tensors.items(), key=lambda entry: (-entry[1].element_size(), entry[0]))
    write_safetensors(path, [(name, header_of(tensor)) for name, tensor in ordered], (tensor for _, tensor in ordered))


class StreamedFile:
    """A safetensors file that takes its tensors one at a time, in the order given; `tensor_hashes` gets each one's.

    The library's own writer needs all tensors at once; here the header is known from the plan, so memory holds one tensor.
    What is written goes on to the disk in a thread, so that little is left to wait for at the end.
    """

    def __init__(
        self,
        path: Path,
        headers: Sequence[tuple[str, TensorHeader]],
        open_files: ExitStack,
        tensor_hashes: dict[str, str] | None = None,
    ) -> None:
        header = _encoded_header(headers)
        self._path, self._expected, self._digest = path, iter(headers), RunningHash(header)
        self._tensor_hashes = tensor_hashes
        self._file = open_files.enter_context(path.open("wb"))
        self._disk = open_files.enter_context(ThreadPoolExecutor(1))
        self._sync: Future[None] | None = None
        self._unsynced = self._file.write(header)

    def add(self, value: Tensor) -> None:
        """The next tensor."""
        name, expected = next(self._expected)
        data = _bytes_of(value)
        if data.nbytes != expected.nbytes:
            raise MergeError(f"{self._path.name}: tensor '{name}' has {data.nbytes} bytes, the plan says {expected.nbytes}")
        self._file.write(data)
        self._digest.update(data)
        if self._tensor_hashes is not None:
            self._tensor_hashes[name] = RunningHash(data).told()
        self._unsynced += data.nbytes
        if self._unsynced >= _SYNCED_AT_ONCE:
            self._start_sync()

    def _start_sync(self) -> Future[None]:
        """Have what is written brought to the disk, when what was written before is there."""
        if self._sync:
            self._sync.result()  # the system tells of a failed write only once: it may have told this one
        self._file.flush()
        self._sync, self._unsynced = self._disk.submit(os.fsync, self._file.fileno()), 0
        return self._sync

    def finish(self) -> str:
        """Complete the file; its hash."""
        left = [name for name, _ in self._expected]
        if left:
            raise MergeError(f"{self._path.name}: tensor '{left[0]}' was not written")
        self._start_sync().result()
        return self._digest.told()


def tensor_hash(tensor: Tensor) -> str:
    """The hash of a tensor's values as a file holds them."""
    return RunningHash(_bytes_of(tensor)).told()


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
class GrowingFile:
    """A safetensors file whose tensors are not known beforehand: data first, to the side; the header at the end."""

    path: Path
    data: BinaryIO
    headers: list[tuple[str, TensorHeader]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """One more tensor."""
        self.headers.append((name, TensorHeader(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))))
        self.data.write(_bytes_of(tensor))

    def finish(self) -> None:
        """Write the file."""
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
        self._files: dict[str, GrowingFile] = {}

    def _file(self, place: str) -> GrowingFile:
        if place not in self._files:
            path = self._folder / place / self._shard
            path.parent.mkdir(parents=True, exist_ok=True)
            data = self._open_files.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
            self._files[place] = GrowingFile(path, data)
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
        return {f"{place}/{self._shard}": file_hash(file.path) for place, file in self._files.items()}
