"""Outputs with a model per task: interrupted, damaged, in part, loaded by transformers, and what users are told of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import acemerge
import model_zoo as zoo
from acemerge.cli.app import main
from acemerge.errors import InputError
from acemerge.execute import shard
from interruption import one_by_one, stop_at
from per_task_cases import REFERENCES, Array, every_method
from per_task_models import Models, assert_is, check_tasks, write


def interrupt(models: Models, method: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("layers.1.weight", calls)))
        with pytest.raises(KeyboardInterrupt):
            models.merge("out", method, shard_size="1kB")
    assert any((models.root / "out.partial/tasks/e0").iterdir())
    return calls


@every_method
def test_a_resumed_merge_keeps_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    models = write(tmp_path)
    whole = models.merge("whole", method, shard_size="1kB")
    done = interrupt(models, method, monkeypatch)
    calls: list[str] = []
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("", calls)))
    output = models.merge("out", method, shard_size="1kB")
    assert done[0] not in calls
    assert zoo.file_hashes(output) == zoo.file_hashes(whole)
    check_tasks(models, output, method)


@pytest.mark.parametrize("damage", ["changed", "removed"])
def test_a_shard_whose_parts_were_damaged_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    models = write(tmp_path)
    whole = models.merge("whole", "emr", shard_size="1kB")
    interrupt(models, "emr", monkeypatch)
    part = min((tmp_path / "out.partial/tasks/e0").iterdir())
    if damage == "changed":
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    else:
        part.unlink()
    assert zoo.file_hashes(models.merge("out", "emr", shard_size="1kB")) == zoo.file_hashes(whole)


def test_another_method_starts_over_without_the_old_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = write(tmp_path)
    interrupt(models, "emr", monkeypatch)
    output = models.merge("out", "average", shard_size="1kB")
    assert not (output / "tasks").exists()
    assert not (output / "shared").exists()


def test_a_missing_file_of_parts_is_named(tmp_path: Path) -> None:
    output = write(tmp_path).merge("out", "emr")
    (output / "tasks/e1/model.safetensors").unlink()
    with pytest.raises(InputError, match=r"tasks/e1/model.safetensors: missing, but named in acemerge_manifest.json"):
        acemerge.export_expert(output, "e1", tmp_path / "task")
    assert not (tmp_path / "task").exists()


def test_an_unknown_expert_gets_a_hint(tmp_path: Path) -> None:
    output = write(tmp_path).merge("out", "twin", rank_share=0.0)  # no part at all, yet three tasks
    with pytest.raises(InputError, match=r"'e': did you mean 'e\d'\? Known: e0, e1, e2"):
        acemerge.export_expert(output, "e", tmp_path / "task")


def test_the_manifest_has_the_parts_hashes(tmp_path: Path) -> None:
    output = write(tmp_path).merge("out", "emr")
    manifest = json.loads((output / "acemerge_manifest.json").read_text())
    hashes = zoo.file_hashes(output)
    assert manifest["parts"] == {path: sha for path, sha in hashes.items() if path.startswith(("shared/", "tasks/"))}
    assert len(manifest["parts"]) == 4
    assert manifest["per_task"] is True


def test_rules_may_mix_methods_and_scales(tmp_path: Path) -> None:
    models = write(tmp_path)
    rules: list[dict[str, Any]] = [
        {"match": "layers.0.*", "method": "tall_mask", "options": {"alpha": 0.7}},
        {"match": "odd.*", "method": "twin"},
        {"match": "layers.1.*", "do": "average"},
    ]
    result = acemerge.merge(tmp_path / "base", models.folders, tmp_path / "out", method="average", alpha=0.9, tensors=rules)
    assert [re.findall(r"method '(\w+)'", note)[0] for note in result.plan.notes] == ["tall_mask", "twin"]
    exported = load_file(acemerge.export_expert(tmp_path / "out", "e2", tmp_path / "task") / "model.safetensors")
    root = load_file(tmp_path / "out/model.safetensors")
    expected = {method: models.expected(method)["e2"] for method in ("tall_mask", "twin")}
    for name, found in exported.items():
        method = "tall_mask" if name.startswith("layers.0") else "twin" if name.startswith("odd") else None
        if method:
            assert_is({name: found}, {name: expected[method][name]}, models.base)
        else:
            assert found.equal(root[name])


def test_a_tensor_that_an_expert_lacks_comes_from_the_shared_model(tmp_path: Path) -> None:
    models = write(tmp_path)
    zoo.rewrite(tmp_path / "e1", tmp_path / "lacking", lambda own: {n: w for n, w in own.items() if n != "odd.weight"})
    folders = {**models.folders, "e1": tmp_path / "lacking"}
    acemerge.merge(tmp_path / "base", folders, tmp_path / "out", method="emr", missing="skip")
    exported = load_file(acemerge.export_expert(tmp_path / "out", "e1", tmp_path / "task") / "model.safetensors")
    root = load_file(tmp_path / "out/model.safetensors")
    assert exported["odd.weight"].equal(root["odd.weight"])
    assert not exported["layers.0.weight"].equal(root["layers.0.weight"])


def task_vectors_of(models: zoo.Models, names: Mapping[str, str]) -> dict[str, Array]:
    base = zoo.read_tensors(models.base)
    experts = [zoo.read_tensors(folder) for folder in models.experts.values()]
    return {ours: torch.stack([e[theirs] - base[ours] for e in experts]).double().numpy() for theirs, ours in names.items()}


@every_method
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loaded_models_follow_the_formula(tmp_path: Path, method: str, family: str) -> None:
    """GPT-2 classifiers with heads of their own on a language model's backbone; Llamas without any."""
    models = zoo.gpt2(tmp_path) if family == "gpt2" else zoo.llama(tmp_path, tied=False)
    acemerge.merge(models.base, models.experts, tmp_path / "out", method=method)
    with zoo.quiet_transformers():
        loaded = acemerge.load_expert_head(tmp_path / "out", "blue")
    state, expert, base = loaded.state_dict(), zoo.read_tensors(models.experts["blue"]), zoo.read_tensors(models.base)
    own = {"score.weight"} if family == "gpt2" else set()
    assert state.keys() == expert.keys()
    assert all(state[name].equal(expert[name]) for name in own)
    names = {theirs: theirs for theirs in expert if theirs not in own}
    change = REFERENCES[method](task_vectors_of(models, names))[list(models.experts).index("blue")]
    expected = {name: base[name].double() + torch.from_numpy(change[name]) for name in names}
    assert_is({name: state[name] for name in names}, expected, base)
    tokens = torch.tensor([[5, 9, 31, 7]])
    with torch.no_grad():
        assert torch.isfinite(loaded(input_ids=tokens).logits).all()


@dataclass(frozen=True)
class Command:
    """Runs `acemerge ...` in this process."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> str:
        self.monkeypatch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
        main_error = None
        try:
            main()
        except SystemExit as error:
            main_error = error.code
        out, err = self.capsys.readouterr()
        assert not main_error, err
        return " ".join(out.split())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@every_method
def test_it_is_said_everywhere_that_this_is_not_one_merged_model(tmp_path: Path, command: Command, method: str) -> None:
    models = write(tmp_path)
    arguments = [tmp_path / "base", *models.folders.values(), "-m", method]
    plan = command("plan", *arguments)
    assert f"note: method '{method}' makes one model per task, not one merged model" in plan
    assert "writes at most" in plan
    assert "shared/ and tasks/" in plan
    assert json.loads(command("plan", *arguments, "--json"))["per_task"] is True
    assert "one model per task, not one merged model" in command("merge", *arguments, "-o", tmp_path / "out")
    described = command("methods", method)
    assert "ONE MODEL PER TASK, not one merged model" in described
    assert "`acemerge task OUT EXPERT -o DIR`" in described
    assert json.loads(command("methods", method, "--json"))[0]["per_task"] is True
    card = (tmp_path / "out/README.md").read_text()
    assert "One model per task, not one merged model, made from 3 fine-tuned ones" in card
    assert "## Not one merged model" in card
    assert "acemerge task this-folder e0 -o OUT" in card
    assert "`e0`, `e1`, `e2`" in card


def test_methods_that_make_one_model_say_so(tmp_path: Path, command: Command) -> None:
    models = write(tmp_path)
    out = command("merge", tmp_path / "base", *models.folders.values(), "-m", "average", "-o", tmp_path / "out")
    assert "per task" not in out
    assert "One model made from 3 fine-tuned ones" in (tmp_path / "out/README.md").read_text()
    assert "per task" not in (tmp_path / "out/README.md").read_text()
    listed = command("methods")
    assert "One model per task, not one merged model" in listed
    assert json.loads(command("methods", "average", "--json"))[0]["per_task"] is False


def test_the_task_command(tmp_path: Path, command: Command) -> None:
    models = write(tmp_path)
    output = models.merge("out", "emr")
    assert "the merged model for the task of 'e1'" in command("task", output, "e1", "-o", tmp_path / "task")
    assert_is(load_file(tmp_path / "task/model.safetensors"), models.expected("emr")["e1"], models.base)
    assert "low-rank factors" in command("task", "--help")
