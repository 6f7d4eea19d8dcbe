"""Packages are fetched by name and version, checked by hash, and never run."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Literal

import pytest

from acemerge.bench.data.packages import FetchError, Package

MEMBERS = {"tiny/data/rows.csv": b"a,1\nb,2\n", "tiny/data/more.csv": b"c,3\n"}


def archive_of(name: str) -> bytes:
    content = io.BytesIO()
    if name.endswith(".whl"):
        with zipfile.ZipFile(content, "w") as wheel:
            for path, text in MEMBERS.items():
                wheel.writestr(path, text)
    else:
        with tarfile.open(fileobj=content, mode="w:gz") as tar:
            for path, text in {**MEMBERS, "setup.py": b"raise SystemExit('a package must not be run')"}.items():
                header = tarfile.TarInfo(path)
                header.size = len(text)
                tar.addfile(header, io.BytesIO(text))
    return content.getvalue()


def package(file: str, registry: Literal["python", "npm"] = "python") -> tuple[Package, bytes]:
    content = archive_of(file)
    return Package(registry, "tiny", "1.0", file, hashlib.sha256(content).hexdigest()), content


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACEMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packages"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only index there is."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize("file", ["tiny-1.0.tar.gz", "tiny-1.0-py3-none-any.whl", "tiny-1.0-cp39-cp39-win_amd64.whl"])
def test_a_package_is_fetched_checked_and_read(file: str, cache: Path, index: Path) -> None:
    wanted, content = package(file)
    (index / file).write_bytes(content)
    assert wanted.read("*/rows.csv") == MEMBERS["tiny/data/rows.csv"]
    (index / file).unlink()
    assert dict(wanted.read_all("*.csv")) == MEMBERS, "what is in the cache needs no index"
    assert [path.name for path in cache.iterdir()] == [file]


def test_another_file_of_that_name_is_refused(cache: Path, index: Path) -> None:
    wanted, content = package("tiny-1.0.tar.gz")
    (index / wanted.file).write_bytes(content + b"more")
    with pytest.raises(FetchError, match="not the file that was expected"):
        wanted.path()
    assert not list(cache.glob("*"))
    cache.mkdir(parents=True, exist_ok=True)
    (cache / wanted.file).write_bytes(b"put there by hand")
    with pytest.raises(FetchError, match=r"tiny 1\.0"):
        wanted.path()


def test_no_index(cache: Path, index: Path) -> None:
    wanted, _ = package("tiny-1.0.tar.gz")
    with pytest.raises(FetchError, match=r"tiny-1.0.tar.gz into .*packages by hand"):
        wanted.path()


def test_npm(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, content = package("tiny-1.0.tgz", "npm")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match="npm is not installed"):
        wanted.path()
    (tmp_path / "stored.tgz").write_bytes(content)
    npm = tmp_path / "npm"
    npm.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3" = "pack tiny@1.0 --ignore-scripts" ] && /bin/cp {tmp_path}/stored.tgz "$5/tiny-1.0.tgz"\n'
    )
    npm.chmod(0o755)
    assert dict(wanted.read_all("*.csv")) == MEMBERS
    npm.write_text("#!/bin/sh\necho 'npm error 404' >&2\nexit 1\n")
    os.unlink(cache / wanted.file)
    with pytest.raises(FetchError, match=r"npm said: npm error 404"):
        wanted.path()


def test_a_pattern_that_fits_several_members(cache: Path, index: Path) -> None:
    wanted, content = package("tiny-1.0-py3-none-any.whl")
    (index / wanted.file).write_bytes(content)
    with pytest.raises(FetchError, match="has 2 members"):
        wanted.read("*.csv")
