"""How fused matrices lie, against what transformers' own layers make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from acemerge.checkpoints.fused import fused_matrices
from acemerge.planning.view import View

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 30}
FALCON = {**SMALL, "new_decoder_architecture": False, "multi_query": False, "alibi": False}

Parts = Callable[[torch.nn.Module, Tensor], tuple[Tensor, ...]]


def in_thirds(module: torch.nn.Module, out: Tensor) -> tuple[Tensor, ...]:
    return tuple(out.chunk(3, -1))


def of_each_head(module: torch.nn.Module, out: Tensor) -> tuple[Tensor, ...]:
    return tuple(out.view(*out.shape[:-1], 4, -1).chunk(3, -1))


def as_falcon_does(module: Any, out: Tensor) -> tuple[Tensor, ...]:
    return tuple(module._split_heads(out))


def as_phi3_does(module: torch.nn.Module, out: Tensor) -> tuple[Tensor, ...]:
    return out[..., :16], out[..., 16:24], out[..., 24:]


CASES: dict[str, tuple[str, dict[str, Any], str, Parts]] = {
    "phi3": ("Phi3", {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}, "self_attn.qkv_proj", as_phi3_does),
    "gpt_neox": ("GPTNeoX", SMALL, "attention.query_key_value", of_each_head),
    "bloom": ("Bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 4, "vocab_size": 30}, "query_key_value", of_each_head),
    "falcon by head": ("Falcon", FALCON, "query_key_value", as_falcon_does),
    "falcon with one key": ("Falcon", {**FALCON, "multi_query": True}, "query_key_value", as_falcon_does),
    "falcon in groups": (
        "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, "query_key_value", as_falcon_does
    ),
    "modernbert": ("ModernBert", {**SMALL, "intermediate_size": 24, "pad_token_id": 0}, "attn.Wqkv", in_thirds),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_parts_are_those_that_the_layer_takes(case: str) -> None:
    """The outputs of each matrix by itself are what the layer makes of the outputs of all."""
    family, settings, ending, parts = CASES[case]
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}Model")(config)
    [(name, linear)] = [(name, module) for name, module in model.named_modules() if name.endswith(ending)]
    weight = linear.weight.detach()
    fused, is_fused = fused_matrices(f"{name}.weight", len(weight), config.to_dict())
    assert is_fused
    assert fused is not None
    assert fused.outputs == len(weight)
    x = torch.randn(2, 3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    layer = model.get_submodule(name.rpartition(".")[0])
    expected = parts(layer, torch.nn.functional.linear(x, weight))
    for block, theirs in zip(View(fused=fused).apart(), expected, strict=True):
        ours = torch.nn.functional.linear(x, block.to_method(weight))
        theirs = theirs.reshape(2, 3, -1)
        if theirs.shape[-1] > ours.shape[-1]:  # falcon gives every head a copy of its group's key
            theirs = theirs.view(2, 3, 2, -1, 4)[..., 0, :].reshape(2, 3, -1)
        torch.testing.assert_close(ours, theirs)


def test_every_part_of_a_config_is_looked_into() -> None:
    """The language model of a vision-language model has its sizes in a config of its own."""
    text = {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 2}
    fused, is_fused = fused_matrices(
        "language_model.layers.0.self_attn.qkv_proj.weight", 32, {"model_type": "x", "text_config": text}
    )
    assert is_fused
    assert fused is not None
    assert fused.parts == (16, 8, 8)


@pytest.mark.parametrize("heads", [None, 0, -2, 5, "four", True])
def test_sizes_that_make_no_sense_do_not_fit(heads: object) -> None:
    config = {"model_type": "gpt_neox", "num_attention_heads": heads}
    fused, is_fused = fused_matrices("layers.0.attention.query_key_value.weight", 48, config)
    assert is_fused
    assert fused is None or heads is True  # Python takes True for 1


def test_a_name_alone_does_not_make_it_fused() -> None:
    assert fused_matrices("blocks.0.attn.qkv.weight", 48, {"model_type": "nobody-heard-of-it"}) == (None, False)
