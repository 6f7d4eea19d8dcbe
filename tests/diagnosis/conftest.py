"""A family, and its diagnosis."""

from __future__ import annotations

import pytest

import acemerge
import model_zoo
from acemerge.diagnosis.measure import Diagnosis


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> model_zoo.Models:
    return model_zoo.bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def diagnosis(family: model_zoo.Models) -> Diagnosis:
    return acemerge.diagnose(family.base, family.experts)
