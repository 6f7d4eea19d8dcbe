"""One tokenizer of several: text is cut as before, new tokens are known, ids are as planned; or they are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

import acemerge
import vocabulary_zoo as zoo
from acemerge.errors import InputError
from model_zoo import quiet_transformers


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return zoo.base(tmp_path / "base")


def union(base: Path, *experts: Path, **asked: Any) -> Any:
    out = base.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    acemerge.merge(base, experts, out, "average", tokenizer="union", **asked)
    return transformers.AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_text_is_cut_as_before(kind: str, tmp_path: Path) -> None:
    base = zoo.base(tmp_path / "base", kind, "bert" if kind == "wordpiece" else "llama")
    ours = transformers.AutoTokenizer.from_pretrained(base)
    theirs = union(base, zoo.expert(base, tmp_path / "a", "<x>", "<y>"))
    for text in zoo.TEXTS:
        assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    assert theirs.tokenize("cat<x>") == [*ours.tokenize("cat"), "<x>"]


def test_tokens_that_text_is_cut_into(tmp_path: Path) -> None:
    """A tokenizer that was trained further: its merges follow the base's."""
    base = zoo.base(tmp_path / "base")
    expert = zoo.expert(base, tmp_path / "a")
    content = json.loads((expert / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"zq": 280, "zqx": 281}
    content["model"]["merges"] += [["z", "q"], ["zq", "x"]]
    (expert / "tokenizer.json").write_text(json.dumps(content))
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_pretrained(expert)
        model.resize_token_embeddings(282, mean_resizing=False)
        model.save_pretrained(expert)
    made = union(base, expert)
    assert made.tokenize("zqxa") == ["zqx", "a"]
    assert made.get_vocab()["zqx"] == 281


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer", "BertTokenizer", "T5Tokenizer"])
def test_transformers_own_classes_read_it(class_name: str, tmp_path: Path) -> None:
    """They build their tokenizer anew from the vocabulary in the file."""
    kind = {"GPT2Tokenizer": "bpe", "Qwen2Tokenizer": "bpe", "BertTokenizer": "wordpiece", "T5Tokenizer": "unigram"}[class_name]
    base = zoo.base(tmp_path / "base", kind, "bert" if kind == "wordpiece" else "llama")
    settings = json.loads((base / "tokenizer_config.json").read_text()) | {"tokenizer_class": class_name}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = transformers.AutoTokenizer.from_pretrained(base)
    assert type(ours).__name__ == class_name
    ours.save_pretrained(base)
    with quiet_transformers():
        kinds = transformers.AutoModelForMaskedLM if kind == "wordpiece" else transformers.AutoModelForCausalLM
        model = kinds.from_pretrained(base)
        model.resize_token_embeddings(len(ours), mean_resizing=False)
        model.save_pretrained(base)
    made = union(base, zoo.expert(base, tmp_path / "a", "<x>"), zoo.expert(base, tmp_path / "b", "<y>", seed=2, special=True))
    assert type(made).__name__ == class_name
    end = len(ours)
    assert made.get_vocab() == {**ours.get_vocab(), "<x>": end, "<y>": end + 1}
    assert made.convert_tokens_to_ids(made.tokenize("the <x> cat <y>"))[-1] == end + 1
    assert made("the cat")["input_ids"] == ours("the cat")["input_ids"]


def test_settings_of_transformers_4(base: Path, tmp_path: Path) -> None:
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"0": {"content": "<s>", "special": True}, "1": {"content": "</s>", "special": True}}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "vocab.json").write_text("{}")
    made = union(base, zoo.expert(base, tmp_path / "a", "<x>"))
    assert made.get_vocab()["<x>"] == 280
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert written["280"]["content"] == "<x>"
    assert not (tmp_path / "out/vocab.json").exists()  # it does not know the new token


def test_merges_as_text_stay_text(base: Path, tmp_path: Path) -> None:
    expert = zoo.expert(base, tmp_path / "a", "<x>")
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    (base / "tokenizer.json").write_text(json.dumps(content))
    union(base, expert)
    assert json.loads((tmp_path / "out/tokenizer.json").read_text())["model"]["merges"] == content["model"]["merges"]


# --- what cannot be made one -------------------------------------------------------------------------------------------


def refused(base: Path, expert: Path) -> str:
    with pytest.raises(InputError) as error:
        acemerge.plan(base, [expert], "average", tokenizer="union")
    return str(error.value)


def test_tokenizers_of_two_kinds(base: Path, tmp_path: Path) -> None:
    expert = zoo.expert(base, tmp_path / "a")
    zoo.tokenizer("wordpiece").save_pretrained(expert)
    said = refused(base, expert)
    assert "cannot be made one: one is BPE, the other WordPiece; use --tokenizer base or --tokenizer a" in said


def test_tokens_that_are_spelt_differently(base: Path, tmp_path: Path) -> None:
    expert = zoo.expert(base, tmp_path / "a")
    content = json.loads((expert / "tokenizer.json").read_text())
    content |= {"pre_tokenizer": {"type": "Metaspace"}, "decoder": None}
    content["model"]["vocab"]["\u2581zebra"] = 280
    (expert / "tokenizer.json").write_text(json.dumps(content))
    assert "they spell tokens differently, and '\\u2581zebra' is one that the base lacks" in refused(base, expert)


@pytest.mark.parametrize(
    ("whose", "changed"),
    [
        ("a", {"model": {"vocab": {"a": "b"}}}),
        ("a", {"model": {"vocab": [["a"]]}}),
        ("base", {"model": {"vocab": {"a": 0}, "merges": [["a"]]}}),
        ("base", {"model": {"vocab": {"a": 0}, "merges": 3}}),
        ("base", {"added_tokens": [{"content": "<x>"}]}),
        ("base", {"added_tokens": {"a": 1}}),
    ],
)
def test_files_that_are_not_as_they_should_be(whose: str, changed: dict[str, Any], base: Path, tmp_path: Path) -> None:
    expert = zoo.expert(base, tmp_path / "a", "<x>")
    path = tmp_path / whose / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert "is not as the library `tokenizers` writes it" in refused(base, expert)


def test_a_base_with_older_files_only(base: Path, tmp_path: Path) -> None:
    expert = zoo.expert(base, tmp_path / "a", "<x>")
    (base / "vocab.json").write_text(json.dumps(json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]))
    (base / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(base, expert)
