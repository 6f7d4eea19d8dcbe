"""A family that says which matrices are fused has them merged apart, as if the model stored them so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import acemerge
import lora_zoo
from acemerge.checkpoints import families
from acemerge.checkpoints import fused as fused_table
from acemerge.checkpoints.families import Family
from acemerge.checkpoints.folder import from_state_dict
from acemerge.checkpoints.fused import Rule, equal
from acemerge.output.manifest import MANIFEST, read_merge
from acemerge.planning.plan import Plan
from acemerge.planning.planner import build_plan
from acemerge.planning.tensor import computed
from acemerge.recipe.recipe import make_recipe
from acemerge.reports.merge_report import merge_page
from small_models import fine_tuned, write_model

Tensors = Mapping[str, Tensor]
BLOCKS = ("q", "k", "v")
FUSING = Rule("*.qkv.weight", equal(3))


@pytest.fixture(params=[False, True], ids=["stored [out, in]", "stored [in, out]"])
def stored_in_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A family with fused matrices, in one order or the other."""
    turned = ("*.weight",) if request.param else ()
    family = Family("fusing", "for this test", frozenset({"fusing"}), stored_in_out=turned)
    monkeypatch.setattr(families, "FAMILIES", (family, *families.FAMILIES))
    monkeypatch.setattr(fused_table, "FUSED", (FUSING, *fused_table.FUSED))
    return bool(request.param)


def unfused_models(experts: int = 3) -> tuple[Tensors, list[Tensors]]:
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{layer}.{module}.weight" for layer in range(2) for module in (*BLOCKS, "out")]
    base = {name: torch.randn(8, 8, generator=generator) for name in names}
    # Experts and matrices of unequal strength, so that one threshold or norm for all three is not the same as three.
    tuned = [fine_tuned(base, i, strength=0.02 * 2.0**i) for i in range(experts)]
    return base, [{n: base[n] + (w - base[n]) * (5 if ".k." in n else 1) for n, w in expert.items()} for expert in tuned]


def fused(model: Tensors, stored_in_out: bool) -> dict[str, Tensor]:
    found = {name: w for name, w in model.items() if ".out." in name}
    for layer in range(2):
        found[f"layers.{layer}.qkv.weight"] = torch.cat([model[f"layers.{layer}.{block}.weight"] for block in BLOCKS])
    return {name: (w.T if stored_in_out else w).contiguous() for name, w in found.items()}


@pytest.mark.parametrize("method", ["ace", "tsv_m", "iso_cts", "cart", "wudi", "knots_ties", "core_space"])
def test_the_same_as_the_model_stored_unfused(stored_in_out: bool, method: str) -> None:
    base, experts = unfused_models()
    asked: dict[str, Any] = {"method": method, **({"steps": 20} if method == "wudi" else {})}
    apart = acemerge.merge_state_dicts(base, experts, **asked, preset="generic")
    stored, tuned = fused(base, stored_in_out), [fused(e, stored_in_out) for e in experts]
    merged = acemerge.merge_state_dicts(stored, tuned, **asked, preset="fusing")
    expected = fused(apart, stored_in_out)
    assert merged.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-5, atol=1e-6)
    as_one = acemerge.merge_state_dicts(stored, tuned, **asked, preset="fusing", fused="whole")["layers.0.qkv.weight"]
    assert not merged["layers.0.qkv.weight"].allclose(as_one, rtol=1e-3, atol=1e-4), "merging apart is something else"


def test_what_is_told_of_every_block(stored_in_out: bool, tmp_path: Path) -> None:
    base, experts = unfused_models()
    folders = [
        write_model(tmp_path / name, fused(model, stored_in_out), {"model_type": "fusing"})
        for name, model in zip(("base", "a", "b", "c"), (base, *experts), strict=True)
    ]
    acemerge.merge(folders[0], folders[1:], tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    [record] = [tensor for tensor in manifest["tensors"] if tensor["name"] == "layers.0.qkv.weight"]
    assert record["orientation"].endswith(", as 3 matrices")
    assert {f"overlap of block {block}" for block in range(3)} <= record.keys()
    written, before = (load_file(tmp_path / model / "model.safetensors")[record["name"]] for model in ("out", "base"))
    assert record["norm"] == pytest.approx(float((written - before).norm()), rel=1e-4)
    table = merge_page(read_merge(tmp_path / "out")).table
    assert "overlap of block 2" in [column.title for column in table.columns]


def test_adapters_of_a_fused_matrix(tmp_path: Path) -> None:
    """In their core or expanded to full models, GPT-2's c_attn comes out alike."""
    zoo = lora_zoo.build(tmp_path, "GPT2LMHeadModel")
    of_adapters = acemerge.merge(zoo.base, list(zoo.adapters.values()), tmp_path / "from-core", fused="apart")
    kept = _untouched_kept(of_adapters.plan)
    acemerge.merge(zoo.base, list(zoo.full.values()), tmp_path / "from-full", tensors=kept, fused="apart")
    core, full, base = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "from-core", tmp_path / "from-full", zoo.base)
    )
    names = [name for name in core if name.endswith("c_attn.weight")]
    assert names
    for name in names:
        error = (core[name] - full[name]).norm() / (full[name] - base[name]).norm()
        assert error < 1e-4, name


def _untouched_kept(plan: Plan) -> list[dict[str, str]]:
    return [{"match": tensor.name, "do": "keep"} for tensor in plan.tensors if not tensor.method]


def planned(base: Tensors, config: Mapping[str, Any], **fields: Any) -> Plan:
    recipe = make_recipe({"base": "base", "experts": ["a"], **fields})
    return build_plan(recipe, from_state_dict(base, "base"), [from_state_dict(fine_tuned(base, 1), "a")], config)


def orientation(plan: Plan) -> str:
    [tensor] = computed(plan.tensors)
    return tensor.fate.view.orientation


def test_where_it_cannot_be_taken_apart_a_note_says_so() -> None:
    plan = planned({"a.qkv_proj.weight": torch.randn(7, 4)}, {"model_type": "phi3", "num_attention_heads": 4})
    assert plan.notes == ("'a.qkv_proj.weight': fused matrices, merged as one: their sizes do not fit the config",)
    assert orientation(plan) == "as stored"


def test_gpt2_and_open_clip_are_merged_whole_unless_asked() -> None:
    """As the ACE authors did; in other families fused matrices are merged apart unless asked."""
    c_attn = {"h.0.attn.c_attn.weight": torch.randn(4, 12)}
    whole, apart = "stored [in, out], merged as [out, in]", "stored [in, out], merged as [out, in], as 3 matrices"
    gpt2 = {"model_type": "gpt2"}
    assert [orientation(planned(c_attn, gpt2, fused=way)) for way in ("auto", "whole", "apart")] == [whole, whole, apart]
    in_proj = {"visual.transformer.resblocks.0.attn.in_proj_weight": torch.randn(12, 4)}
    assert [orientation(planned(in_proj, {}, fused=way)) for way in ("auto", "apart")] == [
        "as stored",
        "as stored, as 3 matrices",
    ]
    other = {"encoder.layers.0.self_attn.in_proj_weight": torch.randn(12, 4)}
    assert [orientation(planned(other, {}, fused=way)) for way in ("auto", "whole")] == ["as stored, as 3 matrices", "as stored"]


def test_methods_for_all_tensors_and_the_stored_order_take_them_whole() -> None:
    base, config = {"a.qkv_proj.weight": torch.randn(8, 4)}, {"num_attention_heads": 2, "num_key_value_heads": 1}
    phi3 = {"model_type": "phi3", **config}
    assert orientation(planned(base, phi3)) == "as stored, as 3 matrices of 4, 2 and 2 outputs"
    assert orientation(planned(base, phi3, method="ties")) == "as stored"
    assert orientation(planned(base, phi3, orientation="stored")) == "as stored"
