"""A Llama with few weights as llama.cpp's converter writes it, and the values that its tensors stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN = 64, 2, 4, 2, 96
BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""The letters that GPT-2's tokenizer writes bytes with."""
TOKENS = ["<|endoftext|>", *BYTES, "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]
SHAPES = {
    "token_embd.weight": (len(TOKENS), WIDTH),
    "output_norm.weight": (WIDTH,),
    **{
        f"blk.{layer}.{part}.weight": shape
        for layer in range(LAYERS)
        for part, shape in {
            "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH),
            "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,), "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH),
            "ffn_down": (WIDTH, HIDDEN),
        }.items()
    },
}  # fmt: skip


def write_gguf(
    path: Path, kind: Kind = Kind.Q8_0, architecture: str = "llama", extra: Mapping[str, np.ndarray] | None = None,
    strings: Mapping[str, str] | None = None, numbers: Mapping[str, int] | None = None, tokenizer: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Write it; gives its tensors by the file's names, as the library dequantises them."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    for name, value in (strings or {}).items():
        writer.add_string(name, value)
    for name, number in (numbers or {}).items():
        writer.add_uint32(name, number)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
    generator, values = np.random.default_rng(0), {}
    arrays: dict[str, Any] = {name: generator.normal(size=shape).astype(np.float32) / 8 for name, shape in SHAPES.items()}
    for name, array in {**arrays, **(extra or {})}.items():
        stored = kind if array.ndim == 2 else Kind.F32
        content = gguf.quants.quantize(array, stored)
        writer.add_tensor(name, content, raw_dtype=stored)
        values[name] = torch.from_numpy(gguf.quants.dequantize(content, stored).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def turned(weights: Tensor, heads: int) -> Tensor:
    """What llama.cpp's converter does to rows of q and k (LlamaModel.permute)."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
