"""GGUF models in several files, as llama.cpp splits them: the first says what the model is, each holds some of its tensors."""

from __future__ import annotations

import re
from pathlib import Path

from acemerge.checkpoints.gguf_header import GgufHeader, read_header
from acemerge.errors import InputError

_NAME = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST = 1000


def part_files(path: Path) -> list[Path]:
    """All parts of the model that a file is one of, by its name, the first one first; the file itself if it is no part."""
    match = _NAME.fullmatch(path.name)
    if match is None or not 1 < (count := int(match["count"])) <= _MOST:
        return [path]
    parts = [path.with_name(f"{match['model']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise InputError(f"{path}: one of {count} parts, of which {missing[0]} is missing; download it, into the same folder")
    return parts


def first_part(header: GgufHeader) -> GgufHeader:
    """The header that says what the model is: of the first part, or of the file itself."""
    count = header.metadata.get("split.count", 1)
    if count == 1:
        return header
    parts, number = part_files(header.path), header.metadata.get("split.no")
    if not isinstance(number, int) or len(parts) != count or not 0 <= number < count or parts[number] != header.path:
        raise InputError(
            f"{header.path}: says it is part {number!a} of {count!a} (counted from 0), which its name does not; call the parts "
            "NAME-00001-of-00002.gguf and so on, or join them with llama.cpp's llama-gguf-split --merge"
        )
    return header if number == 0 else read_header(parts[0])


def all_parts(first: GgufHeader) -> GgufHeader:
    """What the first part says, with the tensors of all."""
    if first.metadata.get("split.count", 1) == 1:
        return first
    tensors = {name: tensor for part in part_files(first.path) for name, tensor in read_header(part).tensors.items()}
    return GgufHeader(first.path, first.metadata, tensors)
