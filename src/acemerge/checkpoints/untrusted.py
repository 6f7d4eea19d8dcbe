"""What is checked of files that strangers wrote before anything else looks at them: bounded time and memory, one clear error."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

# Far above what real models have (a shard of the largest ones: 1 MB of header; their index: 10 MB), far below what hurts.
MAX_HEADER_BYTES = 10_000_000
MAX_JSON_BYTES = 50_000_000
MAX_NAME_LENGTH = 500
_LONGEST_FILE_NAME = 255  # bytes: what file systems allow
_LFS = b"version https://git-lfs"  # how a pointer file of git-lfs begins
_GET_AGAIN = "download it again, from a source you trust"


def parse_json(text: str | bytes, where: object) -> Any:
    """JSON in which no name is given twice and nothing is nested without end."""
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(pairs, where))
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; {_GET_AGAIN}") from None
    except ValueError as error:  # malformed, not UTF-8, or a number of thousands of digits
        raise InputError(f"{where}: cannot be read as JSON ({shortened(str(error))}). Restore it from where it came.") from None


def _without_duplicates(pairs: list[tuple[str, Any]], where: object) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InputError(f"{where}: the name {shortened(ascii(twice))} is there twice; {_GET_AGAIN}")
    return fields


def read_bounded(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """A small file's content; a file too large to be what its name says is refused unread."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise InputError(f"{path}: larger than {limit // 1000} kB, far more than such a file ever needs; {_GET_AGAIN}")
    return content


def check_not_pointer(path: Path) -> None:
    """A clone without git-lfs has small text files in the place of weights."""
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise InputError(f"{path}: a git-lfs pointer, not the weights; install git-lfs and run `git lfs pull` in that folder")


def check_header_length(path: Path) -> None:
    """A safetensors file begins with the length of its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise InputError(f"{path}: not a whole safetensors file (a header of {length} bytes is not plausible); {_GET_AGAIN}")


def safetensors_header(path: Path) -> dict[str, Any]:
    """The tensors of a file that safetensors has accepted, as its header names them: twice the same is refused here."""
    with path.open("rb") as file:
        header = parse_json(file.read(int.from_bytes(file.read(8), "little")), f"{path}, header")
    assert isinstance(header, dict)  # safetensors takes nothing else
    header.pop("__metadata__", None)
    return header


def check_zip(path: Path) -> None:
    """A torch.save file is an uncompressed zip archive: one that is compressed, or larger inside than out, is not torch's."""
    try:
        if not zipfile.is_zipfile(path):
            return  # torch's format before 1.6
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path}: a damaged archive ({shortened(str(error))}); {_GET_AGAIN}") from None
    compressed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise InputError(
            f"{path}: entry {shortened(ascii(compressed[0]))} is compressed, which torch.save never does: it may be a zip bomb; "
            "load and save it again with torch, or convert it to safetensors"
        )
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise InputError(f"{path}: its entries claim to be larger than the file; {_GET_AGAIN}")


def check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """A tensor from a pickle must be plain numbers that are really in the file."""
    import torch

    problem = None
    kinds = (torch.Tensor, torch.nn.Parameter)
    if type(tensor) not in kinds or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        problem = f"is not a plain dense tensor ({type(tensor).__name__}, {tensor.layout}, {tensor.dtype})"
    elif tensor.device.type != "cpu":
        problem = f"has no data in the file (device '{tensor.device.type}')"
    elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        problem = f"claims shape {list(tensor.shape)}, but the file holds fewer numbers"
    if problem:
        raise InputError(f"{path}: tensor {shortened(ascii(name))} {problem}; save model.state_dict() of an ordinary model")


def check_names(path: Path, names: Iterable[str]) -> None:
    """Tensor names go into file headers and onto terminals: no control characters, lone surrogates or endless names."""
    for name in names:
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable() or name == "__metadata__":
            raise InputError(f"{path}: {shortened(ascii(name))} cannot be a tensor's name; {_GET_AGAIN}")


def is_file_name(name: str) -> bool:
    """Whether it is a plain one, of a file or folder in a folder that is meant."""
    return Path(name).name == name not in ("", "..") and name.isprintable() and len(name.encode()) <= _LONGEST_FILE_NAME


def check_is_a_name(name: str, folder: Path) -> None:
    """What a stranger's manifest calls an expert is used as the name of a folder in it."""
    if not is_file_name(name):
        raise InputError(f"{folder}: {shortened(ascii(name))} cannot be an expert's name; {_GET_AGAIN}")


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Links, also of folders in it, must stay in the model's folder, or in the hub cache's folder of the same model."""
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in paths:
        target = path.resolve()
        inner = (path, *(parent for parent in path.parents if folder in parent.parents))
        linked = any(each.is_symlink() for each in inner)
        if linked and not any(place in target.parents for place in allowed):
            raise InputError(
                f"{path}: a link that leaves the model's folder, to {target}; if it is your own, put the file itself there, or "
                "give its path as the model"
            )


def check_runs_nothing(config: Mapping[str, Any], where: object) -> None:
    """What transformers would fetch by a model's config and run: attention by a kernel of the hub, OWNER/NAME."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_runs_nothing(value, where)
        elif key.endswith("attn_implementation") and "/" in str(value):
            raise InputError(
                f"{where}: config.json asks for code of the hub, {key} = {shortened(ascii(value))}, which is not run; remove it"
            )


def shortened(text: str) -> str:
    """What a stranger wrote, at a length that fits into a message."""
    return text if len(text) <= 200 else text[:200] + "..."
