"""Tiny models to merge, and reports that tests only read: drawing them takes longest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import acemerge
import lora_zoo
import model_zoo
from acemerge.output.manifest import read_merge
from acemerge.reports.merge_report import merge_page
from acemerge.reports.page import write_report
from layered_models import layered
from small_models import Models, write_models


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return write_models(tmp_path)


@pytest.fixture(scope="session")
def bert(models_of: Callable[..., model_zoo.Models], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge of real models, by the method with the most figures."""
    folder, models = tmp_path_factory.mktemp("reported"), models_of(model_zoo.bert)
    acemerge.merge(models.base, models.experts, folder / "merged", "ace")
    return folder / "merged"


@pytest.fixture(scope="session")
def bert_report(bert: Path) -> Path:
    return write_report(merge_page(read_merge(bert)), bert.parent / "report.html")


@pytest.fixture(scope="session")
def folded_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a merge of adapters, which keeps the tensors that no adapter changes."""
    folder = tmp_path_factory.mktemp("adapters")
    zoo = lora_zoo.build(folder, "LlamaForCausalLM")
    acemerge.merge(zoo.base, zoo.adapters, folder / "merged", save_as="adapter", rank=2)
    return write_report(merge_page(read_merge(folder / "merged")), folder / "merged.html")


@pytest.fixture(scope="session")
def twelve_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports on eight experts of twelve layers."""
    folder = tmp_path_factory.mktemp("reports")
    base, experts = layered(folder, 12, 8)
    acemerge.merge(base, experts, folder / "merged", "ace")
    return {
        "diagnosis": acemerge.diagnose(base, experts).write_report(folder / "diagnosis.html"),
        "merge": write_report(merge_page(read_merge(folder / "merged")), folder / "merge.html"),
    }
