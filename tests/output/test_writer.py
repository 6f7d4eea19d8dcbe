"""Files are streamed to the disk, like the library's own; the same bytes whatever the shards, the threads and the order."""

import errno
import json
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

import acemerge
from acemerge.checkpoints.tensor_header import TensorHeader
from acemerge.output import writer
from acemerge.output.writer import write_safetensors
from small_models import Models


def blake3_of(content: bytes) -> str:
    return f"blake3:{blake3(content).hexdigest()}"


DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool"]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6))
def test_streamed_files_load_like_the_librarys_own(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("streamed") / "x.safetensors"
    tensors = {f"t{i}": torch.rand(shape).mul(5).to(getattr(torch, dtype)) for i, (dtype, shape) in enumerate(kinds)}
    headers = [(name, TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape))) for name, t in tensors.items()]
    digest = write_safetensors(path, headers, tensors.values())
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[n].equal(t) and loaded[n].dtype == t.dtype for n, t in tensors.items())
    assert len(path.read_bytes()) <= len(save(tensors, {"format": "pt"})) + 8
    assert digest == blake3_of(path.read_bytes())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_each_tensors_own_hash_is_that_of_its_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(300, 7), "b": torch.arange(5), "empty": torch.zeros(0, 3)}
    headers = [(name, TensorHeader(str(t.dtype).removeprefix("torch."), tuple(t.shape))) for name, t in tensors.items()]
    hashes: dict[str, str] = {}
    write_safetensors(tmp_path / "x.safetensors", headers, tensors.values(), hashes)
    assert hashes == {name: blake3_of(tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def test_one_tensor_is_written_while_the_next_is_made_and_never_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def values() -> Iterator[torch.Tensor]:
        nonlocal most
        for _ in range(6):
            value = torch.rand(200_000)
            alive.add(value)
            most = max(most, len(alive))
            yield value
            del value

    headers = [(f"t{i}", TensorHeader("float32", (200_000,))) for i in range(6)]
    write_safetensors(tmp_path / "x.safetensors", headers, values())
    assert most == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_an_error_while_writing_behind_is_raised() -> None:
    headers = [(f"t{i}", TensorHeader("float32", (50_000,))) for i in range(4)]
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(Path("/dev/full"), headers, (torch.rand(50_000) for _ in headers))


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_error_on_the_way_to_the_disk_is_raised_even_if_told_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer, "_SYNCED_AT_ONCE", 1000)
    monkeypatch.setattr("os.fsync", fsync)
    headers = [(f"t{i}", TensorHeader("float32", (300,))) for i in range(2)]  # two that are synced at once, and the end
    with pytest.raises(OSError, match="Input/output error"):
        write_safetensors(tmp_path / "x.safetensors", headers, (torch.rand(300) for _ in headers))
    assert len(calls) == failing


def test_nothing_local_in_the_documents(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    for name in ("README.md", "acemerge.yaml", "acemerge_manifest.json"):
        text = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in text
        assert not re.search(r"[\s\"'](/\w+)+/", text)
        assert sys.prefix not in text


def test_every_tensor_is_accounted_for(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())
    base, output = (load_file(folder / "model.safetensors") for folder in (models.base, tmp_path / "out"))
    assert {t["name"] for t in manifest["tensors"]} == base.keys() == output.keys()
    assert sum(manifest["totals"][a] for a in ("merged", "averaged", "kept", "copied")) == len(base)
    assert manifest["outputs"]["model.safetensors"] == blake3_of((tmp_path / "out/model.safetensors").read_bytes())


def test_the_share_of_weights_is_told(models: Models, tmp_path: Path) -> None:
    """One table of embeddings may outweigh all layers: counts of tensors say little."""
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())
    base = load_file(models.base / "model.safetensors")
    elements = dict.fromkeys(("merged", "averaged", "kept", "copied"), 0)
    for tensor in manifest["tensors"]:
        elements[tensor["action"]] += base[tensor["name"]].numel()
    assert {action: manifest["totals"][f"{action}_weights"] for action in elements} == elements
    total = sum(tensor.numel() for tensor in base.values())
    told = ", ".join(f"{count / total:.1%} {action}" for action, count in elements.items() if count)
    assert f"Of all weights: {told}." in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("method", ["dare_task_arithmetic", "dare_ties", "della"])
def test_random_methods_do_not_depend_on_shards_threads_or_order(models: Models, tmp_path: Path, method: str) -> None:
    acemerge.merge(models.base, models.experts, tmp_path / "one", method=method, seed=3)
    turned = models.experts[::-1]
    acemerge.merge(models.base, turned, tmp_path / "many", method=method, seed=3, shard_size="1kB", threads=2)
    one = load_file(tmp_path / "one/model.safetensors")
    many = {k: v for path in (tmp_path / "many").glob("*.safetensors") for k, v in load_file(path).items()}
    assert one.keys() == many.keys()
    for name, weight in one.items():
        torch.testing.assert_close(many[name], weight, rtol=0, atol=1e-6)
