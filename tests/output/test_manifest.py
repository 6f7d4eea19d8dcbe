"""The manifest: typed in memory, and the same bytes in the file, whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import acemerge
from acemerge.errors import InputError
from acemerge.output.manifest import (
    MANIFEST,
    ExportManifest,
    Manifest,
    TensorRecord,
    own_files,
    read_manifest,
    read_merge,
)
from acemerge.output.staging import check_output
from small_models import write_models


@pytest.fixture
def output(tmp_path: Path) -> Path:
    models = write_models(tmp_path)
    acemerge.merge(models.base, models.experts, tmp_path / "out", method="emr", shard_size="1kB")
    return tmp_path / "out"


def change(output: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((output / MANIFEST).read_text())
    edit(content)
    (output / MANIFEST).write_text(json.dumps(content))


def test_what_is_read_is_what_was_written(output: Path, tmp_path: Path) -> None:
    acemerge.export_expert(output, "expert-0", tmp_path / "task")
    for folder, kind in ((output, Manifest), (tmp_path / "task", ExportManifest)):
        manifest = read_manifest(folder)
        assert isinstance(manifest, kind)
        assert json.dumps(manifest.to_json(), indent=1) + "\n" == (folder / MANIFEST).read_text()


RECORD = {
    "name": "layers.0.weight", "shape": [2, 3], "dtype": "float32", "output_dtype": "float32", "action": "merged", "reason": "",
    "shard": "model.safetensors", "method": "own", "options": {"alpha": 1, "limit": None}, "orientation": "as stored",
    "experts": {"a": "w", "b": None}, "coefficient of a": 0.5, "gamma": 2, "norms": [1, 2.5], "branch": "left", "odd": True,
    "warnings": [], "hash": "blake3:" + "0" * 64,
}  # fmt: skip


def test_facts_are_whatever_a_method_tells() -> None:
    record = TensorRecord.model_validate(RECORD)
    assert list(record.facts) == ["coefficient of a", "gamma", "norms", "branch", "odd"]
    assert (record.number("coefficient of a"), record.numbers("norms"), record.text("branch")) == (0.5, [1, 2.5], "left")
    assert json.dumps(record.to_json()) == json.dumps(RECORD)


def test_a_fact_of_another_kind_is_none() -> None:
    record = TensorRecord.model_validate(RECORD | {"gamma": "<b>", "norms": [1, None], "branch": 3})
    assert record.number("gamma") is record.number("odd") is record.number("absent") is None
    assert record.text("branch") is None
    assert record.numbers("norms") == record.numbers("gamma") == []


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda content: content.pop("method"), "method: Field required"),
        (lambda content: content["tensors"][1].pop("action"), r"tensors\.1\.action: Field required"),
        (lambda content: content.update(files={"README.md": "0"}), r"files\.README\.md: .* is no hash"),
    ],
)
def test_every_reader_says_what_is_damaged(output: Path, edit: Callable[[dict[str, Any]], object], place: str) -> None:
    change(output, edit)
    for read in (read_manifest, read_merge):
        with pytest.raises(InputError, match=f"damaged, or of another version .*{place}.*; merge again"):
            read(output)


def test_a_tensor_without_a_scale_has_no_task_model(output: Path, tmp_path: Path) -> None:
    change(output, lambda content: [tensor.get("options", {}).update(alpha="1") for tensor in content["tensors"]])
    with pytest.raises(InputError, match=r"alpha is no number\); copy the whole output folder again"):
        acemerge.export_expert(output, "expert-0", tmp_path / "task")


def test_an_output_of_another_version_is_still_ours_to_replace(output: Path) -> None:
    known = own_files(output)
    change(output, lambda content: [content.pop(name) for name in ("tensors", "method")])
    assert own_files(output) == known
    check_output(output, overwrite=True)


@pytest.mark.parametrize("content", ["{}", '{"files": 1}', "[]", "{", '{"files": {}, "files": {}}', '{"a":' * 10_000])
def test_a_folder_without_an_account_is_never_replaced(output: Path, content: str) -> None:
    (output / MANIFEST).write_text(content)
    with pytest.raises(InputError, match="is not an acemerge output, so it is not replaced"):
        check_output(output, overwrite=True)
