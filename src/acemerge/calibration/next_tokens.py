"""How little a language model expected the tokens of a text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

_NOTHING_TO_EXPECT = -100


def next_token_losses(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """[row, token] in nats: how little the logits at a token expected the next one; 0 where a text ends."""
    targets = torch.full_like(batch["input_ids"], _NOTHING_TO_EXPECT)
    targets[:, :-1] = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, _NOTHING_TO_EXPECT)
    found = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_NOTHING_TO_EXPECT, reduction="none")
    return found.view_as(targets)


def mean_next_token_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Over all tokens but each text's first, which nothing comes before."""
    return next_token_losses(logits, batch).sum() / batch["attention_mask"][:, 1:].sum()
