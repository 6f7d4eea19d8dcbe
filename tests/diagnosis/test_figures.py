"""The figures of a diagnosis show what they speak of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import acemerge
import lora_zoo
from acemerge.diagnosis.figures import figures
from acemerge.diagnosis.measure import Diagnosis
from acemerge.diagnosis.report import diagnosis_page
from acemerge.reports.figure import Figure
from layered_models import layered


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return acemerge.diagnose(*layered(tmp_path_factory.mktemp("layers"), 4, 3))


def heterogeneous_in(diagnosis: Diagnosis, *names: str) -> Diagnosis:
    tensors = [replace(x, heterogeneous=any(name in x.name for name in names)) for x in diagnosis.tensors]
    return replace(diagnosis, tensors=tuple(tensors))


def figure(diagnosis: Diagnosis, name: str) -> Figure | None:
    return next((figure for figure in figures(diagnosis) if figure.name == name), None)


def test_refinement_is_shown_in_layers_where_it_happens(four_layers: Diagnosis) -> None:
    found = figure(heterogeneous_in(four_layers, "layers.0.self_attn.q_proj", "layers.3.mlp.up_proj"), "spectra")
    assert found is not None
    (panels,) = found.draw.args  # type: ignore[attr-defined]
    assert [panel.title for panel in panels] == ["attention q, layer 0", "MLP up, layer 3"]
    assert all(list(panel.lines) == ["P, before refinement", "M, after"] for panel in panels)
    assert "2 of 16 matrices are refined" in found.caption


def test_where_nothing_is_refined_there_is_no_such_figure(four_layers: Diagnosis) -> None:
    assert figure(heterogeneous_in(four_layers), "spectra") is None
    unrefined = replace(heterogeneous_in(four_layers, "layers"), ace={**four_layers.ace, "refine": False})
    assert figure(unrefined, "spectra") is None


def test_the_forecast_carries_its_caveat_and_ranks_nobody(four_layers: Diagnosis) -> None:
    for name in ("forecast", "forecast-by-layer"):
        found = figure(four_layers, name)
        assert found is not None
        assert "what ACE minimises, not accuracy" in found.caption
    found = figure(four_layers, "forecast")
    assert found is not None
    assert tuple(found.draw.args[0].rows) == four_layers.candidates, "in the order they were asked for"  # type: ignore[attr-defined]
    assert "Gn" not in found.draw.args[0].colours, "no scale from red to green"  # type: ignore[attr-defined]


def test_without_ace_there_is_nothing_about_ace(tmp_path: Path) -> None:
    diagnosis = acemerge.diagnose(*layered(tmp_path, 2, 2), candidates=["ties", "average"])
    page = diagnosis_page(heterogeneous_in(diagnosis, "layers"))
    assert not {"heterogeneity", "regulariser", "spectra", "concentration"} & {figure.name for figure in page.figures}
    assert not {"gamma", "branch", "ridge", "leading"} & {column.key for column in page.table.columns}


def test_ranks_of_adapters_are_told(tmp_path: Path) -> None:
    zoo = lora_zoo.build(tmp_path, "LlamaForCausalLM")
    diagnosis = acemerge.diagnose(zoo.base, zoo.adapters, quick=True, candidates=["average"])
    configs = {name: json.loads((Path(path) / "adapter_config.json").read_text()) for name, path in zoo.adapters.items()}
    for name, (low, high) in diagnosis.ranks.items():
        assert low <= configs[name]["r"] <= high
    assert set(diagnosis.ranks) == set(configs)
    assert all(name in diagnosis_page(diagnosis).facts["adapter ranks"] for name in configs)
