"""One LoRA module in an adapter's file: tensors that do not make one are refused, one sentence for one mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lora_zoo as zoo
from adapter_reading import LLAMA, Q0, Bases, Refuse, changed, renamed, without
from model_zoo import Tensors

_BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no B": (without("B.weight"), r"'model.layers.0.self_attn.q_proj' has no lora_B"),
    "no A": (without("A.weight"), r"'model.layers.0.self_attn.q_proj' has no lora_A"),
    "ranks differ": (changed("B.weight", lambda B: B[:, :3]), r"do not fit each other: A is \[4, 16\], B is \[16, 3\]"),
    "A is a vector": (changed("A.weight", lambda A: A[0]), r"do not fit each other: A is \[16\]"),
    "B is a stack": (changed("B.weight", lambda B: B.expand(2, 16, 4)), "do not fit each other"),
    "B is a window": (changed("B.weight", lambda B: B[..., None, None].expand(16, 4, 3, 3)), "do not fit each other"),
    "rank 0": (lambda f: changed("A.weight", lambda A: A[:0])(changed("B.weight", lambda B: B[:, :0])(f)), "do not fit each"),
    "another rank": (
        lambda f: changed("A.weight", lambda A: A[:3])(changed("B.weight", lambda B: B[:, :3])(f)),
        r"'model.layers.0.self_attn.q_proj' has rank 3, adapter_config.json says 4",
    ),
    "absurd rank": (
        lambda f: changed("A.weight", lambda A: torch.zeros(70_000, 16))(
            changed("B.weight", lambda B: torch.zeros(16, 70_000))(f)
        ),
        "q_proj.*70000",
    ),
    "integers": (changed("A.weight", torch.Tensor.int), "int32 and float32, not floating-point weights"),
    "longer inputs": (changed("A.weight", lambda A: torch.ones(4, 18)), r"q_proj.weight': shape \[16, 16\] in base.*\[16, 18\]"),
    "longer outputs": (changed("B.weight", lambda B: torch.ones(18, 4)), r"q_proj.weight': shape \[16, 16\] in base.*\[18, 16\]"),
    "unknown modules": (renamed("self_attn", "cross_attn"), r"'model.layers.0.cross_attn.*not in base"),
    "deeper model": (renamed("layers.1.", "layers.7."), r"'model.layers.7.self_attn.*not in base"),
    "unknown kind": (renamed("lora_A.weight", "lora_E"), "lora_E' belongs to a kind of adapter"),
    "unknown tensor": (lambda f: {**f, "base_model.model.model.prompt": torch.ones(3)}, "model.prompt' belongs to a kind"),
    "a bias of A": (lambda f: {**f, Q0 + "A.bias": torch.ones(4)}, "lora_A.bias' belongs to a kind"),
    "two kinds of one module": (lambda f: {**f, Q0 + "embedding_A": f[Q0 + "A.weight"] + 1}, "q_proj.*belongs to a kind"),
    "another adapter's name": (renamed("lora_A.weight", "lora_A.other.weight"), "lora_A.other.weight' belongs to a kind"),
    "twice": (
        lambda f: {**f, Q0 + "A.default.weight": f[Q0 + "A.weight"] + 1},
        "lora_A.*both stand for|lora_A.default.weight' and",
    ),
    "magnitude without DoRA": (lambda f: {**f, Q0 + "magnitude_vector": torch.ones(16)}, "lora_magnitude_vector.*use_dora"),
    "bias without lora_bias": (lambda f: {**f, Q0 + "B.bias": torch.ones(16)}, "lora_B.bias.*lora_bias"),
    "nothing at all": (lambda f: {}, "holds no tensors"),
}


@pytest.mark.parametrize("case", _BROKEN)
def test_broken_weights(case: str, bases: Bases, plain: Path, refusal: Refuse, tmp_path: Path) -> None:
    change, says = _BROKEN[case]
    adapter = zoo.copy_adapter(plain, tmp_path / "adapter", change)
    message = refusal(bases(LLAMA), adapter)
    assert re.search(says, message), message
    assert message.count("\n  - ") == 1, message  # one mistake, one line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("magnitude_vector"), "'model.layers.0.self_attn.q_proj' has no lora_magnitude_vector"),
        (changed("magnitude_vector", lambda m: m[:15]), r"lora_magnitude_vector.*15.*16"),
    ],
    ids=["no lengths", "too few lengths"],
)
def test_broken_dora(
    change: Callable[[Tensors], Tensors], says: str, bases: Bases, dora: Path, refusal: Refuse, tmp_path: Path
) -> None:
    adapter = zoo.copy_adapter(dora, tmp_path / "adapter", change)
    message = refusal(bases(LLAMA), adapter)
    assert re.search(says, message), message


def test_lora_bias_without_its_biases(bases: Bases, refusal: Refuse, tmp_path: Path) -> None:
    whole = zoo.write_adapter(bases("BertModel"), tmp_path / "whole", "BertModel", target_modules=["query"], lora_bias=True)
    adapter = zoo.copy_adapter(whole, tmp_path / "adapter", lambda f: {n: t for n, t in f.items() if "0" in n or "bias" not in n})
    assert "'encoder.layer.1.attention.self.query' has no lora_B.bias" in refusal(bases("BertModel"), adapter)
