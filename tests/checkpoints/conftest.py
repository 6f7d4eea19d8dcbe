"""Models that tests of checkpoints only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import model_zoo as zoo
from checkpoint_files import merged_tensors
from family_cases import CASES, Built
from model_zoo import Models, Tensors


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> Iterator[None]:
    with zoo.quiet_transformers():
        yield


@pytest.fixture(scope="session")
def plain(models_of: Callable[..., Models]) -> Models:
    return models_of(zoo.unknown)


@pytest.fixture(scope="session")
def plain_merge(plain: Models, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    return merged_tensors(plain, tmp_path_factory.mktemp("plain_merge"))


@pytest.fixture(scope="session")
def llama(models_of: Callable[..., Models]) -> Models:
    return models_of(zoo.llama, tied=False)


@pytest.fixture(scope="session")
def bert(models_of: Callable[..., Models]) -> Models:
    return models_of(zoo.bert)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Each family's checkpoints, made when first asked for."""
    built: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in built:
            root = tmp_path_factory.mktemp(name)
            built[name] = Built(CASES[name], CASES[name].build(root), root)
        return built[name]

    return get
