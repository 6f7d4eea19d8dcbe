import sys
from pathlib import Path

import pytest

from acemerge.cache import cache_folder


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_the_variable_says_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", "~/elsewhere")
    assert cache_folder() == Path("/home/ada/elsewhere")


def test_without_it_the_cache_is_where_the_system_has_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACEMERGE_CACHE", "")
    place = "Library/Caches" if sys.platform == "darwin" else ".cache"
    assert cache_folder() == Path("/home/ada") / place / "acemerge"
