"""GGUF files are read as the models that llama.cpp's converter was given, one tensor at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.checkpoints.formats import gguf as our_format
from acemerge.checkpoints.gguf_header import read_header
from acemerge.checkpoints.gguf_model import ARCHITECTURES
from acemerge.errors import InputError

gguf = pytest.importorskip("gguf")

from gguf_files import HEADS, KEY_HEADS, LAYERS, TOKENS, WIDTH, turned, write_gguf  # noqa: E402

Kind = gguf.GGMLQuantizationType


def test_the_header_is_the_librarys(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    ours, theirs = read_header(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    assert {n: (t.quantisation, t.shape, t.start) for n, t in ours.tensors.items()} == {
        t.name: (t.tensor_type, tuple(reversed(t.shape.tolist())), t.data_offset) for t in theirs.tensors
    }
    assert {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")} == ours.metadata


def test_long_arrays_are_only_counted(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_token_list([f"token {i}" for i in range(2000)])
    writer.add_token_scores([0.5] * 3000)
    writer.add_string("last", "found")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(tmp_path / "x.gguf").metadata
    assert (metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], metadata["last"]) == (2000, 3000, "found")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_tensors_are_the_librarys_with_q_and_k_turned_back(tmp_path: Path, kind: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_format, "_AT_ONCE", 7 * WIDTH)  # several turns for every matrix
    values = write_gguf(tmp_path / "model.gguf", kind)
    model = open_checkpoint(tmp_path / "model.gguf", "model")
    assert len(model.tensors) == len(values)
    dtype = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
    for theirs, ours in {
        "token_embd": "model.embed_tokens",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
    }.items():
        assert torch.equal(model.read(f"{ours}.weight"), values[f"{theirs}.weight"].to(dtype))
    for part, heads in (("q", HEADS), ("k", KEY_HEADS)):
        read = model.read(f"model.layers.1.self_attn.{part}_proj.weight")
        assert torch.equal(turned(read, heads), values[f"blk.1.attn_{part}.weight"].to(dtype))
        assert not torch.equal(read, values[f"blk.1.attn_{part}.weight"].to(dtype))
    assert all(model.read(name).dtype == getattr(torch, header.dtype) for name, header in model.tensors.items())


def test_names_are_in_the_librarys_map() -> None:
    for name in OWN_PARTS:
        own = ARCHITECTURES[name]
        kind = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
        known = gguf.get_tensor_name_map(kind, LAYERS)
        pairs = {**own.top, **{f"blk.1.{part}": f"model.layers.1.{ours}" for part, ours in own.in_layer.items()}}
        if own.model_type != "qwen3":
            pairs = {theirs: ours for theirs, ours in pairs.items() if not theirs.endswith(("q_norm", "k_norm"))}
        assert {theirs: known.get_name(ours) for theirs, ours in pairs.items()} == {theirs: theirs for theirs in pairs}


OWN_PARTS = {
    "llama": (("attn_q.bias", WIDTH), ("attn_k.bias", WIDTH // 2), ("attn_v.bias", WIDTH // 2), ("attn_output.bias", WIDTH)),
    "qwen2": (("attn_q.bias", WIDTH), ("attn_k.bias", WIDTH // 2), ("attn_v.bias", WIDTH // 2)),
    "qwen3": (("attn_q_norm.weight", WIDTH // HEADS), ("attn_k_norm.weight", WIDTH // HEADS)),
}


@pytest.mark.parametrize("name", OWN_PARTS)
def test_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    extra = {
        f"blk.{layer}.{part}": np.linspace(-1, layer, size, dtype=np.float32)
        for part, size in OWN_PARTS[name]
        for layer in range(LAYERS)
    }
    write_gguf(tmp_path / "model.gguf", architecture=name, extra=extra, numbers={f"{name}.attention.key_length": WIDTH // HEADS})
    model = open_checkpoint(tmp_path / "model.gguf", "model")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = type(theirs)(**model.config)
    ours.rms_norm_eps = float(np.float32(ours.rms_norm_eps))
    # Of the last two, transformers reads neither from a GGUF file of every kind: it takes its own defaults.
    apart = {"architectures", "dtype", "rope_theta", "head_dim", "attention_bias"}
    compared = model.config.keys() - apart | {"rope_parameters"}
    assert {key: getattr(ours, key, None) for key in compared} == {key: getattr(theirs, key, None) for key in compared}
    assert model.config["head_dim"] == WIDTH // HEADS
    assert model.config.get("attention_bias", False) is (name == "llama")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=ours, dtype=torch.float32
    ).state_dict()
    assert loaded.keys() - model.tensors.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(loaded[name], model.read(name)) for name in model.tensors)


def test_a_file_becomes_a_folder_that_transformers_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "small.gguf")
    file = tmp_path / "small.gguf"
    acemerge.merge(file, [file], tmp_path / "out", method="passthrough", dtype="bfloat16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = open_checkpoint(file, "small")
    assert all(torch.equal(loaded.state_dict()[name], model.read(name).bfloat16()) for name in model.tensors)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hello")["input_ids"] == [TOKENS.index("hello")]
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert "no tokenizer" not in capsys.readouterr().err


def test_a_file_merges_with_ordinary_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As base and as expert. A file that holds no tokenizer is merged nevertheless, and that is told."""
    write_gguf(tmp_path / "small.gguf", tokenizer=False)
    model = open_checkpoint(tmp_path / "small.gguf", "small")
    values = {name: model.read(name) for name in model.tensors}
    (tmp_path / "expert").mkdir()
    save_file({name: value * 1.01 for name, value in values.items()}, tmp_path / "expert/model.safetensors")
    acemerge.merge(tmp_path / "small.gguf", [tmp_path / "expert"], tmp_path / "as-base", method="average")
    assert "warning: the output has no tokenizer" in capsys.readouterr().err
    acemerge.merge(tmp_path / "expert", [tmp_path / "small.gguf"], tmp_path / "as-expert", method="average")
    for name, value in load_file(tmp_path / "as-base/model.safetensors").items():
        torch.testing.assert_close(value, values[name] * 1.01)
    for name, value in load_file(tmp_path / "as-expert/model.safetensors").items():
        torch.testing.assert_close(value, values[name])


def test_llama_3_stretches_positions(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS}
    configs = [
        transformers.LlamaConfig(**sizes, rope_parameters={"rope_theta": 500000.0, **scaling})
        for scaling in ({"rope_type": "default"}, expected)
    ]
    plain, stretched = (transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq for config in configs)
    write_gguf(tmp_path / "model.gguf", extra={"rope_freqs.weight": (plain / stretched).numpy()})
    model = open_checkpoint(tmp_path / "model.gguf", "model")
    assert model.config["rope_scaling"] == expected
    assert not any("rope" in name for name in model.tensors)
    write_gguf(tmp_path / "other.gguf", extra={"rope_freqs.weight": np.full(8, 3.0, np.float32)})
    with pytest.raises(InputError, match=r"other\.gguf: 'rope_freqs\.weight' stretches positions otherwise than Llama 3"):
        open_checkpoint(tmp_path / "other.gguf", "other")


def test_a_config_beside_the_file_is_taken(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", strings={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(InputError, match="stretches positions by 'yarn', which is not translated; put the model's own config"):
        open_checkpoint(tmp_path / "model.gguf", "model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert open_checkpoint(tmp_path, "model").config == {"model_type": "llama"}


def test_other_kinds_of_model_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", architecture="mamba")
    with pytest.raises(
        InputError, match=r"model\.gguf: a model of kind 'mamba', not llama, qwen2, qwen3, .*, gemma2, .*\. Give the"
    ):
        open_checkpoint(tmp_path / "model.gguf", "model")
    write_gguf(tmp_path / "moe.gguf", extra={"blk.0.ffn_gate_exps.weight": np.zeros((4, 32), np.float32)})
    with pytest.raises(InputError, match=r"no known name for tensor 'blk\.0\.ffn_gate_exps\.weight'"):
        open_checkpoint(tmp_path / "moe.gguf", "moe")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match="needs the library gguf: pip install gguf"):
        open_checkpoint(tmp_path / "model.gguf", "model")


def test_damaged_files(tmp_path: Path) -> None:
    """Cut off anywhere, or with any byte of the header changed: a model or one clear error, at once."""
    write_gguf(tmp_path / "whole.gguf")
    content, damaged = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "damaged.gguf"
    data = min(tensor.start for tensor in read_header(tmp_path / "whole.gguf").tensors.values())
    for length in (0, 3, 4, 20, *range(24, data, 97), len(content) - 1):
        damaged.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"damaged\.gguf"):
            open_checkpoint(damaged, "damaged")
    for at in range(0, data, 61):
        for byte in (0, 255):
            damaged.write_bytes(content[:at] + bytes([byte]) + content[at + 1 :])
            try:
                model = open_checkpoint(damaged, "damaged")
                assert all(model.read(name).shape == header.shape for name, header in model.tensors.items())
            except InputError as error:
                assert "damaged" in str(error)  # noqa: PT017
