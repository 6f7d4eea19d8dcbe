"""Data that are texts: tokenised as the base does it, and every mistake told in one sentence before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import acemerge
from acemerge.calibration.texts import read_texts
from acemerge.checkpoints.folder import open_checkpoint
from model_zoo import Models, quiet_transformers
from refused_data import refusal


def add_tokenizer(folder: Path, words: int = 40) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{i}": i for i in range(2, words)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", model_max_length=10).save_pretrained(
        folder
    )


def write_texts(folder: Path, models: Models, *lines: Any) -> Path:
    folder.mkdir()
    for name in models.experts:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (folder / f"{name}.jsonl").write_text(text + "\n")
    return folder


def test_texts_are_tokenised_cut_and_padded(models: Models, tmp_path: Path) -> None:
    add_tokenizer(models.base)
    long = " ".join(f"w{i}" for i in range(2, 30))
    folder = write_texts(tmp_path / "rows", models, {"text": "w5 w6", "label": 1}, "", {"text": long})
    base, red = open_checkpoint(models.base, "base"), open_checkpoint(models.experts["red"], "red")
    with quiet_transformers():
        texts = read_texts(folder / "red.jsonl", base, red)
    assert texts.lengths.tolist() == [2, 10]
    batch = texts.batch(torch.tensor([1, 0]))
    assert batch["input_ids"][0].tolist() == list(range(2, 12))
    assert batch["attention_mask"][1].tolist() == [1, 1] + [0] * 8
    assert batch["input_ids"][1].tolist()[:2] == [5, 6]


@pytest.mark.parametrize("method", ["regmean", "fisher"])
def test_a_merge_with_texts(method: str, models: Models, tmp_path: Path) -> None:
    add_tokenizer(models.base)
    lines = [{"text": f"w{i} w{i + 1} w7", "text_pair": f"w{i + 2}"} for i in range(2, 12)]
    rows = write_texts(tmp_path / "rows", models, *lines)
    with quiet_transformers():
        result = acemerge.merge(models.base, list(models.experts.values()), tmp_path / "out", method=method, data=rows)
    assert result.plan.to_json()["data"]["about"] == "files of rows"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "holds no rows"),
        (["not JSON"], "line 1: cannot be read as JSON"),
        (["[1]"], "line 1: expected an object"),
        ([{"txt": "w5"}], "there is no field 'txt': did you mean 'text'?"),
        ([{"text": 5}], "'text' must be text, found int"),
        ([{"label": 5}], "'text' must be text, found NoneType"),
        ([{"text": "w5"}, {"text": "w5", "text_pair": "w6"}], "line 2: give 'text_pair' on every line, or on none"),
        ([{"text": ""}], "row 1 has no tokens"),
    ],
)
def test_wrong_texts_are_told_before_any_work(lines: list[Any], expected: str, models: Models, tmp_path: Path) -> None:
    add_tokenizer(models.base)
    assert expected in refusal(models, tmp_path, data=write_texts(tmp_path / "rows", models, *lines))


def test_texts_need_a_tokenizer_with_the_models_words(models: Models, tmp_path: Path) -> None:
    rows = write_texts(tmp_path / "rows", models, {"text": "w5 w60"})
    assert "has a tokenizer; put its files beside one of them" in refusal(models, tmp_path, data=rows)
    add_tokenizer(models.base, words=70)
    assert "token 60 is not in the vocabulary" in refusal(models, tmp_path, data=rows)
