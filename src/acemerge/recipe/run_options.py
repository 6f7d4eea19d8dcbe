"""How a merge is to be run: where, with what, over what. None of it changes a byte of what comes out.

This is the one place where these options are spelt out: the command line makes its flags of the fields, and the Python interface
takes them as keywords.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from acemerge.errors import InputError


def option(default: Any, help_text: str, *names: str, least: int | None = None, metavar: str | None = None) -> Any:
    """A field with what the command line says of it; `names` are its flags, if they do not follow from its name."""
    return field(default=default, metadata={"help": help_text, "names": names, "least": least, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a recipe is carried out."""

    device: str = option(
        "cpu", "Where to compute: cpu, cuda, cuda:N, or several, cuda:0,cuda:1, a shard at a time on each.", metavar="DEVICE"
    )
    threads: int | None = option(
        None, "CPU threads; all cores by default. With --engine ray: of each task, 1 by default.", least=1, metavar="N"
    )
    engine: str = option(
        "local", "local: this process. ray: the machines of a Ray cluster, a shard at a time on each core.", metavar="local|ray"
    )
    ray_address: str | None = option(
        None,
        "With --engine ray: the cluster, HOST:PORT or 'auto'. By default RAY_ADDRESS, else one started for this run.",
        metavar="ADDRESS",
    )
    resume: bool = option(
        True,
        "Go on from the finished shards of an interrupted run of the same merge, after checking their checksums.",
        "--resume/--no-resume",
    )
    verify: bool = option(
        False, "Hash every input in full first, and reuse finished shards only if they were made of the same bytes.", "--verify"
    )
    overwrite: bool = option(False, "Replace an earlier acemerge output.", "--overwrite")
    force: bool = option(
        False,
        "Try even if disk or memory seem too small, and merge experts that do not look like fine-tunes of the base.",
        "--force",
    )
    report: bool = option(False, "Also write report.html into the output: what became of every tensor, with figures.", "--report")
    keep_stages: str | None = option(
        None, "Keep the merges that a recipe has as base or experts, each as a model under its name.", metavar="FOLDER"
    )
    offline: bool = option(False, "Never touch the network; hub ids come from the local cache.", "--offline")
    quiet: bool = option(False, "No progress, no summary; warnings and errors only.", "-q", "--quiet")

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads={self.threads}: give at least one")
