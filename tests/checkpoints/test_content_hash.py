"""A hash says by which algorithm it was made, and is the same of a file, of its pieces and by that algorithm's own definition."""

import hashlib
from pathlib import Path

import pytest

from acemerge.checkpoints.content_hash import RunningHash, file_hash, has_hash

NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
"""BLAKE3 of no bytes, as its authors' test vectors have it."""


def test_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert RunningHash().told() == file_hash(tmp_path / "empty") == f"blake3:{NOTHING}"


def test_of_pieces_and_of_a_file(tmp_path: Path) -> None:
    pieces = [bytes([i]) * 100_000 for i in range(9)]  # more than is read at once
    running = RunningHash(pieces[0])
    for piece in pieces[1:]:
        running.update(piece)
    path = tmp_path / "file"
    path.write_bytes(b"".join(pieces))
    assert running.told() == file_hash(path)
    assert file_hash(path, "sha256") == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_whether_a_file_has_it(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    told = file_hash(path, "sha256" if algorithm == "sha256" else "blake3")
    assert has_hash(path, told)
    path.write_bytes(b"contenT")
    assert not has_hash(path, told)
