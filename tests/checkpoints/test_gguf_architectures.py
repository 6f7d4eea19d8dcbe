"""GGUF files of models that are not built like Llama: as transformers reads them, and as the model that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import acemerge
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.checkpoints.gguf_model import ARCHITECTURES

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 60, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "rms_norm_eps": 1e-5}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "gemma2": ("Gemma2Config", GEMMA, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "final_logit_softcapping": None}, {"rope.freq_base": 1000000.0}),
    "phi3": ("Phi3Config", {**SIZES, "pad_token_id": 0, "sliding_window": 8}, {}),
    "starcoder2": ("Starcoder2Config", {**SIZES, "norm_epsilon": 1e-5, "sliding_window": 8}, {}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 64}, {}),
}


def write(path: Path, name: str, model: Any, numbers: dict[str, float]) -> None:
    """As llama.cpp's converter does: names by the library's map, one more in Gemma's norms, GPT-2's matrices turned."""
    config, writer = model.config, gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.n_inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_pad_token_id(0)
    if "gemma" in name:
        writer.add_key_length(config.head_dim)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    for key, value in numbers.items():
        writer.add_float32(f"{name}.{key}", value)
    kind = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    known = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for own, value in model.state_dict().items():
        if own in tied:
            continue
        array = value.float().numpy()
        module, _, part = own.rpartition(".")
        if "gemma" in name and own.endswith("norm.weight"):
            array = array + 1
        if name == "gpt2" and module.endswith(("c_attn", "c_proj", "c_fc")) and part == "weight":
            array = array.T
        writer.add_tensor(
            f"{known.get_name(module)}.{part}", np.ascontiguousarray(array), raw_dtype=gguf.GGMLQuantizationType.F32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_model_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    config_class, settings, numbers = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**settings)).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.05)
    write(tmp_path / "model.gguf", name, model, numbers)
    ours, values = open_checkpoint(tmp_path / "model.gguf", "model"), model.state_dict()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert ours.tensors.keys() == values.keys() - tied
    for own, header in ours.tensors.items():
        assert header.shape == ours.read(own).shape == values[own].shape
        torch.testing.assert_close(ours.read(own), values[own], rtol=0, atol=1e-6)  # one was added and taken away
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=model.config, dtype=torch.float32
    ).state_dict()
    assert all(torch.equal(ours.read(own), theirs[own]) for own in ours.tensors)
    acemerge.merge(tmp_path / "model.gguf", [tmp_path / "model.gguf"], tmp_path / "out", method="passthrough")
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    ids = torch.arange(40)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_every_architecture_is_tried() -> None:
    """Here, in test_gguf.py or in test_gguf_mixtures.py."""
    assert MODELS.keys() | {"llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe"} == ARCHITECTURES.keys()
