import copy
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

import acemerge
from acemerge.checkpoints.folder import from_state_dict
from acemerge.errors import InputError
from reference_ace import reference_ace
from small_models import base_tensors, fine_tuned, write_models


def state_dicts() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    base = base_tensors()
    return base, [fine_tuned(base, i, strength=0.02 * 2.5**i) for i in range(3)]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def test_merge_state_dicts_equals_the_equations() -> None:
    base, experts = state_dicts()
    merged = acemerge.merge_state_dicts(base, experts, method="ace", epsilon=1e-3)
    for name in ("layers.0.weight", "layers.1.weight"):
        deltas = np.stack([(expert[name].double() - base[name].double()).numpy() for expert in experts])
        expected = base[name].double() + torch.from_numpy(reference_ace(deltas, epsilon=1e-3).merged)
        assert (merged[name] - expected).norm() / (expected - base[name]).norm() < 1e-4
    for name in ("layers.0.bias", "embed.weight", "scale"):
        torch.testing.assert_close(merged[name], torch.stack([expert[name] for expert in experts]).mean(0))
    assert merged["steps"].equal(base["steps"])


def test_merge_state_dicts_leaves_its_inputs_alone_and_hands_out_new_memory() -> None:
    base, experts = state_dicts()
    before = copy.deepcopy([base, *experts])
    merged = acemerge.merge_state_dicts(base, experts)
    assert all(same(one, other) for one, other in zip([base, *experts], before, strict=True))
    inputs = {t.data_ptr() for model in (base, *experts) for t in model.values()}
    assert not inputs & {t.data_ptr() for t in merged.values()}


def test_experts_that_changed_nothing_give_the_base_bit_for_bit() -> None:
    base = base_tensors()
    base["layers.0.weight"][0, 0] = -0.0
    same_weights = base_tensors() | {"layers.0.weight": base["layers.0.weight"].clone()}
    with pytest.warns(UserWarning, match="is a copy of the base"):
        merged = acemerge.merge_state_dicts(base, [same_weights] * 2)
    assert same(merged, base)
    assert torch.signbit(merged["layers.0.weight"][0, 0])


def test_a_frozen_expert_has_no_opinion() -> None:
    base, experts = state_dicts()
    with pytest.warns(UserWarning, match="is a copy of the base"):
        with_frozen = acemerge.merge_state_dicts(base, [*experts, base])
    without = acemerge.merge_state_dicts(base, experts)
    for name in ("layers.0.weight", "layers.1.weight"):
        assert with_frozen[name].equal(without[name])


def test_tied_tensors_stay_tied() -> None:
    base, experts = state_dicts()
    for model in (base, *experts):
        model["lm_head.weight"] = model["embed.weight"]
    merged = acemerge.merge_state_dicts(base, experts)
    assert merged["lm_head.weight"].data_ptr() == merged["embed.weight"].data_ptr()


def test_named_experts_and_config() -> None:
    base, experts = state_dicts()
    named = dict(zip("abc", experts, strict=True))
    merged = acemerge.merge_state_dicts(base, named, method="ace", config={"model_type": "gpt2"})
    assert same(merged, acemerge.merge_state_dicts(base, experts, method="ace", preset="gpt2", epsilon=4e-2))


def test_options_are_validated_everywhere() -> None:
    base, experts = state_dicts()
    with pytest.raises(InputError, match="did you mean 'epsilon'"):
        acemerge.merge_state_dicts(base, experts, method="ace", epsilom=1)
    with pytest.raises(InputError, match="did you mean 'tau'"):
        acemerge.merge_task_vectors(torch.zeros(2, 3, 3), method="ace", ta=1)
    with pytest.raises(InputError, match="there is no method 'aec'"):
        acemerge.merge_task_vectors(torch.zeros(2, 3, 3), method="aec")


def test_one_row_and_one_column_matrices_are_averaged() -> None:
    base = {"row.weight": torch.zeros(1, 5), "column.weight": torch.zeros(5, 1)}
    experts = [{name: torch.rand(w.shape) for name, w in base.items()} for _ in range(2)]
    merged = acemerge.merge_state_dicts(base, experts)
    for name in base:
        torch.testing.assert_close(merged[name], (experts[0][name] + experts[1][name]) / 2)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'marge'"):
        _ = acemerge.marge


@pytest.mark.parametrize(
    ("task_vectors", "complaint"),
    [
        (torch.zeros(0, 3, 3), "at least one task"),
        (torch.full((2, 3, 3), float("nan")), "18 NaN or infinite values"),
        (torch.zeros(2, 3), "merges matrices"),
    ],
)
def test_task_vectors_that_cannot_be_merged(task_vectors: Tensor, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        acemerge.merge_task_vectors(task_vectors)


def test_parameters_can_be_given_as_they_are() -> None:
    task_vectors = torch.rand(2, 4, 4, requires_grad=True)
    assert not acemerge.merge_task_vectors(task_vectors).requires_grad


def test_problems_survive_the_way_between_processes() -> None:
    import pickle

    from acemerge.errors import PreflightError

    again = pickle.loads(pickle.dumps(PreflightError(["one", "two"])))
    assert (again.problems, str(again)) == (("one", "two"), str(PreflightError(["one", "two"])))


def test_options_that_are_named_like_a_keyword_go_into_options(tmp_path: Path) -> None:
    models = write_models(tmp_path, 2)
    merged = acemerge.merge(models.base, models.experts, tmp_path / "cart", "cart", options={"rank": 0.5}, alpha=0.3)
    assert merged.plan.recipe.options == {"rank": 0.5, "alpha": 0.3}
    grid = acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"alpha": [0.3]}, "ties", options={"keep": 0.4})
    [point] = grid.points
    alone = acemerge.merge(models.base, models.experts, tmp_path / "alone", "ties", keep=0.4, alpha=0.3)
    assert point.folder is not None
    assert (point.folder / "model.safetensors").read_bytes() == (alone.output / "model.safetensors").read_bytes()


def test_a_method_s_keep_is_not_the_sweep_s(tmp_path: Path) -> None:
    models = write_models(tmp_path, 2)
    with pytest.raises(InputError, match=r"keep=0.3.*options="):
        acemerge.sweep(models.base, models.experts, tmp_path / "grid", {"alpha": [0.3]}, "ties", keep="0.3")


def test_parameters_are_tensors_too(tmp_path: Path) -> None:
    base, experts = state_dicts()
    watched = [{name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in m.items()} for m in (base, *experts)]
    models = write_models(tmp_path, 2)
    torch.save(watched[1], tmp_path / "watched.pt")
    torch.save(experts[0], tmp_path / "plain.pt")
    for method in ("ace", "linear", "ties"):
        merged = acemerge.merge_state_dicts(watched[0], watched[1:], method=method)
        assert same(merged, acemerge.merge_state_dicts(base, experts, method=method))
        assert not any(tensor.requires_grad for tensor in merged.values())
        written = []
        for name in ("watched", "plain"):
            output = tmp_path / f"{method}-{name}"
            acemerge.merge(models.base, [tmp_path / f"{name}.pt", models.experts[1]], output, method)
            written.append((output / "model.safetensors").read_bytes())
        assert written[0] == written[1]


def test_what_is_no_state_dict_is_refused_in_words() -> None:
    base, experts = state_dicts()
    name = "layers.0.weight"
    for bad, complaint in (
        (base[name].numpy(), "is a ndarray, not a tensor"),
        ({"inner": base[name]}, "is a dict, not a tensor"),
        (base[name].to_sparse(), "not a plain dense tensor"),
        (base[name].to("meta"), "not a plain dense tensor"),
    ):
        with pytest.raises(InputError, match=f"expert 0: '{name}' .*{complaint}|expert 0: '{name}' {complaint}"):
            from_state_dict({**experts[0], name: bad}, "expert 0")  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"a Linear is no state dict; give model.state_dict\(\)"):
        from_state_dict(torch.nn.Linear(2, 2), "base")  # type: ignore[arg-type]


def test_one_expert_is_given_in_a_list(tmp_path: Path) -> None:
    models = write_models(tmp_path, 1)
    with pytest.raises(InputError, match="give a list of models"):
        acemerge.merge(models.base, str(models.experts[0]), tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", "bfloat16"])
def test_dtypes_have_several_names(tmp_path: Path, dtype: torch.dtype | str) -> None:
    models = write_models(tmp_path, 2)
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", dtype=dtype)
    assert result.plan.recipe.dtype == "bfloat16"
    assert len(repr(result)) < 500


def test_plan_verify_and_report_from_python(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    planned = acemerge.plan(models.base, models.experts, power=0.5, dtype="bfloat16")
    result = acemerge.merge(models.base, models.experts, tmp_path / "out", power=0.5, dtype="bfloat16")
    assert planned.to_json() == result.plan.to_json()
    assert str(result) == f"{tmp_path / 'out'}: 3 experts by ace_auto; 2 merged, 3 averaged, 0 kept, 1 copied"
    assert str(result.plan) == "3 experts by ace_auto; 2 merged, 3 averaged, 0 kept, 1 copied"
    told = str(acemerge.diagnose(models.base, models.experts, candidates=["average"])).splitlines()
    assert told[0].startswith(("These ", "Do not "))
    assert all(line.startswith("- ") for line in told[1:])
    assert acemerge.verify(tmp_path / "out").problems == []
    assert acemerge.report(tmp_path / "out") == tmp_path / "out.html"
    (tmp_path / "out/config.json").write_text("{}")
    assert "config.json" in acemerge.verify(tmp_path / "out").problems[0]


def test_everything_public_is_there_whatever_was_imported_before() -> None:
    """`acemerge.plan` is a function, and no module of that name gets in its way."""
    for name in acemerge.__all__:
        assert not isinstance(getattr(acemerge, name), ModuleType)
    assert set(acemerge._HOME) == set(acemerge.__all__)
