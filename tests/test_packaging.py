"""What is declared, what is locked, and what works with the core alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from core_only import same_name

ROOT = Path(__file__).parents[1]


def all_locked() -> list[str]:
    """The lines of the lock, without comments."""
    return [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.lstrip().startswith("#")]


def locked() -> dict[str, str]:
    """The same by package name."""
    return {line.partition("==")[0]: line for line in all_locked()}


def test_every_declared_package_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], project["build-system"]["requires"]]
    groups += project["project"]["optional-dependencies"].values()
    names = {same_name(re.split(r"[^\w.-]", requirement)[0]) for group in groups for requirement in group}
    assert names - {"acemerge"} <= locked().keys(), "run `make lock`"


def test_the_lock_has_exact_versions_and_nothing_of_the_machine_it_was_made_on() -> None:
    for name, line in locked().items():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+( ; [\w ='.<>!()]+)?", line), line
        assert not re.match(r"nvidia|cuda|triton", name), line


def test_the_hashes_are_of_what_is_locked() -> None:
    """Of all but torch, whose CPU build has not the hash of the index's build."""
    lines = [line.removesuffix(" \\") for line in (ROOT / "requirements.hashes").read_text().splitlines()]
    own = [number for number, line in enumerate(lines) if "==" in line]
    assert {lines[number] for number in own} == {line for line in all_locked() if not line.startswith("torch==")}
    assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", lines[number + 1]) for number in own), "run `make lock`"


def test_plan_merge_verify_help_and_a_methods_checks_need_no_extra(tmp_path: Path) -> None:
    script = ROOT / "tests/support/core_only.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "models", "--pretend"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"the core works without its extras \(\d\d modules refused\)", done.stdout), done.stdout
