"""Experts whose tokenizer is not the base's: the plan says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import acemerge
import model_zoo as zoo
from model_zoo import Models

IDS = {"<s>": 0, "the": 1, "cat": 2}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return zoo.build_from_shapes(tmp_path / "in", {"embed.weight": (4, 8), "mix.weight": (8, 8)})


def write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)


def vocabulary(ids: Any, added: Mapping[str, int] | None = None) -> dict[str, Any]:
    tokens = [{"id": index, "content": token} for token, index in (added or {}).items()]
    return {"model": {"vocab": ids}, "added_tokens": tokens}


def notes(models: Models, tmp_path: Path) -> list[str]:
    acemerge.merge(models.base, models.experts, tmp_path / "out")
    found: list[str] = json.loads((tmp_path / "out/acemerge_manifest.json").read_text())["notes"]
    return found


@pytest.mark.parametrize(
    ("file", "content"),
    [("chat_template.jinja", "{{ messages }}"), ("tokenizer_config.json", {"chat_template": "{{ messages }}"})],
)
def test_a_chat_template_that_only_an_expert_has(file: str, content: Any, models: Models, tmp_path: Path) -> None:
    write(next(iter(models.experts.values())), file, content)
    (note,) = notes(models, tmp_path)
    assert f"has a chat template ({file}), the base has none" in note


def test_another_chat_template(models: Models, tmp_path: Path) -> None:
    write(models.base, "chat_template.jinja", "{{ ours }}")
    write(next(iter(models.experts.values())), "chat_template.jinja", "{{ theirs }}")
    (note,) = notes(models, tmp_path)
    assert "another than the base" in note


@pytest.mark.parametrize("kind", [dict, list])
def test_permuted_ids(kind: type, models: Models, tmp_path: Path) -> None:
    first, *others = models.experts.values()
    for folder in (models.base, *others):
        write(folder, "tokenizer.json", vocabulary(IDS if kind is dict else [[token, -1.0] for token in IDS]))
    permuted = {"<s>": 0, "cat": 1, "the": 2}
    write(first, "tokenizer.json", vocabulary(permuted if kind is dict else [[token, -2.0] for token in permuted]))
    (note,) = notes(models, tmp_path)
    assert "has other ids than the base for 2 tokens ('cat' is 1, not 2)" in note


def test_added_tokens(models: Models, tmp_path: Path) -> None:
    write(models.base, "tokenizer.json", vocabulary(IDS))
    write(next(iter(models.experts.values())), "tokenizer.json", vocabulary(IDS, {"<s>": 0, "<|im_start|>": 3}))
    (note,) = notes(models, tmp_path)
    assert "has 1 tokens that the base lacks, such as '<|im_start|>'" in note


def test_the_same_ids_in_other_words_have_no_note(models: Models, tmp_path: Path) -> None:
    write(models.base, "tokenizer.json", vocabulary(IDS))
    write(models.base, "chat_template.jinja", "{{ messages }}")
    for folder in models.experts.values():
        write(folder, "tokenizer.json", {**vocabulary(dict(reversed(IDS.items()))), "version": "1.0"})
        write(folder, "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    assert notes(models, tmp_path) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}', '{"model": {"vocab": 3}}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_strange_tokenizer_is_no_obstacle(content: str, models: Models, tmp_path: Path) -> None:
    write(models.base, "tokenizer.json", vocabulary(IDS))
    write(next(iter(models.experts.values())), "tokenizer.json", content)
    (note,) = notes(models, tmp_path)
    assert "was not compared with the base's" in note
    assert str(tmp_path) not in note


@pytest.mark.parametrize("entries", [[[["x"], 1.0]], [{}], [3], [[]]])
def test_strange_entries_are_passed_over(entries: Any, models: Models, tmp_path: Path) -> None:
    write(models.base, "tokenizer.json", vocabulary(IDS))
    strange = {"model": {"vocab": [["<s>", 0.0], *entries]}, "added_tokens": [{"content": ["x"], "id": "y"}, 7]}
    write(next(iter(models.experts.values())), "tokenizer.json", strange)
    assert notes(models, tmp_path) == []
