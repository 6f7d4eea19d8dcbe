"""Merges that use data, on tiny real models through the command line, against the same done by hand with whole activations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import acemerge
import model_zoo
from acemerge.calibration.layer_inputs import LayerInputs
from acemerge.calibration.run import DataRun, ExpertModel
from acemerge.calibration.shared_backbone import SharedBackbone
from acemerge.cli.app import main
from acemerge.execute.pipeline import find_sources, make_plan
from acemerge.methods import all_methods, get_method
from acemerge.planning.progress import SilentProgress
from acemerge.recipe.recipe import make_recipe
from data_statistics import write_rows
from model_zoo import Models, mean_weight, quiet_transformers, read_tensors

DATA_METHODS = [method.name for method in all_methods() if method.uses == "data"]
QUICK: dict[str, dict[str, Any]] = {"adamerging": {"steps": 3, "batch_size": 4, "learning_rate": 0.02}}
FAMILIES: dict[str, Callable[[Path], Models]] = {"bert": model_zoo.bert, "gpt2": model_zoo.gpt2, "vit": model_zoo.vit}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_data_method = pytest.mark.parametrize("method", DATA_METHODS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_transformers():
        yield


def models_and_rows(root: Path, family: str, **settings: Any) -> tuple[Models, Path]:
    models = FAMILIES[family](root / "models")
    return models, write_rows(root / "rows", models.experts, pixels=family == "vit", **settings)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def manifest(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "acemerge_manifest.json").read_text())
    return content


def load(folder: Path) -> Any:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder).eval()


def rows_of(rows: Path, expert: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in load_file(rows / f"{expert}.safetensors").items() if name != "labels"}


# --- by hand -----------------------------------------------------------------------------------------------------------


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def real_inputs(x: Tensor, mask: Tensor | None) -> Tensor:
    return (x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x.reshape(-1, x.shape[-1])).double()


def inputs_by_layer(model: Any, mask: Tensor | None, *arguments: Any, **named: Any) -> dict[str, Tensor]:
    """Everything that every linear layer gets while the model is called, whole."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[name] = real_inputs(given[0], mask)

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linear_layers(model).items()]
    with torch.no_grad():
        model(*arguments, **named)
    for handle in handles:
        handle.remove()
    return seen


def regmean_by_hand(layers: list[nn.Module], inputs: list[Tensor], a: float) -> Tensor:
    """As stored: W = (sum W_t H_t)(sum H_t)^-1, or (sum H_t)^-1 (sum H_t W_t) for [in, out]."""
    H = []
    for x in inputs:
        G = x.T @ x / len(x)
        H.append(a * G + (1 - a) * G.diag().diag())
    inverse: Tensor = torch.linalg.inv(torch.stack(H).sum(0))
    weights: list[Tensor] = [layer.get_parameter("weight").detach().double() for layer in layers]
    if isinstance(layers[0], Conv1D):
        return inverse @ torch.stack([h @ w for h, w in zip(H, weights, strict=True)]).sum(0)
    return torch.stack([w @ h for h, w in zip(H, weights, strict=True)]).sum(0) @ inverse


def merged_model(output: Path, expert: str) -> Any:
    return acemerge.load_expert_head(output, expert)


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    error = float((found.detach().double() - expected).abs().max())
    assert error <= 2e-3 * float(expected.abs().max()), f"{what}: off by {error:.3g}"


# --- RegMean -----------------------------------------------------------------------------------------------------------


@every_family
def test_regmean_is_the_fit_to_the_inputs_of_every_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, rows = models_and_rows(tmp_path, family, rows=40)
    out = tmp_path / "out"
    assert (
        command(monkeypatch, "merge", models.base, *models.experts.values(), "-o", out, "-m", "regmean", "--data", rows, "-q")
        == 0
    )
    experts = {name: load(folder) for name, folder in models.experts.items()}
    inputs = {}
    for name, model in experts.items():
        batch = rows_of(rows, name)
        inputs[name] = inputs_by_layer(model, batch.get("attention_mask"), **batch)
    found = merged_model(out, "red")
    checked = 0
    for name, layer in linear_layers(found).items():
        if name.split(".")[-1] in ("classifier", "score") or "pooler" in name:  # the expert's own
            continue
        layers = [linear_layers(model)[name] for model in experts.values()]
        expected = regmean_by_hand(layers, [inputs[expert][name] for expert in experts], 0.9)
        assert_near(layer.get_parameter("weight"), expected, name)
        checked += 1
    record = manifest(out)
    merged = [tensor for tensor in record["tensors"] if tensor["action"] == "merged"]
    assert checked == len(merged) > 0
    assert record["uses"] == "data"
    assert set(record["data"]["sha256"]) == {f"{name}.safetensors" for name in models.experts}
    assert all(tensor["reason"] for tensor in record["tensors"] if tensor["action"] != "merged")


def test_regmean_averages_what_is_no_linear_layer(tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "gpt2")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="regmean", data=rows)
    base, experts = read_tensors(models.base), [read_tensors(folder) for folder in models.experts.values()]
    merged = read_tensors(tmp_path / "out")
    for name in ("transformer.wte.weight", "transformer.h.0.ln_1.weight", "transformer.h.1.mlp.c_fc.bias"):
        expected = mean_weight(base[name], [expert[name] for expert in experts])
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-5, atol=1e-6)
    record = {tensor["name"]: tensor for tensor in manifest(tmp_path / "out")["tensors"]}
    assert record["transformer.wte.weight"]["reason"] == "not the weight of a linear layer"
    assert record["transformer.h.0.attn.c_proj.weight"]["orientation"] == "stored [in, out], merged as [out, in]"


def test_a_weight_that_is_also_a_lookup_table_is_averaged(tmp_path: Path) -> None:
    """GPT2LMHeadModel's output layer is its embedding."""
    models = model_zoo.gpt2(tmp_path / "models", expert="GPT2LMHeadModel")
    rows = write_rows(tmp_path / "rows", models.experts)
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="regmean", data=rows)
    record = {tensor["name"]: tensor for tensor in manifest(tmp_path / "out")["tensors"]}
    assert record["transformer.wte.weight"]["action"] == "averaged"


def test_layers_that_are_called_twice_or_share_a_weight_count_together() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    model = ExpertModel(nn.ModuleList([one, other]), {"w": [(one, "weight"), (other, "weight")]})
    seen, xs = LayerInputs(), torch.randn(3, 2, 4, 3)
    with seen.watching(model, ["w"]):
        seen.begin({}, model.module)
        one(one(xs[0]))
        other(xs[1])
    one(xs[2])  # nobody is watching any more
    inputs = torch.cat([xs[0].reshape(-1, 3), one(xs[0]).detach().reshape(-1, 3), xs[1].reshape(-1, 3)]).double()
    torch.testing.assert_close(seen.grams()["w"], inputs.T @ inputs / len(inputs))
    assert seen.counts["w"] == 24


@every_data_method
def test_half_precision_in_is_half_precision_out(method: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "vit")
    for folder in models.folders:
        model_zoo.write_tensors(folder, {name: t.bfloat16() for name, t in read_tensors(folder).items()})
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method=method, data=rows, **QUICK.get(method, {})
    )
    for tensor in read_tensors(tmp_path / "out").values():
        assert tensor.dtype == torch.bfloat16
        assert torch.isfinite(tensor).all()


def test_padding_is_no_input(tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "bert")
    wider = tmp_path / "wider"
    wider.mkdir()
    for file in rows.iterdir():
        tensors = load_file(file)
        padded = {name: nn.functional.pad(t, (0, 3)) if t.dim() == 2 else t for name, t in tensors.items()}
        model_zoo.write_tensors(wider, padded, file.name)
    outputs = [tmp_path / "one", tmp_path / "other"]
    for folder, output in zip((rows, wider), outputs, strict=True):
        acemerge.merge(models.base, list(models.experts.values()), output, method="regmean", data=folder)
    one, other = map(read_tensors, outputs)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


# --- RegMean++ ---------------------------------------------------------------------------------------------------------


def parts_of(model: Any, family: str) -> tuple[nn.Module, nn.ModuleList, Callable[..., Tensor]]:
    """What comes before the blocks, the blocks, and how the first block's inputs are made."""
    if family == "bert":
        return model.bert.embeddings, model.bert.encoder.layer, lambda b: model.bert.embeddings(input_ids=b["input_ids"])
    if family == "vit":
        return model.vit.embeddings, model.vit.layers, lambda b: model.vit.embeddings(b["pixel_values"])
    body = model.transformer
    positions = torch.arange(7)
    return body.wte, body.h, lambda b: body.wte(b["input_ids"]) + body.wpe(positions)


def first(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@every_family
@torch.no_grad()
def test_regmean_plusplus_is_regmean_behind_the_merged_blocks(family: str, tmp_path: Path) -> None:
    """Step by step as the paper has it, keeping every block's inputs Z_t."""
    models, rows = models_and_rows(tmp_path, family, rows=40, padded=False)
    out = tmp_path / "out"
    acemerge.merge(models.base, list(models.experts.values()), out, method="regmean_plusplus", data=rows)
    batches = {name: rows_of(rows, name) for name in models.experts}
    experts = {name: load(folder) for name, folder in models.experts.items()}
    trunk = load(models.experts["red"])
    means = {n: torch.stack([dict(e.named_parameters())[n] for e in experts.values()]).mean(0)
             for n, p in trunk.named_parameters() if p.shape == dict(experts["blue"].named_parameters())[n].shape}  # fmt: skip
    for name, parameter in trunk.named_parameters():
        if name in means:
            parameter.copy_(means[name])
    _, merged_blocks, embed = parts_of(trunk, family)
    Z = {name: embed(batch) for name, batch in batches.items()}
    found = merged_model(out, "red")
    for index, block in enumerate(merged_blocks):
        seen, layers = {}, {}
        for name, model in experts.items():
            own = parts_of(model, family)[1][index]
            seen[name] = inputs_by_layer(own, None, Z[name])
            layers[name] = linear_layers(own)
        for layer, module in linear_layers(block).items():
            weight = regmean_by_hand([layers[n][layer] for n in experts], [seen[n][layer] for n in experts], 0.95)
            module.get_parameter("weight").copy_(weight)
            theirs = linear_layers(parts_of(found, family)[1][index])[layer].get_parameter("weight")
            assert_near(theirs, weight, f"block {index} {layer}")
        Z = {name: first(block(z)) for name, z in Z.items()}


@pytest.mark.parametrize("method", ["regmean_plusplus", "adamerging"])
def test_rules_hold_for_the_model_that_is_measured(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While measuring, a tensor that a rule keeps has the base's value, one that is averaged the mean."""
    models, rows = models_and_rows(tmp_path, "bert")
    kept, averaged = "bert.encoder.layer.0.intermediate.dense.weight", "bert.encoder.layer.0.output.dense.weight"
    rules = [{"match": kept, "do": "keep"}, {"match": averaged, "do": "average"}]
    seen: dict[str, Tensor] = {}
    install = ExpertModel.install

    def watched(self: ExpertModel, name: str, value: Tensor) -> None:
        seen[name] = value
        install(self, name, value)

    monkeypatch.setattr(ExpertModel, "install", watched)
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method, data=rows, tensors=rules, **QUICK.get(method, {})
    )
    merged = read_tensors(tmp_path / "out")
    assert seen[kept].equal(read_tensors(models.base)[kept])
    assert seen[averaged].equal(merged[averaged])


def test_regmean_plusplus_keeps_what_comes_after_the_blocks(tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "gpt2")
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method="regmean_plusplus", data=rows)
    base, merged = read_tensors(models.base), read_tensors(tmp_path / "out")
    assert merged["transformer.ln_f.weight"].equal(base["transformer.ln_f.weight"])
    record = {tensor["name"]: tensor for tensor in manifest(tmp_path / "out")["tensors"]}
    assert record["transformer.ln_f.weight"]["reason"] == "after the last block: left at the base"
    assert record["transformer.wpe.weight"]["action"] == "averaged"


@pytest.mark.parametrize("method", ["regmean", "regmean_plusplus", "fisher"])
def test_equal_experts_give_that_expert(method: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "bert")
    red = models.experts["red"]
    copies = {name: model_zoo.rewrite(red, tmp_path / name, lambda tensors: tensors) for name in ("green", "blue")}
    acemerge.merge(models.base, {"red": red, **copies}, tmp_path / "out", method=method, data=rows)
    found, expected = merged_model(tmp_path / "out", "red").state_dict(), load(red).state_dict()
    for name in expected:
        if "pooler" not in name:  # after the blocks
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_models_with_two_stacks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = model_zoo.clip(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts)
    arguments = ["merge", models.base, *models.experts.values(), "-o", tmp_path / "out", "-m", "regmean_plusplus", "--data", rows]
    assert command(monkeypatch, *arguments) == 2
    assert "needs one stack of blocks" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- Fisher ------------------------------------------------------------------------------------------------------------


@every_family
def test_fisher_is_the_average_weighted_by_row_and_class(family: str, tmp_path: Path) -> None:
    """Against a loop over rows and classes: sum_y p_y (d log p_y)^2, scaled to a root mean square of 1."""
    models, rows = models_and_rows(tmp_path, family, rows=4)
    out = tmp_path / "out"
    acemerge.merge(models.base, list(models.experts.values()), out, method="fisher", data=rows)
    found = {name: p.detach().double() for name, p in merged_model(out, "red").named_parameters()}
    total: dict[str, Tensor] = {}
    weighted: dict[str, Tensor] = {}
    shared = [name for name in found if name.split(".")[0] not in ("classifier", "score") and "pooler" not in name]
    for expert, folder in models.experts.items():
        model = load(folder)
        parameters = {name: p for name, p in model.named_parameters() if name in shared}
        F = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        batch = rows_of(rows, expert)
        for row in range(4):
            log_p = model(**{name: t[row : row + 1] for name, t in batch.items()}).logits[0].log_softmax(0)
            for y in range(len(log_p)):
                gradients = torch.autograd.grad(log_p[y], list(parameters.values()), retain_graph=True)
                for name, gradient in zip(parameters, gradients, strict=True):
                    F[name] += float(log_p[y].detach().exp()) * gradient.double().square() / 4
        scale = (sum(f.numel() for f in F.values()) / sum(float(f.square().sum()) for f in F.values())) ** 0.5
        for name, f in F.items():
            weight = (f * scale).clamp_min(1e-6)
            total[name] = total.get(name, 0) + weight
            weighted[name] = weighted.get(name, 0) + weight * parameters[name].detach().double()
    for name in shared:
        assert_near(found[name], weighted[name] / total[name], name)


@pytest.mark.parametrize("form", ["sampled", "summed_gradient"])
def test_the_other_forms_run_and_are_on_record(form: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "bert")
    for output in ("one", "two"):
        acemerge.merge(
            models.base, list(models.experts.values()), tmp_path / output, method="fisher", data=rows, form=form, rows=6
        )
    assert manifest(tmp_path / "one")["options"]["form"] == form
    model_zoo.assert_equal_tensors(read_tensors(tmp_path / "one"), read_tensors(tmp_path / "two"))


def test_a_model_that_answers_for_every_token(tmp_path: Path) -> None:
    """A language model of 40 words: exact is 7 x 39 passes a row, sampled one."""
    models = model_zoo.gpt2(tmp_path / "models", expert="GPT2LMHeadModel")
    rows = write_rows(tmp_path / "rows", models.experts)
    for form in ("exact", "sampled"):
        out = tmp_path / form
        acemerge.merge(models.base, list(models.experts.values()), out, method="fisher", data=rows, form=form, rows=2)
        assert all(torch.isfinite(tensor).all() for tensor in read_tensors(out).values())


# --- AdaMerging --------------------------------------------------------------------------------------------------------


@every_family
def test_no_steps_are_task_arithmetic(family: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, family)
    experts = list(models.experts.values())
    acemerge.merge(models.base, experts, tmp_path / "ada", method="adamerging", data=rows, steps=0)
    acemerge.merge(models.base, experts, tmp_path / "ta", method="task_arithmetic", alpha=0.3)
    found, expected = read_tensors(tmp_path / "ada"), read_tensors(tmp_path / "ta")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)


def open_run(models: Models, rows: Path) -> DataRun:
    recipe = make_recipe(
        {
            "base": str(models.base),
            "experts": [str(f) for f in models.experts.values()],
            "method": "adamerging",
            "data": str(rows),
        }
    )
    plan = make_plan(recipe, find_sources(recipe))
    tensors = [tensor for tensor in plan.tensors if tensor.action == "merged"]
    return DataRun(plan, tensors, {}, torch.device("cpu"), SilentProgress())


def in_float64(models: Models) -> Models:
    for folder in models.folders:
        model_zoo.write_tensors(folder, {name: t.double() for name, t in read_tensors(folder).items()})
    return models


@every_family
def test_slopes_of_the_coefficients_by_finite_differences(family: str, tmp_path: Path) -> None:
    """In float64, for every expert and some tensors of every kind."""
    models = in_float64(FAMILIES[family](tmp_path / "models"))
    rows = write_rows(tmp_path / "rows", models.experts, pixels=family == "vit")
    run = open_run(models, rows)
    backbone = SharedBackbone.open(run)
    batches = [next(run.inputs(expert, 6).batches()) for expert in range(3)]
    coefficients = torch.full((3, len(run.tensors)), 0.3, dtype=torch.float64)

    def entropy(shift: Tensor) -> float:
        backbone.set_coefficients(coefficients + shift)
        return backbone.entropy(batches)

    entropy(torch.zeros_like(coefficients))
    slopes = backbone.slopes()
    step = 1e-4
    for tensor in range(0, len(run.tensors), 5):
        for task in range(3):
            shift = torch.zeros_like(coefficients)
            shift[task, tensor] = step
            difference = (entropy(shift) - entropy(-shift)) / (2 * step)
            assert abs(float(slopes[task, tensor]) - difference) <= 1e-5 * max(1e-3, abs(difference)), run.tensors[tensor].name


def test_entropy_falls_and_the_coefficients_are_on_record(tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "bert")
    run = open_run(models, rows)
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method="adamerging", data=rows, steps=12, batch_size=99,
        learning_rate=0.02,
    )  # fmt: skip
    records = [tensor for tensor in manifest(tmp_path / "out")["tensors"] if "coefficient of red" in tensor]
    learnt = torch.tensor([[record[f"coefficient of {name}"] for record in records] for name in models.experts]).double()
    by_name = {record["name"]: index for index, record in enumerate(records)}
    learnt = learnt[:, [by_name[tensor.name] for tensor in run.tensors]]
    backbone = SharedBackbone.open(run)
    batches = [run.inputs(expert, 1000).some(99, torch.Generator()) for expert in range(3)]
    backbone.set_coefficients(torch.full_like(learnt, 0.3))
    before = backbone.entropy(batches)
    backbone.set_coefficients(learnt)
    assert backbone.entropy(batches) < before
    assert learnt.std() > 0


def test_one_coefficient_for_each_task(tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "bert")
    acemerge.merge(
        models.base, list(models.experts.values()), tmp_path / "out", method="adamerging", data=rows, granularity="task",
        **QUICK["adamerging"],
    )  # fmt: skip
    records = [tensor for tensor in manifest(tmp_path / "out")["tensors"] if "coefficient of red" in tensor]
    assert {len({record[f"coefficient of {name}"] for record in records}) for name in models.experts} == {1}
    assert records[0]["coefficient of red"] != 0.3


def test_learning_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, rows = models_and_rows(tmp_path, "bert")
    experts = list(models.experts.values())
    settings: dict[str, Any] = {"method": "adamerging", "data": rows, "steps": 5, "batch_size": 4}
    monkeypatch.setattr("acemerge.calibration.measurements.adamerging.SAVED_EVERY", 2)
    acemerge.merge(models.base, experts, tmp_path / "whole", **settings)
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "another"))
    steps = 0
    right = SharedBackbone.entropy

    def fails(self: SharedBackbone, batches: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return right(self, batches)

    monkeypatch.setattr(SharedBackbone, "entropy", fails)
    with pytest.raises(KeyboardInterrupt):
        acemerge.merge(models.base, experts, tmp_path / "again", **settings)
    acemerge.merge(models.base, experts, tmp_path / "again", **settings)
    assert steps == 4 + 3, "two of five steps were kept"
    model_zoo.assert_equal_tensors(read_tensors(tmp_path / "again"), read_tensors(tmp_path / "whole"))


# --- other models ------------------------------------------------------------------------------------------------------


def test_an_encoder_with_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    models = model_zoo.t5(tmp_path / "models")
    rows = write_rows(tmp_path / "rows", models.experts)
    arguments = ["merge", models.base, *models.experts.values(), "-o", tmp_path / "out", "-m", "regmean", "--data", rows, "-q"]
    assert command(monkeypatch, *arguments) == 2
    assert "holds no 'decoder_input_ids'" in capsys.readouterr().err
    for file in rows.iterdir():
        tensors = load_file(file)
        model_zoo.write_tensors(rows, {**tensors, "decoder_input_ids": tensors["input_ids"][:, :5]}, file.name)
    assert command(monkeypatch, *arguments) == 0
    merged = [tensor["name"] for tensor in manifest(tmp_path / "out")["tensors"] if tensor["action"] == "merged"]
    assert any("EncDecAttention" in name for name in merged)
    assert not any("relative_attention_bias" in name for name in merged)


@pytest.mark.parametrize("method", ["regmean", "regmean_plusplus"])
def test_a_language_model(method: str, tmp_path: Path) -> None:
    models = model_zoo.llama(tmp_path / "models", tied=False)
    rows = write_rows(tmp_path / "rows", models.experts)
    acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method=method, data=rows)
    fates = {tensor["name"]: tensor["action"] for tensor in manifest(tmp_path / "out")["tensors"]}
    assert fates["model.layers.1.mlp.down_proj.weight"] == "merged"
    assert fates["lm_head.weight"] == ("merged" if method == "regmean" else "kept")
    assert fates["model.embed_tokens.weight"] == "averaged"


# --- all of them -------------------------------------------------------------------------------------------------------


@every_data_method
@every_family
def test_whole_models_come_out_whole_and_the_same_again(method: str, family: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, family)
    options = QUICK.get(method, {})
    for output in ("one", "two"):
        acemerge.merge(models.base, list(models.experts.values()), tmp_path / output, method=method, data=rows, **options)
    base, merged = read_tensors(models.base), read_tensors(tmp_path / "one")
    assert {name: (t.dtype, t.shape) for name, t in merged.items()} == {name: (t.dtype, t.shape) for name, t in base.items()}
    assert all(torch.isfinite(tensor).all() for tensor in merged.values() if tensor.is_floating_point())
    assert model_zoo.file_hashes(tmp_path / "one") == model_zoo.file_hashes(tmp_path / "two")
    assert "from their weights and data of their tasks (files of rows; no labels)" in (tmp_path / "one" / "README.md").read_text()
    assert "data: rows" in (tmp_path / "one" / "acemerge.yaml").read_text()
    assert str(tmp_path) not in (tmp_path / "one" / "acemerge_manifest.json").read_text()


@every_data_method
def test_what_was_measured_is_kept_and_made_again_when_anything_changes(method: str, tmp_path: Path, cache: Path) -> None:
    models, rows = models_and_rows(tmp_path, "bert")

    def merge(output: str) -> set[str]:
        acemerge.merge(
            models.base, list(models.experts.values()), tmp_path / output, method=method, data=rows, **QUICK.get(method, {})
        )
        return {path.name for path in cache.rglob("*.safetensors")}

    first_files = merge("one")
    assert first_files
    assert merge("two") == first_files
    tensors = load_file(rows / "red.safetensors")
    tensors["input_ids"][0, 0] = 39 if tensors["input_ids"][0, 0] != 39 else 38
    model_zoo.write_tensors(rows, tensors, "red.safetensors")
    assert merge("three") > first_files
    for path in cache.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:40])  # a damaged file is measured again
    merge("four")
    model_zoo.assert_equal_tensors(read_tensors(tmp_path / "four"), read_tensors(tmp_path / "three"))


@every_data_method
def test_a_single_expert(method: str, tmp_path: Path) -> None:
    models, rows = models_and_rows(tmp_path, "vit")
    red = models.experts["red"]
    acemerge.merge(models.base, [red], tmp_path / "out", method=method, data=rows, **QUICK.get(method, {}))
    found, expected = read_tensors(tmp_path / "out"), read_tensors(red)
    inner = [name for name in found if ".layer." in name and found[name].dim() == 2]
    assert inner
    for name in inner if method != "adamerging" else []:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_methods_say_what_they_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert DATA_METHODS == ["adamerging", "fisher", "regmean", "regmean_plusplus"]
    assert command(monkeypatch, "methods", "--json") == 0
    listed = {record["name"]: record["uses"] for record in json.loads(capsys.readouterr().out)}
    assert {name for name, uses in listed.items() if uses == "data"} == set(DATA_METHODS)
    assert command(monkeypatch, "methods", "fisher") == 0
    assert "It uses data besides the weights" in capsys.readouterr().out
    assert get_method("ace").uses == "weights"
