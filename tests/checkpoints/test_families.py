"""Each family end to end: which tensors merge, which way round, what the merge writes, and that transformers loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from acemerge.checkpoints.folder import from_state_dict
from acemerge.methods.ace import AceOptions
from acemerge.planning.planner import build_plan
from acemerge.recipe.recipe import make_recipe
from family_cases import CASES, Built, MethodName, merge
from model_zoo import ace_weight, assert_equal_tensors, assert_same_change, bitwise_equal, load_whole, mean_weight, read_tensors


# --- every family ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["ace", "average"])
def test_every_tensor_meets_its_fate(build: Callable[[str], Built], name: str, method: MethodName) -> None:
    built = build(name)
    case = built.case
    result = built.merge(method)
    base, experts = built.tensors()
    merged = read_tensors(result.output)
    actions = case.fates.actions(method)
    assert merged.keys() == base.keys()
    assert {tensor.name: tensor.action for tensor in result.plan.tensors} == actions
    for tensor, action in actions.items():
        if action in ("kept", "copied"):
            assert bitwise_equal(merged[tensor], base[tensor]), f"{tensor} is not the base's, bit for bit"
            continue
        own = [expert[case.name_in_expert(tensor)] for expert in experts]
        if method == "ace" and action == "merged":
            expected = ace_weight(base[tensor], own, case.epsilon, transpose=tensor in case.fates.stored_in_out)
        else:
            expected = mean_weight(base[tensor], own)
        assert merged[tensor].dtype == base[tensor].dtype
        assert_same_change(tensor, merged[tensor], expected, base[tensor])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.loads_as])
@pytest.mark.parametrize("method", ["ace", "average"])
def test_transformers_loads_every_merged_weight(build: Callable[[str], Built], name: str, method: MethodName) -> None:
    built = build(name)
    output = built.merge(method).output
    load_whole(built.case.loads_as or "", output)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_untied", "clip"])
def test_the_loaded_model_has_the_merged_weights(build: Callable[[str], Built], name: str) -> None:
    built = build(name)
    output = built.merge("ace").output
    on_disk = read_tensors(output)
    in_memory = load_whole(built.case.loads_as or "", output).state_dict()
    assert_equal_tensors({key: in_memory[key] for key in on_disk}, on_disk)


def test_the_oracle_tells_the_two_orientations_apart(build: Callable[[str], Built]) -> None:
    # What makes the tests above sensitive to a wrong family rule.
    base, experts = build("gpt2").tensors()
    name = "transformer.h.0.mlp.c_fc.weight"
    own = [expert[name] for expert in experts]
    canonical, stored = (ace_weight(base[name], own, 4e-2, transpose=transpose) for transpose in (True, False))
    assert (canonical - stored).abs().max() > 0.05 * (canonical - base[name]).abs().max()


# --- epsilon -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "epsilon"),
    [
        ({"model_type": "gpt2"}, 4e-2),
        ({"model_type": "roberta", "hidden_size": 768}, 2e-4),
        ({"model_type": "roberta", "hidden_size": 1024}, 1e-5),
        ({"model_type": "bert", "hidden_size": 768}, 1e-5),
        ({"model_type": "llama"}, 1e-5),
        ({"model_type": "t5"}, 1e-5),
        ({"model_type": "clip"}, 1e-5),
        ({"model_type": "unheard-of"}, 1e-5),
        ({}, 1e-5),
    ],
)
def test_epsilon_is_the_papers_for_the_base(config: dict[str, Any], epsilon: float) -> None:
    assert AceOptions().resolve(config).epsilon == epsilon


def test_a_given_epsilon_beats_the_papers() -> None:
    assert AceOptions(epsilon=0.5).resolve({"model_type": "gpt2"}).epsilon == 0.5


@pytest.mark.parametrize("name", ["gpt2", "roberta", "llama_tied", "open_clip"])
def test_the_manifest_states_the_epsilon_used(build: Callable[[str], Built], name: str) -> None:
    built = build(name)
    manifest = json.loads((built.merge("ace").output / "acemerge_manifest.json").read_text())
    used = {record["options"]["epsilon"] for record in manifest["tensors"] if record["action"] == "merged"}
    assert used == {built.case.epsilon}


# --- orientation -------------------------------------------------------------------------------------------------------
def test_stored_orientation_takes_gpt2_as_stored(build: Callable[[str], Built], tmp_path: Path) -> None:
    built = build("gpt2")
    merge(built.models, tmp_path / "out", orientation="stored")
    merged = read_tensors(tmp_path / "out")
    base, experts = built.tensors()
    for name in built.case.fates.merged | built.case.fates.stored_in_out:
        expected = ace_weight(base[name], [expert[name] for expert in experts], 4e-2, transpose=False)
        assert_same_change(name, merged[name], expected, base[name])


def test_stored_orientation_changes_only_matrices_stored_in_out(build: Callable[[str], Built], tmp_path: Path) -> None:
    built = build("open_clip")
    merge(built.models, tmp_path / "out", orientation="stored")
    canonical, stored = read_tensors(built.merge("ace").output), read_tensors(tmp_path / "out")
    assert {name for name in canonical if not torch.equal(canonical[name], stored[name])} == {"visual.proj"}


def test_tables_of_attention_biases_are_no_linear_maps() -> None:
    """Swin's and TinyViT's: two-dimensional, but a number for each head and distance."""
    names = ("blocks.0.attn.relative_position_bias_table", "blocks.0.attn.attention_biases", "blocks.0.mlp.fc1.weight")
    base = {name: torch.zeros(4, 6) for name in names}
    experts = [{name: torch.full((4, 6), float(i)) * torch.arange(6) for name in names} for i in (1, 3)]
    recipe = make_recipe({"base": "base", "experts": ["a", "b"]})
    plan = build_plan(
        recipe, from_state_dict(base, "base"), [from_state_dict(e, n) for e, n in zip(experts, "ab", strict=True)], {}
    )
    assert [tensor.action for tensor in plan.tensors] == ["averaged", "averaged", "merged"]
