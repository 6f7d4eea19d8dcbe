"""Texts, one JSON object a line, tokenised by the expert's tokenizer, or by the base's if the expert has none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acemerge.calibration.inputs import Batch
from acemerge.calibration.models import model_config, quiet_transformers
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.untrusted import parse_json
from acemerge.errors import InputError, did_you_mean, first_line

FIELDS = ("text", "text_pair", "label")
LARGEST_FILE = 1_000_000_000
_LONGEST = 512
"""Tokens, where neither the tokenizer nor the model sets a limit."""


@dataclass(frozen=True)
class TokenisedTexts:
    """Unpadded rows of each of the model's inputs, which are padded on the right, batch by batch."""

    columns: dict[str, list[list[int]]]
    padding: int

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens in each row."""
        return torch.tensor([len(ids) for ids in self.columns["input_ids"]])

    def batch(self, indices: Tensor) -> Batch:
        """Padded to the longest of these rows."""
        rows = indices.tolist()
        longest = max(int(self.lengths[row]) for row in rows)
        batch = {}
        for name, column in self.columns.items():
            fill = self.padding if name == "input_ids" else 0
            batch[name] = torch.tensor([column[row] + [fill] * (longest - len(column[row])) for row in rows])
        return batch


def read_texts(file: Path, base: Checkpoint, expert: Checkpoint) -> TokenisedTexts:
    """Every line of the file, tokenised; labels may be there and are left out."""
    rows = read_lines(file)
    texts, pairs = [row["text"] for row in rows], [row["text_pair"] for row in rows if "text_pair" in row]
    tokenizer, config = _tokenizer(file, base, expert), model_config(expert)
    limits = (tokenizer.model_max_length, *(getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")))
    longest = min((limit for limit in limits if isinstance(limit, int) and limit < 10**6), default=_LONGEST)
    both = (texts, pairs) if pairs else (texts,)
    encoded = tokenizer(*both, truncation=True, max_length=longest, return_attention_mask=True)
    empty = next((line for line, ids in enumerate(encoded["input_ids"], 1) if not ids), None)
    if empty is not None:
        raise InputError(f"{file}: row {empty} has no tokens; leave it out")
    known = (getattr(config, "pad_token_id", None), tokenizer.pad_token_id, 0)
    padding = next(int(token) for token in known if token is not None)
    # Segments mean something to models that have an embedding for them only; GPT-2 would take them for words.
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if getattr(config, "type_vocab_size", 0) else [])]
    return TokenisedTexts({name: list(encoded[name]) for name in names if name in encoded}, padding)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of texts, checked: an object with a text on every line that is not empty."""
    if file.stat().st_size > LARGEST_FILE:
        raise InputError(f"{file}: larger than {LARGEST_FILE // 10**6} MB; a few hundred rows are enough, keep the first ones")
    rows: list[dict[str, Any]] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at separators within a text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as text in UTF-8 ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_json(line, f"{file}, line {number}")
        _check_row(row, f"{file}, line {number}", rows[:1])
        rows.append(row)
    if not rows:
        raise InputError(f'{file}: holds no rows; give at least one line such as {{"text": "..."}}')
    return rows


def _check_row(row: Any, where: str, first: list[dict[str, Any]]) -> None:
    if not isinstance(row, dict):
        raise InputError(f'{where}: expected an object such as {{"text": "..."}}, found {type(row).__name__}')
    for name in row:
        if name not in FIELDS:
            raise InputError(f"{where}: there is no field '{name}': {did_you_mean(name, FIELDS)}")
    for name in ("text", "text_pair"):
        if (name in row or name == "text") and not isinstance(row.get(name), str):
            raise InputError(f"{where}: '{name}' must be text, found {type(row.get(name)).__name__}")
    if first and ("text_pair" in row) != ("text_pair" in first[0]):
        raise InputError(f"{where}: give 'text_pair' on every line, or on none")


def _tokenizer(file: Path, base: Checkpoint, expert: Checkpoint) -> Any:
    for model in (expert, base):
        names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
        if model.folder is None or not any((model.folder / name).is_file() for name in names):
            continue
        try:
            tokenizer = quiet_transformers().AutoTokenizer
            return tokenizer.from_pretrained(model.folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise InputError(
                f"{model.folder}: its tokenizer cannot be loaded ({first_line(error)}), which {file.name} needs"
            ) from None
    raise InputError(
        f"{file}: neither expert {expert.where} nor base {base.where} has a tokenizer; put its files beside one of them, or give "
        f"ready inputs as {file.stem}.safetensors"
    )
