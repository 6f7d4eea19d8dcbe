"""How well language models expect the tokens of held-out texts, on the way from the base to the expert of that kind of text."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from acemerge.bench.data.task import Task
from acemerge.bench.domains.domain import Domain, Prepared
from acemerge.bench.measure.evaluation import HERE, Compute, Part, explained, prepared_rows
from acemerge.bench.measure.metrics import Estimate
from acemerge.cache import cache_folder
from acemerge.calibration.batches import batches_of_like_length
from acemerge.calibration.next_tokens import next_token_losses
from acemerge.checkpoints.content_hash import named_sha256
from acemerge.checkpoints.folder import open_checkpoint
from acemerge.output.whole_files import replace_file

if TYPE_CHECKING:
    from acemerge.bench.suites.registry import Suite

Losses = NDArray[np.float64]
"""[row]: nats, summed over a row's tokens."""


@torch.inference_mode()
def row_losses(domain: Domain, model: nn.Module, rows: Prepared, compute: Compute = HERE) -> Losses:
    """Of every row, in their order."""
    model.to(compute.device).eval()
    found = np.zeros(len(rows.lengths))
    for indices in batches_of_like_length(rows.lengths, compute.batch_size):
        batch = {key: value.to(compute.device) for key, value in rows.batch(indices).items()}
        found[indices.numpy()] = next_token_losses(domain.logits(model, batch), batch).double().sum(1).cpu().numpy()
    return found


def judge_by_loss(suite: Suite, folder: Path, task: Task, part: Part, limit: int | None, seed: int) -> Estimate:
    """How far the model in a folder has gone from the base to the expert."""
    with explained(suite, task):
        return way_from_base_to_expert(suite, suite.domain.load(folder), task, part, limit, seed)


def way_from_base_to_expert(suite: Suite, model: nn.Module, task: Task, part: Part, limit: int | None, seed: int) -> Estimate:
    """Which share of the way from the base's loss to the expert's a model has gone: the base 0, the expert 1."""
    experts, rows = suite.experts(seed), prepared_rows(suite, task, part, limit)
    own = row_losses(suite.domain, model, rows, suite.compute)
    base, expert = (_kept_losses(suite, place, task, part, limit) for place in (experts.base, experts.folder(task)))
    return share_of_gain(own, base, expert, tokens=int((rows.lengths - 1).sum()))


def share_of_gain(own: Losses, base: Losses, expert: Losses, tokens: int) -> Estimate:
    """What a model gains on the base as a share of what the expert gains, a ratio of two sums over the same rows.

    Its standard error is that of such a ratio (by the delta method): rows on which both gain alike say nothing against it.
    """
    gains, possible = base - own, base - expert
    share = float(gains.sum() / possible.sum())
    off = gains - share * possible
    error = math.sqrt(len(off) / max(1, len(off) - 1) * float(off @ off)) / abs(float(possible.sum()))
    means = {name: float(losses.sum()) / tokens for name, losses in (("loss", own), ("base", base), ("expert", expert))}
    return Estimate("loss", share, error, len(own), means)


def _kept_losses(suite: Suite, folder: Path, task: Task, part: Part, limit: int | None) -> Losses:
    """Of the base or an expert, between which every model is judged: measured once for the same weights and rows."""
    weights = [named_sha256(file) for file in open_checkpoint(folder, folder.name).files]
    digest = hashlib.sha256(json.dumps([weights, task.name, task.source, part, limit]).encode()).hexdigest()[:16]
    file = cache_folder() / "scores" / suite.name / "losses" / f"{task.name}-{folder.name}-{digest}.json"
    if not file.is_file():
        rows = prepared_rows(suite, task, part, limit)
        found = row_losses(suite.domain, suite.domain.load(folder), rows, suite.compute)
        with replace_file(file) as staged:
            staged.write_text(json.dumps(found.tolist()) + "\n", encoding="utf-8")
    return np.array(json.loads(file.read_text(encoding="utf-8")))
