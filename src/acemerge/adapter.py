"""PEFT adapters: experts given as low-rank changes of the base's tensors, read without ever expanding them.

LoRA changes the matrix W (out x in) of a module by s B A, with s = alpha / r, or alpha / sqrt(r) for rsLoRA. Conv1D modules and
embeddings store W^T, so they store (s B A)^T. DoRA then rescales each row of W + s B A to a length of its own. Whole modules
(`modules_to_save`) and biases are stored as they are. Anything else an adapter may be is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acemerge.checkpoint import Checkpoint, TensorHeader, WeightsFile, open_file, read_json
from acemerge.errors import InputError
from acemerge.families import Family, align_names, is_output_layer, is_stored_in_out, is_task_head, prefix_exchange
from acemerge.file_stamp import FileStamp
from acemerge.untrusted import check_inside

if TYPE_CHECKING:
    from torch import Tensor

    from acemerge.frame import Factors

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_LARGEST_RANK = 2**16

# Fields of adapter_config.json that change nothing about what the stored weights mean, or that are honoured here.
_UNDERSTOOD = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern fan_in_fan_out use_dora modules_to_save bias lora_bias"
    " init_lora_weights target_modules exclude_modules lora_dropout layers_to_transform layers_pattern auto_mapping"
    " base_model_name_or_path revision task_type inference_mode peft_version loftq_config eva_config runtime_config"
    " qalora_group_size megatron_core ensure_weight_tying".split()
)
# The initialisations that leave the base's weights alone. Others (pissa, olora, loftq, corda, lora_ga) move a part of them into
# the adapter: its change is not one of the base itself.
_LEAVES_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Settings that are used as what they should be.
_TYPES: Mapping[str, type] = {
    "rank_pattern": dict,
    "alpha_pattern": dict,
    "auto_mapping": dict,
    "task_type": str,
    "base_model_name_or_path": str,
}

_MODULE_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.(?P<kind>weight|bias))?"
)


@dataclass(frozen=True)
class LoraChange:
    """How an adapter changes one tensor of the base."""

    read: Callable[[str], Tensor]
    down: str
    """The name of A, r x in."""
    up: str
    """The name of B, out x r."""
    scale: float
    rank: int
    stored_in_out: bool
    """Whether the tensor is stored as W^T."""
    shape: tuple[int, ...]
    """Of the tensor as stored; a convolution's has more than two axes, and its W is out x everything else."""
    module: str
    """The module's name in the model that the adapter was trained on."""
    is_embedding: bool
    magnitude: str | None = None
    """The name of DoRA's row lengths."""

    @property
    def is_low_rank(self) -> bool:
        """Whether it is s B A and no more."""
        return self.magnitude is None

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the adapter's file."""
        return tuple(name for name in (self.down, self.up, self.magnitude) if name)

    def factors(self, transposed: bool) -> Factors:
        """W' - W (or its transpose) as a product, in float32 (float64 if that is how it is stored)."""
        from acemerge.frame import Factors

        A, B = (_at_least_float32(self.read(name)).flatten(1) for name in (self.down, self.up))
        B = B * self.scale
        return Factors(A.T, B.T) if transposed else Factors(B, A)

    def expand(self, base: Tensor) -> Tensor:
        """The change of the tensor as stored, given the base's."""
        import torch

        factors = self.factors(self.stored_in_out and self.magnitude is None)
        if self.magnitude is None:
            return (factors.left @ factors.right).reshape(self.shape)
        W = _at_least_float32(base).flatten(1)
        W = W.T if self.stored_in_out else W
        changed = torch.addmm(W.to(factors.left.dtype), factors.left, factors.right)
        lengths = _at_least_float32(self.read(self.magnitude)).reshape(-1)
        changed *= (lengths / torch.linalg.vector_norm(changed, dim=1))[:, None]
        change = changed.sub_(W)
        return (change.T if self.stored_in_out else change).reshape(self.shape)


@dataclass(frozen=True)
class BiasChange:
    """What `lora_bias` adds to a module's bias: s times the bias of B."""

    read: Callable[[str], Tensor]
    bias: str
    scale: float
    is_low_rank = False

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the adapter's file."""
        return (self.bias,)

    def expand(self, base: Tensor) -> Tensor:  # noqa: ARG002
        """The change of the tensor."""
        return _at_least_float32(self.read(self.bias)) * self.scale


Change = LoraChange | BiasChange


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
        named = (self.settings.get("auto_mapping") or {}).get("base_model_class")
        suffix = _CLASSES.get(self.settings.get("task_type") or "")
        stem = re.match(r"(.+?)(LMHeadModel|Model|For[A-Z]\w+)$", (base_config.get("architectures") or [""])[0])
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
    """Whether a folder is a PEFT adapter."""
    return path.is_dir() and (path / CONFIG).is_file()


def open_adapter(path: Path, name: str, base: Checkpoint, family: Family) -> Adapter:
    """Open an adapter folder; reads headers only. Its tensors come under the base's names, or would-be names."""
    config_stamp = FileStamp.of(path / CONFIG)  # its scales and ranks are as much a part of the change as the weights
    settings = read_json(path / CONFIG)
    _refuse_other_variants(settings, path)
    _check_types(settings, path / CONFIG)
    file = next((path / weights for weights in _WEIGHTS if (path / weights).is_file()), None)
    if file is None:
        raise InputError(f"{path}: has {CONFIG}, but neither {' nor '.join(_WEIGHTS)}; download the weights too")
    check_inside(path, (path / CONFIG, file))
    stored = open_file(file)
    modules, wholes = _sorted_out(stored.tensors, file)
    lora = [_Module(module, parts, stored.tensors, settings, file) for module, parts in modules.items()]
    own_headers = {**{own: stored.tensors[key] for own, key in wholes.items()}, **{m.weight: m.header for m in lora}}
    names = _names_in_base(base, own_headers)
    _leave_out_copies(wholes, lora, names, stored, base)
    changes: dict[str, Change] = {}
    headers = {names[own]: stored.tensors[key] for own, key in wholes.items()}
    for module in lora:
        ours = names[module.weight]
        change = module.change(stored.read_unchanged, ours, base, family)
        changes[ours], headers[ours] = change, TensorHeader(module.header.dtype, change.shape)
        if module.bias is not None:
            bias = ours.removesuffix("weight") + "bias"
            changes[bias], headers[bias] = module.bias_change(stored.read_unchanged), stored.tensors[module.bias]
    whole_keys = {names[own]: key for own, key in wholes.items()}
    own_names = {ours: own for own, ours in names.items()}

    def read(tensor: str) -> Tensor:
        """The whole value, also of what is given as a change: for a head, which is never merged."""
        if tensor in whole_keys:
            return stored.read_unchanged(whole_keys[tensor])
        value = base.read(tensor)
        return value + changes[tensor].expand(value)

    return Adapter(
        name, headers, read, path, (file, path / CONFIG), changes=changes, stamps=(stored.stamp, config_stamp),
        settings=settings, own_names=own_names,
    )  # fmt: skip


def _refuse_other_variants(settings: Mapping[str, Any], path: Path) -> None:
    """Only what is understood is read: an option that might change what the weights mean is refused by its name."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{path}: a PEFT adapter of type {kind}; acemerge reads LORA. {EXPAND}")
    initial = settings.get("init_lora_weights")
    if initial not in _LEAVES_THE_BASE:
        raise InputError(
            f"{path}: init_lora_weights={initial!r} may have moved a part of the base's weights into the adapter, so it is a "
            "change of another base; save it with path_initial_model_for_weight_conversion to turn it into plain LoRA"
        )
    if settings.get("lora_bias") and settings.get("bias", "none") != "none":
        raise InputError(f"{path}: lora_bias together with bias={settings['bias']!r} is not supported. {EXPAND}")
    strange = [name for name, value in settings.items() if name not in _UNDERSTOOD and value not in (None, False, [], {}, "")]
    if strange:
        raise InputError(f"{path / CONFIG}: {strange[0]}={settings[strange[0]]!r} is not supported. {EXPAND}")


def _check_types(settings: Mapping[str, Any], path: Path) -> None:
    for name, wanted in _TYPES.items():
        value = settings.get(name)
        if value is not None and not isinstance(value, wanted):
            what = "a mapping" if wanted is dict else "text"
            raise InputError(f"{path}: {name} must be {what}, not {value!r}; save the adapter again")


EXPAND = "Merge it into its base with peft's merge_and_unload, save that, and give that folder"


def _sorted_out(headers: Mapping[str, TensorHeader], file: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """{module: {part: key}} of the low-rank ones, and {tensor: key} of those stored whole; both without PEFT's wrappings."""
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
            _add_once(modules.setdefault(match["module"], {}), part, key, file)
        elif "lora_" in name or not name.endswith((".weight", ".bias")):
            raise _unknown_kind(key, file)
        else:
            _add_once(wholes, name.replace(".base_layer.", "."), key, file)
    return modules, wholes


def _unknown_kind(key: str, file: Path) -> InputError:
    return InputError(f"{file}: tensor '{key}' belongs to a kind of adapter that acemerge does not read. {EXPAND}")


def _add_once(keys: dict[str, str], name: str, key: str, file: Path) -> None:
    if name in keys:
        raise InputError(f"{file}: tensors '{keys[name]}' and '{key}' both stand for {name}; save the adapter again")
    keys[name] = key


def _leave_out_copies(
    wholes: dict[str, str], lora: list[_Module], names: Mapping[str, str], stored: WeightsFile, base: Checkpoint
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


def _names_in_base(base: Checkpoint, own: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Each of the adapter's tensor names -> the base's; shapes are compared up to transposition."""

    def flat(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        return {name: TensorHeader(header.dtype, tuple(sorted(header.shape))) for name, header in headers.items()}

    return align_names(flat(base.tensors), flat(own))


@dataclass(frozen=True)
class _Module:
    """One module of the adapter: which tensors of its file it consists of, and what they say."""

    name: str
    parts: Mapping[str, str]
    stored: Mapping[str, TensorHeader]
    settings: Mapping[str, Any]
    file: Path

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def bias(self) -> str | None:
        return self.parts.get("lora_B.bias")

    @property
    def is_embedding(self) -> bool:
        return "lora_embedding_A" in self.parts

    def _key(self, part: str) -> str:
        part = part.replace("lora_", "lora_embedding_") if self.is_embedding else part
        if part not in self.parts:
            raise InputError(f"{self.file}: module '{self.name}' has no {part}; the file is not whole, save it again")
        return self.parts[part]

    @property
    def header(self) -> TensorHeader:
        """Of W' - W, out x in (and further axes, if it is a convolution)."""
        self._refuse_other_parts()
        A, B = self.stored[self._key("lora_A")], self.stored[self._key("lora_B")]
        shapes = f"A is {list(A.shape)}, B is {list(B.shape)}"
        matrices = len(A.shape) >= 2 and len(B.shape) >= 2 and math.prod(B.shape[2:]) == 1
        if not matrices or A.shape[0] != B.shape[1] or not 0 < A.shape[0] <= _LARGEST_RANK:
            raise InputError(f"{self.file}: the factors of '{self.name}' do not fit each other: {shapes}; save it again")
        declared = self._setting("rank_pattern", "r")
        if declared != A.shape[0]:
            raise InputError(
                f"{self.file}: '{self.name}' has rank {A.shape[0]}, {CONFIG} says {declared}; save the adapter again"
            )
        if not (A.is_mergeable and B.is_mergeable):
            raise InputError(f"{self.file}: the factors of '{self.name}' are {A.dtype} and {B.dtype}, not floating-point weights")
        self._check_vector("lora_magnitude_vector", "use_dora", B.shape[0])
        self._check_vector("lora_B.bias", "lora_bias", B.shape[0])
        wide = "float64" if "float64" in (A.dtype, B.dtype) else "float32"
        return TensorHeader(wide, (B.shape[0], *A.shape[1:]))

    def _refuse_other_parts(self) -> None:
        factors = ("lora_embedding_A", "lora_embedding_B") if self.is_embedding else ("lora_A", "lora_B", "lora_B.bias")
        strange = sorted(self.parts.keys() - {*factors, "lora_magnitude_vector"})
        if strange:
            raise _unknown_kind(self.parts[strange[0]], self.file)

    def _check_vector(self, part: str, setting: str, length: int) -> None:
        """What a setting announces must be there, once per output; what it does not announce peft would not use."""
        announced = bool(self.settings.get(setting))
        if announced != (part in self.parts):
            has = "has no" if announced else "has a"
            raise InputError(
                f"{self.file}: module '{self.name}' {has} {part}, {CONFIG} says {setting}={announced}; save the adapter again"
            )
        if announced and (found := self.stored[self.parts[part]]).elements != length:
            raise InputError(
                f"{self.file}: the {part} of '{self.name}' has shape {list(found.shape)}, its module has {length} outputs; "
                "save the adapter again"
            )

    def _scale(self) -> float:
        r = self.stored[self._key("lora_A")].shape[0]
        alpha = self._setting("alpha_pattern", "lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise InputError(f"{self.file.parent / CONFIG}: lora_alpha of '{self.name}' is {alpha!r}, not a number")
        return alpha / (math.sqrt(r) if self.settings.get("use_rslora") else r)

    def change(self, read: Callable[[str], Tensor], ours: str, base: Checkpoint, family: Family) -> LoraChange:
        shape = self.header.shape
        stored_in_out = self.is_embedding or self._is_stored_in_out(shape, ours, base, family)
        return LoraChange(
            read, self._key("lora_A"), self._key("lora_B"), self._scale(), self.stored[self._key("lora_A")].shape[0],
            stored_in_out, shape[::-1] if stored_in_out else shape, self.name, self.is_embedding,
            self.parts.get("lora_magnitude_vector"),
        )  # fmt: skip

    def _is_stored_in_out(self, shape: tuple[int, ...], ours: str, base: Checkpoint, family: Family) -> bool:
        """Where the base shows it, the base decides; `fan_in_fan_out` is one flag for modules that may differ."""
        if len(shape) != 2 or ours not in base.tensors or len(base.tensors[ours].shape) != 2:
            return False
        if shape[0] != shape[1]:
            return base.tensors[ours].shape == shape[::-1]
        known = family.stored_in_out or family.name != "generic"
        return is_stored_in_out(ours, family, base.tensors) if known else bool(self.settings.get("fan_in_fan_out"))

    def _setting(self, patterns: str, default: str) -> Any:
        """This module's own value: of the first pattern that matches the end of its name, else the adapter's."""
        for pattern, value in (self.settings.get(patterns) or {}).items():
            try:
                found = re.match(rf"(.*\.)?({pattern})$", self.name)
            except re.error as error:
                raise InputError(
                    f"{self.file.parent / CONFIG}: {patterns}: {pattern!r} is not a pattern ({error}); save the adapter again"
                ) from None
            if found:
                return value
        return self.settings.get(default)

    def bias_change(self, read: Callable[[str], Tensor]) -> BiasChange:
        assert self.bias is not None
        return BiasChange(read, self.bias, self._scale())


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
