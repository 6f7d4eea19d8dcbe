"""Points scored by a few rows of each expert's task; and `merge --tune`, which chooses by them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import acemerge
import lora_zoo
from acemerge.errors import AcemergeError, InputError
from acemerge.output.manifest import read_merge
from acemerge.sweeps.tuning import CANDIDATES
from data_statistics import write_rows
from model_zoo import Models, bert, copy_models, llama, quiet_transformers

ALPHAS = {"alpha": [0.5, 1.0, 1.5]}
WORDS = 30


@pytest.fixture
def bert_models(models_of: Any, tmp_path: Path) -> Models:
    return copy_models(models_of(bert), tmp_path / "models")


def labelled(folder: Path, models: Models, classes: int = 2) -> Path:
    """Random inputs of every expert, with a class each."""
    write_rows(folder, models.experts)
    for name in models.experts:
        file = folder / f"{name}.safetensors"
        inputs = load_file(file)
        rows = len(next(iter(inputs.values())))
        save_file({**inputs, "labels": torch.arange(rows) % classes}, file)
    return folder


def probability_of_labels(model: Any, file: Path) -> float:
    """Row by row, by transformers alone."""
    inputs = load_file(file)
    labels = inputs.pop("labels")
    with torch.inference_mode():
        answers = [model(**{name: tensor[i : i + 1] for name, tensor in inputs.items()}).logits[0] for i in range(len(labels))]
    return fmean(float(logits.softmax(0)[label]) for logits, label in zip(answers, labels, strict=True))


def test_scores_are_the_probability_of_the_labels_under_each_experts_head(bert_models: Models, tmp_path: Path) -> None:
    rows = labelled(tmp_path / "rows", bert_models)
    with quiet_transformers():
        result = acemerge.sweep(
            bert_models.base, bert_models.experts, tmp_path / "grid", ALPHAS, "average", rows=rows, keep="all", quiet=True
        )
        assert [set(point.scores) for point in result.points] == [{"mean", *bert_models.experts}] * 3
        for point in result.points:
            assert point.folder
            for name in bert_models.experts:
                model = acemerge.load_expert_head(point.folder, name)
                expected = probability_of_labels(model, rows / f"{name}.safetensors")
                assert point.scores[name] == pytest.approx(expected, abs=1e-5)
            assert point.scores["mean"] == pytest.approx(fmean(point.scores[name] or 0 for name in bert_models.experts))
    assert len({point.scores["mean"] for point in result.points}) == 3
    assert result.best
    assert result.best.scores["mean"] == max(point.scores["mean"] or 0 for point in result.points)
    assert set(result.references["experts"].scores) == {"mean", *bert_models.experts}


def test_other_rows_ask_again(bert_models: Models, tmp_path: Path) -> None:
    rows = labelled(tmp_path / "rows", bert_models)

    def scores() -> list[float | None]:
        with quiet_transformers():
            result = acemerge.sweep(
                bert_models.base, bert_models.experts, tmp_path / "grid", ALPHAS, "average", rows=rows, quiet=True
            )
        return [point.scores["mean"] for point in result.points]

    first = scores()
    assert scores() == first
    file = rows / f"{next(iter(bert_models.experts))}.safetensors"
    stored = load_file(file)
    save_file({**stored, "labels": 1 - stored["labels"]}, file)
    assert all(a != b for a, b in zip(scores(), first, strict=True))


def test_a_language_model_is_scored_by_its_tokens(tmp_path: Path) -> None:
    models = llama(tmp_path / "models", tied=True)
    (tmp_path / "rows").mkdir()
    for name in models.experts:
        save_file({"input_ids": torch.arange(24).reshape(4, 6)}, tmp_path / "rows" / f"{name}.safetensors")
    with quiet_transformers():
        result = acemerge.sweep(
            models.base, models.experts, tmp_path / "grid", ALPHAS, "average", rows=tmp_path / "rows", keep="all", quiet=True
        )
        from transformers import AutoModelForCausalLM

        folder = result.points[0].folder
        assert folder
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.arange(24).reshape(4, 6)
        with torch.inference_mode():
            expected = -float(model(input_ids=ids, labels=ids).loss)
    assert result.points[0].scores["mean"] == pytest.approx(expected, abs=1e-5)
    assert result.references["experts"].scores["mean"] is not None


def test_tune_merges_by_the_best_candidate(bert_models: Models, tmp_path: Path) -> None:
    rows = labelled(tmp_path / "rows", bert_models)
    with quiet_transformers():
        result = acemerge.merge(bert_models.base, bert_models.experts, tmp_path / "out", tune=rows, quiet=True)
    table = json.loads((tmp_path / "out-tuning" / "sweep.json").read_text())
    tried = {name: record["scores"]["mean"] for name, record in table["points"].items()}
    assert {name.partition(",")[0] for name in tried} == set(CANDIDATES)
    assert table["best"] == max(tried, key=lambda name: tried[name])
    method, _, settings = table["best"].partition(",")
    manifest = read_merge(tmp_path / "out")
    assert manifest.method == method
    for setting in filter(None, settings.split(",")):
        name, _, value = setting.partition("=")
        assert manifest.options[name] == float(value)
    [note] = [note for note in result.plan.notes if "chosen from" in note]
    assert f"chosen from {len(tried)} by the rows of rows" in note
    assert not [path for path in (tmp_path / "out-tuning").iterdir() if path.is_dir()]


def test_adapters_are_judged_by_the_classes_of_their_heads(tmp_path: Path) -> None:
    base = lora_zoo.write_base(tmp_path / "base", "BertModel")
    kind: dict[str, Any] = {"task_type": "SEQ_CLS", "target_modules": ["query"], "labels": 5}
    adapters = {
        name: lora_zoo.write_adapter(base, tmp_path / name, "BertForSequenceClassification", seed=seed, **kind)
        for seed, name in enumerate(("red", "blue"))
    }
    rows = labelled(tmp_path / "rows", Models(base, adapters), classes=5)
    with quiet_transformers():
        result = acemerge.sweep(base, adapters, tmp_path / "grid", ALPHAS, "average", rows=rows, keep="all", quiet=True)
        folder = result.points[0].folder
        assert folder
        expected = probability_of_labels(acemerge.load_expert_head(folder, "red"), rows / "red.safetensors")
    assert result.points[0].scores["red"] == pytest.approx(expected, abs=1e-5)
    assert "is an adapter" in (result.references["experts"].failure or "")
    with_label(rows, "red", 5)
    with quiet_transformers(), pytest.raises(AcemergeError, match=r"has label 5, but expert .* has 5 classes"):
        acemerge.merge(base, adapters, tmp_path / "out", tune=rows, quiet=True)


def other_class(models: Models, class_name: str) -> None:
    for folder in models.experts.values():
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [class_name]}))


@pytest.mark.parametrize(
    ("class_name", "with_labels", "message"),
    [
        ("BertForTokenClassification", True, "has labels, but BertForTokenClassification gives no class for each row"),
        ("BertForMaskedLM", False, "has no labels, but BertForMaskedLM does not expect the next token"),
    ],
)
def test_models_that_answer_otherwise_are_refused_before_any_merge(
    class_name: str, with_labels: bool, message: str, bert_models: Models, tmp_path: Path
) -> None:
    other_class(bert_models, class_name)
    rows = labelled(tmp_path / "rows", bert_models)
    for name in bert_models.experts if not with_labels else ():
        without_labels(rows, name)
    with quiet_transformers(), pytest.raises(AcemergeError, match=message):
        acemerge.merge(bert_models.base, bert_models.experts, tmp_path / "out", tune=rows, quiet=True)
    assert not list(tmp_path.glob("out*"))


def test_tune_takes_no_method(bert_models: Models, tmp_path: Path) -> None:
    rows = labelled(tmp_path / "rows", bert_models)
    with pytest.raises(InputError, match="--tune: chooses the method"):
        acemerge.merge(bert_models.base, bert_models.experts, tmp_path / "out", "ties", tune=rows, quiet=True)
    assert not list(tmp_path.glob("out*"))


def without_labels(rows: Path, name: str) -> None:
    stored = load_file(rows / f"{name}.safetensors")
    del stored["labels"]
    save_file(stored, rows / f"{name}.safetensors")


def with_label(rows: Path, name: str, label: int) -> None:
    stored = load_file(rows / f"{name}.safetensors")
    stored["labels"][0] = label
    save_file(stored, rows / f"{name}.safetensors")


def fewer_labels(rows: Path, name: str) -> None:
    stored = load_file(rows / f"{name}.safetensors")
    save_file({**stored, "labels": stored["labels"][:-1].clone()}, rows / f"{name}.safetensors")


WRONG: list[tuple[Any, str]] = [
    (lambda rows, name: (rows / f"{name}.safetensors").unlink(), "no data for expert"),
    (without_labels, "has no labels, but BertForSequenceClassification does not expect the next token"),
    (fewer_labels, "12 rows and 11 labels"),
    (lambda rows, name: with_label(rows, name, -1), "whole numbers .* from 0"),
    (lambda rows, name: with_label(rows, name, 7), "has label 7, but expert .* has 5 classes"),
]


@pytest.mark.parametrize(("damage", "message"), WRONG, ids=["missing", "unlabelled", "short", "negative", "beyond"])
def test_wrong_rows_are_told(damage: Any, message: str, bert_models: Models, tmp_path: Path) -> None:
    rows = labelled(tmp_path / "rows", bert_models)
    damage(rows, list(bert_models.experts)[-1])
    with quiet_transformers(), pytest.raises(AcemergeError, match=message):
        acemerge.merge(bert_models.base, bert_models.experts, tmp_path / "out", tune=rows, quiet=True)
    assert not list(tmp_path.glob("out*"))
