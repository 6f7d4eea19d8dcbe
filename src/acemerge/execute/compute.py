"""Where and with how many threads is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

from acemerge.errors import InputError, first_line
from acemerge.numerics.blas import load


def torch_device(name: str) -> torch.device:
    """The device of that name, if it can be used here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        usable = "cpu" if not torch.cuda.is_available() else f"cpu, or cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        raise InputError(f"--device {name}: not available here ({first_line(error)[:80]}); use {usable}") from None
    return device


@contextmanager
def compute_threads(threads: int | None) -> Iterator[None]:
    """Limit torch's and the BLAS libraries' threads alike, so that they do not fight for cores."""
    if threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    load()  # a library that comes later would take all cores
    try:
        with threadpool_limits(limits=threads):
            yield
    finally:
        torch.set_num_threads(before)
