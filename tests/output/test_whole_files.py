"""Files and folders that appear whole: several at once or none, and one process at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from acemerge.output.whole_files import replace_file, replace_files, replace_folder, staged_name, write_files
from child import fork, wait
from small_models import tree


def test_all_of_them_or_none_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    places = [tmp_path / "page.html", tmp_path / "new/deep/figure.svg"]

    def half() -> None:
        with replace_files(places) as staged:
            staged[0].write_text("new")
            assert tree(tmp_path)["page.html"] == b"old"
            raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        half()
    assert tree(tmp_path) == {"page.html": b"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    write_files(dict.fromkeys(places, "new"))
    assert tree(tmp_path) == {"page.html": b"new", "new/deep/figure.svg": b"new"}


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / staged_name("file")).write_text("half of it, and longer")
    write_files({tmp_path / "file": "whole"})
    (tmp_path / staged_name("folder")).mkdir()
    (tmp_path / staged_name("folder") / "half").write_text("half")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/earlier").write_text("earlier")
    with replace_folder(tmp_path / "folder") as staged:
        (staged / "whole").write_text("whole")
    assert tree(tmp_path) == {"file": b"whole", "folder/whole": b"whole"}


def test_a_folder_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    def half() -> None:
        with replace_folder(tmp_path / "folder") as staged:
            (staged / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_who_writes_the_same_file_waits(tmp_path: Path) -> None:
    file, started = tmp_path / "file", tmp_path / "started"

    def slowly() -> None:
        with replace_file(file) as staged:
            staged.write_text("fir")
            started.touch()
            time.sleep(0.2)
            staged.write_text("first")

    null = os.open(os.devnull, os.O_WRONLY)
    child = fork(slowly, null, null)
    while not started.exists():
        time.sleep(0.01)
    with replace_file(file) as staged:
        assert file.read_text() == "first"
        staged.write_text("second")
    assert wait(child) == 0
    assert tree(tmp_path) == {"file": b"second", "started": b""}
