"""The command line in this process, with what it prints."""

from __future__ import annotations

import sys

import pytest

from acemerge.cli.app import main


class Command:
    """Runs `acemerge ...` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["acemerge", *map(str, arguments)])
        self._monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err
