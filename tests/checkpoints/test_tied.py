"""One weight under several names: stored once, and tied again when it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import model_zoo as zoo
from checkpoint_files import convert, copy_without_weights, merged_tensors
from model_zoo import Models, Tensors, assert_equal_tensors, bitwise_equal, load_whole, read_tensors, rewrite

TIED: dict[str, tuple[Callable[[Path], Models], str, str, tuple[str, ...]]] = {
    # family: (builder, class, the embedding, other names that stand for it)
    "llama": (lambda root: zoo.llama(root, tied=True), "LlamaForCausalLM", "model.embed_tokens.weight", ("lm_head.weight",)),
    "gpt2": (
        lambda root: zoo.gpt2(root, expert="GPT2LMHeadModel"),
        "GPT2LMHeadModel",
        "transformer.wte.weight",
        ("lm_head.weight",),
    ),
    "t5": (
        zoo.t5,
        "T5ForConditionalGeneration",
        "shared.weight",
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    ),
    "bert": (
        lambda root: zoo.bert(root, expert="BertForMaskedLM"),
        "BertForMaskedLM",
        "bert.embeddings.word_embeddings.weight",
        ("cls.predictions.decoder.weight",),
    ),
    "roberta": (
        lambda root: zoo.roberta(root, "RobertaForMaskedLM"),
        "RobertaForMaskedLM",
        "roberta.embeddings.word_embeddings.weight",
        ("lm_head.decoder.weight",),
    ),
}


@pytest.fixture(scope="module")
def build_tied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Models, Tensors]]:
    """A family's models, which store the embedding once, and their average; made when first asked for."""
    built: dict[str, tuple[Models, Tensors]] = {}

    def get(family: str) -> tuple[Models, Tensors]:
        if family not in built:
            root = tmp_path_factory.mktemp(family)
            models = TIED[family][0](root / "in")
            built[family] = models, merged_tensors(models, root, method="average")
        return built[family]

    return get


def with_copies(tensors: Tensors, family: str, *, first: bool) -> Tensors:
    """The embedding under all its names, sharing memory; the copies before or after everything else."""
    _, _, embedding, copies = TIED[family]
    extra = dict.fromkeys(copies, tensors[embedding])
    return {**extra, **tensors} if first else {**tensors, **extra}


def store_twice(family: str) -> Callable[[Path, Path], Path]:
    def clone(tensors: Tensors) -> Tensors:
        return {name: tensor.clone() for name, tensor in with_copies(tensors, family, first=False).items()}

    return lambda source, target: rewrite(source, target, clone)


def share_storage(family: str, *, first: bool) -> Callable[[Path, Path], Path]:
    def change(source: Path, target: Path) -> Path:
        tensors = with_copies(read_tensors(source), family, first=first)
        torch.save(tensors, copy_without_weights(source, target) / "pytorch_model.bin")
        return target

    return change


def assert_loads_tied(family: str, folder: Path) -> None:
    model = load_whole(TIED[family][1], folder)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied, "the output embedding is a weight of its own"


STORED: dict[str, Callable[[str], Callable[[Path, Path], Path]]] = {
    "twice": store_twice,
    "shared": lambda family: share_storage(family, first=False),
    "shared_head_first": lambda family: share_storage(family, first=True),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("family", "where"), [*((family, "all") for family in TIED), ("t5", "base"), ("t5", "experts")])
def test_a_tied_copy_is_left_out_and_loads_tied(
    build_tied: Callable[[str], tuple[Models, Tensors]], tmp_path: Path, family: str, stored: str, where: str
) -> None:
    models, stored_once = build_tied(family)
    redundant = convert(models, tmp_path, STORED[stored](family))
    base = models.base if where == "experts" else redundant.base
    experts = models.experts if where == "base" else redundant.experts
    found = merged_tensors(Models(base, experts), tmp_path, method="average")
    assert_loads_tied(family, tmp_path / "out")
    assert_equal_tensors(found, stored_once)
    assert not (tmp_path / "out" / "heads").exists()


@pytest.mark.parametrize("first", [False, True])
def test_shared_storage_ties_without_a_word_in_the_config(
    build_tied: Callable[[str], tuple[Models, Tensors]], tmp_path: Path, first: bool
) -> None:
    models, stored_once = build_tied("gpt2")
    base = share_storage("gpt2", first=first)(models.base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    found = merged_tensors(Models(base, models.experts), tmp_path, method="average")
    assert_equal_tensors(found, stored_once)


def test_gpt2_merges_its_embedding_whichever_name_comes_first(tmp_path: Path) -> None:
    # The experts are classifiers: they know the embedding, not the lm_head that shares its memory in the base.
    models = zoo.gpt2(tmp_path / "in")
    base = share_storage("gpt2", first=True)(models.base, tmp_path / "base")
    expected = merged_tensors(models, tmp_path / "plain")
    assert_equal_tensors(merged_tensors(Models(base, models.experts), tmp_path), expected)


def test_an_untied_head_is_kept(llama: Models, tmp_path: Path) -> None:
    merged = merged_tensors(llama, tmp_path, method="ace")
    assert bitwise_equal(merged["lm_head.weight"], read_tensors(llama.base)["lm_head.weight"])


def test_experts_that_tie_what_the_base_does_not(tmp_path: Path) -> None:
    """Their output layer is their input embedding, so that is what merges into the base's own output layer."""
    models = zoo.llama(tmp_path / "in", tied=True)
    base = zoo.rewrite(models.base, tmp_path / "base", lambda t: {**t, "lm_head.weight": 2 * t["model.embed_tokens.weight"]})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    found = merged_tensors(Models(base, models.experts), tmp_path, method="average")
    experts = [read_tensors(folder)["model.embed_tokens.weight"] for folder in models.experts.values()]
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(found[name], torch.stack(experts).mean(0))
    assert load_whole("LlamaForCausalLM", tmp_path / "out").lm_head.weight.equal(found["lm_head.weight"])


def test_an_output_layer_with_values_of_its_own_is_merged_whatever_the_config_says(tmp_path: Path) -> None:
    """Some classes never tie what their config ties, as bigbird_pegasus and luke; such a layer was once left out."""
    models = zoo.llama(tmp_path / "in", tied=True)

    def untie(tensors: Tensors) -> Tensors:
        return {**tensors, "lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}

    base, *experts = (rewrite(folder, tmp_path / "untied" / folder.name, untie) for folder in models.folders)
    untied = Models(base, dict(zip(models.experts, experts, strict=True)))
    merged = merged_tensors(untied, tmp_path, method="average")
    torch.testing.assert_close(merged["lm_head.weight"], 2 * merged["model.embed_tokens.weight"])
