"""What is measured is kept in a cache; each test has its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import model_zoo
from model_zoo import Models, quiet_transformers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_transformers():
        yield


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return model_zoo.bert(tmp_path / "models")
