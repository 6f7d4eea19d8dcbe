"""What a model's folder says of its tokenizer: the ids of its tokens, and how a conversation is written as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from acemerge.checkpoints.folder import read_json
from acemerge.checkpoints.untrusted import read_bounded
from acemerge.errors import InputError

TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


def chat_template(folder: Path) -> tuple[str, Any] | None:
    """The file that holds a chat template, and the template; None if the folder has none."""
    if (folder / _TEMPLATE).is_file():
        return _TEMPLATE, read_bounded(folder / _TEMPLATE).decode("utf-8", errors="replace")
    template = read_json(folder / _SETTINGS).get("chat_template") if (folder / _SETTINGS).is_file() else None
    return (_SETTINGS, template) if template else None


def token_ids(folder: Path) -> dict[str, int]:
    """Token -> id, by tokenizer.json: a vocabulary by name, or in order, and the tokens added to it."""
    content = read_json(folder / TOKENIZER)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    entries: list[tuple[Any, Any]]
    if isinstance(vocabulary, list):  # with scores, as Unigram has them
        entries = [(entry[0], index) for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
    elif isinstance(vocabulary, dict):
        entries = list(vocabulary.items())
    else:
        raise InputError(f"{folder / TOKENIZER}: has no vocabulary that acemerge understands")
    if isinstance(added, list):
        entries += [(entry.get("content"), entry.get("id")) for entry in added if isinstance(entry, dict)]
    return {token: index for token, index in entries if isinstance(token, str) and isinstance(index, int)}
