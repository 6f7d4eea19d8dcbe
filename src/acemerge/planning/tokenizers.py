"""Notes on experts whose tokenizer is not the base's, which is the one that the output gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.tokenizer import TOKENIZER, chat_template, token_ids
from acemerge.checkpoints.untrusted import read_bounded, shortened
from acemerge.errors import InputError


def tokenizer_notes(base: Checkpoint, experts: Sequence[Checkpoint]) -> Iterator[str]:
    """What would be lost, or mixed up, without a word. A file that cannot be read is no obstacle: it is only copied."""
    for expert in experts:
        for compare in (_template_notes, _id_notes):
            try:
                if base.folder and expert.folder:
                    yield from compare(base.folder, expert.folder, expert.name)
            except (InputError, OSError):  # whose message would name a path of this machine
                yield f"the tokenizer of expert '{expert.name}' was not compared with the base's: one of them cannot be read"


def _template_notes(base: Path, folder: Path, name: str) -> Iterator[str]:
    ours, theirs = chat_template(base), chat_template(folder)
    if theirs is None or (ours and ours[1] == theirs[1]):
        return
    lacks = "another than the base, whose own is kept" if ours else "the base has none, and the output gets none"
    yield f"expert '{name}' has a chat template ({theirs[0]}), {lacks}; copy it if the merged model is to chat that way"


def _id_notes(base: Path, folder: Path, name: str) -> Iterator[str]:
    if not all((place / TOKENIZER).is_file() for place in (base, folder)):
        return
    if read_bounded(base / TOKENIZER) == read_bounded(folder / TOKENIZER):
        return
    ours, theirs = token_ids(base), token_ids(folder)
    moved = [token for token, index in theirs.items() if ours.get(token, index) != index]
    if moved:
        first = moved[0]
        yield (
            f"expert '{name}' has other ids than the base for {len(moved)} tokens ({_shown(first)} is {theirs[first]}, not "
            f"{ours[first]}): the rows of its embeddings and of its output layer stand for other tokens, and are not reordered"
        )
    if added := [token for token in theirs if token not in ours]:
        yield (
            f"expert '{name}' has {len(added)} tokens that the base lacks, such as {_shown(added[0])}; the output gets the "
            "base's tokenizer, which does not know them"
        )


def _shown(token: str) -> str:
    return shortened(ascii(token))
