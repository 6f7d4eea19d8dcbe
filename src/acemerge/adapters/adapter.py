"""Adapters: experts given as low-rank changes of the base's tensors, read without ever expanding them.

Whole modules (`modules_to_save`) and biases are stored as they are, all other changes as factors (`lora_change.py`). Anything
else that an adapter may be is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.adapters.kohya import lora_file, read_kohya
from acemerge.adapters.mlx import is_mlx, read_mlx
from acemerge.adapters.module import LoraModule, unknown_kind
from acemerge.adapters.parameters import changes_of_parameters
from acemerge.adapters.settings import CONFIG, EXPAND, read_settings
from acemerge.adapters.translated import Translated
from acemerge.checkpoints.change import Change
from acemerge.checkpoints.families import Family, align_names, is_output_layer, is_task_head, prefix_exchange
from acemerge.checkpoints.file_stamp import FileStamp
from acemerge.checkpoints.folder import Checkpoint, architecture_of, read_json
from acemerge.checkpoints.formats.registry import WeightsFile, formats, open_file
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.checkpoints.untrusted import check_inside
from acemerge.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_MODULE_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.(?P<kind>weight|bias))?"
)


@dataclass(frozen=True)
class Adapter(Checkpoint):
    """An expert that says what it changes; every tensor it does not mention is the base's."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """adapter_config.json."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """Name in the base -> name in the model that the adapter was trained on."""

    def backbone(self, base_names: Iterable[str]) -> dict[str, str]:
        """Name in the model that the adapter was trained on -> name in the base, of everything under that model's head."""
        theirs, ours = next(((own, name) for name, own in self.own_names.items() if name in (self.changes or {})), ("", ""))
        old, new = prefix_exchange(theirs, ours)
        return {old + name.removeprefix(new): name for name in base_names if name.startswith(new) and not is_output_layer(name)}

    def head_config(self, base_config: Mapping[str, Any], head: Mapping[str, TensorHeader]) -> dict[str, Any]:
        """The base's config for the model that the adapter was trained on: its class, and as many labels as its head has."""
        config = dict(base_config)
        stated = (self.settings.get("auto_mapping") or {}).get("base_model_class")
        named = stated if isinstance(stated, str) else None
        suffix = _CLASSES.get(self.settings.get("task_type") or "")
        stem = re.match(r"(.+?)(LMHeadModel|Model|For[A-Z]\w+)$", architecture_of(base_config))
        if named or (suffix and stem):
            config["architectures"] = [named or f"{stem[1] if stem else ''}{suffix}"]
        outputs = [header.shape[0] for name, header in sorted(head.items()) if is_task_head(name) and header.shape]
        if any(is_output_layer(name) and not is_task_head(name) for name in head) and config.get("tie_word_embeddings"):
            config["tie_word_embeddings"] = False  # an output layer of its own
        if outputs:  # a head of two layers sorts as dense, out_proj
            labels = {f"LABEL_{i}": i for i in range(outputs[-1])}
            config |= {"id2label": {str(i): label for label, i in labels.items()}, "label2id": labels}
        return config


_CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}


def is_adapter(path: Path) -> bool:
    """Whether a folder or file is an adapter: it has settings for one, or nothing but factors."""
    return (path / CONFIG).is_file() or lora_file(path) is not None


def _opened(path: Path, base: Checkpoint) -> tuple[dict[str, Any], WeightsFile]:
    """The settings and the weights, as peft's, whichever trainer saved them."""
    if not (path / CONFIG).is_file() and (file := lora_file(path)):
        return read_kohya(file, base)
    if is_mlx(settings := read_json(path / CONFIG)):
        return read_mlx(path, settings)
    settings = read_settings(path)
    names_of_weights = [f"adapter_model{each.suffixes[0]}" for each in formats() if each.of_hugging_face]
    file = next((path / weights for weights in names_of_weights if (path / weights).is_file()), None)
    if file is None:
        raise InputError(f"{path}: has {CONFIG}, but neither {' nor '.join(names_of_weights)}; download the weights too")
    check_inside(path, (path / CONFIG, file))
    return settings, open_file(file)


def open_adapter(path: Path, name: str, base: Checkpoint, family: Family) -> Adapter:
    """Open an adapter; reads headers only. Its tensors come under the base's names, or would-be names."""
    # Settings hold scales and ranks, as much a part of the change as the weights.
    config = tuple(file for file in (path / CONFIG,) if file.is_file())
    config_stamps = tuple(map(FileStamp.of, config))
    settings, stored = _opened(path, base)
    file = stored.path
    parts, wholes = _sorted_out(stored)
    modules = {module: LoraModule(module, keys, stored.tensors, settings, file) for module, keys in parts.items()}
    parameters = changes_of_parameters(modules, settings, base, stored)
    lora = list(modules.values())
    own_headers = {**{own: stored.tensors[key] for own, key in wholes.items()}, **{m.weight: m.header for m in lora}}
    names = _names_in_base(base, own_headers)
    _leave_out_copies(wholes, lora, names, stored, base)
    lora = _without_idle(lora, names, stored, base)
    of_other_trainer = isinstance(stored, Translated)  # whose names are no modules of transformers' model; the base's are
    changes: dict[str, Change] = dict(parameters)
    headers = {names[own]: stored.tensors[key] for own, key in wholes.items()}
    headers |= {name: TensorHeader("float32", base.tensors[name].shape) for name in parameters}
    for module in lora:
        ours = names[module.weight]
        change = module.change(stored.read_unchanged, ours, base, family)
        if of_other_trainer:
            change = replace(change, module=ours.removesuffix(".weight"))
        changes[ours], headers[ours] = change, TensorHeader(module.header.dtype, change.shape)
        if module.bias is not None:
            bias = ours.removesuffix("weight") + "bias"
            changes[bias], headers[bias] = module.bias_change(stored.read_unchanged), stored.tensors[module.bias]
    whole_keys = {names[own]: key for own, key in wholes.items()}
    own_names = {ours: ours if of_other_trainer else own for own, ours in names.items()} | {name: name for name in parameters}

    def read(tensor: str) -> Tensor:
        """The whole value, also of what is given as a change: for a head, which is never merged."""
        if tensor in whole_keys:
            return stored.read_unchanged(whole_keys[tensor])
        value = base.read(tensor)
        return value + changes[tensor].expand(value)

    return Adapter(
        name, headers, read, path, (file, *config), changes=changes, stamps=(stored.stamp, *config_stamps),
        settings=settings, own_names=own_names,
    )  # fmt: skip


def with_adapter(model: Checkpoint, adapter: Adapter) -> Checkpoint:
    """A full model whose tensors are those that the adapter makes of them, one at a time as they are read."""
    changed = {name: _as_read(header, model.tensors.get(name)) for name, header in adapter.tensors.items()}

    def made_of(name: str) -> list[Tensor]:
        of_adapter = adapter.mapped(name) if name in changed else []
        return [*of_adapter, *(model.mapped(name) if name in model.tensors else [])]

    return replace(
        model,
        name=adapter.name,
        tensors={**model.tensors, **changed},
        read=lambda name: adapter.read(name) if name in changed else model.read(name),
        made_of=made_of,
        files=(*model.files, *adapter.files),
        tied={copy: original for copy, original in model.tied.items() if copy not in changed and original not in changed},
        stamps=(*model.stamps, *adapter.stamps),
    )


def _as_read(change: TensorHeader, base: TensorHeader | None) -> TensorHeader:
    """What `Adapter.read` gives: the base's value plus a change of at least float32, or a whole value."""
    if base is None or base.shape != change.shape:
        return change
    return replace(change, dtype="float64" if "float64" in (base.dtype, change.dtype) else "float32", made=True)


def _sorted_out(stored: WeightsFile) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """{module: {part: key}} of the low-rank ones, and {tensor: key} of those stored whole; both without PEFT's wrappings."""
    headers, file = stored.tensors, stored.path
    modules: dict[str, dict[str, str]] = {}
    wholes: dict[str, str] = {}
    if not headers:
        raise InputError(f"{file}: holds no tensors; save the adapter again")
    for key in headers:
        if ".original_module." in key:  # the base's own, which a saved module stands in for
            continue
        name = key.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
        match = _MODULE_PART.fullmatch(name)
        if match:
            part = match["part"] if match["kind"] != "bias" else f"{match['part']}.bias"
            _add_once(modules.setdefault(match["module"], {}), part, key, stored)
        elif "lora_" in name or not name.endswith((".weight", ".bias")):
            raise unknown_kind(key, file)
        else:
            _add_once(wholes, name.replace(".base_layer.", "."), key, stored)
    return modules, wholes


def _add_once(keys: dict[str, str], name: str, key: str, stored: WeightsFile) -> None:
    """peft saves a module twice that was trained whole after the vocabulary had grown: alike, or the file is not sound."""
    first = keys.setdefault(name, key)
    if first != key and not _same(first, key, stored):
        raise InputError(
            f"{stored.path}: tensors '{first}' and '{key}' both stand for {name}, and are not equal; save the adapter again"
        )


def _same(one: str, other: str, stored: WeightsFile) -> bool:
    return stored.tensors[one] == stored.tensors[other] and bool((stored.read(one) == stored.read(other)).all())


def _leave_out_copies(
    wholes: dict[str, str], lora: list[LoraModule], names: Mapping[str, str], stored: WeightsFile, base: Checkpoint
) -> None:
    """A changed embedding may come with a copy of the base's own table, which peft saves in case the vocabulary has grown."""
    for module in lora:
        key = wholes.pop(module.weight, None)
        ours = names[module.weight]
        if key is None or ours not in base.tensors:  # which the plan reports
            continue
        same_shape = stored.tensors[key].shape == base.tensors[ours].shape
        if not (same_shape and bool((stored.read(key) == base.read(ours)).all())):
            raise InputError(
                f"{stored.path}: comes with its own '{module.weight}' {list(stored.tensors[key].shape)}, not that of base "
                f"{base.where}: a change of another base, or of a larger vocabulary. {EXPAND}"
            )


def _without_idle(lora: list[LoraModule], names: Mapping[str, str], stored: WeightsFile, base: Checkpoint) -> list[LoraModule]:
    """All but modules that the base lacks and that change nothing.

    mlx-lm adapts layers that the model never uses, such as Gemma's k and v where a layer takes those of another; they are as
    they were made, with a factor of zeros, and transformers saves no such layer.
    """
    if not any(names[module.weight] in base.tensors for module in lora):
        return lora  # of another model, which the plan reports
    return [module for module in lora if names[module.weight] in base.tensors or not module.is_idle(stored.read)]


def _names_in_base(base: Checkpoint, own: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Each of the adapter's tensor names -> the base's; shapes are compared up to transposition."""

    def flat(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        return {name: TensorHeader(header.dtype, tuple(sorted(header.shape))) for name, header in headers.items()}

    return align_names(flat(base.tensors), flat(own))
