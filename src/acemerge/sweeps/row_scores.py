"""Scores from a few rows of each expert's task: how much a merged model believes in the right answers.

A row with a label scores the probability that the model, under the expert's own head, gives the right class: the share of right
answers, were they drawn at random, and steadier on few rows than the share that it gets right. A text without a label scores the
mean log-probability of its tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from acemerge.calibration.batches import batches_of_like_length
from acemerge.calibration.files import file_of, prepare_rows
from acemerge.calibration.inputs import Batch, Prepared
from acemerge.calibration.labels import read_labels
from acemerge.calibration.models import load_model, outline_model
from acemerge.calibration.next_tokens import next_token_losses
from acemerge.checkpoints.content_hash import file_hash
from acemerge.checkpoints.folder import Checkpoint, open_checkpoint
from acemerge.errors import InputError, PreflightError, no_folder
from acemerge.output.task_models import load_expert_head


@dataclass(frozen=True)
class ExpertRows:
    """A file, and what it answers."""

    file: Path
    expert: Checkpoint
    labels: Tensor | None
    """[row]; None of texts, whose tokens are the answers."""
    hash: str

    @staticmethod
    def open(folder: Path, base: Checkpoint, expert: Checkpoint) -> ExpertRows:
        """Read and check; the rows are made ready once by what is known before a merge."""
        file, reader = file_of(folder, expert), expert if expert.config else base
        rows, labels = prepare_rows(file, base, reader), read_labels(file, expert, base)
        if labels is not None and len(labels) != len(rows.lengths):
            raise InputError(f"{file}: has {len(rows.lengths)} rows and {len(labels)} labels; give one for each row")
        if labels is None and "input_ids" not in rows.batch(torch.tensor([0])):
            raise InputError(f"{file}: has no labels, and without text there are no tokens to expect; add 'labels' [row]")
        found = ExpertRows(file, expert, labels, file_hash(file))
        found._refuse_other_answers(rows)
        return found

    @torch.inference_mode()
    def _refuse_other_answers(self, rows: Prepared) -> None:
        """Before any merge, as far as a model without values shows what it answers; some want values, and an adapter is none."""
        try:
            model, batch = outline_model(self.expert).eval(), rows.batch(torch.tensor([0]))
            shapes = {
                name: value.to("meta") for name, value in batch.items() if "mask" not in name
            }  # whose values models look at
            logits = model(**shapes).logits
        except Exception:
            return
        self._check_answers(model, logits, batch)

    def _check_answers(self, model: nn.Module, logits: Tensor, batch: Batch) -> None:
        """Classes for rows with labels, and next tokens for texts without."""
        name = type(model).__name__
        if self.labels is not None and logits.dim() != 2:
            raise InputError(f"{self.file}: has labels, but {name} gives no class for each row; score by a command: --evaluate")
        if self.labels is None and (logits.dim() != 3 or "decoder_input_ids" in batch or not _writes_on(model)):
            raise InputError(f"{self.file}: has no labels, but {name} does not expect the next token; add a label to every row")

    @torch.inference_mode()
    def score(self, model: nn.Module, place: Checkpoint) -> float:
        """The mean of the rows' scores; `place` has the config and the tokenizer that belong to the model."""
        rows = prepare_rows(self.file, place, place)
        if self.labels is None:
            return -self._token_loss(model, rows)
        right = [
            self._right(model, rows.batch(indices), self.labels[indices]) for indices in batches_of_like_length(rows.lengths)
        ]
        return float(torch.cat(right).mean())

    def _right(self, model: nn.Module, batch: Batch, labels: Tensor) -> Tensor:
        """Probability of each row's label."""
        logits = _logits(model, batch, self.file)
        self._check_answers(model, logits, batch)
        return logits.double().softmax(1).gather(1, labels[:, None])[:, 0]

    def _token_loss(self, model: nn.Module, rows: Prepared) -> float:
        """Nats for each token but the first of a text, over all texts."""
        total = tokens = 0.0
        for indices in batches_of_like_length(rows.lengths):
            batch = rows.batch(indices)
            logits = _logits(model, batch, self.file)
            self._check_answers(model, logits, batch)
            seen = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}
            total += float(next_token_losses(logits.float(), seen).double().sum())
            tokens += float(seen["attention_mask"][:, 1:].sum())
        if not tokens:
            raise InputError(f"{self.file}: its texts have one token each, so there is none to expect; give longer ones")
        return total / tokens


@dataclass(frozen=True)
class RowScores:
    """Scores the model in a folder: an evaluation of a sweep's points."""

    rows: Sequence[ExpertRows]

    @staticmethod
    def open(folder: Path, base: Checkpoint, experts: Sequence[Checkpoint]) -> RowScores:
        """A folder with a file for each expert; all problems at once."""
        if not folder.is_dir():
            raise InputError(f"{no_folder(folder)}; give one with a file for each expert, <expert>.jsonl or .safetensors")
        problems: list[str] = []
        found = []
        for expert in experts:
            try:
                found.append(ExpertRows.open(folder, base, expert))
            except InputError as error:
                problems.extend(error.found)
        if problems:
            raise PreflightError(problems)
        if len({rows.labels is None for rows in found}) > 1:
            with_labels, without = (next(r.file.name for r in found if (r.labels is None) == none) for none in (False, True))
            raise InputError(
                f"{folder}: {with_labels} has labels and {without} has none; classes and tokens cannot be averaged: give "
                "labels to all experts, or to none"
            )
        return RowScores(found)

    @property
    def command(self) -> str:
        """What the scores are noted with: other rows give others."""
        hashes = {rows.expert.name: rows.hash for rows in self.rows}
        return f"rows {hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]}"

    def __call__(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:  # noqa: ARG002
        """Of the merged model under each expert's head, on its rows."""
        scores = {rows.expert.name: rows.score(*_model_for(folder, rows.expert.name)) for rows in self.rows}
        return _with_mean(scores)

    def of_experts(self) -> dict[str, float]:
        """What there is to be kept: of each expert itself, on its own rows."""
        adapter = next((rows.expert for rows in self.rows if rows.expert.changes is not None), None)
        if adapter is not None:
            raise InputError(f"expert {adapter.where} is an adapter, which is not run without its base")
        return _with_mean({rows.expert.name: rows.score(load_model(rows.expert), rows.expert) for rows in self.rows})


def _with_mean(scores: Mapping[str, float]) -> dict[str, float]:
    return {"mean": fmean(scores.values()), **scores}


def _model_for(merged: Path, expert: str) -> tuple[nn.Module, Checkpoint]:
    """The merged model with what is the expert's own, and where its config and tokenizer are."""
    model = open_checkpoint(merged, merged.name)
    head = merged / "heads" / expert
    if not head.is_dir() and not (merged / "tasks" / expert).is_dir():
        return load_model(model), model
    own = Checkpoint(expert, {}, model.read, location=head if head.is_dir() else merged)
    return load_expert_head(merged, expert), own


def _logits(model: nn.Module, batch: Batch, file: Path) -> Tensor:
    logits: Tensor | None = getattr(model(**batch), "logits", None)
    if logits is None:
        raise InputError(
            f"{file}: cannot be scored, since {type(model).__name__} has no head; give experts with their task heads"
        )
    return logits


def _writes_on(model: nn.Module) -> bool:
    """Whether it is one of transformers' that generate text."""
    can_generate: Any = getattr(model, "can_generate", None)
    return bool(can_generate and can_generate())
