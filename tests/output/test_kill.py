"""Kill at any moment: the output is absent or whole, and the same command again ends with the bytes of an undisturbed merge."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kill_harness
from acemerge.output import publishing


@pytest.fixture
def scene() -> Iterator[Path]:
    """In memory where possible: these merges flush every file to the disk, which is most of what they do."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "scene"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_merge_leaves_nothing_half_made_and_goes_on(scene: Path, overwrite: bool) -> None:
    ends = kill_harness.run(scene, trials=9, seed=1, overwrite=overwrite)
    assert ends["shards left"] > 0  # some were killed in the middle, so that there was something to go on from


def test_where_folders_cannot_be_exchanged(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "exchange", lambda one, other: False)
    kill_harness.run(scene, trials=6, seed=2, overwrite=True)
