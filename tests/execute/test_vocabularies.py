"""Models whose vocabularies differ, merged: every row is its token's, and transformers loads, tokenises and generates."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

import acemerge
import vocabulary_zoo as zoo
from acemerge.errors import InputError
from acemerge.execute import shard
from acemerge.execute.opening import set_scene
from acemerge.execute.pipeline import run_merge
from acemerge.execute.ray_task import Order, Part, write_shard
from acemerge.recipe.arguments import recipe_from
from acemerge.recipe.recipe import make_recipe
from acemerge.recipe.run_options import RunOptions
from interruption import one_by_one, stop_at
from model_zoo import quiet_transformers

EMBEDDINGS = {
    "llama": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
    "bert": "bert.embeddings.word_embeddings.weight",
}
FIELDS = [("bpe", "llama"), ("unigram", "llama"), ("bpe", "gpt2"), ("wordpiece", "bert"), ("unigram", "gpt2")]


def shuffled(tokens: int, seed: int = 0) -> list[int]:
    order: list[int] = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def expect(out: Path, models: list[Path], name: str, scale: float) -> None:
    """Every row of a tensor is what a plain transcription makes of the same token's rows."""
    base, *experts = [zoo.rows_by_token(folder, name) for folder in models]
    wanted, found = zoo.merged_by_token(base, experts, scale=scale), zoo.rows_by_token(out, name)
    assert found.keys() == zoo.vocabulary(out).keys()
    for token, row in found.items():
        torch.testing.assert_close(row.double(), wanted[token], rtol=1e-6, atol=1e-7, msg=token)


@pytest.fixture(scope="module", params=FIELDS, ids="-".join)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """A base, an expert with two tokens more, and one with two others and all its tokens renumbered."""
    kind, architecture = request.param
    root = tmp_path_factory.mktemp("in")
    base = zoo.base(root / "base", kind, architecture, tied=architecture == "gpt2")
    a = zoo.expert(base, root / "a", "<x>", "<y>")
    b = zoo.expert(base, root / "b", "<y>", "<z>", seed=2, special=True)
    zoo.renumber(b, shuffled(len(zoo.vocabulary(b))))
    return architecture, [base, a, b]


@pytest.mark.parametrize("choice", [None, "base", "union", "a", "b"])
def test_rows_are_lined_up_by_token(choice: str | None, models: tuple[str, list[Path]], tmp_path: Path) -> None:
    architecture, (base, *experts) = models
    acemerge.merge(base, experts, tmp_path / "out", "task_arithmetic", alpha=0.3, tokenizer=choice)
    tokens = zoo.vocabulary({None: base, "base": base, "union": tmp_path / "out", "a": experts[0], "b": experts[1]}[choice])
    assert zoo.vocabulary(tmp_path / "out") == tokens
    if choice == "union":
        assert tokens == {
            **zoo.vocabulary(base),
            **{t: len(zoo.vocabulary(base)) + i for i, t in enumerate(("<x>", "<y>", "<z>"))},
        }
    names = [name for name in zoo.weights(base) if name.endswith(zoo.ROWS_BY_TOKEN)]
    assert EMBEDDINGS[architecture] in names
    for name in names:
        expect(tmp_path / "out", [base, *experts], name, 0.3)
    assert not acemerge.verify(tmp_path / "out").problems


@pytest.mark.parametrize("choice", ["union", "b"])
def test_the_merged_model_loads_and_generates_with_an_added_token(
    choice: str, models: tuple[str, list[Path]], tmp_path: Path
) -> None:
    architecture, (base, *experts) = models
    acemerge.merge(base, experts, tmp_path / "out", tokenizer=choice)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    kind = transformers.AutoModelForMaskedLM if architecture == "bert" else transformers.AutoModelForCausalLM
    model, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == len(own)
    asked = own("the <y> cat <z>", return_tensors="pt")
    assert {own.convert_tokens_to_ids("<y>"), own.convert_tokens_to_ids("<z>")} <= set(asked["input_ids"][0].tolist())
    assert "<y>" in own.decode(asked["input_ids"][0])
    assert "<z>" not in own.decode(asked["input_ids"][0], skip_special_tokens=True)  # b added it as a special one
    if architecture == "bert":
        assert model(**asked).logits.shape[-1] == len(own)
        return
    assert model.generate(**asked, max_new_tokens=4, do_sample=False).shape[1] > asked["input_ids"].shape[1]
    for role in ("bos", "eos", "pad"):
        assert getattr(model.generation_config, f"{role}_token_id") == getattr(own, f"{role}_token_id")
        assert getattr(model.config, f"{role}_token_id") == getattr(own, f"{role}_token_id")


def test_methods_that_keep_embeddings_add_rows_to_them(models: tuple[str, list[Path]], tmp_path: Path) -> None:
    architecture, (base, *experts) = models
    keep: dict[str, Any] = (
        {"tensors": [{"match": f"*{EMBEDDINGS[architecture]}", "do": "keep"}]} if architecture == "gpt2" else {}
    )
    acemerge.merge(base, experts, tmp_path / "out", "ace", tokenizer="union", **keep)
    expect(tmp_path / "out", [base, *experts], EMBEDDINGS[architecture], 0.0)
    common = len(zoo.weights(base)[EMBEDDINGS[architecture]])
    assert torch.equal(
        zoo.weights(tmp_path / "out")[EMBEDDINGS[architecture]][:common], zoo.weights(base)[EMBEDDINGS[architecture]]
    )


def test_the_order_of_tokens_changes_nothing_of_the_rest(models: tuple[str, list[Path]], tmp_path: Path) -> None:
    """Methods see the base's rows alone, whichever tokens the output has: TIES' thresholds are of whole tensors."""
    _, (base, *experts) = models
    found = []
    for choice in ("base", "union", "b"):
        acemerge.merge(base, experts, tmp_path / choice, "ties", tokenizer=choice)
        found.append(tmp_path / choice)
    for name in zoo.weights(found[0]):
        if name.endswith(zoo.ROWS_BY_TOKEN):
            rows, *others = [zoo.rows_by_token(folder, name) for folder in found]
            assert all(torch.equal(row, own[token]) for own in others for token, row in rows.items())
        else:
            assert all(torch.equal(zoo.weights(found[0])[name], zoo.weights(folder)[name]) for folder in found[1:])


# --- how it is run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("llama")
    base = zoo.base(root / "base")
    a, b = zoo.expert(base, root / "a", "<x>", "<y>"), zoo.expert(base, root / "b", "<y>", seed=2)
    zoo.renumber(b, shuffled(len(zoo.vocabulary(b))))
    return [base, a, b]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_recipe_same_bytes_and_the_written_recipe_repeats_it(llama: list[Path], tmp_path: Path) -> None:
    base, *experts = llama
    sources = {"<x>": "zero", "<y>": {"source": "b", "force": False}}
    for name in ("one", "two"):
        acemerge.merge(
            base, experts, tmp_path / name, "task_arithmetic", tokenizer="union", token_sources=sources, pad_to_multiple_of=16
        )
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    recipe = (tmp_path / "one/acemerge.yaml").read_text()
    (base.parent / "again.yaml").write_text(recipe)
    asked, place = recipe_from([str(base.parent / "again.yaml")], [], {})
    run_merge(asked, tmp_path / "again", RunOptions(quiet=True), relative_to=place)
    assert contents(tmp_path / "again") == contents(tmp_path / "one")


@pytest.mark.parametrize("method", ["task_arithmetic", "ace"])
def test_the_points_of_a_sweep_are_merges(method: str, llama: list[Path], tmp_path: Path) -> None:
    base, *experts = llama
    option = {"task_arithmetic": "alpha", "ace": "epsilon"}[method]
    acemerge.sweep(base, experts, tmp_path / "sweep", {option: [0.1, 0.2]}, method, tokenizer="union", keep="all")
    for point in (0.1, 0.2):
        acemerge.merge(base, experts, tmp_path / str(point), method, tokenizer="union", options={option: point})
    points = [zoo.weights(path.parent) for path in sorted((tmp_path / "sweep").rglob("model.safetensors"))]
    for found, folder in zip(points, (tmp_path / "0.1", tmp_path / "0.2"), strict=True):
        assert all(torch.equal(tensor, zoo.weights(folder)[name]) for name, tensor in found.items())


def test_an_interrupted_run_goes_on(llama: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, *experts = llama
    asked: dict[str, Any] = {"method": "task_arithmetic", "tokenizer": "union", "shard_size": 20_000}
    acemerge.merge(base, experts, tmp_path / "whole", **asked)
    before: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("model.norm.weight", before)))
        with pytest.raises(KeyboardInterrupt):
            acemerge.merge(base, experts, tmp_path / "out", **asked)
    after: list[str] = []
    monkeypatch.setattr(shard, "merge_tensor_at_points", one_by_one(stop_at("", after)))
    acemerge.merge(base, experts, tmp_path / "out", **asked)
    assert "model.embed_tokens.weight" in before
    assert "model.embed_tokens.weight" not in after
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not acemerge.verify(tmp_path / "out").problems


def test_a_changed_tokenizer_starts_over(llama: list[Path], tmp_path: Path) -> None:
    base, *experts = llama
    shutil.copytree(experts[1], tmp_path / "b")
    first = acemerge.plan(base, [tmp_path / "b"], "task_arithmetic")
    content = json.loads((tmp_path / "b/tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "b/tokenizer.json").write_text(json.dumps(content))
    assert acemerge.plan(base, [tmp_path / "b"], "task_arithmetic").digest != first.digest


def test_memory_for_the_rearrangement_is_counted(llama: list[Path]) -> None:
    base, *experts = llama
    plan = acemerge.plan(base, experts, "task_arithmetic", tokenizer="union")
    (embeddings,) = [tensor for tensor in plan.tensors if tensor.name == "model.embed_tokens.weight"]
    assert plan.peak_memory >= 2 * embeddings.output_bytes + len(experts) * embeddings.header.nbytes
    assert embeddings.output_bytes == 282 * 16 * 4


def test_methods_that_use_data_refuse_another_vocabulary(llama: list[Path], tmp_path: Path) -> None:
    base, *experts = llama
    for expert in experts:
        (tmp_path / f"{expert.name}.jsonl").write_text('{"text": "the cat"}\n' * 4)
    with pytest.raises(InputError, match=r"runs models of one vocabulary, and expert 'a' .* has another than the base's"):
        acemerge.plan(base, experts, "regmean", data=tmp_path)


def test_the_manifest_tells_of_the_choice(llama: list[Path], tmp_path: Path) -> None:
    base, *experts = llama
    acemerge.merge(base, experts, tmp_path / "out", "task_arithmetic", tokenizer="union")
    manifest: dict[str, Any] = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())
    told = manifest["vocabulary"]
    assert told | {"sha256": ""} == {
        "tokenizer": "union", "files_from": "base", "tokens": 282, "rows": 282, "sha256": "",
        "experts": {"a": {"moved": 0, "added": 2, "lacking": 0}, "b": {"moved": 280, "added": 1, "lacking": 0}},
    }  # fmt: skip
    (embeddings,) = [tensor for tensor in manifest["tensors"] if tensor["name"] == "model.embed_tokens.weight"]
    assert embeddings["shape"] == [282, 16]
    assert embeddings["rows"] == (
        "rows of 'a' and 'b' lined up by token, 280 rows become 282, 2 taken from 'a', 1 taken from 'b'"
    )


def test_another_process_makes_the_same(llama: list[Path], tmp_path: Path) -> None:
    base, *experts = llama
    fields = {"base": str(base), "experts": [str(e) for e in experts], "method": "task_arithmetic", "tokenizer": "union"}
    recipe = make_recipe(fields)
    scene = set_scene(recipe, RunOptions())
    [plan] = scene.plans([recipe])
    order = pickle.dumps(Order([recipe], scene, [plan.digest], tmp_path, {0: {}}))
    *_, records = write_shard(order, Part("model.safetensors", {0: tmp_path}), "cpu", 1)
    acemerge.merge(base, experts, tmp_path / "out", "task_arithmetic", tokenizer="union")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    assert len(records) == 1


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/tokenizers.md").read_text(encoding="utf-8")
    make_models, ask = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with quiet_transformers(), torch.random.fork_rng():
        exec(make_models, {})
        made = acemerge.merge("base", ["chat", "tools"], "merged", tokenizer="union", files_from="chat")
        capsys.readouterr()
        exec(ask, {})
    told = page.replace("\n    ", " ")
    assert capsys.readouterr().out.strip().replace("\n", " ") in told
    notes = [*made.plan.notes, *acemerge.plan("base", ["chat", "tools"]).notes]
    assert all(f"note: {note}" in told for note in notes)
    (fields,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    planned = acemerge.plan("base", ["chat", "tools"], **yaml.safe_load(fields))
    assert planned.vocabulary is not None
    assert planned.vocabulary.rows == 320
