"""An adapter for one task: the merged adapter with one expert's head in it, as peft saves it."""

from __future__ import annotations

import json
from pathlib import Path

from acemerge.adapters.settings import CONFIG
from acemerge.checkpoints.families import head_module
from acemerge.checkpoints.folder import read_json
from acemerge.checkpoints.formats.registry import open_file
from acemerge.checkpoints.untrusted import check_inside, check_is_a_name
from acemerge.errors import InputError, did_you_mean
from acemerge.output.adapter_writer import PREFIX
from acemerge.output.manifest import ExportManifest, write_manifest
from acemerge.output.staging import staged_output
from acemerge.output.writer import write_safetensors
from acemerge.planning.plan import ADAPTER_WEIGHTS

HEAD_TENSORS = "head.safetensors"
HEAD_NAMES = "head.json"


def export_task_adapter(merged: Path, expert: str, output: Path, *, overwrite: bool) -> None:
    """Write a PEFT adapter folder for one task."""
    known = sorted(path.name for path in merged.glob("heads/*") if path.is_dir())
    if not known:
        raise InputError(f"{merged}: holds no heads; the merged adapter itself serves every task")
    if expert not in known:
        raise InputError(f"{merged}: has nothing of an expert '{expert}': {did_you_mean(expert, known)}")
    check_is_a_name(expert, merged)
    folder = merged / "heads" / expert
    check_inside(merged, (folder / HEAD_TENSORS, folder / HEAD_NAMES, merged / ADAPTER_WEIGHTS, merged / CONFIG))
    adapter, head = open_file(merged / ADAPTER_WEIGHTS), open_file(folder / HEAD_TENSORS)
    headers = [*adapter.tensors.items(), *((PREFIX + name, header) for name, header in head.tensors.items())]
    values = [*(adapter.read(name) for name in adapter.tensors), *(head.read(name) for name in head.tensors)]  # memory-mapped
    settings = read_json(merged / CONFIG)
    settings["modules_to_save"] = sorted({*(settings["modules_to_save"] or ()), *map(head_module, head.tensors)})
    settings["task_type"] = read_json(folder / HEAD_NAMES).get("task_type")
    with staged_output(output, digest="", resume=False, overwrite=overwrite) as staging:
        digest = write_safetensors(staging.folder / ADAPTER_WEIGHTS, headers, values)
        (staging.folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        write_manifest(staging.folder, ExportManifest(exported=expert, files={}), {ADAPTER_WEIGHTS: digest})
