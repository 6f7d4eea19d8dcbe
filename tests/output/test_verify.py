"""Every tensor is accounted for, and an output can be checked against its account at any time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
import model_zoo as zoo
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.errors import InputError
from acemerge.output.verify import verify_output
from child import command, in_child
from small_models import write_models

MANIFEST = "acemerge_manifest.json"
FAMILIES = [
    *((build, {}) for build in (zoo.bert, zoo.roberta, zoo.distilbert, zoo.gpt2, zoo.t5, zoo.vit)),
    *((build, {}) for build in (zoo.clip, zoo.clip_vision, zoo.open_clip, zoo.unknown)),
    (zoo.llama, {"tied": False}),
    (zoo.llama, {"tied": True}),
]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with zoo.quiet_transformers():
        yield


@pytest.mark.parametrize(("build", "settings"), FAMILIES)
def test_inputs_are_merged_averaged_kept_or_copied_in_every_family(
    models_of: Callable[..., zoo.Models], build: Callable[..., zoo.Models], settings: dict[str, bool], tmp_path: Path
) -> None:
    models = models_of(build, **settings)
    acemerge.merge(models.base, models.experts, tmp_path / "out", shard_size=20_000)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    fates = {tensor["name"]: tensor["action"] for tensor in manifest["tensors"]}
    by_fate = {fate: {name for name, own in fates.items() if own == fate} for fate in ("merged", "averaged", "kept", "copied")}
    assert {fate: len(names) for fate, names in by_fate.items()} == {fate: manifest["totals"][fate] for fate in by_fate}

    # The base: every tensor has one fate, or is a second name of one that has.
    base = open_checkpoint(models.base, "base").tensors.keys()
    assert set().union(*by_fate.values()) | manifest["omitted"].keys() == base
    assert set(manifest["omitted"].values()) <= fates.keys()

    # The experts: every tensor is in the merge, in the expert's head, or named as unused.
    for expert, path in models.experts.items():
        used = {t["experts"][expert] for t in manifest["tensors"] if expert in t.get("experts", {})}
        head, unused = set(manifest["heads"].get(expert, [])), set(manifest["unused"][expert])
        assert used | head | unused == open_checkpoint(path, expert).tensors.keys()
        assert len(used) + len(head) + len(unused) == len(used | head | unused)
        assert used

    with pytest.raises(InputError, match="nowhere: no such folder"):
        verify_output(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"manifest\.json: is a file, not a folder"):
        verify_output(tmp_path / "out" / "acemerge_manifest.json")
    found = verify_output(tmp_path / "out")
    assert not found.problems
    assert (found.tensors, found.foreign) == (len(fates), [])


def test_the_account_of_one_tensor_is_complete(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    acemerge.merge(models.base, models.experts, tmp_path / "out", tensors=[{"match": "layers.1.*", "options": {"reach": 0.5}}])
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    record = next(tensor for tensor in manifest["tensors"] if tensor["name"] == "layers.1.weight")
    assert record["experts"] == {f"expert-{i}": "layers.1.weight" for i in range(3)}
    assert (record["action"], record["reason"], record["method"]) == ("merged", "rule 'layers.1.*'", "ace_auto")
    assert {"overlap", "rank", "strength", "length", "norm", "largest_task_norm", "norm_ratio", "shard", "hash"} <= record.keys()
    assert record["options"]["reach"] == 0.5


@pytest.fixture
def output(tmp_path: Path) -> Path:
    models = write_models(tmp_path)
    acemerge.merge(models.base, models.experts, tmp_path / "out", method="emr", shard_size="1kB")
    return tmp_path / "out"


def flip(path: Path, offset: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def swap_tensors(output: Path) -> None:
    """A file that is sound in itself."""
    path = next(p for p in output.glob("*.safetensors") if "layers.0.weight" in load_file(p))
    tensors = load_file(path)
    tensors["layers.0.weight"] = torch.zeros(12, 8)
    save_file(tensors, path, metadata={"format": "pt"})


TAMPERING: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a weight": (lambda out: flip(min(out.glob("*.safetensors"))), "its content has changed"),
    "a bit of a part": (lambda out: flip(min(out.glob("tasks/expert-1/*"))), "tasks/expert-1/model-0000"),
    "other weights": (swap_tensors, "tensor 'layers.0.weight' in model-0000"),
    "a missing shard": (lambda out: min(out.glob("*.safetensors")).unlink(), "missing"),
    "an edited config": (lambda out: (out / "config.json").write_text("{}"), "config.json: its content has changed"),
    "a file for the loader": (lambda out: save_file({}, out / "model.safetensors"), "a loader may take it"),
    "a truncated shard": (lambda out: min(out.glob("*.safetensors")).write_bytes(b""), "not a whole safetensors file"),
}


@pytest.mark.parametrize("case", TAMPERING)
def test_what_has_changed_is_named(output: Path, case: str) -> None:
    assert not verify_output(output).problems
    change, complaint = TAMPERING[case]
    change(output)
    assert complaint in "\n".join(verify_output(output).problems)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[:-100], "cannot be read as JSON"),
        (lambda text: text.replace('"files"', '"filed"'), "damaged, or of another version"),
        (lambda text: text.replace('"hash": "', '"hash": "x'), "damaged, or of another version"),
    ],
)
def test_a_damaged_account(output: Path, damage: Callable[[str], str], complaint: str) -> None:
    path = output / MANIFEST
    path.write_text(damage(path.read_text()))
    with pytest.raises(InputError, match=complaint):
        verify_output(output)


def test_an_account_that_does_not_add_up(output: Path) -> None:
    path = output / MANIFEST
    path.write_text(path.read_text().replace('"merged": ', '"merged": 1'))
    assert any("is not the number of tensors" in problem for problem in verify_output(output).problems)


def test_an_account_that_names_files_elsewhere(output: Path) -> None:
    manifest = json.loads((output / MANIFEST).read_text())
    manifest["files"]["../base/config.json"] = "blake3:" + "0" * 64
    (output / MANIFEST).write_text(json.dumps(manifest))
    assert f"../base/config.json: named in {MANIFEST}, but outside the folder" in verify_output(output).problems


def test_the_command_and_its_exit_codes(output: Path, tmp_path: Path) -> None:
    (output / "eval.txt").write_text("mine")
    ended = in_child(lambda: command("verify", output))
    assert ended.code == 0
    assert "whole; " in ended.out
    assert "note: eval.txt is not from acemerge" in ended.out
    flip(min(output.glob("*.safetensors")))
    ended = in_child(lambda: command("verify", output, "--json"))
    assert ended.code == 1
    assert json.loads(ended.out)["whole"] is False
    assert "its values have changed" in ended.err
    ended = in_child(lambda: command("verify", tmp_path / "base"))
    assert (ended.code, "is not an output of acemerge" in ended.err) == (2, True)


def test_a_tasks_model_can_be_verified_too(output: Path, tmp_path: Path) -> None:
    acemerge.export_expert(output, "expert-0", tmp_path / "task")
    assert not verify_output(tmp_path / "task").problems
    flip(tmp_path / "task/model.safetensors")
    assert verify_output(tmp_path / "task").problems == ["model.safetensors: its content has changed"]
