"""The methods as their authors publish them, written plainly from the papers' formulas: float32, one product for each symbol.

What a reader of the papers would write, and what their releases do: T Gram matrices, an explicit inverse, full singular value
decompositions, an optimiser that visits every expert in every step. The benchmarks run these beside acemerge's own routes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

TaskVectors = Float[Tensor, "task out in"]
Matrix = Float[Tensor, "out in"]


def published_ace(task_vectors: TaskVectors, heterogeneous: bool, epsilon: float = 1e-5, k_frac: float = 0.3) -> Matrix:
    """ACE-Merging; which branch is taken is given, so that both can be timed on the same tensors."""
    T, _, n = task_vectors.shape
    energies = torch.stack([(D.T @ D).trace() for D in task_vectors])
    logs = energies.log()
    _gamma = logs.var() / logs.mean() ** 2
    centred = [D - D.mean(0, keepdim=True) for D in task_vectors]
    covariances = [C.T @ C for C in centred]
    scales = [1 / S.trace() if heterogeneous else torch.tensor(1.0) for S in covariances]
    covariances = [a * S for a, S in zip(scales, covariances, strict=True)]
    identity = torch.eye(n, dtype=task_vectors.dtype)
    regular = [S + epsilon * a * identity for a, S in zip(scales, covariances, strict=True)]
    prior = torch.stack(covariances).sum(0).mean(0)
    if heterogeneous:
        prior = prior / energies.mean()
    numerator = sum_of([C @ S for C, S in zip(centred, regular, strict=True)])
    P: Tensor = numerator @ torch.linalg.inv(sum_of(regular) + prior[None])
    if not heterogeneous:
        return P
    mean = sum_of(regular) / T
    F = P + sum_of([D @ (S - mean) for D, S in zip(task_vectors, covariances, strict=True)])
    U, s, Vh = torch.linalg.svd(F, full_matrices=False)
    k = int(k_frac * min(F.shape))
    refinement: Tensor = s[:k].mean() * (U[:, :k] @ Vh[:k])
    return P + refinement


def published_tsv_m(task_vectors: TaskVectors) -> Matrix:
    """TSV-M: T full decompositions, then two of the stacked singular vectors."""
    T, m, n = task_vectors.shape
    k = min(m, n) // T
    parts = [torch.linalg.svd(D, full_matrices=False) for D in task_vectors]
    left = torch.cat([U[:, :k] for U, _, _ in parts], 1)
    values = torch.cat([s[:k] for _, s, _ in parts])
    right = torch.cat([Vh[:k] for _, _, Vh in parts])
    return polar(left) * values @ polar(right)


def published_iso_cts(task_vectors: TaskVectors, common: float = 0.8) -> Matrix:
    """Iso-CTS: a decomposition of the sum and of each remainder, then two of the stacked singular vectors."""
    T, m, n = task_vectors.shape
    r = min(m, n)
    each = round((r - int(common * r)) / T)
    k = r - each * T
    U, s, Vh = torch.linalg.svd(task_vectors.sum(0), full_matrices=False)
    Uc = U[:, :k]
    parts = [torch.linalg.svd(D - Uc @ (Uc.T @ D), full_matrices=False) for D in task_vectors]
    left = torch.cat([*(own[:, :each] for own, _, _ in parts), Uc], 1)
    values = torch.cat([*(own[:each] for _, own, _ in parts), s[:k]])
    right = torch.cat([*(own[:each] for _, _, own in parts), Vh[:k]])
    return values.mean() * (polar(left) @ polar(right))


def published_wudi(task_vectors: TaskVectors, steps: int) -> Matrix:
    """WUDI-Merging: Adam on the interference with every expert, by automatic differentiation."""
    M = task_vectors.sum(0).clone().requires_grad_()
    optimiser = torch.optim.Adam([M], lr=1e-5)
    energies = task_vectors.square().sum((1, 2))
    for _ in range(steps):
        optimiser.zero_grad()
        losses = [((M - D) @ D.T).square().sum() / energy for D, energy in zip(task_vectors, energies, strict=True)]
        torch.stack(losses).sum().backward()
        optimiser.step()
    return M.detach()


def polar(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """U V^T of a thin singular value decomposition."""
    U, _, Vh = torch.linalg.svd(matrix, full_matrices=False)
    factor: Tensor = U @ Vh
    return factor


def sum_of(matrices: list[Tensor]) -> Tensor:
    """Their sum."""
    return torch.stack(matrices).sum(0)
