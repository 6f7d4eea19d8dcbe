"""A mixture's experts, stacked in one tensor, are merged as if every expert's matrices were stored for themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

import acemerge
from acemerge.checkpoints.folder import from_state_dict
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.planning.estimates import peak_memory
from acemerge.planning.plan import Plan
from acemerge.planning.planner import build_plan
from acemerge.recipe.recipe import make_recipe
from acemerge.reports.facts import counts
from acemerge.tensors.fused import joined_facts
from child import command, in_child
from small_models import fine_tuned, write_model

HIDDEN, INNER, EXPERTS = 8, 12, 4
FEW_STEPS = {"wudi": {"steps": 20}}
Tensors = Mapping[str, Tensor]


def unfused(tasks: int = 3) -> tuple[Tensors, list[Tensors]]:
    """Mixtures of experts that store a matrix for each."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"mlp.gate.weight": (EXPERTS, HIDDEN), "self_attn.q_proj.weight": (HIDDEN, HIDDEN)}
    for expert in range(EXPERTS):
        shapes |= {f"mlp.experts.{expert}.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    base = {
        f"layers.{layer}.{name}": torch.randn(shape, generator=generator) for layer in range(2) for name, shape in shapes.items()
    }
    # Experts of unequal strength, so that one threshold or norm for all of a stack is not the same as one for each.
    tuned = [fine_tuned(base, task, strength=0.02 * 2.0**task) for task in range(tasks)]
    return base, [
        {n: base[n] + (w - base[n]) * (5 if ".experts.1." in n or ".up_" in n else 1) for n, w in e.items()} for e in tuned
    ]


def stacked(model: Tensors, model_type: str) -> dict[str, Tensor]:
    """The same as these families' files have it."""
    found = {name: w for name, w in model.items() if ".experts." not in name}
    for layer in range(2):
        module = f"layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([model[f"{module}{expert}.{name}_proj.weight"] for expert in range(EXPERTS)])
            for name in ("gate", "up", "down")
        )
        both = torch.stack([gate, up], 2).flatten(1, 2) if model_type == "gpt_oss" else torch.cat([gate, up], 1)
        turned = model_type != "mixtral"
        found[f"{module}gate_up_proj"] = (both.mT if turned else both).contiguous()
        found[f"{module}down_proj"] = (down.mT if turned else down).contiguous()
    return found


def config(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "hidden_size": HIDDEN}


@pytest.mark.parametrize("model_type", ["mixtral", "llama4_text", "gpt_oss", "qwen3_vl_moe"])
@pytest.mark.parametrize("method", ["ace", "ace_auto", "tsv_m", "iso_c", "cart", "wudi", "knots_ties", "core_space"])
def test_the_same_as_the_model_stored_unfused(model_type: str, method: str) -> None:
    base, experts = unfused()
    asked: dict[str, Any] = {"method": method, "config": config(model_type), **FEW_STEPS.get(method, {})}
    apart = acemerge.merge_state_dicts(base, experts, **asked)
    merged = acemerge.merge_state_dicts(stacked(base, model_type), [stacked(e, model_type) for e in experts], **asked)
    expected = stacked(apart, model_type)
    assert merged.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-5, atol=1e-5)


# Of a mixture's experts in transformers: what makes them, the order of their axes, and where gate and up lie along the outputs.
_SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
CLASSES: dict[str, tuple[Callable[[], torch.nn.Module], bool, tuple[slice, slice]]] = {
    "gpt_oss": (
        lambda: modeling_gpt_oss.GptOssExperts(transformers.GptOssConfig(**_SIZES)),
        True,
        (slice(0, None, 2), slice(1, None, 2)),
    ),
    "llama4_text": (
        lambda: modeling_llama4.Llama4TextExperts(transformers.Llama4TextConfig(**_SIZES)),
        True,
        (slice(0, INNER), slice(INNER, None)),
    ),
    "qwen3_vl_moe": (
        lambda: modeling_qwen3_vl_moe.Qwen3VLMoeTextExperts(
            transformers.Qwen3VLMoeTextConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
        ),
        False,
        (slice(0, INNER), slice(INNER, None)),
    ),
}


@pytest.mark.parametrize("model_type", CLASSES)
def test_stacks_of_transformers_own_classes(model_type: str) -> None:
    """Merged as the matrices are by which the class computes: gate and up are those slices of what it makes of its inputs."""
    make, in_out, slices = CLASSES[model_type]
    shapes = {name: weight.shape for name, weight in make().named_parameters() if not name.endswith("bias")}
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.0.mlp.experts.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    experts = [fine_tuned(base, task, strength=0.02 * 2.0**task) for task in range(3)]

    def unstacked(model: Tensors) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for expert in range(EXPERTS):
            both, down = (model[f"layers.0.mlp.experts.{name}"][expert] for name in ("gate_up_proj", "down_proj"))
            both, down = (both.T, down.T) if in_out else (both, down)
            gate, up = (both[part] for part in slices)
            own = {"gate": gate, "up": up, "down": down}
            found |= {f"layers.0.mlp.experts.{expert}.{name}_proj.weight": w.contiguous() for name, w in own.items()}
        return found

    merged = acemerge.merge_state_dicts(base, experts, method="ace", config=config(model_type))
    apart = acemerge.merge_state_dicts(unstacked(base), list(map(unstacked, experts)), method="ace", config=config("qwen3_moe"))
    for name, weight in unstacked(merged).items():
        torch.testing.assert_close(weight, apart[name], rtol=1e-5, atol=1e-5)


def plan_of(base: Tensors, settings: Mapping[str, Any], **fields: Any) -> Plan:
    recipe = make_recipe({"base": "base", "experts": ["a"], **fields})
    return build_plan(recipe, from_state_dict(base, "base"), [from_state_dict(fine_tuned(base, 1), "a")], settings)


def told(plan: Plan) -> dict[str, tuple[str, str, str]]:
    return {
        tensor["name"].split(".", 2)[2]: (tensor["action"], tensor["reason"], tensor["orientation"])
        for tensor in plan.to_json()["tensors"]
        if ".0." in tensor["name"]
    }


def test_the_plan_says_how_a_stack_is_merged() -> None:
    found = told(plan_of(stacked(unfused()[0], "gpt_oss"), config("gpt_oss")))
    turned = "4 matrices, each stored [in, out], merged as [out, in]"
    assert found["mlp.experts.gate_up_proj"] == ("merged", "", f"{turned}, as 2 matrices that lie in turns")
    assert found["mlp.experts.down_proj"] == ("merged", "", turned)
    assert found["mlp.gate.weight"] == ("averaged", "a router, which chooses among experts", "as stored")


def test_a_rule_can_merge_a_router() -> None:
    base = stacked(unfused()[0], "mixtral")
    rules = [{"match": "*.gate.weight", "do": "merge"}]
    assert told(plan_of(base, config("mixtral"), tensors=rules))["mlp.gate.weight"][0] == "merged"


@pytest.mark.parametrize(
    ("shapes", "model_type", "turned"),
    [
        ({"gate_up_proj": (2, 8, 24), "down_proj": (2, 12, 8)}, "nobody-heard-of-it", True),
        ({"gate_up_proj": (2, 24, 8), "down_proj": (2, 8, 12)}, "qwen3_vl_moe", False),  # the files of this one have either order
        ({"gate_up_proj": (2, 8, 16), "down_proj": (2, 8, 8)}, "nobody-heard-of-it", True),  # as of gpt-oss-20b: one is square
        ({"gate_up_proj": (2, 16, 8), "down_proj": (2, 8, 8)}, "gpt_oss", False),
        ({"down_proj": (2, 8, 8)}, "gpt_oss", True),
        ({"down_proj": (2, 8, 8)}, "mixtral", False),
    ],
)
def test_sizes_tell_the_order_and_the_model_type_where_they_do_not(
    shapes: Mapping[str, Sequence[int]], model_type: str, turned: bool
) -> None:
    base = {f"layers.0.mlp.experts.{name}": torch.randn(*shape) for name, shape in shapes.items()}
    for action, _, orientation in told(plan_of(base, {"model_type": model_type, "text_config": config(model_type)})).values():
        assert action == "merged"
        assert ("stored [in, out]" in orientation) == turned


def test_biases_of_experts_and_other_tensors_of_three_axes_are_no_matrices() -> None:
    base = {
        "layers.0.mlp.experts.gate_up_proj_bias": torch.randn(4, 16),
        "layers.0.conv.weight": torch.randn(4, 4, 3),
        "layers.0.mlp.experts.up_proj": torch.randn(4, 1, 8),
    }
    assert {action for action, _, _ in told(plan_of(base, config("gpt_oss"))).values()} == {"averaged"}


def test_memory_is_that_of_one_matrix() -> None:
    """A larger mixture takes more for its output only."""
    few, many = (
        plan_of({"layers.0.mlp.experts.down_proj": torch.randn(count, 64, 96)}, {"model_type": "mixtral", "hidden_size": 64})
        for count in (2, 32)
    )
    [small], [large] = few.tensors, many.tensors
    assert peak_memory(large) - peak_memory(small) == large.output_bytes - small.output_bytes
    assert many.flops == pytest.approx(16 * few.flops)


def write_mixtures(folder: Path, model_type: str = "gpt_oss") -> list[Path]:
    base, experts = unfused()
    models = zip(("base", "a", "b", "c"), (base, *experts), strict=True)
    return [write_model(folder / name, stacked(model, model_type), config(model_type)) for name, model in models]


def test_what_is_told_of_a_stack(tmp_path: Path) -> None:
    """Of few matrices, everything; of many, the middle and the ends."""
    folders = write_mixtures(tmp_path)
    acemerge.merge(folders[0], folders[1:], tmp_path / "out")
    records = {tensor["name"]: tensor for tensor in json.loads((tmp_path / "out" / MANIFEST).read_text())["tensors"]}
    few, many = records["layers.0.mlp.experts.down_proj"], records["layers.0.mlp.experts.gate_up_proj"]
    assert {f"overlap of block {block}" for block in range(4)} <= few.keys()
    assert many["overlap of block 7"] is not None
    written, before = (load_file(tmp_path / model / "model.safetensors")[many["name"]] for model in ("out", "base"))
    assert many["norm"] == pytest.approx(float((written - before).norm()), rel=1e-4)


def test_what_is_told_of_a_stack_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column for each fact of each of its matrices would leave no room for a letter."""
    folders = write_mixtures(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    ended = in_child(lambda: command("merge", *folders, "-o", tmp_path / "out", "-m", "ace", "-v"))
    out = ended.out
    assert ended.code == 0
    assert max(map(len, out.splitlines())) <= 80
    told = out.split("layers.0.mlp.experts.down_proj: merged\n")[1].split("\nlayers.0.")[0].split()
    assert {"gamma", "to", "branch", "precision"} <= set(told)
    every = [counts(tensor.to_json(), "branch") for tensor in read_merge(tmp_path / "out").tensors]
    matrices = sum(own.total() for own in every)
    assert matrices > len([own for own in every if own]), "a stack is more than one"
    assert f"of {matrices} merged matrices were heterogeneous" in out


def test_of_many_matrices_the_middle_and_the_ends_are_told() -> None:
    facts = joined_facts(
        [{"gamma": float(i), "branch": "low" if i < 4 else "high", "task_norms": [3.0], "norm": 1.0} for i in range(9)]
    )
    assert facts == {
        "gamma of blocks, least": 0.0,
        "gamma of blocks, median": 4.0,
        "gamma of blocks, most": 8.0,
        "branch of blocks, low": 4,
        "branch of blocks, high": 5,
        "task_norms": [9.0],
        "norm": 3.0,
        "largest_task_norm": 9.0,
        "norm_ratio": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(("method", "option", "values"), [("ace", "epsilon", [1e-5, 1e-2]), ("ace_auto", "power", [0.25, 1.0])])
def test_a_sweep_makes_what_merges_make(tmp_path: Path, method: str, option: str, values: list[float]) -> None:
    folders = write_mixtures(tmp_path)
    acemerge.sweep(folders[0], folders[1:], tmp_path / "sweep", {option: values}, method, keep="all")
    for value in values:
        acemerge.merge(folders[0], folders[1:], tmp_path / f"{value}", method, options={option: value})
        [swept] = [
            path
            for path in (tmp_path / "sweep").rglob("model.safetensors")
            if json.loads((path.parent / MANIFEST).read_text())["options"][option] == value
        ]
        assert swept.read_bytes() == (tmp_path / f"{value}" / "model.safetensors").read_bytes()


def test_a_diagnosis_measures_a_stack(tmp_path: Path) -> None:
    folders = write_mixtures(tmp_path)
    found = {tensor.name: tensor for tensor in acemerge.diagnose(folders[0], folders[1:]).tensors}
    assert found["layers.0.mlp.experts.down_proj"].fate == "merged"
    assert found["layers.0.mlp.experts.down_proj"].gamma is not None
    assert found["layers.0.self_attn.q_proj.weight"].forecasts
