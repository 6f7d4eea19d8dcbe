"""A model for one task: the merged backbone with what belongs to one expert put back on it.

`heads/<expert>/` holds the expert's own tensors (head.safetensors), its config, tokenizer and other small files, and
head.json, which says under which names the expert knows the merged tensors. Methods that make one model per task also write
`tasks/<expert>/`, each tensor's small parts, and `shared/`, the vector that masks refer to (see `Merged`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acemerge.checkpoint import Checkpoint, TensorHeader, open_checkpoint, read_json
from acemerge.errors import InputError, did_you_mean
from acemerge.plan import Plan
from acemerge.writer import check_output, staged_output, write_safetensors

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
    """A merged backbone as one expert's task needs it: every tensor under the expert's own name, read lazily."""

    merged: Checkpoint
    backbone: Mapping[str, str]
    side_files: tuple[Path, ...]
    head: Checkpoint | None
    parts: Checkpoint | None
    shared: Checkpoint | None
    alpha: float

    def headers(self) -> list[tuple[str, TensorHeader]]:
        """Names and headers."""
        backbone = [(theirs, self.merged.tensors[ours]) for theirs, ours in self.backbone.items()]
        return sorted([*backbone, *(self.head.tensors.items() if self.head else ())])

    def read(self, name: str) -> Tensor:
        """One tensor."""
        if name in self.backbone:
            return self._backbone_tensor(self.backbone[name])
        assert self.head is not None
        return self.head.read(name)

    def _backbone_tensor(self, name: str) -> Tensor:
        """The merged tensor with the task's parts applied, in the merged tensor's dtype."""
        value = self.merged.read(name)
        if self.parts is None:
            return value
        part = {p: self.parts.read(f"{name}:{p}") for p in _PARTS if f"{name}:{p}" in self.parts.tensors}
        if "left" in part:
            return (value.float() + part["left"] @ part["right"]).to(value.dtype)
        if "delta" in part:
            return (value.float() + part["delta"]).to(value.dtype)
        if "mask" in part and self.shared is not None:
            shared = self.shared.read(name).double()
            bits = np.unpackbits(part["mask"].numpy(), count=shared.numel()).astype(bool)
            mask = torch.from_numpy(bits).reshape(shared.shape)
            base = value.double() - self.alpha * shared
            return (base + float(part["scale"]) * mask * shared).to(value.dtype)
        return value


_PARTS = ("left", "right", "delta", "mask", "scale")


def _open_task_model(merged: Path, expert: str) -> TaskModel:
    known = sorted({path.name for kind in ("heads", "tasks") for path in merged.glob(f"{kind}/*")})
    if not known:
        raise InputError(
            f"{merged}: holds no heads and no tasks; only experts with their own heads, or a method with one model per task, "
            "leave something to put back"
        )
    if expert not in known:
        raise InputError(f"{merged}: has nothing of an expert '{expert}': {did_you_mean(expert, known)}")
    model = open_checkpoint(merged, merged.name)
    head, tasks, shared = merged / "heads" / expert, merged / "tasks" / expert, merged / "shared"
    has_head = head.is_dir()
    return TaskModel(
        model,
        read_json(head / _HEAD_NAMES)["backbone"] if has_head else {name: name for name in model.tensors},
        tuple(p for p in head.iterdir() if p.name not in (_HEAD_TENSORS, _HEAD_NAMES)) if has_head else (),
        open_checkpoint(head / _HEAD_TENSORS, expert) if has_head else None,
        open_checkpoint(tasks, expert) if tasks.is_dir() else None,
        open_checkpoint(shared, "shared") if shared.is_dir() else None,
        float(read_json(merged / "acemerge_manifest.json")["options"]["alpha"]),
    )


def export_expert(merged: str | Path, expert: str, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write an ordinary Hugging Face folder for one task: the merged backbone, that expert's head, config and tokenizer."""
    merged, output = Path(merged), Path(output)
    check_output(output, overwrite)
    model = _open_task_model(merged, expert)
    headers = model.headers()
    with staged_output(output, digest="", resume=False, overwrite=overwrite) as staging:
        digest = write_safetensors(staging.folder / "model.safetensors", headers, (model.read(name) for name, _ in headers))
        for path in (*model.merged.side_files(), *model.side_files):  # the expert's own files win
            shutil.copyfile(path, staging.folder / path.name)
        manifest = {"exported": expert, "weights_sha256": digest}
        (staging.folder / "acemerge_manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return output


def load_expert_head(merged: str | Path, expert: str) -> Any:
    """The transformers model for one task: the merged backbone with that expert's head, on the CPU, in eval mode."""
    try:
        import transformers
    except ImportError:
        raise InputError("load_expert_head needs transformers: pip install 'acemerge[eval]'") from None
    model = _open_task_model(Path(merged), expert)
    folder = Path(merged) / "heads" / expert
    config = transformers.AutoConfig.from_pretrained(folder if folder.is_dir() else merged)
    architecture = (config.architectures or [None])[0]
    if architecture is None or not hasattr(transformers, architecture):
        raise InputError(f"{merged}, '{expert}': config.json names no architecture that transformers knows ({architecture})")
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
