"""Heads that differ by task: kept beside the merged backbone, and put back on it for one task at a time.

`heads/<expert>/` holds the expert's own tensors (head.safetensors), its config, tokenizer and other small files, and
head.json, which says under which names the expert knows the merged tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.checkpoint import Checkpoint, TensorHeader, open_checkpoint, read_json
from acemerge.errors import InputError, did_you_mean
from acemerge.plan import Plan
from acemerge.writer import check_output, staged_output, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

_HEAD_TENSORS = "head.safetensors"
_HEAD_NAMES = "head.json"


def write_heads(plan: Plan, folder: Path) -> None:
    """Write each expert's own tensors and small files under `heads/`."""
    for head in plan.heads:
        expert = plan.experts[head.expert]
        target = folder / "heads" / expert.name
        target.mkdir(parents=True, exist_ok=True)
        headers = [(name, expert.tensors[name]) for name in head.tensors]
        write_safetensors(target / _HEAD_TENSORS, headers, (expert.read(name) for name in head.tensors))
        names = {"backbone": dict(sorted(head.backbone.items()))}
        (target / _HEAD_NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
        for path in expert.side_files():
            shutil.copyfile(path, target / path.name)


@dataclass(frozen=True)
class TaskModel:
    """A merged backbone with one expert's head on it: every tensor under the expert's own name, read lazily."""

    merged: Checkpoint
    head: Checkpoint
    folder: Path
    backbone: Mapping[str, str]

    def headers(self) -> list[tuple[str, TensorHeader]]:
        """Names and headers, in the order of the merged model."""
        shared = [(theirs, self.merged.tensors[ours]) for theirs, ours in self.backbone.items()]
        return sorted([*shared, *self.head.tensors.items()])

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self.merged.read(self.backbone[name]) if name in self.backbone else self.head.read(name)


def _open_task_model(merged: Path, expert: str) -> TaskModel:
    heads = merged / "heads"
    known = sorted(path.name for path in heads.iterdir()) if heads.is_dir() else []
    if not known:
        raise InputError(f"{merged}: holds no heads; only a merge of experts with their own heads writes heads/")
    if expert not in known:
        raise InputError(f"{merged}: has no head of an expert '{expert}': {did_you_mean(expert, known)}")
    folder = heads / expert
    names = read_json(folder / _HEAD_NAMES)["backbone"]
    return TaskModel(open_checkpoint(merged, merged.name), open_checkpoint(folder / _HEAD_TENSORS, expert), folder, names)


def export_expert(merged: str | Path, expert: str, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write an ordinary Hugging Face folder: the merged backbone, one expert's head, config and tokenizer."""
    merged, output = Path(merged), Path(output)
    check_output(output, overwrite)
    model = _open_task_model(merged, expert)
    headers = model.headers()
    with staged_output(output, digest="", resume=False, overwrite=overwrite) as staging:
        digest = write_safetensors(staging.folder / "model.safetensors", headers, (model.read(name) for name, _ in headers))
        for path in (*model.merged.side_files(), *model.folder.iterdir()):
            if path.name not in (_HEAD_TENSORS, _HEAD_NAMES):
                shutil.copyfile(path, staging.folder / path.name)
        manifest = {"exported": expert, "weights_sha256": digest}
        (staging.folder / "acemerge_manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return output


def load_expert_head(merged: str | Path, expert: str) -> Any:
    """The transformers model of one task: the merged backbone with that expert's head, on the CPU, in eval mode."""
    try:
        import transformers
    except ImportError:
        raise InputError("load_expert_head needs transformers: pip install 'acemerge[eval]'") from None
    model = _open_task_model(Path(merged), expert)
    config = transformers.AutoConfig.from_pretrained(model.folder)
    architecture = (config.architectures or [None])[0]
    if architecture is None or not hasattr(transformers, architecture):
        raise InputError(f"{model.folder / 'config.json'}: names no architecture that transformers knows ({architecture})")
    state_dict = {name: model.read(name).clone() for name, _ in model.headers()}
    loaded, report = getattr(transformers, architecture).from_pretrained(
        None, config=config, state_dict=state_dict, output_loading_info=True
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        raise InputError(
            f"{merged}, head '{expert}': {architecture} misses {sorted(report['missing_keys'])} and does not know "
            f"{sorted(report['unexpected_keys'])}"
        )
    return loaded.eval()
