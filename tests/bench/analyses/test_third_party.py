"""Third-party models without fetching them: what is measured, and how it is shown."""

import pytest
import torch
from torch import nn

from acemerge.bench.analyses import third_party, third_party_vision
from acemerge.bench.analyses.third_party_vision import MedsamMerges, answers
from acemerge.bench.data.operations_terms import TERMS
from acemerge.bench.domains.tiny_vit import FrozenNormConvolution, TinyViT, TinyViTConfig
from acemerge.bench.measure.metrics import Accuracy


def test_every_meaning_has_one_term() -> None:
    assert len(set(TERMS.values())) == len(TERMS) > 50
    assert not any(term.lower() in meaning.lower() for term, meaning in TERMS.items())  # it would be found by its letters


def test_unrelated_models_are_told_from_fine_tunes() -> None:
    base = {"a": torch.randn(20, 20), "b": torch.randn(30, 20), "bias": torch.ones(3)}
    fine_tune = {name: value + 0.01 * torch.randn_like(value) for name, value in base.items()}
    stranger = {name: torch.randn_like(value) for name, value in base.items()}
    assert third_party.relatedness(base, fine_tune) > 0.99
    assert abs(third_party.relatedness(base, stranger)) < 0.3


def test_tables_name_who_must_not_be_merged() -> None:
    score = Accuracy(3, 4)
    found = third_party.ThirdParty({"sre": 1.0, "fold": 0.01}, {"snli": score}, {"snli": score}, {"base": 0.25})
    accuracy, terms, verdict = found.grids()
    assert accuracy[1] == ["snli", "75.0", "75.0"]
    assert terms[1] == ["base", "25.0"]
    assert [row[2] for row in verdict[1:]] == ["yes", "NO: do not merge"]


@pytest.fixture
def first_layer(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    layer = nn.Sequential(FrozenNormConvolution(3, 32), nn.GELU(), FrozenNormConvolution(32, 64))
    monkeypatch.setattr(
        third_party_vision, "_encoder", lambda: {f"patch_embed.seq.{n}": t for n, t in layer.state_dict().items()}
    )
    return layer.eval()


def test_answers_are_those_of_the_body_behind_the_other_first_layer(first_layer: nn.Module) -> None:
    model = TinyViT(TinyViTConfig()).eval()
    side = model.config.image_size
    pictures = torch.rand(3, 3, side, side)
    found = answers(model, pictures)
    with torch.inference_mode():
        grid = first_layer(pictures.view(3, 3, side // 4, 4, side // 4, 4).mean((3, 5)))
        for stage in model.layers:
            grid = stage(grid)
        wanted = grid - grid.mean((0, 2, 3), keepdim=True)
    torch.testing.assert_close(found, wanted.flatten(1), rtol=1e-4, atol=1e-4)


def test_the_base_has_no_accuracy_on_tasks_of_its_own() -> None:
    [rows] = MedsamMerges({"ace with medsam": 0.5}, {"base": 0.1, "ace with medsam": 0.25}).grids()
    assert rows[1:] == [["base", "", "0.100"], ["ace with medsam", "50.0", "0.250"]]
