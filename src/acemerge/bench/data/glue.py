"""GLUE: sequence classifiers of any architecture, on the data sets of nyu-mll/glue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.bench.data.hub_rows import DataSource, LazySplits, find_column
from acemerge.bench.data.task import Rows
from acemerge.bench.domains.text import PreparedTexts, quiet_transformers
from acemerge.bench.measure.metrics import Metric
from acemerge.checkpoints.folder import read_json
from acemerge.checkpoints.untrusted import check_runs_nothing
from acemerge.errors import InputError

GLUE = "nyu-mll/glue"
MATCHED, MISMATCHED = "validation_matched", "validation_mismatched"


@dataclass(frozen=True)
class GlueTask:
    """One of GLUE's tasks as its data set has it."""

    name: str
    texts: tuple[str, ...]
    """The columns."""
    classes: tuple[str, ...]
    """None for a regression."""
    metric: Metric = "accuracy"
    """Of GLUE itself, where a task of two metrics counts their mean."""
    test_split: str = "validation"
    """The labels of GLUE's own test are not public."""


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
GLUE_TASKS: Mapping[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask("cola", ("sentence",), ("unacceptable", "acceptable"), "matthews"),
        GlueTask("sst2", ("sentence",), ("negative", "positive")),
        GlueTask("mrpc", _PAIR, ("not_equivalent", "equivalent"), "accuracy_and_f1"),
        GlueTask("stsb", _PAIR, (), "pearson_and_spearman"),
        GlueTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), "accuracy_and_f1"),
        GlueTask("mnli", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), test_split=MATCHED),
        GlueTask("qnli", ("question", "sentence"), _ENTAILMENT),
        GlueTask("rte", _PAIR, _ENTAILMENT),
    )
}


def glue_splits(task: GlueTask, source: DataSource, test_split: str) -> LazySplits:
    """Rows whose inputs are tuples of texts."""
    return LazySplits(source, partial(_rows, task.texts, source.name), test_split)


def _rows(columns: tuple[str, ...], where: str, dataset: Any) -> Rows:
    texts = [list(dataset[find_column(dataset, (column,), where)]) for column in columns]
    return Rows(list(zip(*texts, strict=True)), list(dataset[find_column(dataset, ("label",), where)]))


@dataclass(frozen=True)
class ClassifierDomain:
    """Sequence classifiers with a head of their own. See `Domain`."""

    name: str
    base: Path
    """Its tokenizer is used for all."""
    longest: int
    """Tokens; longer texts are cut."""

    def load(self, folder: Path) -> nn.Module:
        """An expert, or a merged model with its head; a head that is not there is refused, not made up."""
        from transformers import AutoModelForSequenceClassification

        quiet_transformers()
        check_runs_nothing(read_json(folder / "config.json"), folder)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, output_loading_info=True, trust_remote_code=False
        )
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise InputError(f"{folder}: has no head of its own ({missing} missing).{_pickled_head(folder)}")
        model.config.pad_token_id = self._padding()  # GPT-2's head looks at the last token that is no padding
        classifier: nn.Module = model
        return classifier

    def _padding(self) -> int:
        tokenizer = _tokenizer(self.base)
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.unk_token_id
        return int(padding)

    def prepare(self, rows: Rows) -> PreparedTexts:
        """Tokenise, unless the rows are token ids already. Padding to the longest of a batch is hidden by the mask."""
        if rows.inputs and isinstance(rows.inputs[0], list):
            ids = list(rows.inputs)
        else:
            columns = [list(column) for column in zip(*rows.inputs, strict=True)]
            ids = _tokenizer(self.base)(*columns, truncation=True, max_length=self.longest)["input_ids"]
        return PreparedTexts(ids, [[0] * len(row) for row in ids], torch.tensor(rows.labels), self._padding())

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The head's scores."""
        scores: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return scores


def _tokenizer(base: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base, trust_remote_code=False)


def _pickled_head(folder: Path) -> str:
    if not (folder / "classifier_head.pt").is_file():
        return " Give an expert, or a merged model with the experts' heads beside it"
    return (
        " classifier_head.pt is a pickled module, which could run code when loaded, so it is not. If you trust it, put its "
        "tensors into the model's own file: m = AutoModelForSequenceClassification.from_pretrained(folder); m.classifier = "
        "torch.load('classifier_head.pt', weights_only=False); m.save_pretrained(folder)"
    )
