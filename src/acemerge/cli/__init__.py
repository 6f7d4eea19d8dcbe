"""The command line: one small file per verb, and how things look."""

from acemerge.cli.app import main

__all__ = ["main"]
