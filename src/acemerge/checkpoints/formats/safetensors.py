"""safetensors: a JSON header, then plain numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.formats.registry import Format, WeightsFile
from acemerge.checkpoints.tensor_header import SAFETENSORS_DTYPES, TensorHeader
from acemerge.checkpoints.untrusted import check_header_length, safetensors_header
from acemerge.errors import InputError, disk_failed, first_line


def _open(path: Path) -> WeightsFile:
    stamp = FileStamp.of(path)  # before it is opened, so that no later change is missed
    try:
        check_header_length(path)
        handle: Any = safe_open(path, framework="pt")  # its methods are untyped
        header = safetensors_header(path)
        # The library's own order leaves open which of several empty tensors comes first.
        names = sorted(header, key=lambda name: (header[name]["data_offsets"], name))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}). Download or save it again.") from None
    except RuntimeError as error:  # torch's, of all that the system may refuse; too little memory is told by who asks for it
        if not disk_failed(error):
            raise
        raise InputError(f"{path}: cannot be read ({first_line(error)}); the disk fails, copy the file elsewhere") from None
    strange = next((name for name in names if header[name]["dtype"] not in SAFETENSORS_DTYPES), None)
    if strange is not None:
        raise InputError(f"{path}: tensor '{strange}' has dtype {header[strange]['dtype']}, which acemerge cannot read")
    tensors = {name: TensorHeader(SAFETENSORS_DTYPES[header[name]["dtype"]], tuple(header[name]["shape"])) for name in names}
    data = stamp.size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
    starts = {name: data + entry["data_offsets"][0] for name, entry in header.items()} if hasattr(os, "preadv") else {}
    return WeightsFile(stamp, tensors, handle.get_tensor, starts=starts)


FORMAT = Format((".safetensors",), "model.safetensors", _open, rank=0)
