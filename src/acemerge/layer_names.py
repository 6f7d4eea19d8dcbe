"""What a tensor's name tells: how deep it lies and what kind of layer it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable

KINDS = (
    ("norm", r"norm|\bln_|\bln\d|layernorm"),
    ("embedding", r"embed|\bwte\b|\bwpe\b|\bshared\b|relative_attention_bias|attention_biases"),
    ("attention q", r"\bq_proj\b|\bquery\b|\bto_q\b|\bq_lin\b|attention\.q\b|\bq\b"),
    ("attention k", r"\bk_proj\b|\bkey\b|\bto_k\b|\bk_lin\b|attention\.k\b|\bk\b"),
    ("attention v", r"\bv_proj\b|\bvalue\b|\bto_v\b|\bv_lin\b|attention\.v\b|\bv\b"),
    ("attention qkv", r"\bqkv\b|\bqkv_proj\b|\bc_attn\b|\bin_proj|\bquery_key_value\b|\bwqkv\b"),
    ("attention out", r"\bo_proj\b|\bout_proj\b|\bout_lin\b|attn\.(c_)?proj\b|attention\.(output\.dense|dense|o)\b|\bto_out\b"),
    ("MLP up", r"\b(up|gate|gate_up)_proj\b|\bfc1\b|\bc_fc\b|intermediate\.dense|\bwi(_\d)?\b|\blin1\b|dense_h_to_4h|\bw[13]\b"),
    ("MLP down", r"\bdown_proj\b|\bfc2\b|mlp\.c_proj|output\.dense|\bwo\b|\blin2\b|dense_4h_to_h|\bw2\b"),
    ("convolution", r"\bconv|\.c\.weight$|patch_embed|patch_embedding"),
)  # fmt: skip
"""Kind and the pattern of names that belong to it; the first that fits counts."""

OTHER = "other"
_MATCHERS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS)


def kind_of(name: str, dimensions: int = 2) -> str:
    """The kind of layer that a tensor belongs to; what is no matrix is a bias, a norm, an embedding or a convolution.

    >>> kind_of("encoder.layer.3.attention.output.dense.weight"), kind_of("h.0.mlp.c_proj.weight"), kind_of("h.0.ln_1.bias", 1)
    ('attention out', 'MLP down', 'norm')
    """
    found = next((kind for kind, matcher in _MATCHERS if matcher.search(name)), OTHER)
    if dimensions == 4:
        return "convolution"
    if dimensions < 2 and found not in ("norm", "embedding"):
        return "bias"
    return found


def kinds_in_order(kinds: Iterable[str]) -> list[str]:
    """Each kind once, in the order of a layer."""
    order = {
        kind: position for position, kind in enumerate(["embedding", *(k for k, _ in KINDS if k not in ("norm", "embedding"))])
    }
    return sorted(set(kinds), key=lambda kind: (order.get(kind, len(order)), kind))


def depths(names: Iterable[str]) -> dict[str, int | None]:
    """Name -> which of the model's layers it lies in, counted from 0 through all stages; None outside of them.

    >>> depths(["wte.weight", "h.0.attn.weight", "h.1.attn.weight"])
    {'wte.weight': None, 'h.0.attn.weight': 0, 'h.1.attn.weight': 1}
    """
    places = {name: _place(name) for name in names}
    order = {place: depth for depth, place in enumerate(sorted({p for p in places.values() if p is not None}))}
    return {name: None if place is None else order[place] for name, place in places.items()}


def relative_depths(names: Iterable[str]) -> dict[str, float]:
    """Name -> 0 in the first layer, 1 in the last (or only) one, 0 outside of layers.

    >>> relative_depths(["wte.weight", "h.0.w", "h.1.w", "h.2.w"])
    {'wte.weight': 0.0, 'h.0.w': 0.0, 'h.1.w': 0.5, 'h.2.w': 1.0}
    """
    found = depths(names)
    last = max((depth for depth in found.values() if depth is not None), default=0)
    return {name: 0.0 if depth is None else depth / last if last else 1.0 for name, depth in found.items()}


def _place(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Where a layer is: what its name begins with (an encoder, a decoder), and the numbers of stage and layer."""
    parts = name.split(".")
    found = [position for position, part in enumerate(parts) if part.isdigit()][:2]
    if not found or "embed" in parts[0]:
        return None
    second = found[1:] if len(found) > 1 and parts[found[1] - 1] in ("blocks", "layer", "layers", "block", "resblocks") else []
    return ".".join(parts[: found[0]]), tuple(int(parts[position]) for position in [found[0], *second])


def layers_of(depths: Iterable[int | None]) -> list[int | None]:
    """Each layer once, in order; first None, if something lies outside of layers."""
    found = set(depths)
    return [*([None] if None in found else []), *sorted(depth for depth in found if depth is not None)]
