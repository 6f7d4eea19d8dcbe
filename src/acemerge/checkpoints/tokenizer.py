"""What a model's folder says of its tokenizer: the ids of its tokens, its files, and how a conversation is written as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from acemerge.checkpoints.folder import read_json
from acemerge.checkpoints.untrusted import read_bounded
from acemerge.errors import InputError

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_FILES = (TEMPLATE, "chat_template.json")
GENERATION = "generation_config.json"
_BY_NAME, _IN_ORDER, _ADDED = "vocab.json", "vocab.txt", "added_tokens.json"
_BINARY = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
"""Vocabularies that acemerge does not read."""
OTHER_VOCABULARIES = (_BY_NAME, _IN_ORDER, _ADDED, "merges.txt", *_BINARY)
"""The same vocabulary in other words than tokenizer.json's, or a part of it."""
TOKENIZER_FILES = (TOKENIZER, SETTINGS, "special_tokens_map.json", *TEMPLATE_FILES, *OTHER_VOCABULARIES)

_MOST_TOKENS = 10_000_000
"""Far above what real vocabularies have; a larger id is no token's."""


def chat_template(folder: Path) -> tuple[str, Any] | None:
    """The file that holds a chat template, and the template; None if the folder has none."""
    if (folder / TEMPLATE).is_file():
        return TEMPLATE, read_bounded(folder / TEMPLATE).decode("utf-8", errors="replace")
    template = read_json(folder / SETTINGS).get("chat_template") if (folder / SETTINGS).is_file() else None
    return (SETTINGS, template) if template else None


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a vocabulary, readable or not."""
    return any((folder / name).is_file() for name in (TOKENIZER, _BY_NAME, _IN_ORDER, *_BINARY))


def token_ids(folder: Path) -> Mapping[str, int]:
    """Token -> id, by tokenizer.json, or else by vocab.json or vocab.txt and added_tokens.json."""
    path = next((folder / name for name in (TOKENIZER, _BY_NAME, _IN_ORDER) if (folder / name).is_file()), None)
    if path is None:
        found = next((name for name in _BINARY if (folder / name).is_file()), None)
        held = f"{found} alone" if found else "no tokenizer"
        raise InputError(
            f"{folder}: has {held}; acemerge lines tokens up by tokenizer.json, which "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes"
        )
    status, added = path.stat(), folder / _ADDED
    more = added.stat().st_mtime_ns if added.is_file() else 0
    return _token_ids(path, status.st_mtime_ns, status.st_size, more)


@lru_cache(maxsize=32)  # a sweep makes many plans of the same models
def _token_ids(path: Path, *stamp: int) -> Mapping[str, int]:  # noqa: ARG001
    if path.name == TOKENIZER:
        entries = _of_tokenizer(path)
    else:
        added = path.with_name(_ADDED)
        entries = [*_in_order(path), *(read_json(added).items() if added.is_file() else ())]
    named = ((token, index) for token, index in entries if isinstance(token, str) and isinstance(index, int))
    return MappingProxyType({token: index for token, index in named if 0 <= index < _MOST_TOKENS})


def _of_tokenizer(path: Path) -> list[tuple[Any, Any]]:
    """A vocabulary by name, or in order, and the tokens added to it."""
    content = read_json(path)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    entries: list[tuple[Any, Any]]
    if isinstance(vocabulary, list):  # with scores, as Unigram has them
        entries = [(entry[0], index) for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
    elif isinstance(vocabulary, dict):
        entries = list(vocabulary.items())
    else:
        raise InputError(f"{path}: has no vocabulary that acemerge understands")
    if isinstance(added, list):
        entries += [(entry.get("content"), entry.get("id")) for entry in added if isinstance(entry, dict)]
    return entries


def _in_order(path: Path) -> Iterable[tuple[Any, Any]]:
    if path.name == _BY_NAME:
        return read_json(path).items()
    lines = read_bounded(path).decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    return [(token.removesuffix("\r"), index) for index, token in enumerate(lines)]
