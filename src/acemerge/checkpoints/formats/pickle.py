"""What torch.save writes: a pickle, from which only plain tensors are taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.formats.registry import Format, WeightsFile
from acemerge.checkpoints.tensor_header import SAFETENSORS_NAME, header_of, shared_storage
from acemerge.checkpoints.untrusted import check_plain, check_zip
from acemerge.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_DEEPEST_WRAPPING = 8


def _open(path: Path) -> WeightsFile:
    """A torch.save file, read without running code and, unless it is in torch's pre-1.6 format, memory-mapped."""
    stamp = FileStamp.of(path)
    check_zip(path)
    state_dict = _unwrap(_load_weights_only(path), path)
    for name, tensor in state_dict.items():
        check_plain(path, name, tensor)
    headers = {name: header_of(tensor) for name, tensor in state_dict.items()}
    strange = next((name for name, header in headers.items() if header.dtype not in SAFETENSORS_NAME), None)
    if strange is not None:
        raise InputError(f"{path}: tensor '{strange}' has dtype {headers[strange].dtype}, which acemerge cannot read")
    return WeightsFile(stamp, headers, state_dict.__getitem__, shared_storage(state_dict))


def _load_weights_only(path: Path) -> Any:
    import torch

    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling untrusted bytes can fail in any way
        raise InputError(
            f"{path}: cannot be loaded safely because it is damaged or holds more than plain tensors "
            f"({type(error).__name__}). If you trust the file, convert it where its code is installed: "
            "safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
        ) from None


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside a training checkpoint: {'state_dict': ...}, {'model': ...}, some levels deep."""
    import torch

    for _ in range(_DEEPEST_WRAPPING):  # a pickle can hold itself
        if not isinstance(content, Mapping):
            break
        wrapper = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if wrapper is None:
            # Parameters are tensors that torch watches, and what is read here is written to pieces that it does not.
            tensors = {str(name): value.detach() for name, value in content.items() if isinstance(value, torch.Tensor)}
            if tensors:
                return tensors
            break
        content = content[wrapper]
    raise InputError(f"{path}: holds no state dict of tensors (found {type(content).__name__}); save model.state_dict()")


FORMAT = Format((".bin", ".pt", ".pth"), "pytorch_model.bin", _open, rank=100)
