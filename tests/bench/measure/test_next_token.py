"""Losses are transformers' own, and a score is a place between base and expert with an honest standard error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from acemerge.bench.measure.next_token import share_of_gain
from acemerge.calibration.next_tokens import mean_next_token_loss, next_token_losses
from tiny_llama import SHAPE


def test_losses_are_those_of_transformers_and_padding_has_none() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE.config()).eval()
    rows = [torch.randint(3, SHAPE.vocabulary, (length,)) for length in (5, 9, 2)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    batch = {"input_ids": ids, "attention_mask": torch.arange(9) < torch.tensor([[5], [9], [2]])}
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
        found = next_token_losses(logits, batch)
        theirs = [model(input_ids=row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
        assert found.shape == ids.shape
        torch.testing.assert_close(found.sum(1), torch.stack(theirs))
        torch.testing.assert_close(mean_next_token_loss(logits, batch), torch.stack(theirs).sum() / (4 + 8 + 1))
    assert (found > 0).sum(1).tolist() == [4, 8, 1]


def test_the_base_is_0_and_the_expert_1() -> None:
    base, expert = np.array([30.0, 20.0, 50.0]), np.array([20.0, 15.0, 25.0])
    for own, share in ((base, 0.0), (expert, 1.0), ((base + expert) / 2, 0.5), (2 * base - expert, -1.0)):
        found = share_of_gain(own, base, expert, tokens=50)
        assert found.share == share
        assert found.standard_error == 0.0  # every row says the same
        assert found.others == {"loss": own.sum() / 50, "base": 2.0, "expert": 1.2}


def test_the_standard_error_is_that_of_drawing_other_rows() -> None:
    generator = np.random.default_rng(0)

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        base = generator.gamma(4.0, 20.0, rows)
        expert = base * generator.normal(0.7, 0.05, rows)
        return base - (base - expert) * generator.normal(0.6, 0.3, rows), base, expert

    found = [share_of_gain(*draw(200), tokens=1) for _ in range(2000)]
    spread = float(np.std([estimate.share for estimate in found]))
    told = float(np.mean([estimate.standard_error for estimate in found]))
    assert spread == pytest.approx(told, rel=0.06)
