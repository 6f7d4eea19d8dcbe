"""What experts say of the model they were made from, where that is not the base given.

Names prove nothing: folders are renamed, and the same model goes by several. So this is a note; the weights are looked at later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from acemerge.adapters.adapter import Adapter
from acemerge.checkpoints.card import base_models
from acemerge.checkpoints.folder import Checkpoint
from acemerge.checkpoints.source import is_hub_id


def origin_notes(base: Checkpoint, experts: Sequence[Checkpoint]) -> Iterator[str]:
    """One for each expert that names another base, and none of the names that this one goes by."""
    ours = {_last_part(name) for name in _names_of(base)}
    for expert in experts:
        named = _origins(expert)
        if named and ours.isdisjoint(map(_last_part, named)):
            # A path of somebody's machine says no more than its last part, and is nobody else's business.
            told = " and ".join(f"'{name if is_hub_id(name) else PurePosixPath(name).name}'" for name in named)
            yield (
                f"expert '{expert.name}' says it was made from {told}; the base given is '{base.name}': make sure it is the same"
            )


def _names_of(base: Checkpoint) -> list[str]:
    own = base.config.get("_name_or_path")
    folder = [base.location.name] if base.location else []
    return [base.name, *folder, *([own] if isinstance(own, str) else [])]


def _origins(expert: Checkpoint) -> list[str]:
    """By its settings, its config or its card. A full model's config may name any folder that it was once loaded from."""
    if isinstance(expert, Adapter):
        claimed = [expert.settings.get("base_model_name_or_path")]
    else:
        loaded_from = expert.config.get("_name_or_path")
        claimed = [loaded_from] if isinstance(loaded_from, str) and "/" in loaded_from and is_hub_id(loaded_from) else []
        claimed += base_models(expert.folder) if expert.folder else []
    return [name for name in claimed if isinstance(name, str) and PurePosixPath(name).name]


def _last_part(name: str) -> str:
    """What a hub id, a folder and a path of the same model have in common."""
    return PurePosixPath(name.partition("@")[0]).name.lower()
