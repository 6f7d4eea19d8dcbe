"""Everything headers can show to be wrong is reported at once, before work, and no output appears."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.checkpoints.source import resolve_source
from acemerge.errors import InputError, MergeError, PreflightError
from small_models import Models, base_tensors, fine_tuned, write_model, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def problems(models: Models, output: Path, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        acemerge.merge(models.base, models.experts, output, **options)  # type: ignore[arg-type]
    assert not list(output.parent.glob(f"{output.name}*"))
    return str(caught.value)


def test_all_problems_at_once(models: Models, tmp_path: Path) -> None:
    edit(models.experts[0], lambda t: t.pop("layers.0.weight"))
    edit(models.experts[1], lambda t: t.update({"layers.1.weight": torch.zeros(6, 13)}))
    edit(models.experts[2], lambda t: t.update({"layers.9.weight": torch.zeros(2, 2), "embed.weight": torch.zeros(20, 8).long()}))
    message = problems(models, tmp_path / "out")
    assert message.startswith("4 problems")
    assert f"expert 'expert-0' ({models.experts[0]}) lacks 'layers.0.weight'" in message
    assert "tensor 'layers.1.weight': shape [6, 12] in base 'base'" in message
    assert f"[6, 13] in expert 'expert-1' ({models.experts[1]})" in message
    assert "tensor 'layers.9.weight' [2, 2] of expert 'expert-2'" in message
    assert "tensor 'embed.weight': float32 in base" in message
    assert "int64 in expert 'expert-2'" in message
    assert message.count("do: head") == 2  # the fixes are spelled out


def test_missing_tensors_can_be_skipped(models: Models, tmp_path: Path) -> None:
    edit(models.experts[0], lambda t: t.pop("layers.0.weight"))
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", missing="skip", method="average")
    assert "expert 'expert-0' lacks 'layers.0.weight'" in result.warnings[0]
    base = load_file(models.base / "model.safetensors")
    others = [load_file(expert / "model.safetensors")["layers.0.weight"] for expert in models.experts[1:]]
    merged = load_file(tmp_path / "out/model.safetensors")["layers.0.weight"]
    torch.testing.assert_close(merged, base["layers.0.weight"] + sum(w - base["layers.0.weight"] for w in others) / 2)


def test_an_extra_tensor_can_be_declared_a_head(models: Models, tmp_path: Path) -> None:
    edit(models.experts[2], lambda t: t.update({"probe.weight": torch.ones(2, 8)}))
    acemerge.merge(models.base, models.experts, tmp_path / "out", tensors=[{"match": "probe.*", "do": "head"}])
    assert load_file(tmp_path / "out/heads/expert-2/head.safetensors")["probe.weight"].equal(torch.ones(2, 8))


def test_a_pattern_that_matches_nothing(models: Models, tmp_path: Path) -> None:
    assert "'layer.*' matches no tensor" in problems(models, tmp_path / "out", tensors=[{"match": "layer.*", "do": "keep"}])


def test_the_same_model_twice(models: Models, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(models.experts[0])
    twice = Models(models.base, [models.experts[0], link])
    assert "are the same files" in problems(twice, tmp_path / "out")
    assert "are the same files" in problems(Models(models.base, [models.base]), tmp_path / "out")


def test_nothing_in_common(models: Models, tmp_path: Path) -> None:
    stranger = write_model(tmp_path / "stranger", {"classifier.weight": torch.zeros(3, 3)})
    message = problems(Models(models.base, [stranger]), tmp_path / "out")
    assert "no weights in common" in message


def test_missing_shards_are_all_named(models: Models, tmp_path: Path) -> None:
    folder = models.experts[0]
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00003.safetensors")
    names = load_file(folder / "model-00001-of-00003.safetensors").keys()
    index = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    message = problems(models, tmp_path / "out")
    assert "model-00002-of-00003.safetensors: missing" in message
    assert "model-00003-of-00003.safetensors: missing" in message


def test_a_tensor_the_index_promises(models: Models, tmp_path: Path) -> None:
    folder = models.experts[0]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"gone.weight": "model.safetensors"}}))
    assert "tensor 'gone.weight' is missing" in problems(models, tmp_path / "out")


def test_shards_outside_the_folder_are_refused(models: Models, tmp_path: Path) -> None:
    weight_map = {"layers.0.weight": "../expert-1/model.safetensors"}
    (models.experts[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "plain file names" in problems(models, tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncated", "not safetensors", "empty"])
def test_damaged_files(models: Models, tmp_path: Path, damage: str) -> None:
    path = models.experts[1] / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:-10], "not safetensors": b"hello " * 50, "empty": b""}[damage])
    message = problems(models, tmp_path / "out")
    assert str(path) in message
    assert "not a whole safetensors file" in message


def test_adapters_and_quantised_models_are_refused_by_name(models: Models, tmp_path: Path) -> None:
    (models.experts[0] / "adapter_config.json").write_text("{}")
    config = json.loads((models.experts[1] / "config.json").read_text()) | {"quantization_config": {"bits": 4}}
    assert "a PEFT adapter" in problems(models, tmp_path / "out")
    (models.experts[0] / "adapter_config.json").unlink()
    (models.experts[1] / "config.json").write_text(json.dumps(config))
    assert "is quantised" in problems(models, tmp_path / "out")


def test_not_enough_disk(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    assert "make room" in problems(models, tmp_path / "out")


def test_places_that_are_not_models(models: Models, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no weights at all" in problems(Models(models.base, [tmp_path / "empty"]), tmp_path / "out")
    assert problems(Models(models.base, [tmp_path / "nowhere"]), tmp_path / "out").endswith("nowhere: no such file or folder")


def test_a_path_with_a_slip_in_it(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = models.experts[0]
    slip = first.with_name(first.name.replace("-", "_"))
    assert problems(Models(models.base, [slip]), tmp_path / "out").endswith(f"no such file or folder; did you mean {first}?")
    monkeypatch.chdir(first.parent.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wrong = Path(f"{first.parent.name}s") / first.name  # might be one of the hub
    assert problems(Models(models.base, [wrong]), tmp_path / "out").endswith(f"; did you mean {first.parent.name}/{first.name}?")


def test_a_model_of_another_kind_is_one_problem(models: Models, tmp_path: Path) -> None:
    edit(
        models.experts[0],
        lambda t: [t.update({name.replace("weight", "kernel"): t.pop(name)}) for name in list(t) if "weight" in name],
    )
    config = models.experts[0] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "another"}))
    message = problems(models, tmp_path / "out")
    assert message.startswith("1 problem found")
    assert message.endswith("(model_type 'another' against 'nobody-heard-of-it'); give the base it was fine-tuned from")


def test_a_snapshot_in_the_hubs_cache_is_known_by_its_hub_id(models: Models, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--fine-tune.v1" / "snapshots" / "0123abcd"
    shutil.copytree(models.experts[0], snapshot)
    source = resolve_source(str(snapshot))
    assert (source.public_name, source.short_name) == ("org/fine-tune.v1@0123abcd", "fine-tune.v1")
    acemerge.merge(models.base, [snapshot, models.experts[1]], tmp_path / "merged")
    assert "org/fine-tune.v1@0123abcd" in (tmp_path / "merged" / "README.md").read_text()
    assert resolve_source(str(models.base)).hub_id is None


def test_a_hub_id_that_is_not_cached_when_offline(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not in the local hub cache"):
        acemerge.merge(models.base, ["nobody/nothing@main"], tmp_path / "out", offline=True)


def test_nan_is_never_published(models: Models, tmp_path: Path) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.weight"][0, :2] = float("nan")

    edit(models.experts[1], poison)
    for method in ("ace", "average"):
        with pytest.raises(MergeError, match=r"expert-1.* has 2 NaN or infinite values in 'layers\.0\.weight'"):
            acemerge.merge(models.base, models.experts, tmp_path / "out", method=method)
    assert not list(tmp_path.glob("out*"))


def test_nan_in_a_head_is_never_published(models: Models, tmp_path: Path) -> None:
    edit(models.experts[1], lambda t: t.update({"classifier.weight": torch.full((2, 8), float("nan"))}))
    with pytest.raises(MergeError, match=r"'classifier\.weight' of expert 'expert-1'"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_a_rule_names_the_rule(models: Models, tmp_path: Path) -> None:
    rules = [{"match": "layers.0.*", "options": {"keep": 0.2}}]
    assert "recipe rule 'layers.0.*': method 'ace_auto' has no option 'keep'" in problems(models, tmp_path / "out", tensors=rules)


def test_how_long_a_merge_is_against_its_inputs_is_a_fact_and_one_warning(tmp_path: Path) -> None:
    base = base_tensors()
    write_model(tmp_path / "base", base)
    for i in range(4):
        write_model(tmp_path / f"e{i}", fine_tuned(base, i, strength=1e-4 * 3.0**i))
    experts = [tmp_path / f"e{i}" for i in range(4)]
    result = acemerge.merge(tmp_path / "base", experts, tmp_path / "out", "ace", epsilon=1.0, tau=0.0)
    assert result.warnings == list(result.plan.cautions)  # of the whole model, and none of single tensors
    assert len(result.warnings) == 1
    assert max(record.get("norm_ratio", 0) for record in result.tensors) > 3


def test_same_basename_experts_get_names_from_their_parents(tmp_path: Path) -> None:
    base = base_tensors()
    write_model(tmp_path / "base", base)
    experts = [write_model(tmp_path / run / "checkpoint", fine_tuned(base, i)) for i, run in enumerate(("math", "code"))]
    result = acemerge.merge(tmp_path / "base", experts, tmp_path / "out")
    assert [expert.name for expert in result.plan.experts] == ["math_checkpoint", "code_checkpoint"]


def test_preflight_error_is_an_input_error() -> None:
    assert str(PreflightError(["one"])).startswith("1 problem found")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"method": "linear", "weights": [1, 2, 3]}, "are 3 numbers for 2 experts; give one per expert for 'layers.0.weight'"),
        ({"method": "slerp"}, "method 'slerp' takes exactly 2 experts, 1 were given for 'layers.0.weight'"),
    ],
)
def test_what_too_few_experts_cannot_do_is_reported_before_any_work(
    models: Models, tmp_path: Path, options: dict[str, object], complaint: str
) -> None:
    edit(models.experts[0], lambda t: t.pop("layers.0.weight"))
    fewer = Models(models.base, models.experts[:2]) if options["method"] == "slerp" else models
    assert complaint in problems(fewer, tmp_path / "out", missing="skip", **options)


def test_a_rule_whose_method_takes_another_number_of_experts(models: Models, tmp_path: Path) -> None:
    rules = [{"match": "layers.*", "method": "slerp"}]
    message = problems(models, tmp_path / "out", tensors=rules)
    assert message.count("takes exactly 2 experts, 3 were given for 'layers.0.bias', 'layers.0.weight', 'layers.1.weight'") == 1


def test_another_kind_of_model_with_other_shapes_is_refused(models: Models, tmp_path: Path) -> None:
    """A larger vocabulary alone is only noted where it does not merge."""
    for folder in (models.base, *models.experts):
        edit(folder, lambda t: t.update({"embed_tokens.weight": t.pop("embed.weight")}))
    edit(models.experts[0], lambda t: t.update({"embed_tokens.weight": torch.zeros(25, 8)}))
    result = acemerge.merge(models.base, models.experts, tmp_path / "same-kind", preset="llm")
    assert any("'embed_tokens.weight' is [25, 8] in expert" in note for note in result.plan.notes)
    config = models.experts[0] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "another"}))
    message = problems(models, tmp_path / "out", preset="llm")
    assert "shape [20, 8] in base" in message
    assert "(model_type 'another' against 'nobody-heard-of-it'); give fine-tunes of this base" in message


def test_a_model_of_another_random_start_is_refused_unless_forced(models: Models, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(9)
    edit(models.experts[1], lambda t: t.update({n: torch.randn(x.shape, generator=random) for n, x in t.items() if x.dim() == 2}))
    with pytest.raises(PreflightError, match="does not look like a fine-tune of this base"):
        acemerge.merge(models.base, models.experts, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", force=True)
    (told,) = [warning for warning in result.warnings if "does not look like a fine-tune of this base" in warning]
    assert f"expert '{models.experts[1].name}'" in told
    assert acemerge.merge(models.base, models.experts[:1], tmp_path / "related").warnings == []


def test_hundreds_of_problems_do_not_fill_the_screen() -> None:
    error = PreflightError(f"problem {i}" for i in range(300))
    assert len(error.problems) == 300
    lines = str(error).splitlines()
    assert lines[0] == "300 problems found before any work was done:"
    assert lines[-1] == "  and 280 more, the first of them: problem 20"
    assert len(lines) == 22
    assert str(PreflightError(["one"])).splitlines()[1:] == ["  - one"]


def test_a_model_is_given_with_one_adapter_at_most(tmp_path: Path) -> None:
    """The first of two would be lost without a word."""
    for name in ("base", "lora"):
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=r"base\+lora: no such file or folder"):
        resolve_source("base+lora+lora", relative_to=tmp_path)
