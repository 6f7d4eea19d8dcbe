"""The smallest model of every `model_type` of the installed transformers: its config's numbers, made small by their names."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tiny_configs import NEEDED, VOCABULARY
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

KINDS = {
    "vision-language": ("IMAGE_TEXT_TO_TEXT",),
    "causal LM": ("CAUSAL_LM",),
    "masked LM": ("MASKED_LM",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "several media": ("MULTIMODAL_LM",),
    "image": ("IMAGE_CLASSIFICATION", "IMAGE"),
    "audio": ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION"),
}
"""Kind of model -> transformers' lists of classes, the first that has a model_type counts."""

MOST_WEIGHTS = 30_000_000

# A number whose name matches is at most this. The first match counts.
_SMALL = (
    (r"feat_extract_layers|num_.*conv|num_stages", 10**9),
    (r"codebook_size", 64),
    (r"vocab_size|num_embeddings", VOCABULARY),
    (r"max_position|max_seq|n_positions|max_source|max_target|context_length|block_size", 64),
    (r"(key_value|kv|k_v|key|value)_heads|n_head_kv|kv_n_heads", 2),
    (r"head_dim|d_kv|head_size|d_head", 8),
    (r"heads?$|heads_", 4),
    (r"layers?$|depth$|num_blocks|_layers_", 2),
    (r"experts_per|top_?k|topk", 2),
    (r"n_group|topk_group", 1),
    (r"experts?$|n_routed", 4),
    (r"rank$", 8),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"intermediate|ffn|mlp_dim|d_ff|n_inner|feed_forward|expert_dim|inner_dim", 48),
    (r"hidden|d_model|n_embd|embed|width|projection_dim|dim$|channels$|_size$", 32),
)


@dataclass(frozen=True)
class Kind:
    """Which class of transformers a model_type is tried with, and what kind of model that is."""

    about: str
    class_name: str


def kinds() -> dict[str, Kind]:
    """Every model_type that has a class of one of the kinds."""
    found: dict[str, Kind] = {}
    for about, lists in KINDS.items():
        for name in lists:
            for model_type, classes in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
                found.setdefault(model_type, Kind(about, classes if isinstance(classes, str) else classes[0]))
    return found


def tiny_model(model_type: str, kind: Kind) -> PreTrainedModel:
    """With random weights; an exception says why it cannot be made."""
    import transformers

    model_class = getattr(transformers, kind.class_name)
    reasons = []
    for widths in (True, False):  # some models' widths hang together in ways that their names do not tell
        try:
            return _built(model_class, _tiny_config(_config_class(model_type, model_class), widths))
        except Exception as error:
            reasons.append(error)
    raise reasons[0]


def _config_class(model_type: str, model_class: type[PreTrainedModel]) -> type[PretrainedConfig]:
    """That of the model_type, unless its model of this kind is a part that has a config of its own, as MusicGen's decoder."""
    whole: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
    part: type[PretrainedConfig] = model_class.config_class
    return part if part in getattr(whole, "sub_configs", {}).values() else whole


def _tiny_config(config_class: type[PretrainedConfig], widths: bool) -> PretrainedConfig:
    return config_class(**_small_numbers(config_class, widths))


def _small_numbers(config_class: type[PretrainedConfig], widths: bool) -> dict[str, Any]:
    """The numbers to make it with; of configs within it, too."""
    needed = NEEDED.get(config_class.model_type, {})
    default = _default(config_class, needed)
    parts = {name: getattr(default, name, None) for name in getattr(config_class, "sub_configs", {})}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, PretrainedConfig):
            small = _small_numbers(type(part), widths)
            found[name] = {"model_type": part.model_type, **small} if part.model_type else small
    for name, value in default.to_dict().items():
        if name not in parts and (smaller := _smaller(name, value, widths)) is not None:
            found[name] = smaller
    for name, value in needed.items():
        found[name] = {**found[name], **value} if name in parts and name in found else value
    return found


def _default(config_class: type[PretrainedConfig], needed: dict[str, Any]) -> PretrainedConfig:
    """Some classes refuse their own defaults."""
    try:
        return config_class()
    except Exception:  # whatever a config's checks raise
        return config_class(**needed)


def _smaller(name: str, value: Any, widths: bool) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if name.endswith(("token_id", "token_index")) or name in ("image_token", "video_token"):
        return VOCABULARY - 1 if value >= VOCABULARY else None
    for pattern, most in _SMALL:
        if re.search(pattern, name):
            is_width = most in (8, 32, 48, 4)
            return min(value, most) if value > most and (widths or not is_width) else None
    return None


def _built(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size / 1e6:.0f} million weights at the least")
    torch.manual_seed(0)
    model = model_class(config).eval()
    for weight in model.state_dict().values():  # some classes leave weights to what memory holds
        if weight.is_floating_point() and not weight.isfinite().all():
            weight.normal_(std=0.02)
    return model


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """TimeoutError after so much of the processor's time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
