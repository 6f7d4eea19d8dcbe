"""acemerge sweep: every point as a merge of its own would be, in one pass; what is done is not done again."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
from acemerge.errors import InputError, MergeError, PreflightError
from acemerge.execute import sweep as sweep_engine
from acemerge.methods import Method, all_methods, get_method
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor
from acemerge.recipe.arguments import parse_lists
from acemerge.sweeps import room
from acemerge.sweeps.points import make_points
from acemerge.sweeps.table import TABLE, Objective
from acemerge.tensors import computing
from acemerge.tensors.computing import TensorMerge
from acemerge.tensors.merging import merge_tensor_at_points
from acemerge.tensors.task_vectors import load_task_vectors
from lora_zoo import build
from running import run_command
from small_models import Models, write_models

GRID = {"epsilon": [1e-5, 1e-3], "tau": [0.0, 9.0], "k_frac": [0.1, 0.5]}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_as_merged_alone(folder: Path, alone: Path) -> None:
    """The same files; the same weights up to rounding; the same account but for hashes and last digits."""
    assert names_in(folder) == names_in(alone)
    for path in alone.rglob("*.safetensors"):
        expected, found = load_file(path), load_file(folder / path.relative_to(alone))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
    for name in ("acemerge.yaml", "README.md", "config.json"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes()
    expected, found = (json.loads((place / "acemerge_manifest.json").read_text()) for place in (alone, folder))
    assert found.keys() == expected.keys()
    for mine, theirs in zip(found["tensors"], expected["tensors"], strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["options"] == theirs["options"] if "options" in theirs else True


# --- every point is a merge


def test_every_point_is_what_a_merge_writes(models: Models, tmp_path: Path) -> None:
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", GRID, shard_size="1kB")
    assert len(result.points) == 8
    assert result.best is None
    assert result.points[0].settings == {"epsilon": 1e-5, "tau": 0.0, "k_frac": 0.1}
    assert result.points[0].folder == tmp_path / "grid" / "epsilon=1e-05,tau=0.0,k_frac=0.1"
    assert names_in(tmp_path / "grid") == sorted([TABLE, *(point.folder.name for point in result.points if point.folder)])
    for number, point in enumerate(result.points):
        alone = acemerge.merge(models.base, models.experts, tmp_path / f"alone-{number}", shard_size="1kB", **point.settings)
        assert point.folder is not None
        check_as_merged_alone(point.folder, alone.output)
        assert point.warnings == sum(len(tensor["warnings"]) for tensor in alone.tensors)


@pytest.mark.parametrize("method", [m for m in all_methods() if m.uses == "weights"], ids=lambda m: m.name)
def test_every_method_and_its_alpha(method: Method, tmp_path: Path) -> None:
    models = write_models(tmp_path, method.experts or 3)
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"alpha": [0.5, 1.0]}, method.name)
    for point in result.points:
        alone = acemerge.merge(
            models.base, models.experts, tmp_path / str(point.settings["alpha"]), method.name, **point.settings
        )
        assert point.folder is not None
        check_as_merged_alone(point.folder, alone.output)
        assert not method.per_task or (point.folder / "tasks").is_dir()


@pytest.mark.parametrize(("method", "settings"), [("ties", {"keep": [0.1, 0.2, 0.3]}), ("ace", GRID)])
def test_the_experts_are_read_as_often_as_for_one_merge(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, settings: dict[str, list[Any]]
) -> None:
    """ties makes passes over the whole model first: as many for three points as for one."""
    reads: list[str] = []

    def counted(plan: Plan, planned: ComputedTensor, device: torch.device) -> Any:
        reads.append(planned.name)
        return load_task_vectors(plan, planned, device)

    monkeypatch.setattr(computing, "load_task_vectors", counted)
    first: dict[str, Any] = {name: values[0] for name, values in settings.items()}
    acemerge.merge(models.base, models.experts, tmp_path / "one", method, **first)
    of_one = list(reads)
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", settings, method)
    assert reads == 2 * of_one


def test_thresholds_of_the_whole_model(models: Models, tmp_path: Path) -> None:
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"keep": [0.1, 0.2, 0.3]}, "ties")
    for point in result.points:
        alone = acemerge.merge(models.base, models.experts, tmp_path / str(point.settings["keep"]), "ties", **point.settings)
        assert point.folder is not None
        check_as_merged_alone(point.folder, alone.output)


@pytest.mark.parametrize("save_as", ["adapter", "model"])
def test_adapters(tmp_path: Path, save_as: str) -> None:
    zoo = build(tmp_path / "zoo", "LlamaForCausalLM")
    settings = {"epsilon": [1e-4, 1e-2], "tau": [0.0, 9.0]}
    result = acemerge.sweep(zoo.base, zoo.adapters, tmp_path / "grid", settings, save_as=save_as)
    for number, point in enumerate(result.points):
        alone = acemerge.merge(zoo.base, zoo.adapters, tmp_path / str(number), save_as=save_as, **point.settings)
        assert point.folder is not None
        if save_as == "model":
            check_as_merged_alone(point.folder, alone.output)
            continue
        assert names_in(point.folder) == names_in(alone.output)
        expected, found = (load_file(place / "adapter_model.safetensors") for place in (alone.output, point.folder))
        assert found.keys() == expected.keys()
        for A, B in ((name, name.replace("lora_A", "lora_B")) for name in expected if "lora_A" in name):
            torch.testing.assert_close(found[B] @ found[A], expected[B] @ expected[A], rtol=1e-4, atol=1e-6)


def test_a_recipes_fixed_options_and_rules_hold(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {
        "base": str(models.base), "experts": [str(e) for e in models.experts], "options": {"k_frac": 0.5},
        "tensors": [{"match": "embed.*", "do": "keep"}],
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert run_command(monkeypatch, "sweep", tmp_path / "recipe.yaml", "-o", tmp_path / "grid", "--set", "tau=0,1", "-q") == 0
    for tau in ("0.0", "1.0"):
        manifest = json.loads((tmp_path / "grid" / f"tau={tau}" / "acemerge_manifest.json").read_text())
        assert manifest["options"]["k_frac"] == 0.5
        assert next(t["action"] for t in manifest["tensors"] if t["name"] == "embed.weight") == "kept"


# --- evaluation


def distance_from_base(models: Models) -> Callable[[Path, Mapping[str, Any]], dict[str, float]]:
    base = load_file(models.base / "model.safetensors")

    def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        merged = load_file(folder / "model.safetensors")
        return {"length": float((merged["layers.0.weight"] - base["layers.0.weight"]).norm()), "alpha": settings["alpha"]}

    return evaluate


ALPHAS = {"alpha": [0.5, 2.0, 1.0]}


@pytest.mark.parametrize("at_once", [None, 1, 2])
def test_the_best_model_is_kept(models: Models, tmp_path: Path, at_once: int | None) -> None:
    output = tmp_path / "grid"
    result = acemerge.sweep(models.base, models.experts, output, ALPHAS, evaluate=distance_from_base(models), at_once=at_once)
    assert result.best is not None
    assert result.best.settings == {"alpha": 2.0}
    assert names_in(output) == ["alpha=2.0", TABLE]
    lengths = [point.scores["length"] for point in result.points]
    assert lengths[1] == pytest.approx(4 * lengths[0])  # type: ignore[operator]
    stored = json.loads((output / TABLE).read_text())
    assert stored["best"] == "alpha=2.0"
    assert stored["points"]["alpha=0.5"]["scores"] == result.points[0].scores
    assert acemerge.merge(models.base, models.experts, tmp_path / "alone", alpha=2.0)
    check_as_merged_alone(output / "alpha=2.0", tmp_path / "alone")


@pytest.mark.parametrize(("keep", "left"), [("all", ["alpha=0.5", "alpha=1.0", "alpha=2.0"]), ("none", [])])
def test_all_or_no_models_can_be_kept(models: Models, tmp_path: Path, keep: str, left: list[str]) -> None:
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=distance_from_base(models), keep=keep)
    assert names_in(tmp_path / "grid") == [*left, TABLE]


def test_the_smallest_of_another_score_can_decide(models: Models, tmp_path: Path) -> None:
    evaluate = distance_from_base(models)
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=evaluate, minimise="alpha")
    assert result.best is not None
    assert result.best.settings == {"alpha": 0.5}


def test_no_more_models_than_asked_for_are_on_the_disk(models: Models, tmp_path: Path) -> None:
    seen: list[int] = []

    def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        seen.append(len([path for path in folder.parent.iterdir() if path.is_dir()]))
        return {"score": -settings["alpha"]}

    alphas = {"alpha": [0.1 * i for i in range(1, 8)]}
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", alphas, evaluate=evaluate, at_once=2)
    assert len(seen) == 7
    assert max(seen) <= 3  # two, and the best so far


def test_models_written_to_stay_are_not_removed_by_a_later_evaluation(models: Models, tmp_path: Path) -> None:
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS)
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=lambda folder, settings: {"score": 1.0})
    assert names_in(tmp_path / "grid") == ["alpha=0.5", "alpha=1.0", "alpha=2.0", TABLE]


def test_what_is_not_a_number_is_worst(models: Models, tmp_path: Path) -> None:
    scores = {0.5: float("nan"), 2.0: -1.0, 1.0: float("nan")}
    result = acemerge.sweep(
        models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=lambda folder, settings: scores[settings["alpha"]]
    )
    assert result.best is not None
    assert result.best.settings == {"alpha": 2.0}
    assert result.points[0].scores == {"score": None}


@pytest.mark.parametrize("given", ["good", {}, {"a": "b"}, {1: 2.0}, None, [0.5], {"a": True}])
def test_scores_that_are_none_are_refused(models: Models, tmp_path: Path, given: Any) -> None:
    with pytest.raises(MergeError, match=r"the evaluation of alpha=0\.5"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=lambda folder, settings: given)


def test_the_deciding_score_must_be_there(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no score 'lenght': did you mean 'length'"):
        acemerge.sweep(
            models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=distance_from_base(models), maximise="lenght"
        )


SCORE = """
import json, sys
print("some words")
manifest = json.load(open(sys.argv[1] + "/acemerge_manifest.json"))
print(json.dumps({"closeness": -abs(manifest["options"]["alpha"] - 1)}))
"""


@pytest.mark.parametrize("place", ["", " {}"])
def test_a_command_evaluates(models: Models, tmp_path: Path, monkeypatch: Any, capsys: Any, place: str) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    evaluate = f"{sys.executable} {tmp_path / 'score.py'}{place}"
    arguments = [*models.arguments, "-o", tmp_path / "grid", "--set", "alpha=0.5,1,2", "--evaluate", evaluate]
    assert run_command(monkeypatch, "sweep", *arguments) == 0
    shown = capsys.readouterr()
    assert "best: alpha=1.0" in shown.out
    assert "3/3 alpha=2.0: closeness -1" in shown.err
    assert names_in(tmp_path / "grid") == ["alpha=1.0", TABLE]
    assert run_command(monkeypatch, "sweep", *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["best"]["settings"] == {"alpha": 1.0}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit(3)", "ended with code 3"),
        ("print('hello')", "its last line is 'hello', not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_command_that_fails(models: Models, tmp_path: Path, monkeypatch: Any, capsys: Any, script: str, message: str) -> None:
    (tmp_path / "score.py").write_text(script)
    evaluate = f"{sys.executable} {tmp_path / 'score.py'}"
    arguments = [*models.arguments, "-o", tmp_path / "grid", "--set", "alpha=0.5,1", "--evaluate", evaluate, "-q"]
    assert run_command(monkeypatch, "sweep", *arguments) == 1
    assert message in capsys.readouterr().err


# --- going on


def test_points_that_are_done_are_not_done_again(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "grid"
    first = acemerge.sweep(models.base, models.experts, output, {"epsilon": [1e-5, 1e-3]})
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.safetensors")}
    seen = count_merges(monkeypatch)
    acemerge.sweep(models.base, models.experts, output, {"epsilon": [1e-5, 1e-3]})
    assert seen == []
    larger = acemerge.sweep(models.base, models.experts, output, {"epsilon": [1e-5, 1e-4, 1e-3]})
    assert set(seen) == {1}  # one point only
    assert [point.folder is not None for point in larger.points] == [True] * 3
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(first.points) == 2


def count_merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many points each tensor is merged at from now on."""
    seen: list[int] = []

    def counted(merges: Sequence[TensorMerge], device: torch.device) -> Any:
        seen.append(len(merges))
        return merge_tensor_at_points(merges, device)

    monkeypatch.setattr(sweep_engine, "merge_tensor_at_points", counted)
    return seen


def test_scores_are_kept_and_what_is_left_is_evaluated(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[float] = []

    def evaluate(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        if len(asked) == 2:
            asked.append(0.0)
            raise KeyboardInterrupt
        asked.append(settings["alpha"])
        return {"score": settings["alpha"]}

    with pytest.raises(KeyboardInterrupt):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=evaluate)
    assert names_in(tmp_path / "grid") == ["alpha=1.0", "alpha=2.0", TABLE]  # the best so far, and the one not evaluated
    seen = count_merges(monkeypatch)
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=evaluate)
    assert seen == []
    assert asked == [0.5, 2.0, 0.0, 1.0]
    assert result.best is not None
    assert result.best.settings == {"alpha": 2.0}
    assert names_in(tmp_path / "grid") == ["alpha=2.0", TABLE]


def test_another_evaluation_scores_anew(models: Models, tmp_path: Path) -> None:
    def smaller(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        return {"score": -settings["alpha"]}

    acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=distance_from_base(models))
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS, evaluate=smaller)
    assert result.best is not None
    assert result.best.scores == {"score": -0.5}


def test_an_interrupted_pass_goes_on_from_its_shards(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "grid"

    def work() -> None:
        acemerge.sweep(models.base, models.experts, output, GRID, shard_size="1kB")

    def interrupted(merges: Sequence[TensorMerge], device: torch.device) -> Any:
        if merges[0].planned.name == "layers.1.weight":
            raise KeyboardInterrupt
        return merge_tensor_at_points(merges, device)

    with monkeypatch.context() as patch:
        patch.setattr(sweep_engine, "merge_tensor_at_points", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work()
    assert all(name == TABLE or name.endswith(".partial") for name in names_in(output))
    seen = count_merges(monkeypatch)
    work()
    assert 0 < len(seen) < 6
    assert not [name for name in names_in(output) if "partial" in name]
    acemerge.sweep(models.base, models.experts, tmp_path / "whole", GRID, shard_size="1kB")
    for path in (tmp_path / "whole").rglob("*.safetensors"):
        assert path.read_bytes() == (output / path.relative_to(tmp_path / "whole")).read_bytes()


def test_a_folder_of_another_merge_is_not_taken_for_done(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "grid"
    acemerge.sweep(models.base, models.experts, output, ALPHAS)
    with pytest.raises(InputError, match=r"alpha=0\.5: already exists"):
        acemerge.sweep(models.base, models.experts, output, ALPHAS, tau=0.0)
    acemerge.sweep(models.base, models.experts, output, ALPHAS, tau=0.0, overwrite=True)
    assert json.loads((output / "alpha=0.5" / "acemerge_manifest.json").read_text())["options"]["tau"] == 0.0


def test_points_of_another_sweep_are_not_mixed_with_these(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "grid"
    acemerge.sweep(models.base, models.experts, output, {"keep": [0.1, 0.2]}, "ties")
    before = (output / TABLE).read_bytes()
    for method, experts, options, reason in (
        ("linear", models.experts, {}, "method ties, not linear"),
        ("ties", models.experts[:2], {}, "other models"),
        ("ties", models.experts, {"scope": "tensor"}, r"options {}, not {'scope': 'tensor'}"),
    ):
        with pytest.raises(InputError, match=f"holds keep=0.1 of a sweep with {reason}"):
            acemerge.sweep(models.base, experts, output, {"alpha": [0.5]}, method, options=options)
    assert (output / TABLE).read_bytes() == before
    acemerge.sweep(models.base, models.experts, output, {"keep": [0.3]}, "ties")
    weighted = {"weights": (1.0, 2.0, 3.0)}
    for alphas in ([0.5], [1.0]):
        acemerge.sweep(models.base, models.experts, tmp_path / "weighted", {"alpha": alphas}, "linear", options=weighted)
    assert sorted(json.loads((output / TABLE).read_text())["points"]) == ["keep=0.1", "keep=0.2", "keep=0.3"]


def test_a_best_that_is_beaten_later_does_not_stay(models: Models, tmp_path: Path) -> None:
    def score(folder: Path, settings: Mapping[str, Any]) -> float:
        return float(settings["alpha"])

    output = tmp_path / "grid"
    acemerge.sweep(models.base, models.experts, output, {"alpha": [0.5, 1.0]}, evaluate=score)
    assert names_in(output) == ["alpha=1.0", TABLE]
    acemerge.sweep(models.base, models.experts, output, {"alpha": [0.5, 1.0, 1.5]}, evaluate=score)
    assert names_in(output) == ["alpha=1.5", TABLE]
    result = acemerge.sweep(models.base, models.experts, output, {"alpha": [0.5, 1.0, 1.5]}, evaluate=score, minimise="score")
    assert names_in(output) == ["alpha=0.5", TABLE]
    assert result.best is not None
    assert result.best.folder == output / "alpha=0.5"


# --- refusals: one sentence, before any work, and no folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "epsilonn=1"], "method 'ace' has no option 'epsilonn': did you mean 'epsilon'?"),
        (["--set", "epsilon=1e-5,lots"], "epsilon='lots' is not allowed: it must be"),
        (["--set", "epsilon="], "a value is empty"),
        (["--set", "epsilon=1e-5,,1e-4"], "a value is empty"),
        (["--set", "epsilon"], "write it as KEY=VALUE,VALUE"),
        (["--set", "epsilon=1e-5,0.00001"], "--set epsilon: the value 1e-05 is given twice"),
        (["--set", "epsilon=paper,1e-5"], "epsilon=paper and epsilon=1e-05 are the same merge"),
        (["--set", "epsilon=1", "--set", "epsilon=2"], "--set epsilon: is given twice"),
        (["--set", "dtype=float16,float32"], "not an option of a method; use --dtype"),
        (["--set", "tau=1", "-m", "ties"], "method 'ties' has no option 'tau'"),
        (["--set", "tau=1", "--keep", "bset"], "did you mean 'best'?"),
        (["--set", "tau=1", "--evaluate", "no-such-command-here"], "there is no such command"),
        (["--set", "tau=1", "--maximise", "a", "--minimise", "b"], "one score decides"),
        (["--set", "tau=1", "--dtype", "int8"], "dtype"),
    ],
)
def test_refusals(models: Models, tmp_path: Path, monkeypatch: Any, capsys: Any, flags: list[str], message: str) -> None:
    assert run_command(monkeypatch, "sweep", *models.arguments, "-o", tmp_path / "grid", *flags) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("grid*"))


def test_nothing_to_vary(models: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a sweep varies something"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {})
    with pytest.raises(InputError, match="give at least one value"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"tau": []})


def test_a_folder_that_is_no_sweeps(models: Models, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("private")
    with pytest.raises(InputError, match="is no sweep's folder"):
        acemerge.sweep(models.base, models.experts, tmp_path / "mine", ALPHAS)
    with pytest.raises(InputError, match="that is read"):
        acemerge.sweep(models.base, models.experts, models.base / "grid", ALPHAS)
    assert names_in(tmp_path / "mine") == ["diary.txt"]


@pytest.mark.parametrize("content", ["", "{", '{"points": 3}', '{"points": {"a": {}}}'])
def test_a_damaged_table(models: Models, tmp_path: Path, content: str) -> None:
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / TABLE).write_text(content)
    with pytest.raises(InputError, match="cannot be read"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS)


def test_a_disk_too_small_for_all_names_the_way_out(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    size = sum(path.stat().st_size for path in models.base.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000 + 5 * size))
    alphas = {"alpha": [0.1 * i for i in range(1, 46)]}
    with pytest.raises(PreflightError, match=r"45 models need .*; give --evaluate COMMAND"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", alphas)
    assert not (tmp_path / "grid").exists()
    result = acemerge.sweep(models.base, models.experts, tmp_path / "grid", alphas, evaluate=lambda f, s: {"score": s["alpha"]})
    assert result.best is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PreflightError, match="1 at a time and the best one need"):
        acemerge.sweep(models.base, models.experts, tmp_path / "other", alphas, evaluate=lambda f, s: {"score": s["alpha"]})


def test_memory_counts_what_the_shared_route_holds(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(room, "check_memory", asked.append)
    result = acemerge.merge(models.base, models.experts, tmp_path / "one")
    acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"epsilon": [1e-5, 1e-3]})
    assert asked[0] > result.plan.peak_memory


def test_nan_in_an_input_stops_all_points_and_leaves_no_folder(models: Models, tmp_path: Path) -> None:
    tensors = load_file(models.experts[0] / "model.safetensors")
    tensors["layers.0.weight"][0, 0] = torch.nan
    save_file(tensors, models.experts[0] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"1 NaN or infinite values in 'layers\.0\.weight'"):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", GRID)
    assert not list(tmp_path.glob("grid*"))


def test_two_sweeps_at_once(models: Models, tmp_path: Path) -> None:
    def again(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        with pytest.raises(InputError, match="another acemerge process is writing it"):
            acemerge.sweep(models.base, models.experts, tmp_path / "grid", ALPHAS)
        return {"score": 1.0}

    acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"alpha": [1.0]}, evaluate=again)


# --- the parts


def test_names_and_values() -> None:
    points = make_points(get_method("linear"), parse_lists(["weights=[0.7,0.3],equal", "alpha=1,0.5"]))
    assert [point.name for point in points] == [
        "weights=[0.7,0.3],alpha=1.0", "weights=[0.7,0.3],alpha=0.5", "weights=equal,alpha=1.0", "weights=equal,alpha=0.5",
    ]  # fmt: skip


def test_the_first_score_decides_by_default() -> None:
    assert Objective().of({"b": 2.0, "a": 1.0}) == 2.0
    assert Objective("a", largest=False).of({"b": 2.0, "a": 1.0}) == -1.0
