"""What a merge takes: seconds, and memory beyond what the imported program holds anyway. Measured in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

from acemerge.bench.measure.evaluation import HERE, Compute

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MergeReport:
    """Of one merge. Inputs are memory-mapped; anonymous memory is what the merge itself needs."""

    seconds: float
    peak_bytes: int | None
    """Beyond the footprint of the program; unknown where there is no /proc."""
    options: Mapping[str, Any]
    """The method's, with every default made explicit."""
    warnings: int


def measured_merge(
    base: Path, experts: Mapping[str, Path], output: Path, request: Mapping[str, Any], compute: Compute = HERE
) -> MergeReport:
    """What `merge_experts` does with this request, in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(merge_here, base, experts, output, request, compute).result()


def merge_here(
    base: Path, experts: Mapping[str, Path], output: Path, request: Mapping[str, Any], compute: Compute = HERE
) -> MergeReport:
    """The same in this process, where memory that others use is counted too."""
    import torch

    from acemerge.bench.measure.merging import merge_experts
    from acemerge.methods import get_method

    if compute.threads:
        torch.set_num_threads(compute.threads)
    ace = get_method("ace")
    ace(torch.randn(2, 64, 64), ace.options({"tau": 0.0}).resolve({}))  # loads what loads lazily
    footprint = _anonymous_memory()
    peak, done = footprint, Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.003):
            peak = max(peak, _anonymous_memory())

    sampler = Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    try:
        result = merge_experts(base, experts, output, request, threads=compute.threads, device=compute.device, overwrite=True)
    finally:
        seconds = time.perf_counter() - started
        done.set()
        sampler.join()
    peak_bytes = peak - footprint if footprint else None
    return MergeReport(seconds, peak_bytes, asdict(result.plan.options), len(result.warnings))


def _anonymous_memory() -> int:
    """RssAnon of this process in bytes; 0 where it cannot be told."""
    if not _STATUS.exists():
        return 0
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
