"""Experts whose tokenizer is not the base's: what the plan says of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import acemerge
import model_zoo as zoo
from acemerge.errors import InputError
from model_zoo import Models

IDS = {"<s>": 0, "the": 1, "cat": 2}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return zoo.build_from_shapes(tmp_path / "in", {"embed_tokens.weight": (4, 8), "mix.weight": (8, 8)})


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
    assert "--files-from red takes this one" in note


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
    assert "has other ids than the base for 2 tokens ('cat' is 1, not 2); the rows of its embeddings" in note
    assert note.endswith("are lined up by token")


def test_added_tokens(models: Models, tmp_path: Path) -> None:
    write(models.base, "tokenizer.json", vocabulary(IDS))
    write(next(iter(models.experts.values())), "tokenizer.json", vocabulary(IDS, {"<s>": 0, "<|im_start|>": 3}))
    (note,) = notes(models, tmp_path)
    assert "has 1 token that the base lacks, such as '<|im_start|>'" in note
    assert note.endswith("--tokenizer union keeps them, --tokenizer red takes this expert's")


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
    (note,) = notes(models, tmp_path)
    assert "lacks 2 tokens of the base, such as 'the'" in note


def test_tokens_without_rows_that_are_known_by_name(tmp_path: Path) -> None:
    models = zoo.build_from_shapes(tmp_path / "in", {"strange.weight": (4, 8), "mix.weight": (8, 8)})
    write(models.base, "tokenizer.json", vocabulary(IDS))
    write(models.experts["red"], "tokenizer.json", vocabulary({"<s>": 0, "cat": 1, "the": 2}))
    (note,) = notes(models, tmp_path)
    assert note.endswith("no tensor is known to have a row for every token: none is lined up")


# --- what is asked for -------------------------------------------------------------------------------------------------


def problem(models: Models, **asked: Any) -> str:
    with pytest.raises(InputError) as refused:
        acemerge.plan(models.base, models.experts, **asked)
    return str(refused.value)


@pytest.fixture
def with_tokenizers(models: Models) -> Models:
    write(models.base, "tokenizer.json", vocabulary(IDS))
    write(models.experts["red"], "tokenizer.json", vocabulary(IDS, {"<x>": 3}))
    return models


@pytest.mark.parametrize("field", ["tokenizer", "files_from"])
def test_an_unknown_expert(field: str, with_tokenizers: Models) -> None:
    assert "there is no expert 'rde': did you mean 'red'?" in problem(with_tokenizers, **{field: "rde"})


@pytest.mark.parametrize("field", ["tokenizer", "files_from"])
def test_an_expert_without_a_tokenizer(field: str, with_tokenizers: Models) -> None:
    assert "has no tokenizer; put its tokenizer.json into its folder" in problem(with_tokenizers, **{field: "green"})


@pytest.mark.parametrize("asked", [{"tokenizer": "union"}, {"pad_to_multiple_of": 8}, {"token_sources": {"cat": "red"}}])
def test_a_base_without_a_tokenizer(asked: dict[str, Any], models: Models) -> None:
    assert "has no tokenizer; put its tokenizer.json into its folder" in problem(models, **asked)


def test_a_tokenizer_that_cannot_be_read_is_an_obstacle_if_it_is_asked_for(with_tokenizers: Models) -> None:
    write(with_tokenizers.experts["red"], "tokenizer.json", "{")
    assert "cannot be read as JSON" in problem(with_tokenizers, tokenizer="union")


def test_a_tokenizer_in_a_format_that_is_not_read(with_tokenizers: Models) -> None:
    (with_tokenizers.experts["red"] / "tokenizer.json").unlink()
    write(with_tokenizers.experts["red"], "tokenizer.model", "...")
    assert "has tokenizer.model alone; acemerge lines tokens up by tokenizer.json" in problem(with_tokenizers, tokenizer="union")


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"<y>": "red"}, "'<y>': the output's tokenizer has no such token"),
        ({"<x>": "green"}, "'<x>': 'green' has no token '<x>'"),
        ({"<x>": "base"}, "'<x>': 'base' has no token '<x>'"),
        ({"<x>": "yellow"}, "there is no expert 'yellow'"),
        ({"<x>": {"source": "red", "sorce": 1}}, "there is no such field: did you mean 'source'?"),
    ],
)
def test_sources_that_do_not_have_the_token(sources: Any, said: str, with_tokenizers: Models) -> None:
    assert said in problem(with_tokenizers, tokenizer="union", token_sources=sources)


def test_methods_with_one_model_per_task(with_tokenizers: Models) -> None:
    rows = zoo.build_from_shapes(with_tokenizers.base.parent / "five", {"embed_tokens.weight": (5, 8), "mix.weight": (8, 8)})
    write(rows.base, "tokenizer.json", vocabulary(IDS))
    for folder in rows.experts.values():
        write(folder, "tokenizer.json", vocabulary(IDS, {"<x>": 3, "<y>": 4}))
    assert "makes one model per task, each with the base's vocabulary" in problem(rows, method="emr", tokenizer="union")


def test_an_expert_of_other_rows_without_a_tokenizer(with_tokenizers: Models, tmp_path: Path) -> None:
    other = zoo.build_from_shapes(tmp_path / "other", {"embed_tokens.weight": (5, 8), "mix.weight": (8, 8)})
    models = Models(with_tokenizers.base, {"green": other.experts["green"]})
    said = problem(models, method="task_arithmetic")
    assert "shape [4, 8] in base" in said
    assert "with the tokenizer.json of both in their folders, rows are lined up by token" in said


# --- vocabularies in other files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "content"), [("vocab.txt", "<s>\ncat\nthe\n"), ("vocab.json", {"<s>": 0, "cat": 1, "the": 2})])
def test_vocabularies_of_older_tokenizers(file: str, content: Any, models: Models, tmp_path: Path) -> None:
    write(models.base, "tokenizer.json", vocabulary(IDS))
    write(models.experts["red"], file, content)
    write(models.experts["red"], "added_tokens.json", {"<x>": 3})
    moved, added = notes(models, tmp_path)
    assert "has other ids than the base for 2 tokens ('cat' is 1, not 2)" in moved
    assert "has 1 token that the base lacks, such as '<x>'" in added
