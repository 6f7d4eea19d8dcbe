"""Shapes in signatures are checked at run time in every test. The matrices are small: one thread is fastest."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
# Where a test asks for more, they sleep when they have nothing to do: other tests run on the cores that they would burn.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest  # noqa: E402
import typer.main  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

from shape_checks import check_shapes_in  # noqa: E402

if TYPE_CHECKING:
    from command import Command
    from model_zoo import Models

threadpool_limits(1)  # what pytest's plugins loaded before it could read the variables above: numpy's BLAS

check_shapes_in(
    "acemerge.numerics.linalg",
    "acemerge.numerics.covariance",
    "acemerge.numerics.frame",
    "acemerge.methods",
    "acemerge.tensors",
    "acemerge.calibration.measurements",
    "acemerge.api",
)

# A busy machine is no failure: nothing here may depend on how long an example takes.
settings.register_profile(
    "acemerge", max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# `make fuzz`: other random numbers every time, as many examples as are asked for.
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "0")) or 1,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fuzz" if "FUZZ_EXAMPLES" in os.environ else "acemerge")


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of our own modules are errors: those that they raise, and those of libraries about how they are called."""
    root = Path(__file__).parents[1]
    scripts = [path.stem for folder in ("tests/support", "benchmarks", "demos") for path in (root / folder).glob("*.py")]
    config.addinivalue_line("filterwarnings", rf"error:::(acemerge|tests|conftest|script_\w+|{'|'.join(scripts)})(\.|$)")


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking it through for garbage again and again takes a twentieth of the tests' time."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_file_need_outlive_the_machine() -> Iterator[None]:
    """Waiting for the disk takes longer than most merges. What is synced, and what if that fails, has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _commands_are_built_once() -> Iterator[None]:
    """Of our type hints, which takes longer than most of what they do; a process of its own runs one command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `acemerge ...` in this process."""
    from command import Command

    return Command(monkeypatch, capsys)


@pytest.fixture(scope="session")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Models]:
    """Models of `model_zoo`, made when first asked for and only read: `models_of(model_zoo.llama, tied=True)`."""

    @cache
    def get(build: Callable[..., Models], **settings: Any) -> Models:
        return build(tmp_path_factory.mktemp(build.__name__), **settings)

    return get
