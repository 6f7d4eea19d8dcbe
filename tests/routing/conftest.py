"""A base, adapters and an index, made once."""

from __future__ import annotations

import pytest

import routing_team
from command import Command
from routing_team import Team


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Team:
    return routing_team.build(tmp_path_factory.mktemp("team"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
