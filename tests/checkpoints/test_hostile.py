"""Files that were made to do harm: no code runs, memory stays bounded, and one clear error comes soon."""

from __future__ import annotations

import json
import os
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.checkpoints.folder import open_checkpoint, read_json
from acemerge.checkpoints.untrusted import MAX_HEADER_BYTES
from acemerge.errors import InputError
from acemerge.recipe.recipe import make_recipe, read_recipe
from child import in_child
from small_models import Models, base_tensors, fine_tuned, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def refusal(work: Callable[[], object]) -> str:
    """The one error that some work ends with: short, and with nothing in it that a terminal would act on."""
    with pytest.raises(InputError) as caught:
        work()
    message = str(caught.value)
    assert len(message) < 2_000
    assert message.isascii()
    assert "\x1b" not in message
    return message


def refusal_of_merge(models: Models, output: Path) -> str:
    message = refusal(lambda: acemerge.merge(models.base, models.experts, output))
    assert not list(output.parent.glob(f"{output.name}*"))
    return message


# --- safetensors -------------------------------------------------------------------------------------------------------

F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def one(name: str = "a", **changes: Any) -> str:
    return json.dumps({name: F32 | changes})


HEADERS: dict[str, tuple[str | bytes, bytes, str]] = {
    "a tensor twice": ('{"a": %s, "a": %s}' % ((json.dumps(F32),) * 2), bytes(4), "the name 'a' is there twice"),
    "overlapping": (json.dumps({"a": F32, "b": F32}), bytes(4), "not a whole safetensors file"),
    "a hole": (one(data_offsets=[4, 8]), bytes(8), "not a whole safetensors file"),
    "out of range": (one(shape=[100], data_offsets=[0, 400]), bytes(4), "not a whole safetensors file"),
    "backwards": (one(data_offsets=[4, 0]), bytes(4), "not a whole safetensors file"),
    "a shape that lies": (one(shape=[10**11]), bytes(4), "not a whole safetensors file"),
    "a shape that overflows": (one(shape=[2**32, 2**32, 4]), bytes(4), "not a whole safetensors file"),
    "a negative shape": (one(shape=[-1]), bytes(4), "not a whole safetensors file"),
    "more data than tensors": (one(), bytes(400), "not a whole safetensors file"),
    "endless nesting": (b"[" * 1_000_000, b"", "not a whole safetensors file"),
    "not UTF-8": (b'{"\xff\xfe": 1}', b"", "not a whole safetensors file"),
    "a lone surrogate": (b'{"\\ud800": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4), "not a whole safetensors"),
    "terminal codes in a name": (one("a\x1b[2J"), bytes(4), "cannot be a tensor's name"),
    "a newline in a name": (one("a\nb"), bytes(4), "cannot be a tensor's name"),
    "an empty name": (one(""), bytes(4), "cannot be a tensor's name"),
    "an endless name": (one("a" * 100_000), bytes(4), "cannot be a tensor's name"),
    "an unknown dtype": (one(dtype="F33"), bytes(4), "not a whole safetensors file"),
    "a dtype nobody can merge": (one(dtype="F8_E8M0", shape=[4]), bytes(4), "dtype F8_E8M0, which acemerge cannot read"),
    "no tensors": ("{}", b"", "holds no tensors"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie(tmp_path: Path, case: str) -> None:
    header, data, complaint = HEADERS[case]
    encoded = header.encode() if isinstance(header, str) else header
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    message = refusal(lambda: open_checkpoint(path, "x"))
    assert complaint in message
    assert str(path) in message


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_a_header_without_end_is_not_even_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{")
        file.truncate(min(length, 2**33))  # sparse: the file is as large as it says
    assert f"a header of {length} bytes is not plausible" in refusal(lambda: open_checkpoint(path, "x"))


def test_empty_tensors_have_an_order(tmp_path: Path) -> None:
    """Their offsets do not give one, and the output's bytes must not depend on chance."""
    save_file({f"t{i}": torch.zeros(0, i) for i in (5, 3, 8, 1)}, tmp_path / "model.safetensors")
    orders = {tuple(open_checkpoint(tmp_path / "model.safetensors", "x").tensors) for _ in range(20)}
    assert orders == {("t1", "t3", "t5", "t8")}


# --- pickles -----------------------------------------------------------------------------------------------------------


def holds_itself() -> dict[str, Any]:
    content: dict[str, Any] = {}
    content["model"] = content
    return content


PICKLES: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: {"w": torch.ones(2, 2).to_sparse()}, "not a plain dense tensor"),
    "without data": (lambda: {"w": torch.ones(2, device="meta")}, "has no data in the file"),
    "more numbers than there are": (lambda: {"w": torch.ones(1).expand(10**12)}, "the file holds fewer numbers"),
    "complex128": (lambda: {"w": torch.ones(2, dtype=torch.complex128)}, "dtype complex128, which acemerge cannot read"),
    "itself": (holds_itself, "holds no state dict of tensors"),
    "a name that headers use": (lambda: {"__metadata__": torch.ones(2)}, "cannot be a tensor's name"),
    "a lone surrogate": (lambda: {"\ud800": torch.ones(2)}, "cannot be a tensor's name"),
    "a list": (lambda: [torch.ones(2)], "holds no state dict of tensors"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_are_no_state_dict(tmp_path: Path, case: str) -> None:
    make, complaint = PICKLES[case]
    torch.save(make(), tmp_path / "model.pt")
    assert complaint in refusal(lambda: open_checkpoint(tmp_path / "model.pt", "x"))


def rezip(source: Path, target: Path, change: Callable[[str, bytes], bytes], compression: int) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))


def test_a_zip_bomb(tmp_path: Path) -> None:
    """100 MB of zeros behind the pickle, in a file of 100 kB: refused without unpacking any of it."""
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.bin")
    bomb = tmp_path / "pytorch_model.bin"

    def inflate(name: str, data: bytes) -> bytes:
        return data + bytes(100_000_000) if name.endswith("data.pkl") else data

    rezip(tmp_path / "plain.bin", bomb, inflate, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1_000_000

    def open_it() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert "it may be a zip bomb" in refusal(lambda: open_checkpoint(bomb, "x"))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB

    ended = in_child(open_it)
    assert ended.code == 0, ended.err


def test_an_archive_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(50)}, tmp_path / "model.pt")
    content = bytearray((tmp_path / "model.pt").read_bytes())
    entry = content.rindex(b"PK\x01\x02")  # of the central directory
    content[entry + 20 : entry + 28] = struct.pack("<II", 2**31, 2**31)
    (tmp_path / "model.pt").write_bytes(content)
    message = refusal(lambda: open_checkpoint(tmp_path / "model.pt", "x"))
    assert "claim to be larger than the file" in message or "damaged" in message


# --- JSON and YAML -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"weight_map": {}, "weight_map": {}}', "is there twice"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "cannot be read as JSON"),
        (b'{"a": "\xff\xfe"}', "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b"null", "expected a JSON object"),
    ],
)
def test_json_that_is_no_config(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert complaint in refusal(lambda: read_json(tmp_path / "config.json"))


def test_json_without_end_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    assert "far more than such a file ever needs" in refusal(lambda: read_json(tmp_path / "config.json"))


LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        (LAUGHS + "base: *i\nexperts: [x]\n", "aliases"),
        ("base: &b [*b]\nexperts: [x]\n", "aliases"),
        ("base: !!python/object/apply:os.system [touch ran]\nexperts: [x]\n", "could not determine a constructor"),
        ("base: !!python/name:os.system\nexperts: [x]\n", "could not determine a constructor"),
        ("base: a\nbase: b\nexperts: [x]\n", "'base' is given twice, the second time in line 2"),
        ("base: a\nexperts: [x]\ntensors:\n- match: *embed*\n", "needs quotes: match: '*embeddings*'"),
        ("base: a\nexperts: [x]\ntensors:\n- match: *embed\n", "needs quotes: match: '*embeddings*'"),
        ("base: a\nexperts: [x]\noptions: {epsilon: 1, epsilon: 2}\n", "'epsilon' is given twice"),
        ("base: " + "[" * 20_000, "nested too deeply"),
        ("base: " + "a" * 300_000, "far more than such a file ever needs"),
        ("base: [" + "1, " * 50_000 + "1]\nexperts: [x]\n", "base: Input should be a valid string"),
        ("base: a\x00b\nexperts: [x]\n", "cannot be read as YAML"),
    ],
)
def test_yaml_that_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, complaint: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert complaint in refusal(lambda: make_recipe(read_recipe(tmp_path / "recipe.yaml")))
    assert not (tmp_path / "ran").exists()


def test_a_recipe_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"base: \xff\xfe\n")
    assert "cannot be read as YAML" in refusal(lambda: read_recipe(tmp_path / "recipe.yaml"))


# --- names and links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["../expert-1/model.safetensors", "/etc/passwd", "a/../../b", "..", "", "a\x00b", "a\x1b[2J"])
def test_shards_outside_the_folder(models: Models, tmp_path: Path, shard: str) -> None:
    (models.experts[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layers.0.weight": shard}}))
    message = refusal_of_merge(models, tmp_path / "out")
    assert "model.safetensors.index.json: shard names must be plain file names" in message


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "notes.txt"])
def test_links_that_leave_the_folder(models: Models, tmp_path: Path, name: str) -> None:
    """Otherwise a stranger's folder could have any file of yours copied into an output that you publish."""
    secret = tmp_path / "secret"
    secret.write_bytes((models.base / "model.safetensors").read_bytes() if name == "model.safetensors" else b"{}")
    (models.base / name).unlink(missing_ok=True)
    (models.base / name).symlink_to(secret)
    message = refusal_of_merge(models, tmp_path / "out")
    assert f"{name}: a link that leaves the model's folder, to {secret}" in message


def test_links_within_the_folder_and_the_hub_cache_are_fine(models: Models, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub/models--x--y/snapshots/abc", tmp_path / "hub/models--x--y/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for path in models.base.iterdir():
        path.rename(blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")
    expert = models.experts[0]
    (tmp_path / "anywhere").touch()
    (expert / "optimizer.pt").symlink_to(tmp_path / "anywhere")  # nobody reads or copies it
    (expert / "model.safetensors").rename(expert / "weights.data")
    (expert / "model.safetensors").symlink_to("weights.data")
    acemerge.merge(snapshot, models.experts, tmp_path / "out")


def test_pipes_and_devices_are_not_opened(models: Models, tmp_path: Path) -> None:
    (models.experts[0] / "model.safetensors").unlink()
    os.mkfifo(models.experts[0] / "model.safetensors")
    os.mkfifo(models.experts[0] / "tokenizer.json")
    assert "expected model.safetensors" in refusal_of_merge(models, tmp_path / "out")


def test_names_that_look_alike(models: Models, tmp_path: Path) -> None:
    tensors = fine_tuned(base_tensors(), 0)
    tensors["layers.0.w\u0435ight"] = tensors.pop("layers.0.weight")  # a Cyrillic letter
    save_file(tensors, models.experts[0] / "model.safetensors")
    with pytest.raises(InputError) as caught:
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert r"(not plain ASCII: 'layers.0.w\u0435ight')" in str(caught.value)
    assert "lacks 'layers.0.weight'" in str(caught.value)


# --- an output from somebody else --------------------------------------------------------------------------------------


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    models = write_models(tmp_path)
    for expert in models.experts:
        tensors = load_file(expert / "model.safetensors") | {"classifier.weight": torch.ones(2, 8)}
        save_file(tensors, expert / "model.safetensors", metadata={"format": "pt"})
    acemerge.merge(models.base, models.experts, tmp_path / "merged", method="emr")
    return tmp_path / "merged"


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        (
            "acemerge_manifest.json",
            lambda text: text.replace('"per_task": true', '"per_task": 77'),
            "damaged, or of another version",
        ),
        ("acemerge_manifest.json", lambda text: "[]", "expected a JSON object"),
        (
            "heads/expert-0/head.json",
            lambda text: '{"backbone": {"a": "../x"}}',
            "names tensors that the merged model does not have",
        ),
        ("heads/expert-0/head.json", lambda text: '{"backbone": [1]}', "names tensors that the merged model does not have"),
        ("heads/expert-0/config.json", None, "a link that leaves the model's folder"),
        ("tasks/expert-0/model.safetensors", None, "missing, but named in"),
    ],
)
def test_an_output_that_was_tampered_with(
    merged: Path, tmp_path: Path, file: str, change: Callable[[str], str] | None, complaint: str
) -> None:
    path = merged / file
    if change:
        path.write_text(change(path.read_text()))
    else:
        path.unlink()
        if path.suffix == ".json":
            path.symlink_to("/etc/hostname")
    with pytest.raises(InputError, match=complaint):
        acemerge.export_expert(merged, "expert-0", tmp_path / "task")
    assert not list(tmp_path.glob("task*"))


def test_parts_that_do_not_fit(merged: Path, tmp_path: Path) -> None:
    path = merged / "tasks/expert-0/model.safetensors"
    parts = load_file(path)
    parts["layers.0.weight:mask"] = parts["layers.0.weight:mask"][:-1].clone()
    save_file(parts, path)
    with pytest.raises(InputError, match=r"for 'layers\.0\.weight' does not fit the merged tensor"):
        acemerge.export_expert(merged, "expert-0", tmp_path / "task")
    assert not list(tmp_path.glob("task*"))
