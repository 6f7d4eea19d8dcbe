"""A merge written as one PEFT adapter: how it looks on disk."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acemerge.adapters.adapter import Adapter
from acemerge.adapters.settings import CONFIG
from acemerge.checkpoints.content_hash import file_hash
from acemerge.checkpoints.formats.registry import open_file
from acemerge.checkpoints.source import is_hub_id
from acemerge.errors import MergeError
from acemerge.output.model_names import ModelNames, task_type_of
from acemerge.output.writer import GrowingFile
from acemerge.planning.as_adapter import module_of
from acemerge.planning.plan import ADAPTER_WEIGHTS, Plan
from acemerge.planning.tensor import PlannedTensor

if TYPE_CHECKING:
    from acemerge.checkpoints.source import Sources
    from acemerge.tensors.results import MergedFactors

PREFIX = "base_model.model."
BASE_LAYER = ".base_layer"
ROUNDED_TO_FLOAT32 = 1e-6
"""A relative error that an adapter in float32 does not exceed unless its rank was cut."""
# Loading an adapter of these types, peft expects the task's head in it; ours are in heads/.
_TYPES_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


# --- the weights -------------------------------------------------------------------------------------------------------


class AdapterWriter:
    """Writes adapter_model.safetensors, a tensor at a time; only ranks decide the sizes, so the header comes last."""

    def __init__(self, plan: Plan, folder: Path, open_files: ExitStack) -> None:
        data = open_files.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        self._file = GrowingFile(folder / ADAPTER_WEIGHTS, data)
        self._names, self._saves_rest = ModelNames(plan), plan.recipe.save_rest
        self._low_rank: set[str] = set()

    def add_factors(self, planned: PlannedTensor, merged: MergedFactors) -> None:
        """A merged change, as A and B of its module."""
        place = self._names.place(planned)
        self._low_rank.add(place.module)
        A, B = place.from_factors(merged.factors)
        rank, dtype = A.shape[0], getattr(torch, planned.output_dtype)
        kind, suffix = ("lora_embedding_", "") if place.is_embedding else ("lora_", ".weight")
        ones = [1] * (len(place.shape) - 2)  # a convolution's A has its window, its B has none
        inputs = place.shape[1:] if ones else A.shape[1:]
        for letter, factor in (("A", A.reshape(rank, *inputs)), ("B", B.reshape(-1, rank, *ones))):
            name = f"{PREFIX}{place.module}.{kind}{letter}{suffix}"
            self._file.add(name, factor.to("cpu", dtype).contiguous())

    def add_value(self, planned: PlannedTensor, value: Tensor) -> None:
        """A tensor of a module that is saved whole, or the bias beside factors."""
        self._file.add(PREFIX + self._names.of(planned), value)
        if self._saves_rest and (copy := self._names.tied_copy(planned)):
            self._file.add(PREFIX + copy, value)

    def finish(self) -> str:
        """Complete the file; its hash."""
        if not self._low_rank:  # peft loads no adapter without a target
            raise MergeError("no expert changes any matrix, so there is nothing to write as an adapter; leave out --as adapter")
        self._file.headers[:] = [(self._beside_factors(name), header) for name, header in self._file.headers]
        self._file.finish()
        return file_hash(self._file.path)

    def _beside_factors(self, name: str) -> str:
        """peft wraps a module that has factors; what else the module has is then in its base layer."""
        module = module_of(name)
        wrapped = ".lora_" not in name and module.removeprefix(PREFIX) in self._low_rank
        return f"{module}{BASE_LAYER}{name.removeprefix(module)}" if wrapped else name


# --- adapter_config.json -----------------------------------------------------------------------------------------------


def write_adapter_config(plan: Plan, sources: Sources, folder: Path) -> None:
    """The settings with which peft loads the weights beside them."""
    adapters = [expert for expert in plan.experts if isinstance(expert, Adapter)]
    header = open_file(folder / ADAPTER_WEIGHTS).tensors
    ranks: dict[str, int] = {}
    whole: set[str] = set()
    biases = False
    for key, tensor in header.items():
        name = key.removeprefix(PREFIX)
        for part in (".lora_A.weight", ".lora_embedding_A"):
            if name.endswith(part):
                ranks[name.removesuffix(part)] = tensor.shape[0]
        if module_of(name).endswith(BASE_LAYER):
            biases = True
        elif ".lora_" not in name:
            whole.add(module_of(name))
    largest = max(ranks.values(), default=1)
    smaller = {module: rank for module, rank in sorted(ranks.items()) if rank != largest}
    settings = {
        "peft_type": "LORA",
        "task_type": _task_type(adapters) if adapters else task_type_of(plan.experts[0]),
        "base_model_name_or_path": sources.base.hub_id or _public_base(adapters) or sources.base.path.resolve().name,
        "inference_mode": True,
        "r": largest,
        "lora_alpha": largest,  # the scale alpha / r is 1: it is in the factors
        "lora_dropout": 0.0,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": _has_conv1d(plan),
        "target_modules": sorted(ranks),
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "modules_to_save": sorted(whole) or None,
        "init_lora_weights": True,
        **({"ensure_weight_tying": True} if plan.recipe.save_rest and _saves_tied(plan) else {}),
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _common(adapters: Sequence[Adapter], field: str) -> Any:
    values = {adapter.settings.get(field) for adapter in adapters}
    return values.pop() if len(values) == 1 else None


def _public_base(adapters: Sequence[Adapter]) -> str | None:
    """What the adapters say that they belong to, if they agree and it can be a hub id: no path, no folder of this machine."""
    name = _common(adapters, "base_model_name_or_path")
    return name if isinstance(name, str) and is_hub_id(name) and not Path(name).exists() else None


def _task_type(adapters: Sequence[Adapter]) -> str | None:
    task_type = _common(adapters, "task_type")
    return None if task_type in _TYPES_WITH_HEADS else task_type


def _saves_tied(plan: Plan) -> bool:
    names = ModelNames(plan)
    return any(tensor.form == "value" and names.tied_copy(tensor) for tensor in plan.tensors)


def _has_conv1d(plan: Plan) -> bool:
    names = ModelNames(plan)
    places = (names.place(tensor) for tensor in plan.tensors if tensor.form == "factors")
    return any(place.stored_in_out and not place.is_embedding for place in places)


def overall_error(records: Iterable[Mapping[str, Any]]) -> float:
    """|M - M_R| / |M| over all tensors that were written as factors."""
    pairs = [(record["norm"], record["relative_error"]) for record in records if "relative_error" in record]
    energy = math.fsum(norm**2 for norm, _ in pairs)
    return math.sqrt(math.fsum((norm * error) ** 2 for norm, error in pairs) / energy) if energy else 0.0
