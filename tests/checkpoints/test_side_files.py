"""What lies beside the weights: copied, left out or left alone, and the same bytes every time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoint_files import merge
from model_zoo import Models, file_hashes

SIDE_FILES = {
    "tokenizer.json": b'{"model":  {"vocab": {"\xc3\xa9": 0}}}\r\n',
    "vocab.txt": b"[PAD]\n[UNK]\n\xff\xfe",
    "chat_template.jinja": b"{% for m in messages %}{{ m }}{% endfor %}",
    "preprocessor_config.json": b"{}",
}


@pytest.fixture
def furnished(bert: Models, tmp_path: Path) -> Models:
    """A base with a tokenizer and other company, and experts with their own."""
    base = shutil.copytree(bert.base, tmp_path / "in" / "base")
    red = shutil.copytree(bert.experts["red"], tmp_path / "in" / "red")
    for name, content in SIDE_FILES.items():
        (base / name).write_bytes(content)
        (red / name).write_bytes(b"the expert's own " + content)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nabout the base\n")
    (base / "training_args.bin").write_bytes(b"not weights")
    (base / "runs").mkdir()
    (base / "runs" / "events.log").write_text("noise")
    return Models(base, {**bert.experts, "red": red})


def test_side_files_are_copied_byte_for_byte(furnished: Models, tmp_path: Path) -> None:
    merge(furnished, tmp_path / "out")
    copied = {*SIDE_FILES, "config.json"}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in copied} == {
        name: (furnished.base / name).read_bytes() for name in copied
    }


def test_the_output_holds_what_it_should_and_no_more(furnished: Models, tmp_path: Path) -> None:
    merge(furnished, tmp_path / "out")
    own = {"model.safetensors", "config.json", "README.md", "acemerge.yaml", "acemerge_manifest.json", "heads"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == own | set(SIDE_FILES)
    assert "about the base" not in (tmp_path / "out" / "README.md").read_text()


def test_the_voices_of_a_model_that_speaks_are_no_weights(furnished: Models, tmp_path: Path) -> None:
    for name in ("spk_dict.pt", "optimizer.pt"):
        (furnished.base / name).write_bytes(b"not weights")
    merge(furnished, tmp_path / "out")
    assert (tmp_path / "out" / "spk_dict.pt").read_bytes() == b"not weights"
    assert not (tmp_path / "out" / "optimizer.pt").exists()


def test_nothing_local_is_written(furnished: Models, tmp_path: Path) -> None:
    merge(furnished, tmp_path / "out")
    texts = [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".md", ".yaml", ".json")]
    assert [path.name for path in texts if str(tmp_path).encode() in path.read_bytes()] == []


def test_inputs_are_untouched(furnished: Models, tmp_path: Path) -> None:
    before = [file_hashes(folder) for folder in furnished.folders]
    merge(furnished, tmp_path / "out")
    assert [file_hashes(folder) for folder in furnished.folders] == before


@pytest.mark.parametrize("shard_size", [4_000, 1_000_000])
def test_two_merges_give_the_same_bytes(furnished: Models, tmp_path: Path, shard_size: int) -> None:
    merge(furnished, tmp_path / "first", shard_size=shard_size)
    merge(furnished, tmp_path / "second", shard_size=shard_size)
    assert file_hashes(tmp_path / "first") == file_hashes(tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "in", "second"]
