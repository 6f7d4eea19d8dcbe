"""What the weights say of the experts: no fine-tune of this base, or the base itself."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import acemerge
import lora_zoo
from acemerge.errors import PreflightError
from acemerge.planning.kinship import seems_the_base
from command import Command
from small_models import Models, base_tensors, fine_tuned, write_model, write_models

LLAMA = "LlamaForCausalLM"
STRANGER = "'stranger' does not look like a fine-tune of this base"
COPY = "'copy' is a copy of the base, weight for weight"


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path / "models", experts=1)


def test_a_stranger_is_refused_with_everything_else_that_is_wrong(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "stranger", base_tensors(seed=9))
    monkeypatch.setattr("acemerge.execute.pipeline.check_space", lambda *_: "the disk is too small")
    with pytest.raises(PreflightError, match="pass --force to merge it all the same") as caught:
        acemerge.merge(models.base, [*models.experts, tmp_path / "stranger"], tmp_path / "out")
    assert len(caught.value.problems) == 2
    assert STRANGER in caught.value.problems[1]
    assert {path.name for path in tmp_path.iterdir()} == {"models", "stranger"}, "nothing is written"


@pytest.mark.parametrize("flags", [(), ("-q",)])
def test_on_the_command_line_it_is_refused_or_warned_of(
    models: Models, tmp_path: Path, run: Command, flags: tuple[str, ...]
) -> None:
    arguments = ("merge", *models.arguments, write_model(tmp_path / "stranger", base_tensors(seed=9)), "-o", tmp_path / "out")
    code, out, err = run(*arguments, *flags)
    assert (code, out) == (2, "")
    assert STRANGER in err
    code, _, err = run(*arguments, *flags, "--force")
    assert code == 0
    assert f"warning: expert {STRANGER}" in err


@pytest.mark.parametrize("name", ["stranger", "copy"])
def test_it_is_told_and_noted(models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    if name == "copy":
        shutil.copytree(models.base, tmp_path / name)
    else:
        write_model(tmp_path / name, base_tensors(seed=9))
    said = STRANGER if name == "stranger" else COPY
    result = acemerge.merge(models.base, [*models.experts, tmp_path / name], tmp_path / "out", force=name == "stranger")
    assert f"warning: expert {said}" in capfd.readouterr().err
    assert any(said in warning for warning in result.warnings)
    [note] = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())["notes"]
    assert said in note


def test_an_expert_given_twice_is_told_and_noted(models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(models.experts[0], tmp_path / "again")
    other = write_model(tmp_path / "other", fine_tuned(base_tensors(), 7))
    result = acemerge.merge(models.base, [*models.experts, other, tmp_path / "again"], tmp_path / "out")
    [said] = result.warnings
    assert "experts 'expert-0' and 'again' are the same, weight for weight" in said
    assert f"warning: {said}" in capfd.readouterr().err
    assert json.loads((tmp_path / "out/acemerge_manifest.json").read_text())["notes"] == [said]


def test_an_adapter_given_twice_is_told(tmp_path: Path, run: Command) -> None:
    base = lora_zoo.write_base(tmp_path / "base", LLAMA)
    settings: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["k_proj"], "strength": 0.01}
    one, other = (
        lora_zoo.write_adapter(base, tmp_path / name, LLAMA, seed=seed, **settings) for seed, name in enumerate(("one", "other"))
    )
    shutil.copytree(one, tmp_path / "again")
    _, _, err = run("merge", base, one, other, tmp_path / "again", "-o", tmp_path / "out", "-q")
    assert err.startswith("warning: experts 'one' and 'again' are the same, weight for weight: what they changed counts twice")
    config = tmp_path / "again/adapter_config.json"  # the same factors, multiplied by more, are another change
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 16}))
    assert run("merge", base, one, other, tmp_path / "again", "-o", tmp_path / "stronger", "-q") == (0, "", "")


def test_an_adapter_that_saves_a_stranger_s_module_is_refused(tmp_path: Path, run: Command) -> None:
    base, other = (lora_zoo.write_base(tmp_path / name, LLAMA, seed=seed) for seed, name in enumerate(("base", "other")))
    settings: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "strength": 0.01}
    of_base, of_other = (
        lora_zoo.write_adapter(model, tmp_path / f"of-{model.name}", LLAMA, **settings) for model in (base, other)
    )
    code, _, err = run("merge", base, of_base, of_other, "-o", tmp_path / "out", "-q")
    assert code == 2
    assert "'of-other' does not look like a fine-tune of this base" in err
    assert "'of-base'" not in err


def test_fine_tunes_are_not_spoken_of(models: Models, tmp_path: Path) -> None:
    half = base_tensors() | {"layers.1.weight": fine_tuned(base_tensors(), 5)["layers.1.weight"]}
    write_model(tmp_path / "half", half)  # most of it is as in the base
    assert acemerge.merge(models.base, [*models.experts, tmp_path / "half"], tmp_path / "out").warnings == []


def test_state_dicts_in_memory_are_looked_at_too() -> None:
    base = base_tensors()
    with pytest.warns(UserWarning, match=STRANGER):
        acemerge.merge_state_dicts(base, {"good": fine_tuned(base, 0), "stranger": base_tensors(seed=9)})
    with pytest.warns(UserWarning, match=COPY):
        acemerge.merge_state_dicts(base, {"good": fine_tuned(base, 0), "copy": base})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acemerge.merge_state_dicts(base, {"good": fine_tuned(base, 0), "better": fine_tuned(base, 1)})


def test_a_base_given_as_an_expert_is_told(models: Models, tmp_path: Path, run: Command) -> None:
    first, second, third = (
        write_model(tmp_path / name, fine_tuned(base_tensors(), seed=seed)) for seed, name in enumerate(("a", "b", "c"))
    )
    code, _, err = run("merge", first, models.base, second, third, "-o", tmp_path / "swapped", "-q")
    assert code == 0
    [line] = err.splitlines()
    assert line.startswith("warning: expert 'base' looks like the model that the others were made from")
    assert line.endswith("if it is the base, give it first")
    code, _, err = run("diagnose", first, models.base, second, "--quick", "-q")
    assert (code, "Expert 'base' looks like the model that the others were made from" in err) == (0, True)
    assert run("merge", models.base, first, second, third, "-o", tmp_path / "right", "-q") == (0, "", "")


def test_experts_that_share_a_direction_are_no_bases_of_each_other() -> None:
    together = [[1.0, 0.7, 0.7], [0.7, 1.0, 0.7], [0.7, 0.7, 1.0]]
    assert not any(seems_the_base(together, expert) for expert in range(3))
    on_the_way = [[1.0, 2.0], [2.0, 4.0]]  # a checkpoint half way to the other expert
    assert not any(seems_the_base(on_the_way, expert) for expert in range(2))
    assert [seems_the_base([[1.0, 1.0], [1.0, 2.0]], expert) for expert in range(2)] == [True, False]
    assert not seems_the_base([[1.0]], 0)
