"""What a layer's inputs are, counted while a model runs."""

from __future__ import annotations

import torch
from torch import nn

from acemerge.calibration.layer_inputs import LayerInputs
from acemerge.calibration.run import ExpertModel


def test_layers_that_are_called_twice_or_share_a_weight_count_together() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    model = ExpertModel(nn.ModuleList([one, other]), {"w": [(one, "weight"), (other, "weight")]})
    seen, xs = LayerInputs(), torch.randn(3, 2, 4, 3)
    with seen.watching(model, ["w"]):
        seen.begin({}, model.module)
        one(one(xs[0]))
        other(xs[1])
    one(xs[2])  # nobody is watching any more
    inputs = torch.cat([xs[0].reshape(-1, 3), one(xs[0]).detach().reshape(-1, 3), xs[1].reshape(-1, 3)]).double()
    torch.testing.assert_close(seen.grams()["w"], inputs.T @ inputs / len(inputs))
    assert seen.counts["w"] == 24
