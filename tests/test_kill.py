"""Kill at any moment: the output is absent or whole, and the same command again ends with the bytes of an undisturbed merge."""

from pathlib import Path

import pytest

import kill_harness
from acemerge import publishing


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_merge_leaves_nothing_half_made_and_goes_on(tmp_path: Path, overwrite: bool) -> None:
    ends = kill_harness.run(tmp_path / "scene", trials=10, seed=1, overwrite=overwrite)
    assert ends["shards left"] > 0  # some were killed in the middle, so that there was something to go on from


def test_where_folders_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "exchange", lambda one, other: False)
    kill_harness.run(tmp_path / "scene", trials=8, seed=2, overwrite=True)
