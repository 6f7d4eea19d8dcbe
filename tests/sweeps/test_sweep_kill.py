"""Kill a sweep at any of its file-system operations: every model is absent or whole, and the same sweep again ends the same."""

import random
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import acemerge
from child import wait
from kill_harness import SIGNALS, Scene, count_operations, kill_at_operation, start, tree
from small_models import write_models

ALPHAS = {"alpha": [0.5, 2.0, 1.0]}


def closeness(folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    return {"closeness": -abs(settings["alpha"] - 1.5) - 0.1 * settings["alpha"]}


@dataclass(frozen=True)
class SweepScene(Scene):
    """Three points, evaluated two at a time; the best is kept."""

    def sweep(self, output: Path, keep: str = "best") -> None:
        acemerge.sweep(
            self.models.base,
            self.models.experts,
            output,
            ALPHAS,
            "emr",
            shard_size="1kB",
            evaluate=closeness,
            keep=keep,
            at_once=2,
        )

    def disturbed(self) -> None:
        self.sweep(self.output)

    def prepare(self) -> None:
        for path in self.folder.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        yield Path(place)


def is_whole(path: Path, models: Mapping[str, object]) -> bool:
    """A point's model as an undisturbed sweep writes it, or the average that points are compared with until the sweep ends."""
    return tree(path) == models[path.name] if path.name in models else not acemerge.verify(path).problems


def test_a_killed_sweep_leaves_nothing_half_made_and_goes_on(folder: Path) -> None:
    scene = SweepScene(folder, write_models(folder), overwrite=False)
    scene.sweep(folder / "all", keep="all")
    scene.sweep(folder / "whole")
    models = {path.name: tree(path) for path in (folder / "all").iterdir() if path.is_dir()}
    whole = tree(folder / "whole")
    assert len(models) == 3
    choose, left = random.Random(1), 0
    operations = count_operations(scene)
    for trial in range(12):
        scene.prepare()
        number, with_signal = choose.randint(1, operations), SIGNALS[trial % len(SIGNALS)]
        code = kill_at_operation(scene, number, with_signal)
        assert code in (0, 130, -signal.SIGKILL, -signal.SIGTERM)
        found = [path for path in scene.output.iterdir() if path.is_dir()] if scene.output.exists() else []
        left += bool(found)
        for path in found:
            assert path.name.endswith(".partial") or is_whole(path, models), (number, "half-made", path.name)
        assert wait(start(scene.disturbed)) == 0, (number, "does not go on")
        assert tree(scene.output) == whole, (number, "other bytes or litter")
        assert [path.name for path in folder.glob("out*")] == ["out"], (number, "litter")
    assert left > 0
