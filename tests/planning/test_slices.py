"""Layers of models in another order, and values that differ by layer: what comes out, entry by entry."""

import json
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import acemerge
from acemerge.cli.flags import RecipeFlags
from acemerge.errors import InputError
from acemerge.execute.pipeline import run_merge
from acemerge.recipe.arguments import recipe_from
from acemerge.recipe.run_options import RunOptions
from layered_models import layered

LAYERS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for model in (lambda made: (made[0], *made[1]))(layered(folder, LAYERS, 2)):
        config = {"model_type": "llama", "num_hidden_layers": LAYERS, "layer_types": ["full", "sliding", "full", "sliding"]}
        (model / "config.json").write_text(json.dumps(config))
        tensors = load_file(model / "model.safetensors")
        save_file({**tensors, "norm.weight": torch.rand(8)}, model / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def merge_config(models: Path, output: Path, text: str) -> dict[str, Tensor]:
    config = models / f"{output.name}.yaml"
    config.write_text(textwrap.dedent(text))
    recipe, relative_to = recipe_from([str(config)], [], {})
    run_merge(recipe, output, RunOptions(quiet=True), relative_to=relative_to)
    return weights(output)


def test_passthrough_stacks_layers_bit_for_bit(models: Path, tmp_path: Path) -> None:
    found = merge_config(
        models,
        tmp_path / "out",
        """
        merge_method: passthrough
        slices:
          - sources: [{model: expert-0, layer_range: [0, 3]}]
          - sources: [{model: expert-1, layer_range: [1, 4]}]
        """,
    )
    first, second = weights(models / "expert-0"), weights(models / "expert-1")
    order = [(first, 0), (first, 1), (first, 2), (second, 1), (second, 2), (second, 3)]
    expected = {
        name.replace(f"layers.{layer}.", f"layers.{number}."): tensor
        for number, (model, layer) in enumerate(order)
        for name, tensor in model.items()
        if name.startswith(f"layers.{layer}.")
    }
    expected |= {"embed_tokens.weight": first["embed_tokens.weight"], "norm.weight": second["norm.weight"]}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_hidden_layers"] == 6
    assert config["layer_types"] == ["full", "sliding", "full", "sliding", "full", "sliding"]


def test_passthrough_silences_layers(models: Path, tmp_path: Path) -> None:
    found = merge_config(
        models,
        tmp_path / "out",
        """
        merge_method: passthrough
        slices:
          - sources: [{model: expert-0, layer_range: [0, 4]}]
          - sources:
              - model: expert-0
                layer_range: [3, 4]
                parameters: {scale: [{filter: o_proj, value: 0}, {filter: down_proj, value: 0.5}, {value: 1}]}
        """,
    )
    own = weights(models / "expert-0")
    assert not found["layers.4.self_attn.o_proj.weight"].any()
    assert torch.equal(found["layers.4.mlp.down_proj.weight"], own["layers.3.mlp.down_proj.weight"] * 0.5)
    assert torch.equal(found["layers.4.mlp.up_proj.weight"], own["layers.3.mlp.up_proj.weight"])
    assert torch.equal(found["layers.3.self_attn.o_proj.weight"], own["layers.3.self_attn.o_proj.weight"])


def test_slices_of_two_models_with_weights_by_layer(models: Path, tmp_path: Path) -> None:
    found = merge_config(
        models,
        tmp_path / "out",
        """
        merge_method: linear
        slices:
          - sources:
              - {model: expert-0, layer_range: [0, 3], parameters: {weight: [0, 1]}}
              - {model: expert-1, layer_range: [1, 4], parameters: {weight: 1}}
          - sources: [{model: expert-1, layer_range: [0, 1], parameters: {weight: 3}}]
        """,
    )
    first, second = weights(models / "expert-0"), weights(models / "expert-1")
    for number, weight in enumerate((0.0, 0.5, 1.0)):
        one, other = first[f"layers.{number}.mlp.up_proj.weight"], second[f"layers.{number + 1}.mlp.up_proj.weight"]
        expected = (weight * one.double() + other.double()) / (weight + 1)
        assert torch.allclose(found[f"layers.{number}.mlp.up_proj.weight"].double(), expected, atol=1e-6)
    assert torch.equal(found["layers.3.mlp.up_proj.weight"], second["layers.0.mlp.up_proj.weight"])
    expected = (0 * first["embed_tokens.weight"] + second["embed_tokens.weight"]).double()  # outside of layers: the first value
    assert torch.allclose(found["embed_tokens.weight"].double(), expected, atol=1e-6)


def test_options_by_layer_name_and_expert(models: Path, tmp_path: Path) -> None:
    base, experts = models / "base", [models / "expert-0", models / "expert-1"]
    weighted = {"expert-0": {"by_layer": [1, 0]}, "expert-1": [{"match": "*mlp*", "value": 0.25}, {"value": 2}]}
    result = acemerge.merge(base, experts, tmp_path / "out", method="task_arithmetic", weights=weighted, alpha=0.5)
    W0, first, second, found = (weights(folder) for folder in (base, *experts, tmp_path / "out"))
    for layer in range(LAYERS):
        for part, other in (("mlp.up_proj", 0.25), ("self_attn.q_proj", 2)):
            name = f"layers.{layer}.{part}.weight"
            one = 1 - layer / (LAYERS - 1)
            change = one * (first[name] - W0[name]).double() + other * (second[name] - W0[name]).double()
            assert torch.allclose(found[name].double(), W0[name].double() + 0.5 * change, atol=1e-6), name
    told = {record["name"]: record["options"]["weights"] for record in result.tensors if record["action"] == "merged"}
    assert told["layers.0.mlp.up_proj.weight"] == (1.0, 0.25)
    manifest = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())
    assert manifest["options"]["weights"] == weighted
    again = recipe_from([str(tmp_path / "out/acemerge.yaml")], [], {})[0]
    assert again.options["weights"] == weighted


def test_ties_with_a_share_and_a_weight_for_each(models: Path, tmp_path: Path) -> None:
    base, experts = models / "base", [models / "expert-0", models / "expert-1"]
    options = {"keep": {"expert-0": 0.25, "expert-1": 1.0}, "weights": [0.5, -2.0], "scope": "tensor", "merge": "sum"}
    acemerge.merge(base, experts, tmp_path / "out", method="ties", **options)  # type: ignore[arg-type]
    name = "layers.1.mlp.up_proj.weight"
    W0, first, second, found = (weights(folder)[name] for folder in (base, *experts, tmp_path / "out"))
    one, other = (first - W0).double(), (second - W0).double()
    entries = one.abs().flatten().sort().values
    threshold = entries[len(entries) - len(entries) // 4 - 1]  # one more than a quarter reaches it, as in the authors' code
    u = torch.stack([0.5 * torch.where(one.abs() >= threshold, one, 0.0), -2.0 * other])
    sign = torch.where(u.sum(0) > 0, 1.0, -1.0)
    expected = W0.double() + (u * (u.sign() == sign)).sum(0)
    assert torch.allclose(found.double(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        ([{"layers": {"expert-0": [0, 5]}}], "'expert-0' has layers 0 to 3, but [0, 5] asks for 4"),
        ([{"layers": {"expert-9": [0, 4]}}], "there is no model 'expert-9'"),
        ([{"layers": {"expert-0": [0, 4], "expert-1": [0, 3]}}], "all of the same length"),
        ([{"layers": {"expert-0": [0, 4], "expert-1": [0, 4]}}], "takes exactly 1 expert, 2 were given"),
    ],
)
def test_slices_that_cannot_be(models: Path, tmp_path: Path, slices: list[object], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        acemerge.merge(
            models / "base", [models / "expert-0", models / "expert-1"], tmp_path / "out", method="passthrough", slices=slices
        )
    assert problem in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_models_of_unequal_width_do_not_stack(models: Path, tmp_path: Path) -> None:
    for name, width in (("narrow", 8), ("wide", 16)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": width, "num_hidden_layers": 1}))
        save_file({"layers.0.w": torch.zeros(width, width)}, folder / "model.safetensors")
    with pytest.raises(InputError, match="not equally wide: 'base' 8, 'wide' 16"):
        acemerge.merge(
            tmp_path / "narrow", [tmp_path / "wide"], tmp_path / "out", method="passthrough",
            slices=[{"layers": {"base": [0, 1]}}, {"layers": {"wide": [0, 1]}}],
        )  # fmt: skip


def test_the_base_may_be_an_expert_where_weights_are_joined(models: Path, tmp_path: Path) -> None:
    base, expert = models / "base", models / "expert-0"
    acemerge.merge(base, [base, expert], tmp_path / "out", method="linear", weights=[1, 3])
    name = "layers.0.mlp.up_proj.weight"
    expected = 0.25 * weights(base)[name].double() + 0.75 * weights(expert)[name].double()
    assert torch.allclose(weights(tmp_path / "out")[name].double(), expected, atol=1e-6)
    with pytest.raises(InputError, match="are the same files"):
        acemerge.merge(base, [base, expert], tmp_path / "no", method="task_arithmetic")


def test_a_plan_shows_what_differs_by_slice(models: Path) -> None:
    slices = [{"layers": {"expert-0": [0, 2]}}, {"layers": {"expert-0": [2, 4]}, "options": {"scale": 0.5}}]
    plan = acemerge.plan(models / "base", [models / "expert-0"], method="passthrough", slices=slices)
    assert plan.varying_options == ("scale",)
    told = {tensor["name"]: tensor["options"]["scale"] for tensor in plan.to_json()["tensors"]}
    assert (told["layers.1.mlp.up_proj.weight"], told["layers.2.mlp.up_proj.weight"]) == (1.0, 0.5)


def test_weights_by_name_on_the_command_line(models: Path, tmp_path: Path) -> None:
    flags = RecipeFlags(method=["task_arithmetic"], settings=["alpha=0:1"], weights="expert-1=2,expert-0=0.5")
    recipe, _ = flags.recipe([str(models / "base"), str(models / "expert-0"), str(models / "expert-1")])
    run_merge(recipe, tmp_path / "out", RunOptions(quiet=True))
    W0, first, second, found = (
        weights(folder) for folder in (*(models / n for n in ("base", "expert-0", "expert-1")), tmp_path / "out")
    )
    for layer in range(LAYERS):
        name = f"layers.{layer}.mlp.up_proj.weight"
        change = 0.5 * (first[name] - W0[name]).double() + 2 * (second[name] - W0[name]).double()
        assert torch.allclose(found[name].double(), W0[name].double() + layer / (LAYERS - 1) * change, atol=1e-6)


def test_a_base_without_tensors_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="no weights in common"):
        acemerge.merge_state_dicts({}, [{}])
