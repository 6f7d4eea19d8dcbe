"""adapter_config.json: what an adapter's weights mean. Settings that acemerge does not understand are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acemerge.checkpoints.folder import read_json
from acemerge.checkpoints.untrusted import shortened
from acemerge.errors import InputError

CONFIG = "adapter_config.json"
EXPAND = "Merge it into its base with peft's merge_and_unload, save that, and give that folder"

# Fields of adapter_config.json that change nothing about what the stored weights mean, or that are honoured here.
_UNDERSTOOD = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern fan_in_fan_out use_dora modules_to_save bias lora_bias"
    " init_lora_weights target_modules exclude_modules lora_dropout layers_to_transform layers_pattern auto_mapping"
    " base_model_name_or_path revision task_type inference_mode peft_version loftq_config eva_config runtime_config"
    " target_parameters qalora_group_size megatron_core ensure_weight_tying".split()
)
# The initialisations that leave the base's weights alone. Others (pissa, olora, loftq, corda, lora_ga) move a part of them into
# the adapter: its change is not one of the base itself.
_LEAVES_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_LONGEST_PATTERN = 300
# Settings that are used as what they should be.
_TYPES: Mapping[str, type] = {
    "rank_pattern": dict,
    "alpha_pattern": dict,
    "auto_mapping": dict,
    "task_type": str,
    "base_model_name_or_path": str,
}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of the adapter in a folder, all of them understood."""
    settings = read_json(path / CONFIG)
    _refuse_other_variants(settings, path)
    _check_types(settings, path / CONFIG)
    return settings


def _refuse_other_variants(settings: Mapping[str, Any], path: Path) -> None:
    """Only what is understood is read: an option that might change what the weights mean is refused by its name."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{path}: a PEFT adapter of type {shortened(str(kind))}; acemerge reads LORA. {EXPAND}")
    initial = settings.get("init_lora_weights")
    if initial not in _LEAVES_THE_BASE:
        raise InputError(
            f"{path}: init_lora_weights={shortened(repr(initial))} may have moved a part of the base into the adapter, so "
            "it is a change of another base; save it with path_initial_model_for_weight_conversion to turn it into plain LoRA"
        )
    if settings.get("lora_bias") and settings.get("bias", "none") != "none":
        raise InputError(f"{path}: lora_bias together with bias={shortened(repr(settings['bias']))} is not supported. {EXPAND}")
    strange = [name for name, value in settings.items() if name not in _UNDERSTOOD and value not in (None, False, [], {}, "")]
    if strange:
        raise InputError(f"{path / CONFIG}: {shortened(f'{strange[0]}={settings[strange[0]]!r}')} is not supported. {EXPAND}")


def _check_types(settings: Mapping[str, Any], path: Path) -> None:
    for name, wanted in _TYPES.items():
        value = settings.get(name)
        if value is not None and not isinstance(value, wanted):
            what = "a mapping" if wanted is dict else "text"
            raise InputError(f"{path}: {name} must be {what}, not {shortened(repr(value))}; save the adapter again")


def value_for(module: str, settings: Mapping[str, Any], patterns: str, default: str, path: Path) -> Any:
    """A module's own value: of the first pattern that matches the end of its name, else the adapter's."""
    for pattern, value in (settings.get(patterns) or {}).items():
        # A group that repeats can take exponential time on a name that nearly matches.
        if len(pattern) > _LONGEST_PATTERN or re.search(r"\)[*+?{]", pattern) or pattern.count("*") + pattern.count("+") > 4:
            raise InputError(f"{path}: {patterns}: {shortened(repr(pattern))} is too involved for a module's name")
        try:
            found = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            where = f"{path}: {patterns}: {shortened(repr(pattern))}"
            raise InputError(f"{where} is not a pattern ({error}); save the adapter again") from None
        if found:
            return value
    return settings.get(default)
