"""Random numbers that depend on what they are for, and on nothing else."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, *purpose: object) -> torch.Generator:
    """The same numbers for the same seed and purpose, in whatever order, thread or process they are drawn."""
    identity = "/".join(map(str, (seed, *purpose)))
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "little") >> 1)
