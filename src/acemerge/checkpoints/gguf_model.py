"""GGUF's words for a model in transformers' words: names of tensors, and config.json. For models built like Llama."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from acemerge.checkpoints.gguf_header import GgufHeader
from acemerge.errors import InputError

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: how Llama 3.1 and later stretch positions, which config.json says by four numbers."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")

_BY_TRANSFORMERS = "or convert it: transformers' from_pretrained(FOLDER, gguf_file=FILE), then save_pretrained"
_CONFIG_BESIDE = "put the model's own config.json beside the file, alone in a folder, and give the folder"


@dataclass(frozen=True)
class Architecture:
    """What transformers calls it, and what llama.cpp does to its weights."""

    model_type: str
    class_name: str
    turned: bool = False
    """Whether rows of q and k are stored in the order of llama.cpp's rotary embeddings."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", turned=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}


def architecture_of(header: GgufHeader) -> Architecture:
    """The model's, or an error that says which are known."""
    if header.metadata.get("split.count", 1) != 1:
        raise InputError(f"{header.path}: one of several parts; join them by llama-gguf-split --merge first")
    named = header.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{header.path}: a model of kind {named!a}, not {known}. Give the float model, {_BY_TRANSFORMERS}")
    return ARCHITECTURES[named]


def transformers_name(header: GgufHeader, name: str) -> str:
    """Of a tensor."""
    match = _NAME.fullmatch(name)
    known = match and (_IN_LAYER if match["layer"] else _TOP).get(match["part"])
    if not match or not known:
        raise InputError(
            f"{header.path}: has no known name for tensor {name!a} in transformers. Give the float model, {_BY_TRANSFORMERS}"
        )
    return f"model.layers.{int(match['layer'])}.{known}.{match['kind']}" if match["layer"] else f"{known}.{match['kind']}"


def heads(header: GgufHeader, key: bool) -> int:
    """How many, of queries or of keys."""
    of_queries = _number(header, "attention.head_count")
    return int(_number(header, "attention.head_count_kv", of_queries) if key else of_queries)


def config_of(header: GgufHeader, architecture: Architecture) -> dict[str, Any]:
    """What config.json would say, but the dtype."""
    if "token_embd.weight" not in header.tensors:
        raise InputError(f"{header.path}: has no 'token_embd.weight', so it is not a whole model")
    scaling = header.metadata.get(f"{_prefix(header)}.rope.scaling.type", "none")
    if scaling != "none":
        raise InputError(f"{header.path}: stretches positions by {scaling!a}, which is not translated; {_CONFIG_BESIDE}")
    width, count = _number(header, "embedding_length"), heads(header, key=False)
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": width,
        "intermediate_size": _number(header, "feed_forward_length"),
        "num_hidden_layers": _number(header, "block_count"),
        "num_attention_heads": count,
        "num_key_value_heads": heads(header, key=True),
        "head_dim": _number(header, "attention.key_length", _number(header, "rope.dimension_count", width // count)),
        "max_position_embeddings": _number(header, "context_length"),
        "rms_norm_eps": _number(header, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(header, "rope.freq_base", 10000.0),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if "blk.0.attn_output.bias" in header.tensors:  # Qwen2 has the other three always, and does not say so
        config["attention_bias"] = True
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if isinstance(token := header.metadata.get(f"tokenizer.ggml.{theirs}_token_id"), int):
            config[ours] = token
    return config


def llama3_rope(header: GgufHeader, config: Mapping[str, Any], factors: Sequence[float]) -> dict[str, Any]:
    """The `rope_scaling` that gives these factors of the wavelengths."""
    found = {
        "rope_type": "llama3", "factor": float(max(factors, default=1)), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    lengths = [2 * math.pi * config["rope_theta"] ** (2 * i / config["head_dim"]) for i in range(len(factors))]
    if not np.allclose(factors, [_stretched(length, found) for length in lengths], rtol=1e-4):
        raise InputError(f"{header.path}: '{ROPE_FACTORS}' stretches positions otherwise than Llama 3; {_CONFIG_BESIDE}")
    return found


def _stretched(wavelength: float, settings: Mapping[str, Any]) -> float:
    """Long waves by the whole factor, short ones not at all, smoothly between."""
    turns = settings["original_max_position_embeddings"] / wavelength
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    return float(1 / ((1 - smooth) / settings["factor"] + smooth))


def _prefix(header: GgufHeader) -> str:
    return str(header.metadata.get("general.architecture"))


def _number(header: GgufHeader, key: str, default: float | None = None) -> Any:
    """A positive number; of a float32, the shortest decimal that stands for it."""
    name = f"{_prefix(header)}.{key}"
    value = header.metadata.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{header.path}: '{name}' is {value!a}, not a positive number; {_CONFIG_BESIDE}")
    return float(str(np.float32(value))) if isinstance(value, float) else value
