"""GGUF's words for a model in transformers' words: names of tensors, and config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from acemerge.checkpoints.gguf_header import GgufHeader
from acemerge.errors import InputError

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: how Llama 3.1 and later stretch positions, which config.json says by four numbers."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_NORMS, **_ATTENTION, **_MLP}
_GEMMA = {
    **_ATTENTION, **_MLP, "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_PHI3 = {
    **_NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_STARCODER2 = {**_NORMS, **_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
_QWEN_MIXTURE = {
    **_NORMS, **_ATTENTION, "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_MIXTRAL = {**_NORMS, **_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1", "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}  # fmt: skip
_ONE_OUTPUT = frozenset(("ffn_gate_inp_shexp",))
"""Layers of one output, whose matrix the file has as a vector."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")

_BY_TRANSFORMERS = "or convert it: transformers' from_pretrained(FOLDER, gguf_file=FILE), then save_pretrained"
_CONFIG_BESIDE = "put the model's own config.json beside the file, alone in a folder, and give the folder"


@dataclass(frozen=True)
class Architecture:
    """What transformers calls it, and what llama.cpp does to its weights."""

    model_type: str
    class_name: str
    in_layer: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layers: str = "model.layers"
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    """What config.json calls what the file calls so."""
    turned: bool = False
    """Whether rows of q and k are stored in the order of llama.cpp's rotary embeddings."""
    norms_plus_one: bool = False
    """Whether one is added to the weights of norms."""
    in_out: frozenset[str] = frozenset()
    """Parts of a layer whose matrices transformers stores [in, out]."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Parts of a layer that hold a matrix of every expert, and what each is called."""

    def transformers_names(self, header: GgufHeader, name: str) -> list[str]:
        """Of a tensor; of a stack of the experts' matrices, the name of each."""
        match = _NAME.fullmatch(name)
        part, kind = (match["part"], match["kind"]) if match else ("", "")
        known = self.in_layer if match and match["layer"] else self.top
        if match and match["layer"] and part in self.experts and len(shape := header.tensors[name].shape) == 3:
            ours = [self.experts[part].format(expert) for expert in range(shape[0])]
        elif part in known:
            ours = [known[part]]
        else:
            raise InputError(
                f"{header.path}: has no known name for tensor {name!a} in transformers. Give the float model, {_BY_TRANSFORMERS}"
            )
        where = f"{self.layers}.{int(match['layer'])}." if match and match["layer"] else ""
        return [f"{where}{own}.{kind}" for own in ours]

    def transformers_shape(self, header: GgufHeader, name: str) -> tuple[int, ...]:
        """Of a tensor as it lies in the file, which has none of the axes of length one in front."""
        match, shape = _NAME.fullmatch(name), header.tensors[name].shape
        return (1, *shape) if match and match["part"] in _ONE_OUTPUT and len(shape) == 1 else shape

    def is_in_out(self, name: str) -> bool:
        """Of a tensor of the file."""
        match = _NAME.fullmatch(name)
        return bool(match and match["kind"] == "weight" and match["part"] in self.in_out)


_LAYER_NORM = ("norm_epsilon", "attention.layer_norm_epsilon")
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", turned=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _QWEN_MIXTURE, experts=_QWEN_EXPERTS),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_MIXTURE, experts=_QWEN_EXPERTS),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA, norms_plus_one=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", _STARCODER2, epsilon=_LAYER_NORM),
    "gpt2": Architecture(
        "gpt2", "GPT2LMHeadModel", _GPT2, _GPT2_TOP, "transformer.h", ("layer_norm_epsilon", _LAYER_NORM[1]),
        in_out=frozenset(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
    ),
}  # fmt: skip
_OF_EXPERTS = {"llama": Architecture("mixtral", "MixtralForCausalLM", _MIXTRAL, turned=True, experts=_MIXTRAL_EXPERTS)}
"""Of mixtures that the file calls as their kin without experts."""


def architecture_of(header: GgufHeader) -> Architecture:
    """The model's, or an error that says which are known."""
    named = header.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{header.path}: a model of kind {named!a}, not {known}. Give the float model, {_BY_TRANSFORMERS}")
    return _OF_EXPERTS[named] if named in _OF_EXPERTS and header.metadata.get(f"{named}.expert_count") else ARCHITECTURES[named]


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
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        architecture.epsilon[0]: _number(header, architecture.epsilon[1]),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **(_gpt2_sizes(header) if architecture.model_type == "gpt2" else _sizes(header)),
        **(own(header) if (own := _OWN.get(architecture.model_type)) else {}),
    }
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if isinstance(token := header.metadata.get(f"tokenizer.ggml.{theirs}_token_id"), int):
            config[ours] = token
    return config


def _sizes(header: GgufHeader) -> dict[str, Any]:
    width, count = _number(header, "embedding_length"), heads(header, key=False)
    found = {
        "hidden_size": width,
        "intermediate_size": _number(header, "feed_forward_length"),
        "num_hidden_layers": _number(header, "block_count"),
        "num_attention_heads": count,
        "num_key_value_heads": heads(header, key=True),
        "head_dim": _number(header, "attention.key_length", _number(header, "rope.dimension_count", width // count)),
        "max_position_embeddings": _number(header, "context_length"),
        "rope_theta": _number(header, "rope.freq_base", 10000.0),
    }
    if "blk.0.attn_output.bias" in header.tensors:  # Qwen2 has the other three always, and does not say so
        found["attention_bias"] = True
    return found


def _gpt2_sizes(header: GgufHeader) -> dict[str, Any]:
    return {
        "n_embd": _number(header, "embedding_length"),
        "n_inner": _number(header, "feed_forward_length"),
        "n_layer": _number(header, "block_count"),
        "n_head": heads(header, key=False),
        "n_positions": _number(header, "context_length"),
    }


def _gemma(header: GgufHeader, without_head_size: int, **names: str) -> dict[str, Any]:
    """Queries are divided by the root of a head's size; in the model with so many layers, of its share of the width."""
    sizes = _sizes(header)
    shared = sizes["num_hidden_layers"] == without_head_size
    per_head = sizes["hidden_size"] // sizes["num_attention_heads"] if shared else sizes["head_dim"]
    stated = {ours: _number(header, theirs) for ours, theirs in names.items() if _has(header, theirs)}
    return {"query_pre_attn_scalar": per_head, **stated}


def _gemma2(header: GgufHeader) -> dict[str, Any]:
    return _gemma(
        header, 46, sliding_window="attention.sliding_window", attn_logit_softcapping="attn_logit_softcapping",
        final_logit_softcapping="final_logit_softcapping",
    )  # fmt: skip


def _gemma3(header: GgufHeader) -> dict[str, Any]:
    return {**_gemma(header, 62, sliding_window="attention.sliding_window"), "rope_local_base_freq": 10000.0}


def _phi3(header: GgufHeader) -> dict[str, Any]:
    sizes = _sizes(header)
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    window = _number(header, "attention.sliding_window") if _has(header, "attention.sliding_window") else None
    turned = _number(header, "rope.dimension_count", size)
    share = {"partial_rotary_factor": turned / size} if turned != size else {}
    return {
        "head_dim": size,
        "sliding_window": window,
        "original_max_position_embeddings": sizes["max_position_embeddings"],
        **share,
    }


def _starcoder2(header: GgufHeader) -> dict[str, Any]:
    window = _number(header, "attention.sliding_window") if _has(header, "attention.sliding_window") else None
    return {"use_bias": "blk.0.ffn_up.bias" in header.tensors, "sliding_window": window}


def _experts(header: GgufHeader, called: str) -> dict[str, Any]:
    return {called: _number(header, "expert_count"), "num_experts_per_tok": _number(header, "expert_used_count")}


def _outputs(header: GgufHeader, part: str) -> int:
    """Of a part of the first layer that has it."""
    found = [
        tensor.shape for name, tensor in header.tensors.items() if name.endswith(f".{part}.weight") and len(tensor.shape) > 1
    ]
    if not found:
        raise InputError(f"{header.path}: has no {part}.weight in any layer, so it is not a whole model")
    return found[0][-2]


def _qwen2_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        **_experts(header, "num_experts"),
        "moe_intermediate_size": _outputs(header, "ffn_up_exps"),
        "shared_expert_intermediate_size": _outputs(header, "ffn_up_shexp"),
        "norm_topk_prob": False,
    }


def _qwen3_moe(header: GgufHeader) -> dict[str, Any]:
    """The file does not say that weights of the chosen experts are made to sum to one; llama.cpp does so."""
    width = _outputs(header, "ffn_up_exps")
    return {**_experts(header, "num_experts"), "moe_intermediate_size": width, "norm_topk_prob": True}


def _mixtral(header: GgufHeader) -> dict[str, Any]:
    return _experts(header, "num_local_experts")


_OWN: Mapping[str, Callable[[GgufHeader], dict[str, Any]]] = {
    "gemma2": _gemma2, "gemma3_text": _gemma3, "phi3": _phi3, "starcoder2": _starcoder2, "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe, "mixtral": _mixtral,
}  # fmt: skip


def _has(header: GgufHeader, key: str) -> bool:
    return f"{_prefix(header)}.{key}" in header.metadata


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
