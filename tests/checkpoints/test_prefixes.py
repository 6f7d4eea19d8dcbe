"""Names that differ between models of one family: prefixes, and layer norms of older BERTs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import acemerge
from family_cases import Built, MethodName, merge
from model_zoo import Models, Tensors, assert_equal_tensors, load_whole, read_tensors, rewrite, swap_prefix


@pytest.mark.parametrize("prefixed", ["base", "experts", "red", "base red"])
@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("clip_vision", "vision_model."),
        ("bert_unprefixed", "bert."),
        ("gpt2_unprefixed", "transformer."),
        ("open_clip", "module."),
    ],
)
def test_prefixes_may_differ_between_models(
    build: Callable[[str], Built], tmp_path: Path, name: str, prefix: str, prefixed: str
) -> None:
    plain = build(name).models
    add = swap_prefix("", prefix)

    def variant(model: str, path: Path) -> Path:
        chosen = model in prefixed.split() or (prefixed == "experts" and model != "base")
        return rewrite(path, tmp_path / "in" / model, add) if chosen else path

    mixed = Models(variant("base", plain.base), {name: variant(name, path) for name, path in plain.experts.items()})
    merge(mixed, tmp_path / "mixed", "average")

    expected = read_tensors(build(name).merge("average").output)
    assert_equal_tensors(read_tensors(tmp_path / "mixed"), add(expected) if "base" in prefixed.split() else expected)


@pytest.mark.parametrize("unprefixed", [("red",), ("red", "green", "blue")])
def test_vision_experts_of_a_whole_clip_need_no_prefix(
    build: Callable[[str], Built], tmp_path: Path, unprefixed: tuple[str, ...]
) -> None:
    built = build("clip_with_vision_experts")
    strip = swap_prefix("vision_model.", "")
    experts = {
        name: rewrite(path, tmp_path / "in" / name, strip) if name in unprefixed else path
        for name, path in built.models.experts.items()
    }
    merge(Models(built.models.base, experts), tmp_path / "out")
    assert_equal_tensors(read_tensors(tmp_path / "out"), read_tensors(built.merge("ace").output))
    load_whole("CLIPModel", tmp_path / "out")


def test_a_vision_base_refuses_experts_with_a_text_tower(build: Callable[[str], Built], tmp_path: Path) -> None:
    whole = build("clip").models

    def vision_only(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if name.startswith("vision_model.")}

    base = rewrite(whole.base, tmp_path / "base", vision_only)
    with pytest.raises(acemerge.PreflightError, match=r"text_model\.\S+ .* are not in base"):
        merge(Models(base, whole.experts), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["ace", "average"])
def test_layer_norms_of_older_berts_are_named_gamma_and_beta(
    build: Callable[[str], Built], tmp_path: Path, method: MethodName
) -> None:
    # google-bert/bert-base-uncased is stored so; transformers renames on load and saves experts with weight and bias.
    built = build("bert")

    def older(tensors: Tensors) -> Tensors:
        renamed = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
        return {name.replace(*renamed[0]).replace(*renamed[1]): tensor for name, tensor in tensors.items()}

    base = rewrite(built.models.base, tmp_path / "older", older)
    merge(Models(base, built.models.experts), tmp_path / "out", method)
    assert_equal_tensors(read_tensors(tmp_path / "out"), older(read_tensors(built.merge(method).output)))
    load_whole("BertForMaskedLM", tmp_path / "out")
