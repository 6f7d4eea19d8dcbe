"""Recipes of several stages: the same bytes as by hand, made once, resumed, told in the manifest."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import acemerge
from acemerge.errors import InputError
from acemerge.execute import pipeline
from acemerge.execute.pipeline import run_merge
from acemerge.output.manifest import read_merge
from acemerge.recipe.recipe import make_recipe
from acemerge.recipe.run_options import RunOptions
from command import Command
from small_models import Models


def staged(models: Models) -> dict[str, Any]:
    first, second, third = map(str, models.experts)
    return {
        "base": str(models.base),
        "experts": [{"name": "pair", "merge": {"experts": [first, second], "method": "ties"}}, third],
        "method": "task_arithmetic",
    }


def merged(fields: dict[str, Any], output: Path, **run: Any) -> None:
    run_merge(make_recipe(fields), output, RunOptions(quiet=True, **run))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_same_bytes_as_by_hand_and_nothing_left(models: Models, tmp_path: Path) -> None:
    acemerge.merge(models.base, models.experts[:2], tmp_path / "hand/pair", method="ties")
    acemerge.merge(models.base, [tmp_path / "hand/pair", models.experts[2]], tmp_path / "hand/out", method="task_arithmetic")
    merged(staged(models), tmp_path / "here/out")
    assert weights(tmp_path / "here/out") == weights(tmp_path / "hand/out")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["out"]


def test_nested_twice_kept_and_told(models: Models, tmp_path: Path) -> None:
    inner = staged(models)
    fields = {"base": inner.pop("base"), "experts": [{"name": "outer", "merge": inner}, str(models.experts[0])]}
    merged(fields, tmp_path / "out", keep_stages=str(tmp_path / "kept"))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["outer", "pair"]
    assert not any(acemerge.verify(tmp_path / "kept" / name).problems for name in ("outer", "pair"))
    outer = read_merge(tmp_path / "out").stages["outer"]
    pair = outer["stages"]["pair"]
    assert (outer["method"], pair["method"], list(pair["inputs"])) == (
        "task_arithmetic",
        "ties",
        ["base", "expert-0", "expert-1"],
    )
    again = yaml.safe_load((tmp_path / "out/acemerge.yaml").read_text())
    assert again["experts"][0]["merge"]["experts"][0]["merge"]["method"] == "ties"


def test_a_failed_merge_goes_on_from_its_stages(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, output, real, made = staged(models), tmp_path / "out", pipeline.Executor.merge, list[str]()
    fields["experts"].append({"name": "deep", "merge": {"experts": [fields["experts"][0], str(models.experts[0])]}})

    def failing(self: Any, plans: Any, outputs: list[Path]) -> Any:
        made.append(outputs[0].name)
        if made == ["pair", "deep", "out"]:
            raise RuntimeError
        return real(self, plans, outputs)

    monkeypatch.setattr(pipeline.Executor, "merge", failing)
    with pytest.raises(RuntimeError):
        merged(fields, output)
    assert not output.exists()
    merged(fields, output)
    assert made == ["pair", "deep", "out", "out"]  # the stage that is there twice was made once, and not again
    assert not (tmp_path / ".out.stages").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"method": "tise"}, "tise"),
        ({"options": {"keeep": 1}}, "keeep"),
        ({"experts": ["./nowhere"]}, "nowhere"),
        ({"save_as": "adapter"}, "'save_as' is for the outer merge only"),
        ({"method": "emr"}, "makes a model per task"),
    ],
)
def test_problems_of_a_stage_are_told_before_any_work(models: Models, tmp_path: Path, change: Any, problem: str) -> None:
    fields = staged(models)
    fields["experts"][0]["merge"] |= {"options": {}, **change}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=problem):
        merged(fields, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_the_same_stage_twice_side_by_side_is_refused(models: Models, tmp_path: Path) -> None:
    fields = staged(models)
    fields["experts"].append({**fields["experts"][0], "name": "same"})
    with pytest.raises(InputError, match="'pair' and 'same' of one merge are the same"):
        merged(fields, tmp_path / "out")


def test_a_plan_shows_the_stages(models: Models, tmp_path: Path, run: Command) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(staged(models)))
    code, out, _ = run("plan", tmp_path / "recipe.yaml")
    assert (code, "stage 'pair', made first:" in out) == (0, True)


def test_a_sweep_refuses_stages(models: Models, tmp_path: Path, run: Command) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(staged(models)))
    code, _, err = run("sweep", tmp_path / "recipe.yaml", "-o", tmp_path / "grid", "-s", "alpha=0.5,1")
    assert (code, "which only `acemerge merge` and `acemerge plan` take" in err) == (2, True)


@pytest.mark.parametrize(("place", "problem"), [("out", "lies in the output"), ("models/base/kept", "that is read")])
def test_stages_are_not_kept_in_the_output_or_a_model(models: Models, tmp_path: Path, place: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        merged(staged(models), tmp_path / "out", keep_stages=str(tmp_path / place))
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert len(list(models.base.iterdir())) == 2
