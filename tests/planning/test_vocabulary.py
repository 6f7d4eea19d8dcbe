"""Whose row is whose: added, renumbered, padded and missing tokens; a permutation of an expert's vocabulary changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import acemerge

WIDTH = 4
NAMES = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")


def model(folder: Path, ids: Mapping[str, int], rows: int | None = None, seed: int = 0, **config: Any) -> Path:
    """A model with nothing but rows by token and one matrix, and a tokenizer of these ids."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(ids.values()) + 1 if rows is None else rows
    shapes = {NAMES[0]: (rows, WIDTH), NAMES[1]: (rows, WIDTH), NAMES[2]: (rows,), "mix.weight": (WIDTH, WIDTH)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return write(folder, weights, ids, {"vocab_size": rows, **config})


def write(folder: Path, weights: Mapping[str, Tensor], ids: Mapping[str, int] | None, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if ids is not None:
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "WordLevel", "vocab": dict(ids)}, "added_tokens": []})
        )
    return folder


def rows(folder: Path, name: str = NAMES[0]) -> Tensor:
    return load_file(folder / "model.safetensors")[name]


def merge(base: Path, experts: Sequence[Path], out: Path, method: str = "task_arithmetic", **asked: Any) -> list[str]:
    """The plan's notes."""
    options: dict[str, Any] = {"alpha": 1.0} if method == "task_arithmetic" else {}
    return list(acemerge.merge(base, experts, out, method, force=True, **options, **asked).plan.notes)


IDS = {"<s>": 0, "the": 1, "cat": 2, "dog": 3}


@pytest.mark.parametrize("name", NAMES)
def test_an_added_token_and_one_that_an_expert_lacks(name: str, tmp_path: Path) -> None:
    base = model(tmp_path / "base", IDS)
    a = model(tmp_path / "a", {"the": 0, "<s>": 1, "cat": 2, "<x>": 3}, seed=1)
    merge(base, [a], tmp_path / "out", tokenizer="union")
    found, ours, theirs = rows(tmp_path / "out", name), rows(base, name), rows(a, name)
    wanted = torch.stack([theirs[1], theirs[0], theirs[2], ours[3], theirs[3]])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[3], ours[3])
    assert torch.equal(found[4], theirs[3])


def test_a_token_of_several_experts_is_their_mean(tmp_path: Path) -> None:
    base = model(tmp_path / "base", IDS)
    a, b = model(tmp_path / "a", {**IDS, "<x>": 4}, seed=1), model(tmp_path / "b", {**IDS, "<y>": 4, "<x>": 5}, seed=2)
    merge(base, [a, b], tmp_path / "out", "average", tokenizer="union")
    assert torch.equal(rows(tmp_path / "out")[4], ((rows(a)[4].double() + rows(b)[5].double()) / 2).float())
    assert torch.equal(rows(tmp_path / "out")[5], rows(b)[4])


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("a", ("a", 4)),
        ({"source": "b", "force": False}, ("b", 5)),
        ({"source": "base", "token": "cat"}, ("base", 2)),
        ({"source": "b", "token": "the"}, ("b", 1)),
        ("zero", None),
    ],
)
def test_where_a_new_tokens_row_comes_from(source: Any, wanted: tuple[str, int] | None, tmp_path: Path) -> None:
    folders = {"base": model(tmp_path / "base", IDS)}
    folders["a"] = model(tmp_path / "a", {**IDS, "<x>": 4}, seed=1)
    folders["b"] = model(tmp_path / "b", {**IDS, "<y>": 4, "<x>": 5}, seed=2)
    experts = [folders["a"], folders["b"]]
    merge(folders["base"], experts, tmp_path / "out", tokenizer="union", token_sources={"<x>": source})
    expected = torch.zeros(WIDTH) if wanted is None else rows(folders[wanted[0]])[wanted[1]]
    assert torch.equal(rows(tmp_path / "out")[4], expected)
    assert torch.equal(rows(tmp_path / "out")[5], rows(folders["b"])[4])


def test_a_common_tokens_row_is_taken_only_by_force(tmp_path: Path) -> None:
    base, a = model(tmp_path / "base", IDS), model(tmp_path / "a", IDS, seed=1)
    b = model(tmp_path / "b", IDS, seed=2)
    merge(base, [a, b], tmp_path / "plain", "average")
    merge(base, [a, b], tmp_path / "out", "average", token_sources={"cat": {"source": "a", "force": False}, "dog": "b"})
    plain, found = rows(tmp_path / "plain"), rows(tmp_path / "out")
    assert torch.equal(found[:3], plain[:3])
    assert torch.equal(found[3], rows(b)[3])


# --- padding -----------------------------------------------------------------------------------------------------------


def test_new_tokens_use_up_padding_first(tmp_path: Path) -> None:
    """As most fine-tunes do that do not resize the model: the base's rows suffice."""
    base = model(tmp_path / "base", IDS, rows=8)
    a = model(tmp_path / "a", {**IDS, "<x>": 4}, rows=8, seed=1)
    b = model(tmp_path / "b", {**IDS, "<y>": 4}, rows=16, seed=2)
    merge(base, [a, b], tmp_path / "out", tokenizer="union")
    found = rows(tmp_path / "out")
    assert len(found) == 8
    assert torch.equal(found[4], rows(a)[4])
    assert torch.equal(found[5], rows(b)[4])
    padding = rows(base)[6:] + (rows(a)[6:] - rows(base)[6:]) + (rows(b)[6:8] - rows(base)[6:])
    torch.testing.assert_close(found[6:], padding, rtol=1e-5, atol=1e-5)


def test_the_bases_padding_is_not_anothers_token(tmp_path: Path) -> None:
    base, a = model(tmp_path / "base", IDS, rows=8), model(tmp_path / "a", {**IDS, "<x>": 4}, rows=8, seed=1)
    notes = merge(base, [a], tmp_path / "out")
    assert torch.equal(rows(tmp_path / "out")[4], rows(base)[4])
    assert "expert 'a' has 1 token that the base lacks, such as '<x>'" in notes[0]


def test_padding_to_a_multiple(tmp_path: Path) -> None:
    base, a = model(tmp_path / "base", IDS), model(tmp_path / "a", {**IDS, "<x>": 4}, seed=1)
    merge(base, [a], tmp_path / "out", "average", tokenizer="union", pad_to_multiple_of=8)
    found = rows(tmp_path / "out")
    assert found.shape == (8, WIDTH)
    torch.testing.assert_close(found[5:], found[:4].mean(0).expand(3, -1))
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 8


def test_other_padding_alone_is_lined_up(tmp_path: Path) -> None:
    """The same tokenizer, but the expert's trainer padded the rows."""
    base, a = model(tmp_path / "base", IDS), model(tmp_path / "a", IDS, rows=64, seed=1)
    assert merge(base, [a], tmp_path / "out") == []
    torch.testing.assert_close(rows(tmp_path / "out"), rows(a)[:4])


def test_a_token_without_a_row_is_nobodys(tmp_path: Path) -> None:
    """A tokenizer is often saved with a padding token that the model was not resized for."""
    base, a = model(tmp_path / "base", {**IDS, "<pad>": 4}, rows=4), model(tmp_path / "a", {**IDS, "<pad>": 4}, seed=1)
    b = model(tmp_path / "b", {**IDS, "<pad>": 4, "<x>": 5}, rows=5, seed=2)
    notes = merge(base, [a, b], tmp_path / "out", tokenizer="union")
    found = rows(tmp_path / "out")
    assert torch.equal(found[4], ((rows(a)[4].double() + rows(b)[4].double()) / 2).float())
    torch.testing.assert_close(found[5], found[:4].mean(0))
    assert any("'<x>'" in note for note in notes)


def test_a_union_gives_every_token_a_row(tmp_path: Path) -> None:
    ids = {**IDS, "<pad>": 4}
    base, a = model(tmp_path / "base", ids, rows=4), model(tmp_path / "a", ids, seed=1)
    assert "for which its model has no row" in merge(base, [a], tmp_path / "plain")[0]
    assert len(rows(tmp_path / "plain")) == 4
    merge(base, [a], tmp_path / "out", tokenizer="union")
    assert torch.equal(rows(tmp_path / "out")[4], rows(a)[4])


# --- more than one way to store it ------------------------------------------------------------------------------------


def test_a_nested_config_fits(tmp_path: Path) -> None:
    nested: dict[str, Any] = {"text_config": {"vocab_size": 4, "eos_token_id": 0}, "vision_config": {"vocab_size": 999}}
    base = model(tmp_path / "base", IDS, **nested)
    a = model(tmp_path / "a", {"the": 0, "<s>": 1, "cat": 2, "<x>": 3, "<y>": 4}, seed=1, text_config={"eos_token_id": 3})
    merge(base, [a], tmp_path / "out", tokenizer="a")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["vocab_size"] == config["text_config"]["vocab_size"] == 5
    assert config["text_config"]["eos_token_id"] == 3
    assert config["vision_config"]["vocab_size"] == 999


def test_a_bias_that_lies_sideways(tmp_path: Path) -> None:
    for name, ids, seed in (("base", IDS, 0), ("a", {"the": 0, "<s>": 1, "cat": 2, "dog": 3, "<x>": 4}, 1)):
        folder = model(tmp_path / name, ids, seed=seed)
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, "final_logits_bias": weights["lm_head.bias"][None].clone()}, folder / "model.safetensors")
    merge(tmp_path / "base", [tmp_path / "a"], tmp_path / "out", tokenizer="union")
    assert torch.equal(rows(tmp_path / "out", "final_logits_bias")[0], rows(tmp_path / "out", "lm_head.bias"))


def test_an_expert_that_ties_its_output_layer(tmp_path: Path) -> None:
    named: dict[str, Any] = {"architectures": ["X"]}
    base = model(tmp_path / "base", IDS, **named)
    weights = load_file(model(tmp_path / "full", {**IDS, "<x>": 4}, seed=1) / "model.safetensors")
    del weights["lm_head.weight"]
    a = write(tmp_path / "a", weights, {**IDS, "<x>": 4}, {"vocab_size": 5, "tie_word_embeddings": True, **named})
    merge(base, [a], tmp_path / "out", tokenizer="union")
    torch.testing.assert_close(rows(tmp_path / "out", "lm_head.weight"), rows(a))


@pytest.mark.parametrize("stored", [True, False])
def test_a_base_that_ties_its_output_layer(stored: bool, tmp_path: Path) -> None:
    for name, ids, seed in (("base", IDS, 0), ("a", {**IDS, "<x>": 4}, 1)):
        folder = model(tmp_path / name, ids, seed=seed, tie_word_embeddings=True)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights[NAMES[0]].clone()
        kept = {key: tensor for key, tensor in weights.items() if stored or key != "lm_head.weight"}
        save_file(kept, folder / "model.safetensors")
    merge(tmp_path / "base", [tmp_path / "a"], tmp_path / "out", tokenizer="union")
    found = load_file(tmp_path / "out/model.safetensors")
    assert "lm_head.weight" not in found
    torch.testing.assert_close(found[NAMES[0]], rows(tmp_path / "a"))


def test_half_precision_experts_do_not_change_rows_that_they_lack(tmp_path: Path) -> None:
    base = model(tmp_path / "base", IDS)
    a = model(tmp_path / "a", {"<s>": 0, "the": 1, "<x>": 2}, seed=1)
    weights = load_file(a / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, a / "model.safetensors")
    merge(base, [a], tmp_path / "out")
    assert torch.equal(rows(tmp_path / "out")[2:], rows(base)[2:])


# --- a permutation changes nothing -------------------------------------------------------------------------------------


def permute(folder: Path, order: Sequence[int]) -> None:
    """Token i becomes token order[i]; rows beyond are padding and stay."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {token: order[row] for token, row in content["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    for name in NAMES:
        moved = weights[name].clone()
        moved[torch.tensor(order)] = weights[name][: len(order)]
        weights[name] = moved
    save_file(weights, folder / "model.safetensors")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_permuted_expert_gives_the_same_bytes(data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(["task_arithmetic", "average", "ties", "dare_ties", "slerp", "ace", "tsv_m"]))
    choice = data.draw(st.sampled_from([None, "union", "b"]))
    tokens = [*IDS, *data.draw(st.lists(st.sampled_from(["<x>", "<y>", "<z>"]), unique=True))]
    padding = data.draw(st.integers(0, 3))
    order = data.draw(st.permutations(range(len(tokens))))
    with TemporaryDirectory() as place:
        root = Path(place)
        base = model(root / "base", IDS, rows=len(IDS) + data.draw(st.integers(0, 3)))
        a = model(root / "a", {token: row for row, token in enumerate(tokens)}, rows=len(tokens) + padding, seed=1)
        b = model(root / "b", {**IDS, "<y>": len(IDS)}, seed=2)
        rules: dict[str, Any] = {"tensors": [{"match": "*", "do": "merge"}]} if method == "tsv_m" else {}
        merge(base, [a, b], root / "plain", method, tokenizer=choice, **rules)
        permute(a, order)
        merge(base, [a, b], root / "permuted", method, tokenizer=choice, **rules)
        if choice == "union":  # new tokens follow in the order of the expert's ids
            _compare_by_token(root / "plain", root / "permuted")
        else:
            assert (root / "plain/model.safetensors").read_bytes() == (root / "permuted/model.safetensors").read_bytes()


def _compare_by_token(one: Path, other: Path) -> None:
    ids = [json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] for folder in (one, other)]
    assert ids[0].keys() == ids[1].keys()
    for name in NAMES:
        for token, row in ids[0].items():
            assert torch.equal(rows(one, name)[row], rows(other, name)[ids[1][token]])
