"""GGUF files of mixtures of experts, in one file and in parts: the model that they were made from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.errors import InputError
from gguf_files import turned
from model_zoo import Tensors

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

HEADS, KEY_HEADS = 4, 2
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": 60,
    "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "head_dim": 8,
    "num_experts_per_tok": 2, "rope_theta": 500000.0,
}  # fmt: skip
QWEN = {**SIZES, "num_experts": 4, "moe_intermediate_size": 24}
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2moe": ("qwen2moe", "Qwen2MoeConfig", {**QWEN, "shared_expert_intermediate_size": 40}),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", {**QWEN, "norm_topk_prob": True}),
    "mixtral": ("llama", "MixtralConfig", {**SIZES, "num_local_experts": 4}),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, MIXTURES[name][1])(**MIXTURES[name][2])).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.05)
    return model


def write(path: Path, name: str, saved: Tensors, **split: Any) -> None:
    """As llama.cpp's converter does: names by the library's map, experts stacked, one row as a vector, q and k turned."""
    architecture, _, sizes = MIXTURES[name]
    writer = gguf.GGUFWriter(path, architecture, **split)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_key_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_rope_freq_base(sizes["rope_theta"])
    writer.add_expert_count(4)
    writer.add_expert_used_count(sizes["num_experts_per_tok"])
    kind = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    known = gguf.get_tensor_name_map(kind, sizes["num_hidden_layers"])
    for own, array in stacked(saved).items():
        module, _, part = own.rpartition(".")
        heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(module.rpartition(".")[2])
        value = turned(array, heads) if heads and name == "mixtral" else array.squeeze(0)
        stored = (
            gguf.GGMLQuantizationType.Q8_0 if value.ndim == 3 and value.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        )
        content = gguf.quants.quantize(np.ascontiguousarray(value.numpy()), stored)
        writer.add_tensor(f"{known.get_name(module)}.{part}", content, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(saved: Tensors) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for own in sorted(saved):
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", own), []).append(saved[own].float())
    return {own: torch.stack(values) if ".experts." in own else values[0] for own, values in found.items()}


def rounded(own: str, value: torch.Tensor) -> torch.Tensor:
    """As the file stores it: experts in 8 bits, where rows are of whole blocks."""
    if ".experts." not in own or value.shape[-1] % 32:
        return value.float()
    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.float().numpy(), kind), kind))


@pytest.mark.parametrize("name", MIXTURES)
def test_the_model_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "float")
    saved = load_file(tmp_path / "float" / "model.safetensors")
    write(tmp_path / "model.gguf", name, saved)
    ours = open_checkpoint(tmp_path / "model.gguf", "model")
    assert ours.tensors.keys() == saved.keys()
    assert sum(".experts." in own for own in saved) == 2 * 4 * 3
    for own, header in ours.tensors.items():
        assert header.shape == saved[own].shape
        assert torch.equal(ours.read(own), rounded(own, saved[own])), own
    acemerge.merge(tmp_path / "model.gguf", [tmp_path / "model.gguf"], tmp_path / "out", method="passthrough")
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in MIXTURES[name][2] if key in config} == MIXTURES[name][2]
    rounded_values = {own: rounded(own, value) for own, value in saved.items()}
    save_file(rounded_values, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    expected, ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float"), torch.arange(40)[None]
    torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)
    if name != "mixtral":  # which transformers does not read
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", config=model.config, dtype=torch.float32
        )
        torch.testing.assert_close(loaded(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_it_merges_with_ordinary_folders(tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    model.save_pretrained(tmp_path / "float")
    saved = load_file(tmp_path / "float" / "model.safetensors")
    write(tmp_path / "model.gguf", "qwen3moe", saved)
    acemerge.merge(tmp_path / "float", [tmp_path / "model.gguf"], tmp_path / "out", method="average")
    for own, value in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(value, rounded(own, saved[own]))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The library splits it; the second part does not say what the model is."""
    model_of("mixtral").save_pretrained(tmp_path / "float")
    saved = load_file(tmp_path / "float" / "model.safetensors")
    write(tmp_path / "whole.gguf", "mixtral", saved)
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "model.gguf", "mixtral", saved, split_max_tensors=9)
    return sorted((tmp_path / "parts").iterdir())


def test_parts_are_one_model(parts: list[Path], tmp_path: Path) -> None:
    """Given by their folder, or by any of them."""
    assert [part.name for part in parts] == [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    whole = open_checkpoint(tmp_path / "whole.gguf", "whole")
    for given in (tmp_path / "parts", parts[0], parts[2]):
        model = open_checkpoint(given, "model")
        assert list(model.files) == parts
        assert model.config == whole.config
        assert model.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(model.read(own), whole.read(own)) for own in whole.tensors)
    acemerge.merge(tmp_path / "parts", [parts[1]], tmp_path / "out", method="passthrough", quiet=True)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, whole.read(own)) for own, value in out.items())


def test_a_part_that_is_missing_or_has_another_name_is_refused(parts: list[Path]) -> None:
    renamed = parts[1].rename(parts[1].with_name("second.gguf"))
    with pytest.raises(InputError, match=r"one of 3 parts, of which model-00002-of-00003\.gguf is missing; download it"):
        open_checkpoint(parts[0], "model")
    with pytest.raises(InputError, match=r"second\.gguf: says it is part 1 of 3 .* llama-gguf-split --merge"):
        open_checkpoint(renamed, "model")
    parts[2].rename(parts[1])
    parts[2].write_bytes(parts[0].read_bytes())
    with pytest.raises(InputError, match=r"model-00002-of-00003\.gguf: says it is part 2 of 3"):
        open_checkpoint(parts[0], "model")
