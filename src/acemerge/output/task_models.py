"""A model for one task: the merged backbone with what belongs to one expert put back on it.

`heads/<expert>/` holds the expert's own tensors (head.safetensors), its config, tokenizer and other small files, and
head.json, which says under which names the expert knows the merged tensors. Methods that make one model per task also write
`tasks/<expert>/`, each tensor's small parts, and `shared/`: the vector that masks refer to (see `Merged`), and what a
half-precision output lost of the shared model, so that a task's model is rounded once and not twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acemerge.adapters.adapter import Adapter, is_adapter
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint, read_json
from acemerge.checkpoints.side_files import copy_side_file, write_side_file
from acemerge.checkpoints.source import expand_home
from acemerge.checkpoints.tensor_header import TensorHeader, element_size
from acemerge.checkpoints.tokenizer import GENERATION, TOKENIZER_FILES
from acemerge.checkpoints.transformers_config import transformers_config
from acemerge.checkpoints.untrusted import check_inside, check_is_a_name, check_runs_nothing
from acemerge.errors import InputError, MergeError, did_you_mean, no_folder
from acemerge.output.manifest import MANIFEST, ExportManifest, Manifest, is_export, read_manifest, write_manifest
from acemerge.output.staging import check_output, staged_output
from acemerge.output.task_adapters import HEAD_NAMES, HEAD_TENSORS, export_task_adapter
from acemerge.output.writer import write_safetensors
from acemerge.planning.plan import Plan
from acemerge.planning.rows import OutputRows
from acemerge.planning.vocabulary_files import CONFIG, fitted_config
from acemerge.tensors.nonfinite import INSIST, REPAIR, count_nonfinite
from acemerge.tensors.output_rows import place_rows

_COPY_AGAIN = "copy the whole output folder again"


def write_heads(plan: Plan, folder: Path) -> None:
    """Write each expert's own tensors and small files under `heads/`."""
    for head in plan.heads:
        expert = plan.experts[head.expert]
        target = folder / "heads" / expert.name
        target.mkdir(parents=True, exist_ok=True)
        dtype = plan.recipe.float_dtype
        rows = {name: _head_rows(plan, head.expert, name) for name in head.tensors}
        stored = {name: own.header(expert.tensors[name]) if own else expert.tensors[name] for name, own in rows.items()}
        headers = [(name, _in_dtype(header, dtype)) for name, header in stored.items()]
        values = (_head_tensor(plan, expert, name, header, rows[name]) for name, header in headers)
        write_safetensors(target / HEAD_TENSORS, headers, values)
        names: dict[str, Any] = {"backbone": dict(sorted(head.backbone.items()))}
        if isinstance(expert, Adapter):
            names["task_type"] = expert.settings.get("task_type")
        (target / HEAD_NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
        for path in _fitting_files(plan, head.expert):
            copy_side_file(path, target, dtype, expert.config_changes)
        if isinstance(expert, Adapter) and plan.base.config:
            config = expert.head_config(plan.base.config, {name: expert.tensors[name] for name in head.tensors})
            config = fitted_config(plan.vocabulary, plan.base, config) if plan.vocabulary else config
            (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        elif plan.vocabulary and expert.config and not plan.vocabulary.is_as_output(head.expert):
            write_side_file(CONFIG, fitted_config(plan.vocabulary, expert, expert.config), target, dtype)


def _fitting_files(plan: Plan, expert: int) -> list[Path]:
    """An expert's small files; not its tokenizer, if the merged model has other tokens: that gets along with its own."""
    fits = plan.vocabulary is None or plan.vocabulary.is_as_output(expert)
    return [path for path in plan.experts[expert].side_files() if fits or path.name not in (*TOKENIZER_FILES, GENERATION)]


def _head_rows(plan: Plan, expert: int, name: str) -> OutputRows | None:
    """Of an output layer over the expert's own tokens."""
    return plan.vocabulary.head_rows(expert, name, plan.experts[expert].tensors[name]) if plan.vocabulary else None


def _head_tensor(plan: Plan, expert: Checkpoint, name: str, header: TensorHeader, rows: OutputRows | None) -> Tensor:
    value = expert.read(name).to(getattr(torch, header.dtype))
    if value.is_floating_point() and not plan.recipe.allow_nonfinite and (bad := count_nonfinite(value)):
        raise MergeError(
            f"tensor '{name}' of expert {expert.where}, a part of its head, has {bad} NaN or infinite values; {REPAIR}, {INSIST}"
        )
    return place_rows(rows, value) if rows else value


def _in_dtype(header: TensorHeader, dtype: str | None) -> TensorHeader:
    return replace(header, dtype=dtype) if dtype and header.is_mergeable else header


@dataclass(frozen=True)
class TaskModel:
    """A merged backbone as one expert's task needs it: every tensor under the expert's own name, read lazily."""

    merged: Checkpoint
    backbone: Mapping[str, str]
    side_files: tuple[Path, ...]
    head: Checkpoint | None
    parts: Parts
    shared: Parts
    alphas: Mapping[str, float]
    """Per tensor: rules may set another."""

    def headers(self) -> list[tuple[str, TensorHeader]]:
        """Names and headers, wide dtypes first, which keeps every tensor aligned in a file."""
        backbone = [(theirs, self.merged.tensors[ours]) for theirs, ours in self.backbone.items()]
        everything = [*backbone, *(self.head.tensors.items() if self.head else ())]
        return sorted(everything, key=lambda entry: (-element_size(entry[1].dtype), entry[0]))

    def read(self, name: str) -> Tensor:
        """One tensor."""
        if name in self.backbone:
            return self._backbone_tensor(self.backbone[name])
        assert self.head is not None
        return self.head.read(name)

    def _backbone_tensor(self, name: str) -> Tensor:
        """The merged tensor with the task's parts applied (see `Merged`), in the merged tensor's dtype."""
        value = self.merged.read(name)
        part = self.parts.of(name)
        if not part:
            return value
        try:
            return self._with_parts(name, value, part, self.shared.of(name))
        except (KeyError, RuntimeError, ValueError):
            raise InputError(
                f"{self.merged.location}: what tasks/ and shared/ hold for '{name}' does not fit the merged tensor; copy the "
                "whole output folder again (`acemerge verify` shows what has changed)"
            ) from None

    def _with_parts(self, name: str, value: Tensor, part: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> Tensor:
        exact = value.to(torch.float64, copy=True)
        if "lost" in shared:
            exact += shared["lost"]
        if "left" in part:
            exact += part["left"] @ part["right"]
        if "delta" in part:
            exact += part["delta"]
        if "mask" in part:
            # From the shared model's W0 + alpha * vector to the task's W0 + scale * mask * vector.
            change = _unpacked(part["mask"], value.shape).double().mul_(part["scale"]).sub_(self.alphas[name])
            exact.addcmul_(change, shared["vector"].double())
        return exact.to(value.dtype)


def _unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    """The mask that `tensors.parts` packed."""
    if len(bits) != (shape.numel() + 7) // 8:
        raise ValueError(f"{len(bits)} bytes of mask for {shape.numel()} entries")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=shape.numel())).reshape(shape)


@dataclass(frozen=True)
class Parts:
    """The files of `shared/` or of one `tasks/<expert>/`: per tensor, its parts by name."""

    files: tuple[Checkpoint, ...]

    @cached_property
    def _where(self) -> dict[str, dict[str, Checkpoint]]:
        where: dict[str, dict[str, Checkpoint]] = {}
        for file in self.files:
            for stored in file.tensors:
                name, _, part = stored.rpartition(":")
                where.setdefault(name, {})[part] = file
        return where

    def of(self, name: str) -> dict[str, Tensor]:
        """One tensor's parts; none if it has none."""
        return {part: file.read(f"{name}:{part}") for part, file in self._where.get(name, {}).items()}


def _open_parts(merged: Path, place: str, named: Iterable[str]) -> Parts:
    """The files that the manifest names there. Not every shard has one: some hold nothing that is a task's own."""
    paths = [merged / path for path in named if Path(path).parent == Path(place)]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: missing, but named in {MANIFEST}; copy the whole output folder")
    check_inside(merged, paths)
    return Parts(tuple(open_checkpoint(path, place) for path in paths))


def _read_account(merged: Path) -> Manifest | None:
    """What a merge says about its tasks; another folder says nothing."""
    manifest = read_manifest(merged, cure=_COPY_AGAIN) if (merged / MANIFEST).is_file() else None
    return manifest if isinstance(manifest, Manifest) else None


def _alphas(merged: Path, manifest: Manifest) -> dict[str, float]:
    """By which each tensor was scaled."""
    alphas: dict[str, Any] = {tensor.name: tensor.options.get("alpha") for tensor in manifest.tensors if tensor.options}
    if not all(isinstance(alpha, int | float) for alpha in alphas.values()):
        raise InputError(f"{merged / MANIFEST}: damaged, or of another version (a tensor's alpha is no number); {_COPY_AGAIN}")
    return alphas


def _read_backbone(path: Path, merged: Checkpoint) -> dict[str, str]:
    """The expert's names of the merged tensors."""
    backbone = read_json(path).get("backbone")
    if not isinstance(backbone, dict) or not all(isinstance(name, str) and name in merged.tensors for name in backbone.values()):
        raise InputError(f"{path}: names tensors that the merged model does not have; copy the whole output folder again")
    return backbone


def _open_task_model(merged: Path, expert: str) -> TaskModel:
    if not merged.is_dir():
        raise InputError(no_folder(merged))
    manifest = _read_account(merged)
    with_parts = manifest.experts if manifest and manifest.per_task else []
    known = sorted({*with_parts, *(path.name for path in merged.glob("heads/*") if path.is_dir())})
    if not known:
        raise InputError(
            f"{merged}: holds no heads and no tasks; only experts with their own heads, or a method with one model per task, "
            "leave something to put back"
        )
    if expert not in known:
        raise InputError(f"{merged}: has nothing of an expert '{expert}': {did_you_mean(expert, known)}")
    check_is_a_name(expert, merged)
    model = open_checkpoint(merged, merged.name)
    head = merged / "heads" / expert
    has_head = head.is_dir()
    if has_head and not (head / "config.json").is_file():
        raise InputError(
            f"{head}: has no config.json, because expert '{expert}' was given as a bare weights file; put the config of that "
            "expert's model there"
        )
    beside = sorted(head.iterdir()) if has_head else []
    check_inside(merged, beside)
    side_files = tuple(path for path in beside if path.is_file() and path.name not in (HEAD_TENSORS, HEAD_NAMES))
    parts = manifest.parts if manifest else ()
    return TaskModel(
        model,
        _read_backbone(head / HEAD_NAMES, model) if has_head else {name: name for name in model.tensors},
        side_files,
        open_checkpoint(head / HEAD_TENSORS, expert) if has_head else None,
        _open_parts(merged, f"tasks/{expert}", parts),
        _open_parts(merged, "shared", parts),
        _alphas(merged, manifest) if manifest else {},
    )


def export_expert(merged: str | Path, expert: str, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write an ordinary Hugging Face folder for one task: the merged backbone, or adapter, with what is that expert's own."""
    merged, output = expand_home(Path(merged)), expand_home(Path(output))
    check_output(output, overwrite, [merged])
    if output.exists() and any(output.iterdir()) and not is_export(output):
        raise InputError(f"{output}: is a merge, not an earlier export, so it is not replaced; choose another output")
    if is_adapter(merged):
        export_task_adapter(merged, expert, output, overwrite=overwrite)
        return output
    model = _open_task_model(merged, expert)
    headers = model.headers()
    with staged_output(output, digest="", resume=False, overwrite=overwrite) as staging:
        digest = write_safetensors(staging.folder / "model.safetensors", headers, (model.read(name) for name, _ in headers))
        for path in model.merged.side_files():  # of a merge in 8 bits, whose floats these are, config.json has to say less
            copy_side_file(path, staging.folder, None, model.merged.config_changes)
        for path in model.side_files:  # the expert's own win
            shutil.copyfile(path, staging.folder / path.name)
        manifest = ExportManifest(exported=expert, files={})
        write_manifest(staging.folder, manifest, {"model.safetensors": digest})
    return output


def load_expert_head(merged: str | Path, expert: str) -> Any:
    """The transformers model for one task: the merged backbone with that expert's parts and head, on the CPU, in eval mode."""
    try:
        import transformers
    except ImportError:
        raise InputError("load_expert_head needs transformers: pip install transformers") from None
    merged = expand_home(Path(merged))
    if is_adapter(merged):
        raise InputError(f"{merged}: an adapter, not a model; `acemerge task` makes a task's adapter, which peft loads")
    model = _open_task_model(merged, expert)
    folder = merged / "heads" / expert
    place = folder if folder.is_dir() else merged
    check_runs_nothing(read_json(place / CONFIG), place)
    config = transformers_config(place, str(place))
    architecture = (config.architectures or [None])[0]
    made: Any = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    is_model = isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)
    if made is None or not is_model:
        raise InputError(f"{merged}, '{expert}': config.json names no architecture that transformers knows ({architecture})")
    state_dict = {name: model.read(name).clone() for name, _ in model.headers()}
    loaded, report = made.from_pretrained(
        None, config=config, state_dict=state_dict, output_loading_info=True, trust_remote_code=False
    )
    # A base may have a pooler that the adapter's own model was built without.
    unexpected = sorted(name for name in report["unexpected_keys"] if ".pooler." not in f".{name}")
    if report["missing_keys"] or unexpected:
        raise InputError(
            f"{merged}, head '{expert}': {architecture} misses {sorted(report['missing_keys'])} and does not know {unexpected}"
        )
    return loaded.eval()
