"""Matrices that files hold as one: q, k and v, or gate and up. Which tensors are such, and how their outputs lie, by model type.

All of them read the same inputs, so they lie side by side along the output axis: one after another, or in turns, as where every
head's q, k and v stand together. Sizes come from the config. Adding a model type is a word or a line in FUSED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Fused:
    """How the outputs of several matrices share an axis: `repeats` times so many of the first, so many of the second, and so on.

    >>> Fused((2, 1, 1), repeats=3).outputs
    12
    """

    parts: tuple[int, ...]
    repeats: int = 1

    @property
    def outputs(self) -> int:
        """Of all matrices together."""
        return self.repeats * sum(self.parts)

    def __str__(self) -> str:
        """In words: equal or not, in turns or not."""
        sizes = [part * self.repeats for part in self.parts]
        told = f"as {len(sizes)} matrices"
        if len(set(sizes)) > 1:
            told += f" of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} outputs"
        return told if self.repeats == 1 else f"{told} that lie in turns"


Split = Callable[[int, Config], Fused | None]
"""From the number of outputs and the config; None if they do not fit."""


def fused_matrices(name: str, outputs: int, config: Config) -> tuple[Fused | None, bool]:
    """How a tensor's outputs lie, and whether it is fused at all: where sizes do not fit, one that is cannot be taken apart."""
    for rule in FUSED:
        if fnmatchcase(name, rule.pattern):
            for section in _sections(config):
                if not rule.model_types or section.get("model_type") in rule.model_types:
                    return rule.split(outputs, section), True
    return None, False


@dataclass(frozen=True)
class Rule:
    """Tensors that are fused: in models of these types, or in all."""

    pattern: str
    split: Split
    model_types: frozenset[str] = frozenset()


def _sections(config: Config) -> Iterator[Config]:
    """The config and those within it, such as a vision-language model's of its language model."""
    yield config
    yield from (part for part in config.values() if isinstance(part, Mapping) and "model_type" in part)


# --- ways to be fused --------------------------------------------------------------------------------------------------


def _number(config: Config, *names: str) -> int | None:
    """The first of these that the config has; None unless it is a positive whole number."""
    value = next((config[name] for name in names if name in config), None)
    return value if isinstance(value, int) and value > 0 else None


def _heads(config: Config) -> int | None:
    return _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")


def _shared_out(outputs: int, shares: tuple[int, ...], repeats: int | None = 1) -> Fused | None:
    """Parts in proportion to these shares."""
    if not repeats or outputs % (repeats * sum(shares)):
        return None
    unit = outputs // (repeats * sum(shares))
    return Fused(tuple(unit * share for share in shares), repeats)


def equal(count: int) -> Split:
    """So many of equal size, one after another."""
    return lambda outputs, config: _shared_out(outputs, (1,) * count)  # noqa: ARG005


def in_turns(count: int) -> Split:
    """So many of equal size, an output of each in turn."""
    return lambda outputs, config: _shared_out(outputs, (1,) * count, outputs // count)  # noqa: ARG005


def by_head(outputs: int, config: Config) -> Fused | None:
    """Every head's q, k and v together."""
    return _shared_out(outputs, (1, 1, 1), _heads(config))


def fewer_keys(outputs: int, config: Config) -> Fused | None:
    """q, then k, then v, of which the latter have fewer heads."""
    heads, kv = _heads(config), _number(config, "num_key_value_heads")
    return _shared_out(outputs, (heads, kv, kv)) if heads and kv else None


def _falcon(outputs: int, config: Config) -> Fused | None:
    heads, kv = _heads(config), _number(config, "num_kv_heads", "n_head_kv")
    if not heads:
        return None
    if config.get("new_decoder_architecture"):
        return _shared_out(outputs, (heads // kv, 1, 1), kv) if kv else None
    return _shared_out(outputs, (heads, 1, 1)) if config.get("multi_query", True) else by_head(outputs, config)


def _bigcode(outputs: int, config: Config) -> Fused | None:
    heads = _heads(config)
    if not config.get("multi_query", True):
        return by_head(outputs, config)
    return _shared_out(outputs, (heads, 1, 1)) if heads else None


def _dbrx(outputs: int, config: Config) -> Fused | None:
    attention = config.get("attn_config")
    kv = _number(attention, "kv_n_heads") if isinstance(attention, Mapping) else None
    heads = _heads(config)
    return _shared_out(outputs, (heads, kv, kv)) if heads and kv else None


def _codegen(outputs: int, config: Config) -> Fused | None:  # noqa: ARG001
    """q, v and k of each of the four processors that it was trained on."""
    return _shared_out(outputs, (1, 1, 1), 4)


def _linear_attention(*, turned: bool, gate: bool) -> Split:
    """q, k, v and, with a gate, z of Qwen's linear attention; in turns by the heads of k, or one after another."""

    def split(outputs: int, config: Config) -> Fused | None:
        k_heads, v_heads = _number(config, "linear_num_key_heads"), _number(config, "linear_num_value_heads")
        k_size, v_size = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
        if not (k_heads and v_heads and k_size and v_size):
            return None
        keys, values = k_heads * k_size, v_heads * v_size
        whole = (keys, keys, values, values) if gate else (keys, keys, values)
        repeats = k_heads if turned else 1
        fused = Fused(tuple(size // repeats for size in whole), repeats)
        return fused if fused.outputs == outputs else None

    return split


def _by_key_head(outputs: int, config: Config) -> Fused | None:
    """Two numbers for every head of v, in turns by the heads of k."""
    return _shared_out(outputs, (1, 1), _number(config, "linear_num_key_heads"))


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Image towers whose qkv gives q, k and v one after another. Others, such as TinyViT's, give them by head, under the same name.
_QKV = _types(
    "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp qwen2_5_omni qwen2_5_omni_thinker qwen3_omni_moe"
    " qwen3_omni_moe_thinker cosmos3_omni glm4v glm46v glm4v_moe glm_ocr glm_image glm5_next glmga ernie4_5_vl_moe cohere_compass"
    " deepseek_vl_hybrid deepseek_ocr2 dots3_note unlimited_ocr got_ocr2 pp_formulanet slanext sam sam_hq sam2 hiera vitdet"
    " timesformer seggpt mgp-str florence2 blip blip-2 instructblip instructblipvideo radio"
)

_QWEN35 = _types("qwen3_5_text qwen3_5_moe_text qwen4_exp_text")

FUSED = (
    # mixtures of experts: gate and up of each expert; gpt_oss and Inkling interleave them
    Rule("*.experts.gate_up_proj", in_turns(2), _types("gpt_oss")),
    Rule("*.experts.w13_weight", in_turns(2), _types("inkling_mm_model inkling2 inkling2_text")),
    Rule("*.experts.gate_up_proj", equal(2)),
    Rule("*.experts.fc1.weight", equal(2), _types("aria aria_text")),
    Rule("*.mlp.input_linear.weight", equal(2), _types("jetmoe")),
    Rule("*.block_sparse_moe.input_linear.weight", equal(2)),
    Rule("*.shared_mlp.input_linear.weight", equal(2)),
    # gate and up
    Rule("*.gate_up_proj.weight", equal(2)),
    Rule("*.Wi.weight", equal(2), _types("modernbert modernbert-decoder modernvbert")),
    # q, k and v
    Rule("*in_proj_weight", equal(3)),  # torch's MultiheadAttention
    Rule("*.qkv_proj.weight", fewer_keys, _types("phi3 phi4_multimodal")),
    Rule("*.qkv_proj.weight", by_head, _types("minimax")),
    Rule("*.qkv_proj.weight", _codegen, _types("codegen")),
    Rule("*.qkv_proj.weight", equal(3), _types("gte unlimited_ocr")),
    Rule("*.query_key_value.weight", by_head, _types("gpt_neox gpt_neox_japanese bloom persimmon fuyu")),
    Rule("*.query_key_value.weight", _falcon, _types("falcon")),
    Rule("*.Wqkv.weight", equal(3), _types("modernbert modernvbert mpt nomic_bert jina_embeddings_v3")),
    Rule("*.Wqkv.weight", _dbrx, _types("dbrx")),
    Rule("*.self.in_proj.weight", by_head, _types("deberta")),
    Rule("*.qkv.weight", equal(3), _QKV),
    Rule("*.qkv.weight", fewer_keys, _types("exaone4_5_vision")),
    Rule("*.crossattention.c_attn.weight", equal(2), _types("gpt2 decision_transformer imagegpt")),
    Rule("*.c_attn.weight", equal(3), _types("gpt2 gpt-sw3 openai-gpt decision_transformer imagegpt")),
    Rule("*.c_attn.weight", _bigcode, _types("gpt_bigcode")),
    Rule("*.in_proj_qkvz.weight", _linear_attention(turned=True, gate=True), _types("qwen3_next")),
    Rule("*.in_proj_ba.weight", _by_key_head, _types("qwen3_next")),
    Rule("*.in_proj_qkv.weight", _linear_attention(turned=False, gate=False), _QWEN35),
)
