"""The paper's language suites on tiny checkpoints: whole commands, checked against scikit-learn and scipy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

import acemerge
from acemerge.bench.data.glue import GLUE_TASKS, ClassifierDomain
from acemerge.bench.measure import evaluation
from paper_zoo import LIBRARY, glue_rows, gpt2_models, llama_models, roberta_models, sentences, write_rows
from running import rows_in, run_command

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@torch.inference_mode()
def plain_logits(model: Any, ids: Sequence[Sequence[int]], padding: int, length: int) -> np.ndarray[Any, Any]:
    """One row at a time, each padded to a fixed length."""
    model.config.pad_token_id = padding
    answers = []
    for row in ids:
        filled = torch.tensor([[*row, *[padding] * (length - len(row))]])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row))])
        answers.append(model.eval()(input_ids=filled, attention_mask=mask).logits[0].numpy())
    return np.array(answers)


# --- GPT-2 -------------------------------------------------------------------------------------------------------------

GPT2 = {"cola": 2, "mnli": 3, "qqp": 2}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Rows]]:
    folder = tmp_path_factory.mktemp("gpt2")
    gpt2_models(folder / "models", GPT2)
    data = {}
    for seed, (task, classes) in enumerate(GPT2.items()):
        columns = GLUE_TASKS[task].texts
        splits = ("validation_matched", "validation_mismatched") if task == "mnli" else ("validation",)
        for place, split in enumerate(("train", *splits)):
            data[f"{task} {split}"] = glue_rows(columns, classes, seed + 10 * place)
            write_rows(folder / "data" / task / f"{split}.jsonl", data[f"{task} {split}"])
    return folder, data


def gpt2_accuracy(model: Any, base: Path, task: str, rows: Rows) -> float:
    words = LIBRARY.AutoTokenizer.from_pretrained(base)
    ids = [words(*(row[column] for column in GLUE_TASKS[task].texts))["input_ids"] for row in rows]
    answers = plain_logits(model, ids, words.unk_token_id, 48).argmax(1)
    return float(accuracy_score([row["label"] for row in rows], answers))


def test_gpt2_on_glue(gpt2: tuple[Path, dict[str, Rows]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = gpt2
    base = folder / "models" / "base"
    where = ["--models", folder / "models", "--data", folder / "data", "--tasks", ",".join(GPT2), "-o", tmp_path]
    assert run_command(monkeypatch, "bench", "gpt2-glue", "--methods", "ace,emr", *where) == 0
    rows = rows_in(tmp_path / "gpt2-glue.json")
    assert rows["ace"]["hyper_parameters"].startswith("alpha=1, epsilon=0.04"), rows["ace"]["hyper_parameters"]
    acemerge.merge(base, {task: folder / "models" / task for task in GPT2}, tmp_path / "merged", "ace")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for task in GPT2:
        split = "validation_matched" if task == "mnli" else "validation"
        expert = LIBRARY.GPT2ForSequenceClassification.from_pretrained(folder / "models" / task)
        assert rows["experts"]["scores"][task] == gpt2_accuracy(expert, base, task, data[f"{task} {split}"])
        expert.transformer.load_state_dict(merged, strict=True)
        assert rows["ace"]["scores"][task] == gpt2_accuracy(expert, base, task, data[f"{task} {split}"])
    assert rows["ace"]["paper"]["raw"] == {"cola": 70.3, "mnli": 69.9, "qqp": 79.0}


def test_mnli_mismatched_and_limits(
    gpt2: tuple[Path, dict[str, Rows]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = gpt2
    expert = folder / "models" / "mnli"
    where = ["--models", folder / "models", "--data", folder / "data", "-o", tmp_path]
    assert run_command(monkeypatch, "evaluate", expert, "--suite", "gpt2-glue-mm", "--tasks", "mnli", "--limit", 9, *where) == 0
    score = rows_in(tmp_path / "mnli-gpt2-glue-mm-mnli-9.json")["mnli"]["scores"]["mnli"]
    model = LIBRARY.GPT2ForSequenceClassification.from_pretrained(expert)
    assert score == gpt2_accuracy(model, folder / "models" / "base", "mnli", data["mnli validation_mismatched"][:9])

    assert run_command(monkeypatch, "evaluate", expert, "--suite", "gpt2-glue", "--tasks", "cola,mnli", *where) == 2
    assert "has a head of its own, so it is for one task; say which with --tasks: cola, mnli" in capsys.readouterr().err


def test_a_model_without_heads_gets_those_of_the_experts(
    gpt2: tuple[Path, dict[str, Rows]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = gpt2
    base = folder / "models" / "base"
    where = ["--suite", "gpt2-glue", "--models", folder / "models", "--data", folder / "data", "-o", tmp_path]
    assert run_command(monkeypatch, "evaluate", base, "--tasks", "cola,qqp", *where) == 0
    row = rows_in(tmp_path / "base-gpt2-glue-cola+qqp.json")["base"]
    for task in ("cola", "qqp"):
        expert = LIBRARY.GPT2ForSequenceClassification.from_pretrained(folder / "models" / task)
        expert.transformer.load_state_dict(LIBRARY.GPT2Model.from_pretrained(base).state_dict())
        assert row["scores"][task] == gpt2_accuracy(expert, base, task, data[f"{task} validation"])

    acemerge.merge(base, {"cola": folder / "models" / "cola"}, tmp_path / "merged", "average")
    assert run_command(monkeypatch, "evaluate", tmp_path / "merged", "--tasks", "cola,qqp", *where) == 2
    assert "has no heads of qqp beside it; choose tasks that it has with --tasks: cola" in capsys.readouterr().err
    assert run_command(monkeypatch, "evaluate", tmp_path / "merged", "--tasks", "cola", "--with-experts", *where) == 0
    found = rows_in(tmp_path / "merged-gpt2-glue-cola.json")
    assert found["merged"]["share_of_expert"]["cola"] == 1.0, "the average of one expert is that expert"


def test_an_interrupted_run_goes_on_where_it_stopped(
    gpt2: tuple[Path, dict[str, Rows]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = gpt2
    where = ["--models", folder / "models", "--data", folder / "data", "--tasks", "cola,mnli", "-o", tmp_path]
    arguments = ["bench", "gpt2-glue", "--methods", "ace", *where]
    asked: list[str] = []
    evaluate: Callable[..., Any] = evaluation.evaluate

    def interrupted(*given: Any) -> Any:
        asked.append(given[-1])
        if len(asked) == 6:  # both tasks of the experts and of the base, the first of ace
            raise KeyboardInterrupt
        return evaluate(*given)

    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    assert run_command(monkeypatch, *arguments) == 130
    assert not (tmp_path / "gpt2-glue.json").exists()
    assert run_command(monkeypatch, *arguments) == 0
    assert asked[6:] == ["mnli"], "one task was left"
    assert not list((tmp_path / "cache").rglob("*.unfinished"))
    assert len(rows_in(tmp_path / "gpt2-glue.json")) == 3


def test_the_analyses_work_on_given_experts(
    gpt2: tuple[Path, dict[str, Rows]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = gpt2
    where = ["--suite", "gpt2-glue", "--models", folder / "models", "--data", folder / "data"]
    assert run_command(monkeypatch, "bench", "ablation", *where, "--tasks", "cola,qqp", "-o", tmp_path) == 0
    assert list(rows_in(tmp_path / "ablation-gpt2-glue.json"))[2:] == [
        "E1 closed form", "E2 + normalisation", "E3 + prior", "E4 + refinement",
    ]  # fmt: skip
    assert run_command(monkeypatch, "bench", "sensitivity", *where, "--tasks", "cola,qqp", "-o", tmp_path) == 0
    assert len(rows_in(tmp_path / "sensitivity-gpt2-glue.json")) == 1 + 5 + 5 + 7


# --- RoBERTa -----------------------------------------------------------------------------------------------------------

ROBERTA = {"cola": 2, "sst2": 2, "mrpc": 2, "stsb": 0, "qqp": 2, "mnli": 3, "qnli": 2, "rte": 2}


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Twin-Merging's layout: `<task>/roberta-base_lr1e-05`, and one file of rows for all tasks."""
    folder = tmp_path_factory.mktemp("roberta")
    roberta_models(folder / "models", ROBERTA, "{task}/roberta-base_lr1e-05")
    words = LIBRARY.AutoTokenizer.from_pretrained(folder / "models" / "base")
    rows = []
    for number, (task, classes) in enumerate(ROBERTA.items()):
        columns = GLUE_TASKS[task].texts
        expert = LIBRARY.RobertaForSequenceClassification.from_pretrained(folder / "models" / task / "roberta-base_lr1e-05")
        for index, row in enumerate(glue_rows(columns, classes, number, count=12)):
            encoded = words(*(row[column] for column in columns))
            logits = plain_logits(expert, [encoded["input_ids"]], words.pad_token_id, 40)[0]
            if index % 3:  # the expert is right about two of three rows
                row["label"] = float(logits[0]) if classes == 0 else int(logits.argmax())
            rows.append({**row, **{k: encoded[k] for k in ("input_ids", "attention_mask")}, "dataset_ids": number})
    (folder / "data").mkdir()
    (folder / "data" / "test.json").write_text(json.dumps(rows))
    write_rows(folder / "data" / "stsb" / "train.jsonl", glue_rows(GLUE_TASKS["stsb"].texts, 0, 77))
    return folder, rows


def glue_metric(task: str, labels: list[float], logits: np.ndarray[Any, Any]) -> float:
    """As GLUE defines them."""
    if task == "stsb":
        return float((pearsonr(labels, logits[:, 0])[0] + spearmanr(labels, logits[:, 0])[0]) / 2)
    answers = logits.argmax(1)
    if task == "cola":
        return float(matthews_corrcoef(labels, answers))
    if task in ("mrpc", "qqp"):
        return float((accuracy_score(labels, answers) + f1_score(labels, answers)) / 2)
    return float(accuracy_score(labels, answers))


def test_roberta_on_twin_mergings_rows(
    roberta: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = roberta
    where = ["--models", folder / "models", "--data", folder / "data", "-o", tmp_path]
    assert run_command(monkeypatch, "bench", "roberta-base-glue", "--methods", "ace", *where) == 0
    rows = rows_in(tmp_path / "roberta-base-glue.json")
    folders = {task: folder / "models" / task / "roberta-base_lr1e-05" for task in ROBERTA}
    acemerge.merge(folder / "models" / "base", folders, tmp_path / "merged", "ace")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    shares = []
    for number, task in enumerate(ROBERTA):
        own = [row for row in data if row["dataset_ids"] == number]
        labels, ids = [row["label"] for row in own], [row["input_ids"] for row in own]
        expert = LIBRARY.RobertaForSequenceClassification.from_pretrained(folders[task])
        before = glue_metric(task, labels, plain_logits(expert, ids, expert.config.pad_token_id, 40))
        assert rows["experts"]["scores"][task] == pytest.approx(before, abs=1e-6)
        expert.roberta.load_state_dict(merged)
        after = glue_metric(task, labels, plain_logits(expert, ids, expert.config.pad_token_id, 40))
        assert rows["ace"]["scores"][task] == pytest.approx(after, abs=1e-6)
        assert rows["ace"]["share_of_expert"][task] == pytest.approx(after / before, abs=1e-5)
        shares.append(after / before)
    assert rows["ace"]["normalised_average"] == pytest.approx(np.mean(shares), abs=1e-5)
    assert rows["ace"]["paper"]["normalised"]["average"] == 90.4
    assert len({round(rows["experts"]["scores"][task], 4) for task in ROBERTA}) > 4, "the metrics differ"
    assert "In percent of the expert's score" in (tmp_path / "roberta-base-glue.md").read_text()


def test_roberta_has_training_rows_of_glue(roberta: tuple[Path, list[dict[str, Any]]]) -> None:
    """What methods that look at data ask of a suite."""
    from acemerge.bench.suites.options import SuiteOptions
    from acemerge.bench.suites.registry import get_suite

    folder, _ = roberta
    suite = get_suite("roberta-base-glue", SuiteOptions(folder / "models", folder / "data", ("stsb",)))
    splits = suite.tasks[0].load()
    assert len(splits.train) + len(splits.validation) == 24
    prepared = suite.domain.prepare(splits.train.first(3))
    model = suite.domain.load(suite.folders(0)["stsb"])
    assert suite.domain.logits(model, prepared.batch(torch.arange(3))).shape == (3, 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("rows", "expected a list of rows with dataset_ids, input_ids, label"),
        ("absent", "test.json: missing; expected discriminative/data/test.json"),
    ],
)
def test_roberta_files_that_do_not_fit_are_refused(
    spoil: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    roberta_models(tmp_path / "models", {"cola": 2})
    rows = [{"input_ids": [1, 2, 3], "label": 1, "dataset_ids": 0}] * 3
    if spoil == "rows":
        rows[1] = {"input_ids": [1]}
    (tmp_path / "data").mkdir()
    if spoil != "absent":
        (tmp_path / "data" / "test.json").write_text(json.dumps(rows))
    model = tmp_path / "models" / "cola"
    where = ["--models", tmp_path / "models", "--data", tmp_path / "data", "--tasks", "cola"]
    assert run_command(monkeypatch, "evaluate", model, "--suite", "roberta-base-glue", *where) == 2
    assert message in capsys.readouterr().err


def test_a_pickled_head_is_refused_with_a_way_to_convert_it(tmp_path: Path) -> None:
    roberta_models(tmp_path, {"cola": 2})
    encoder = LIBRARY.RobertaModel.from_pretrained(tmp_path / "cola", add_pooling_layer=False)
    encoder.save_pretrained(tmp_path / "headless")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "headless" / "classifier_head.pt")
    with pytest.raises(acemerge.InputError, match=r"pickled module, which could run code.*m\.classifier = torch\.load"):
        ClassifierDomain("roberta-base-glue", tmp_path / "base", 128).load(tmp_path / "headless")


# --- Llama -------------------------------------------------------------------------------------------------------------

QUESTION = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "question {{{{text}}}} answer"
doc_to_target: answer
doc_to_choice: [number, digit, flower]
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


@torch.inference_mode()
def likeliest(model: Any, words: Any, text: str, choices: Sequence[str]) -> int:
    """By the log-likelihood of ` choice` after the question."""
    scores = []
    for choice in choices:
        before, after = (words(t, return_tensors="pt")["input_ids"] for t in (text, f"{text} {choice}"))
        logs = model(after).logits[0].log_softmax(-1)
        places = range(before.shape[1], after.shape[1])
        scores.append(sum(float(logs[place - 1, after[0, place]]) for place in places))
    return int(np.argmax(scores))


def test_llama_by_lm_eval_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llama_models(tmp_path / "models", ("math", "coding"))
    rows = [{"text": text, "answer": index % 3} for index, text in enumerate(sentences(3, 12))]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mathqa.yaml").write_text(QUESTION.format(name="mathqa", file=tmp_path / "rows.jsonl"))
    where = ["--models", tmp_path / "models", "--data", tmp_path / "tasks", "-o", tmp_path]
    assert run_command(monkeypatch, "bench", "llama-3.2-3b", "--methods", "ace", "--tasks", "mathqa", *where) == 0
    rows_out = rows_in(tmp_path / "llama-3.2-3b.json")
    words = LIBRARY.AutoTokenizer.from_pretrained(tmp_path / "models" / "coding")
    expert = LIBRARY.LlamaForCausalLM.from_pretrained(tmp_path / "models" / "coding").eval()
    texts = [f"question {row['text']} answer" for row in rows]
    answers = [likeliest(expert, words, text, ("number", "digit", "flower")) for text in texts]
    assert rows_out["experts"]["scores"]["mathqa"] == accuracy_score([row["answer"] for row in rows], answers)
    assert rows_out["ace"]["paper"]["normalised"] == {"mathqa": 100.79}

    assert run_command(monkeypatch, "evaluate", tmp_path / "models" / "base", "--suite", "llama-3.2-3b", *where) == 2
    assert "humaneval runs the code that the model writes" in capsys.readouterr().err
