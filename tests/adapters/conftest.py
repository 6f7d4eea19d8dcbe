"""Bases and adapters, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import lora_zoo
from adapter_merging import Dense, merge
from adapter_reading import LLAMA, Bases, Refuse, refuse
from command import Command
from lora_zoo import Zoo


@pytest.fixture(scope="session")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Zoo]:
    return {name: lora_zoo.build(tmp_path_factory.mktemp(name), name) for name in lora_zoo.LORAS}


@pytest.fixture(scope="session")
def llama(zoos: dict[str, Zoo]) -> Zoo:
    return zoos["LlamaForCausalLM"]


@pytest.fixture(scope="session")
def dense(llama: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Dense:
    """Merges that several tests compare with; they only read them."""
    root = tmp_path_factory.mktemp("dense")

    @cache
    def merged(method: str) -> Path:
        merge(llama, root / method, method)
        return root / method

    return merged


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One base per transformers class, made once."""
    root = tmp_path_factory.mktemp("bases")

    def base(class_name: str) -> Path:
        folder = root / class_name
        return folder if folder.is_dir() else lora_zoo.write_base(folder, class_name)

    return base


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    return lambda base, adapter: refuse(base, adapter, monkeypatch, capsys)


@pytest.fixture(scope="session")
def plain(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with nothing wrong with it."""
    return lora_zoo.write_adapter(
        bases(LLAMA), tmp_path_factory.mktemp("plain") / "adapter", LLAMA, target_modules=["q_proj", "k_proj"]
    )


@pytest.fixture(scope="session")
def dora(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dora") / "adapter"
    return lora_zoo.write_adapter(bases(LLAMA), folder, LLAMA, target_modules=["q_proj", "k_proj"], use_dora=True)
