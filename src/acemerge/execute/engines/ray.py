"""The cluster engine: every shard is a task of Ray. Ray itself is imported when the engine is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from acemerge.errors import InputError
from acemerge.execute.opening import Scene
from acemerge.recipe.run_options import RunOptions

if TYPE_CHECKING:
    from acemerge.execute.ray_cluster import RayEngine


def check(run: RunOptions) -> None:
    """Ray must be installed, and gives each task a GPU of its own."""
    if not find_spec("ray"):
        raise InputError("--engine ray needs ray: pip install 'acemerge[cluster]'")
    if run.device not in ("cpu", "cuda"):
        raise InputError(f"--device {run.device}: with --engine ray, give cpu, or cuda: each task then gets a GPU of its own")


@contextmanager
def open_engine(scene: Scene) -> Iterator[RayEngine]:
    """Connected to the cluster."""
    from acemerge.execute.ray_cluster import RayEngine, ray_cluster

    with ray_cluster(scene.run.ray_address):
        yield RayEngine(scene)
