"""Folders are layers: import-linter's contracts hold of the package, and fail on deliberate violations."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the package's sources, with its contracts."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(project: Path) -> tuple[int, str]:
    """What `lint-imports` says of a project, and its exit code."""
    found = subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout + found.stderr


def test_no_layer_imports_one_above_it(project: Path) -> None:
    code, said = lint_imports(project)
    assert code == 0, said


def test_deliberate_violations_are_told(project: Path) -> None:
    package = project / "src" / "acemerge"
    violations = {
        "numerics/linalg.py": "acemerge.planning.plan",
        "methods/regmean.py": "acemerge.calibration.run",
        "methods/ace.py": "acemerge.checkpoints.folder",  # a layer below, but methods are pure
        "execute/passes.py": "acemerge.bench.demo",
        "sweeps/run.py": "acemerge.diagnosis.measure",
    }
    for file, above in violations.items():
        with (package / file).open("a") as source:
            source.write(f"\n\ndef imported_late() -> None:\n    import {above}\n")
    (package / "odds_and_ends.py").touch()
    code, said = lint_imports(project)
    assert code == 1
    for file, above in violations.items():
        importer = f"acemerge.{file.removesuffix('.py').replace('/', '.')}"
        assert f"{importer} -> {above}" in said
    assert "not listed as layers:\n\n- acemerge.odds_and_ends" in said
