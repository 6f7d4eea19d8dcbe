"""What sharded outputs hold: the same tensors, an index that describes them, files that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint_files import INDEX, merge, merged_tensors
from model_zoo import Models, assert_equal_tensors, load_whole, read_tensors


def test_sharded_output_holds_the_same_tensors(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "single")
    merge(llama, tmp_path / "sharded", shard_size=4_000)
    assert_equal_tensors(read_tensors(tmp_path / "sharded"), read_tensors(tmp_path / "single"))


def test_the_index_describes_the_shards(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", shard_size=4_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    contents = {file.name: load_file(file) for file in files}
    sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in contents.items()}
    assert [file.name for file in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert index["weight_map"] == {name: file for file, tensors in contents.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 4_000 for size in sizes.values())


def test_transformers_loads_sharded_output(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", shard_size=4_000)
    loaded = load_whole("LlamaForCausalLM", tmp_path / "out").state_dict()
    assert_equal_tensors(loaded, read_tensors(tmp_path / "out"))


def test_a_tensor_larger_than_a_shard_gets_its_own(plain: Models, tmp_path: Path) -> None:
    expected = merged_tensors(plain, tmp_path / "one")
    assert_equal_tensors(merged_tensors(plain, tmp_path, shard_size=1_000), expected)
    holding = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert [set(tensors) for tensors in holding if "embed.weight" in tensors] == [{"embed.weight"}]


def test_every_shard_says_it_is_torchs(llama: Models, tmp_path: Path) -> None:
    merge(llama, tmp_path / "out", shard_size=4_000)
    for file in (tmp_path / "out").glob("*.safetensors"):
        handle: Any = safe_open(file, framework="pt")
        assert handle.metadata() == {"format": "pt"}
